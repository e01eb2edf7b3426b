"""Signatures of calls: what they tell apart, and that they keep nothing alive."""

import collections
import dataclasses
import functools
import gc
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.show import short
from vernal.transforms._explain import ordinal, traces_of
from vernal.transforms._signatures import signature_of_call

X = jnp.ones(3)
OPTIONS = {"donate": "none"}


def function(x, *rest, n=1, **more):
    return x


def signature(*args, fn=function, options=OPTIONS, **kwargs):
    return signature_of_call(fn, args, kwargs, options)


def changes(before, after, **options):
    return [str(d) for d in signature(before).differences(signature(after), **options)]


class Holder(vernal.Module):
    value: Any

    def __call__(self, x):
        return x


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    note: str = dataclasses.field(default="", compare=False)


class Plain:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Plain({self.name})"


class ByName(Plain):
    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Labelled:
    def __init__(self, child, label):
        self.child, self.label = child, label


jax.tree_util.register_pytree_node(
    Labelled, lambda x: ((x.child,), x.label), lambda label, children: Labelled(*children, label)
)


def capturing(value):
    return lambda: value


def recursive(n):
    def f(k):
        return f(k - 1) if k else n

    return f


def not_assigned():
    def f():
        return late

    if f is None:
        late = 1
    return f


EQUAL = {
    "arrays by value": lambda: jnp.arange(3.0),
    "numpy and jax": iter([np.ones(3, np.float32), jnp.ones(3)]).__next__,
    "nan": lambda: float("nan"),
    "objects by value": lambda: ByName("a"),
    "configurations": lambda: Config(3),
    "sets": lambda: frozenset({1, 2}),
    "classes of aux data": lambda: Labelled(jnp.ones(2), "a"),
}


@pytest.mark.parametrize("name", EQUAL)
def test_values_that_are_equal_do_not_differ(name):
    before, after = EQUAL[name](), EQUAL[name]()
    assert changes(before, after) == []
    assert changes(Holder([before, X]), Holder([after, X])) == []


MADE_AGAIN = {
    "methods": lambda: types.MethodType(function, "owner"),
    "functions": lambda: capturing((1, "a", None, 2.5)),
    "recursive functions": lambda: recursive(2),
    "captured nan": lambda: capturing(float("nan")),
    "captured lists": lambda: capturing(list(range(1000))),
    "a name that is not assigned": not_assigned,
}


@pytest.mark.parametrize("name", MADE_AGAIN)
def test_a_function_made_again_is_another_one(name):
    """It compiles again, and this is what `explain` has to say."""
    before, after = MADE_AGAIN[name](), MADE_AGAIN[name]()
    (change,) = changes(before, after)
    assert change.startswith("x: <") and change.endswith(" (another one that prints the same)")
    (inside,) = changes(Holder([before, X]), Holder([after, X]))
    assert inside == change.replace("x:", "x.value[0]:")
    assert changes(before, before) == []


DIFFERENT = {
    "configuration": (Config(3), Config(4), "x.width: 3 -> 4"),
    "long text": (
        "a" * 200 + "b",
        "a" * 200 + "c",
        f"x: '{'a' * 76}... -> '{'a' * 76}... (another one that prints the same)",
    ),
    "signed zero": (0.0, -0.0, "x: 0.0 -> -0.0"),
    "object": (Plain("a"), Plain("b"), "x: Plain(a) -> Plain(b)"),
    "identity": (
        Plain("a"),
        Plain("a"),
        "x: Plain(a) -> Plain(a) (another one that prints the same)",
    ),
    "partial of JAX over a module": (
        jax.tree_util.Partial(Holder(X)),
        jax.tree_util.Partial(Holder(jnp.ones(3))),
        "x.func.value: f32[3] -> f32[3] (another one that prints the same)",
    ),
    "partial over a list": (
        functools.partial(max, [1]),
        functools.partial(max, [1]),
        "x: <partial max> -> <partial max> (another one that prints the same)",
    ),
    "recursive function": (recursive(2), recursive(3), "x.n (captured): 2 -> 3"),
    "static data": (
        Labelled(X, "a"),
        Labelled(X, "b"),
        "x: Labelled -> Labelled (another one that prints the same)",
    ),
    "child of labelled": (Labelled(X, "a"), Labelled(1, "a"), "x[<flat index 0>]: f32[3] -> 1"),
    "ordered dict": (
        collections.OrderedDict(a=1, b=2),
        collections.OrderedDict(b=2, a=1),
        "x: keys in the order ['a'], ['b'] -> keys in the order ['b'], ['a']",
    ),
    "ordered dict of many keys": (
        collections.OrderedDict(a=1, b=2, c=3, d=4, e=5, f=6),
        collections.OrderedDict(a=1, f=6, b=2, c=3, d=4, e=5),
        "x: keys in the order ..., ['b'], ['c'], ['d'], ['e'], ... "
        "-> keys in the order ..., ['f'], ['b'], ['c'], ['d'], ...",
    ),
    "captured long list": (
        capturing(tuple(range(1000))),
        capturing(tuple(range(1, 1001))),
        f"x.value (captured): {short(tuple(range(1000)))} -> {short(tuple(range(1, 1001)))}",
    ),
    "keys without order": (
        capturing({1: 2, "a": 3}),
        capturing({1: 2, "a": 4}),
        "x.value (captured)['a']: 3 -> 4",
    ),
    "same code elsewhere": (
        eval("lambda: 1", {}),
        eval("lambda: 2", {}),
        "x: <lambda at <string>:1> -> <lambda at <string>:1> (another one that prints the same)",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_differ_are_told_apart_in_words(name):
    before, after, expected = DIFFERENT[name]
    assert changes(before, after) == [expected]


def test_classes_of_one_name_are_told_apart():
    def make(module):
        return type("Same", (vernal.Module,), {"__module__": module, "__qualname__": "Same"})()

    assert changes(make("a"), make("b")) == ["x: a.Same -> b.Same"]
    assert changes(make("a"), make("a")) == ["x: Same -> Same (another one that prints the same)"]


def test_functions_of_one_name_are_told_apart_by_their_places():
    def named(line):
        space = {}
        exec(compile("\n" * line + "def act(x): return x", "other.py", "exec"), space)
        return space["act"]

    assert changes(named(2), named(6)) == ["x: <act at other.py:3> -> <act at other.py:7>"]


def test_arguments_have_the_names_of_their_parameters():
    before, after = signature(1, 2, n=3, k=4), signature(0, 0, n=0, k=0)
    paths = [d.path for d in before.differences(after)]
    assert paths == ["x", "rest[0]", "n", "k"]
    # A builtin has no signature; a call that does not fit it is refused by the function.
    for fn in (max, lambda: None):
        found = signature(1, 2, fn=fn, k=1).differences(signature(0, 2, fn=fn, k=2))
        assert [str(d) for d in found] == ["args[0]: 1 -> 0", "k: 1 -> 2"]


def test_a_function_that_holds_arrays_is_an_argument():
    before, after = (signature(X, fn=Holder(v)) for v in (X, jnp.ones(4)))
    assert [str(d) for d in before.differences(after)] == ["Holder.value: f32[3] -> f32[4]"]


def test_a_device_matters_only_where_it_is_asked_for():
    there = jax.device_put(X, jax.devices()[1])
    assert changes(X, there) == []
    assert changes(X, there, placed=True) == ["x: f32[3] uncommitted -> f32[3] on cpu:1"]


def test_a_signature_keeps_nothing_alive():
    class Owner:
        pass

    array, captured, owner = jnp.arange(4.0), jnp.arange(5.0), Owner()
    closure = lambda: (captured, owner)  # noqa: E731 (it is to be deleted)
    model = vernal.Partial(closure, array, jax.jit(closure))
    kept = signature(model, closure, fn=closure)
    alive = [weakref.ref(x) for x in (array, captured, owner, closure, model)]
    del array, captured, owner, closure, model
    gc.collect()
    assert [ref() for ref in alive] == [None] * 5
    assert kept.differences(kept) == []


def test_a_signature_keeps_no_tracer():
    kept = []

    @jax.jit
    def f(x):
        kept.append(signature(Holder(x), lambda: x))
        return x

    with jax.checking_leaks():
        f(jnp.ones(7))
    assert changes(Holder(1), 2) and kept[0].parts["x"].text == "Holder"


def test_the_traces_of_a_function_are_forgotten_with_it():
    step = vernal.filter_jit(lambda x: x)
    step(X)
    traces = weakref.ref(traces_of(step.fn))
    assert traces().count == 1
    del step
    gc.collect()
    assert traces() is None


def test_ordinals():
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111, 112, 123)] == (
        "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 111th 112th 123rd".split()
    )
