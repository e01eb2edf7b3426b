"""Abstract or final, where a class asks for it."""

import abc
from typing import Any

import pytest

import vernal
from vernal import AbstractVar, Module


class Base(Module, strict=True):
    size: AbstractVar[int]

    @abc.abstractmethod
    def forward(self, x): ...

    def twice(self, x):
        return self.forward(self.forward(x))


class Final(Base):
    size: int = 1

    def forward(self, x):
        return x + self.size

    def __check_init__(self):
        assert self.size


def test_the_pattern_it_asks_for_works():
    assert Final().twice(1) == 3


def test_a_final_class_cannot_be_subclassed():
    with pytest.raises(
        TypeError,
        match=r"strict module: `Final` is final, because it can be instantiated[\s\S]*Sub",
    ):

        class Sub(Final):
            pass


OVERRIDES = {
    "method": lambda: lambda self: 1,
    "property": lambda: property(lambda self: 1),
    "classmethod": lambda: classmethod(lambda cls: 1),
    "staticmethod": lambda: staticmethod(lambda: 1),
}


@pytest.mark.parametrize("make", OVERRIDES.values(), ids=OVERRIDES)
def test_an_implemented_method_cannot_be_overridden(make):
    bases = (
        type(Module)(
            "Root", (Module,), {"thing": make(), "size": 1}, strict=True, is_abstract=True
        ),
    )
    with pytest.raises(TypeError, match=r"strict module: `thing` is already implemented by `Root`"):
        type(Module)("Sub", bases, {"thing": make()})


def test_init_and_call_cannot_be_overridden_either():
    class A(Module, strict=True, is_abstract=True):
        x: Any

        def __init__(self):
            self.x = 1

        def __call__(self): ...

    for name in ("__init__", "__call__"):
        with pytest.raises(TypeError, match=f"strict module: `{name}` is already implemented by"):
            type(Module)("B", (A,), {name: lambda self: None})


def test_generated_methods_and_defaults_are_no_overrides():
    def f(x):
        return x

    class A(Module, strict=True, is_abstract=True):
        x: Any = 1
        fn: Any = f

    class B(A):
        y: Any = 2
        fn: Any = lambda x: x

        def __init__(self):
            self.x = 3

    assert B().x == 3


def test_strictness_cannot_be_switched_off_below():
    with pytest.raises(
        TypeError, match="a subclass of the strict `Base` cannot switch strictness off"
    ):

        class Loose(Base, strict=False):
            pass


def test_a_strict_class_cannot_extend_a_class_that_can_be_instantiated():
    class Ordinary(Module):
        pass

    with pytest.raises(TypeError, match="is final, because it can be instantiated"):

        class Strict(Ordinary, strict=True):
            pass


def test_without_the_option_everything_is_allowed():
    class A(Module):
        def f(self):
            return 1

    class B(A, strict=False):
        def f(self):
            return 2

    assert B().f() == 2


def test_the_public_bases_may_be_extended_strictly():
    class M(Module, strict=True):
        x: Any = 1

        def __repr__(self):
            return "mine"

    assert repr(M()) == "mine"
    assert vernal.tree_equal(M(), M())
