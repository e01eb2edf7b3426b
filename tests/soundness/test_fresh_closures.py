"""Functions made anew after something that they all share has changed: a global variable, the
environment, a class, a module, a method. The fresh one never gets a program of before."""

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.soundness._answers import Answers, X, Y, Z

K = 1.0
LIST = [1.0]


class Base:
    k = 1.0

    def number(self):
        return self.k


class Derived(Base):
    """Reads what its base has."""


class Meta(type):
    k = 1.0


class WithMeta(metaclass=Meta):
    """Reads what its metaclass has."""


class Described:
    """A descriptor whose value changes."""

    k = 1.0

    def __get__(self, instance, cls):
        return type(self).k


class Descriptive:
    k = Described()


def helper():
    return K


def _set_global(k: float) -> None:
    global K
    K = k


def _set_list(k: float) -> None:
    LIST[0] = k


def _set_item_of_globals(k: float) -> None:
    globals()["K"] = k


def _set_environment(k: float) -> None:
    os.environ["VERNAL_SOUNDNESS_K"] = str(k)


def _set(owner: Any, name: str = "k") -> Callable[[float], None]:
    return lambda k: setattr(owner, name, k)


def _patch(owner: Any, name: str) -> Callable[[float], None]:
    return lambda k: setattr(owner, name, lambda *_: k)


def _patch_code(function: Any) -> Callable[[float], None]:
    def change(k):
        function.__code__ = eval(f"lambda *_: {k}").__code__

    return change


def _this_module() -> types.ModuleType:
    return sys.modules[__name__]


def patched():
    return 1.0


def recoded(*_):
    return 1.0


def _over_an_alias() -> Any:
    module = _this_module()
    return lambda x: x * module.K


def _over_an_instance() -> Any:
    one = Derived()
    return lambda x: x * one.k


def _over_a_method() -> Any:
    one = Derived()
    return lambda x: x * one.number()


def _over_a_bound_method() -> Any:
    number = Base().number
    return lambda x: x * number()


def _with_import() -> Any:
    def f(x):
        from tests.soundness import test_fresh_closures as module  # the attack

        return x * module.K

    return f


class Callable_:
    def __call__(self, x):
        return x * K


# name: (a function made anew, the change)
SHARED: dict[str, tuple[Callable[[], Any], Callable[[float], None]]] = {
    "global": (lambda: lambda x: x * K, _set_global),
    "global through a function": (lambda: lambda x: x * helper(), _set_global),
    "global through globals()": (lambda: lambda x: x * globals()["K"], _set_item_of_globals),
    "global through eval": (lambda: lambda x: x * eval("K"), _set_global),
    "global through sys.modules": (lambda: lambda x: x * sys.modules[__name__].K, _set_global),
    "global through vars": (lambda: lambda x: x * vars(_this_module())["K"], _set_global),
    "global through getattr": (lambda: lambda x: x * getattr(_this_module(), "K"), _set_global),  # noqa: B009 (the attack)
    "global through an alias": (_over_an_alias, _set_global),
    "global through an import": (_with_import, _set_global),
    "global of a callable object": (Callable_, _set_global),
    "global list": (lambda: lambda x: x * LIST[0], _set_list),
    "environment": (
        lambda: lambda x: x * float(os.environ["VERNAL_SOUNDNESS_K"]),
        _set_environment,
    ),
    "class attribute": (lambda: lambda x: x * Base.k, _set(Base)),
    "class attribute through a subclass": (lambda: lambda x: x * Derived.k, _set(Base)),
    "class attribute through an instance": (_over_an_instance, _set(Base)),
    "metaclass attribute": (lambda: lambda x: x * WithMeta.k, _set(Meta)),
    "descriptor": (lambda: lambda x: x * Descriptive().k, _set(Described)),
    "patched method": (_over_a_method, _patch(Base, "number")),
    "patched method of a bound one": (_over_a_bound_method, _set(Base)),
    "patched function": (lambda: lambda x: x * patched(), _patch(_this_module(), "patched")),
    "swapped code": (lambda: lambda x: x * recoded(), _patch_code(recoded)),
    "swapped code, captured": (
        lambda: (lambda f: lambda x: x * f())(recoded),
        _patch_code(recoded),
    ),
}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Every change is undone, whatever the test did."""
    attributes = [
        (owner, name, vars(owner)[name])
        for owner, name in (
            (_this_module(), "K"),
            (_this_module(), "patched"),
            (Base, "k"),
            (Base, "number"),
            (Meta, "k"),
            (Described, "k"),
        )
    ]
    code = recoded.__code__
    os.environ["VERNAL_SOUNDNESS_K"] = "1.0"
    yield
    for owner, name, value in attributes:
        setattr(owner, name, value)
    recoded.__code__ = code
    LIST[0] = 1.0
    del os.environ["VERNAL_SOUNDNESS_K"]


@pytest.mark.parametrize(("make", "change"), SHARED.values(), ids=SHARED)
@pytest.mark.sample(12)
def test_a_function_made_after_a_change_sees_it(make, change, answers: Answers):
    first = make()
    answers.check(first, X)
    change(2.0)
    answers.check(make(), X)
    answers.check(first, Y)
    second = make()
    answers.check(second, Y)
    change(1.0)
    answers.check(make(), X)
    answers.check(make(), Y)
    answers.check(second, Z)
    change(3.0)
    answers.check(make(), Z)
    answers.check(make(), X)


@pytest.mark.parametrize(("make", "change"), SHARED.values(), ids=SHARED)
def test_every_change_is_one(make, change):
    """Guards the test above."""
    before = make()(1.0)
    change(before + 1.0)
    assert make()(1.0) == before + 1.0, "this change changes nothing, even for plain Python"
