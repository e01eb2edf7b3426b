"""`same` and `static_key`: when one compiled program may stand for two Python values."""

import collections
import copy
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from vernal._ground import same, static_key


class Point(NamedTuple):
    x: Any
    y: Any = 0


class MyTuple(tuple):
    pass


class MyFloat(float):
    pass


class SlotFloat(float):
    __slots__ = ()


class Subclass(NamedTuple("Subclass", [("x", int)])):
    """Has a `__dict__`, which the `==` of tuples does not see."""


@dataclasses.dataclass(unsafe_hash=True)
class Mutable:
    x: Any


class PlainMethod:
    def method(self):
        pass


OBJECT = PlainMethod()


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(frozen=True)
class HalfCompared:
    x: Any
    note: Any = dataclasses.field(default=None, compare=False)


class ByName:
    def __init__(self, name: str, extra: Any = None):
        self.name = name
        self.extra = extra

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ByName) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


class Incomparable:
    __hash__ = None  # type: ignore[assignment] (that is the point)

    def __eq__(self, other: Any) -> bool:
        raise RuntimeError("do not compare me")


def f():
    pass


def g():
    pass


NAN = float("nan")
DIFFERENT = [
    (1, 1.0),
    (1, True),
    (0, False),
    (1.0, 1 + 0j),
    (0.0, -0.0),
    (MyFloat(0.0), MyFloat(-0.0)),
    (MyFloat(1.0), 1.0),
    (complex(0.0, 0.0), complex(0.0, -0.0)),
    (complex(0.0, 1.0), complex(-0.0, 1.0)),
    (NAN, 0.0),
    ("1", 1),
    ("a", b"a"),
    (None, False),
    ((1,), (1.0,)),
    ((1,), [1]),
    ((1, 2), (1, 2, 3)),
    ((1, (0.0,)), (1, (-0.0,))),
    (MyTuple((1,)), (1,)),
    (Point(1), Point(True)),
    (Point(1, 0), (1, 0)),
    ([1], [True]),
    ({"a": 1}, {"a": 1.0}),
    ({1: "a"}, {True: "a"}),
    ({"a": 1}, {"a": 1, "b": 2}),
    ({"a": 1}, collections.OrderedDict(a=1)),
    ({1, 2}, frozenset({1, 2})),
    (frozenset({1}), frozenset({1.0})),
    (frozenset({0.0}), frozenset({-0.0})),
    (frozenset({(1,)}), frozenset({(True,)})),
    ({(0.0, "a")}, {(-0.0, "a")}),
    (np.float32(1), np.float64(1)),
    (np.float32(0.0), np.float32(-0.0)),
    (np.float64(1), 1.0),
    (np.array([1, 2]), np.array([1, 3])),
    (np.array([1, 2]), np.array([1.0, 2.0])),
    (np.array([[1, 2]]), np.array([1, 2])),
    (f, g),
    (lambda: 1, lambda: 2),
    (functools.partial(f), functools.partial(g)),
    (functools.partial(f, 1), functools.partial(f, True)),
    (int, float),
    (jnp.dtype("float32"), jnp.dtype("float16")),
    (range(0, 3, 2), range(0, 4, 2)),
    (slice(1), slice(True)),
    (slice(0.0), slice(-0.0)),
    (Frozen(1), Frozen(1.0)),
    (Frozen((0.0,)), Frozen((-0.0,))),
    (Frozen(1), HalfCompared(1)),
    (ByName("a"), ByName("b")),
    (object(), object()),
    (MyFloat(1.0), MyFloat(1.0)),
    (MyTuple((1,)), MyTuple((1,))),
    (Subclass(1), Subclass(1)),
    (SlotFloat(0.0), SlotFloat(-0.0)),
    (OBJECT.method, OBJECT.method),
    (functools.partial(OBJECT.method), functools.partial(OBJECT.method)),
    ([].append, [].append),
    (functools.partial(f, a=1), functools.partial(f, a=True)),
    (functools.partial(f, [1]), functools.partial(f, [1])),
    (functools.partial(f, OBJECT), functools.partial(f, OBJECT)),
    (functools.partial(f, np.ones(2)), functools.partial(f, np.ones(2))),
    (functools.partial(f, a=1), functools.partial(f, b=1)),
    (functools.partial(f, 1, 2), functools.partial(f, 1, a=2)),
    (jnp.float32, jnp.float16),
    (np.float64, jnp.float64),
    (np.float32, np.dtype("float32")),
]
EQUAL = [
    (1, 1),
    (10**30, 10**30),
    (NAN, float("nan")),
    (complex(NAN, 0.0), complex(-NAN, 0.0)),
    ((NAN, "a"), (float("nan"), "a")),
    ((), ()),
    ([1, ["a", None]], [1, ["a", None]]),
    ({"a": [NAN]}, {"a": [float("nan")]}),
    (Point(1, (2.0,)), Point(1, (2.0,))),
    (frozenset({1, "a"}), frozenset({"a", 1})),
    ({(NAN,)}, {(float("nan"),)}),
    (np.float32(2), np.float32(2)),
    (np.array([NAN]), np.array([NAN])),
    (np.arange(4)[::2], np.array([0, 2])),
    (f, f),
    (functools.partial(f), functools.partial(f)),
    (jax.nn.relu, jax.nn.relu),
    (len, len),
    (math, math),
    (range(3), range(3)),
    (slice(1, 2), slice(1, 2)),
    (..., ...),
    (Frozen((1, "a")), Frozen((1, "a"))),
    (HalfCompared(1, "x"), HalfCompared(1, "y")),
    (ByName("a", 1), ByName("a", 2)),
    (jnp.dtype("float32"), np.dtype("float32")),
    (jnp.float32, np.dtype("float32")),
    (functools.partial(f, 1, a=2), functools.partial(f, 1, a=2)),
    (functools.partial(f, (1, "a")), functools.partial(f, (1, "a"))),
    (functools.partial(f, None, k=...), functools.partial(f, None, k=...)),
    (functools.partial(f, functools.partial(f, 1)), functools.partial(f, functools.partial(f, 1))),
    (functools.partial(jax.nn.relu, jnp.tanh), functools.partial(jax.nn.relu, jnp.tanh)),
    (SlotFloat(1.0), SlotFloat(1.0)),
]


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_values_that_compile_to_different_programs_are_different(a, b):
    assert not same(a, b)
    assert not same(b, a)
    assert not same((a,), (b,))
    try:
        keys = static_key(a), static_key(b)
    except TypeError:
        return
    assert keys[0] != keys[1]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_values_that_are_interchangeable_are_the_same(a, b):
    assert same(a, b)
    assert same([a], [b])
    try:
        keys = static_key(a), static_key(b)
    except TypeError:
        return
    assert keys[0] == keys[1]
    assert hash(keys[0]) == hash(keys[1])


def test_dictionaries_in_another_order_are_different_because_code_may_walk_them():
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})


def test_a_value_that_cannot_be_compared_is_the_same_as_itself_only():
    x = Incomparable()
    assert same(x, x)
    assert not same(x, Incomparable())
    assert not same((x,), (Incomparable(),))


def test_jax_arrays_compare_by_identity_and_are_never_read():
    x = jnp.ones(2)
    assert same(x, x)
    assert not same(x, jnp.ones(2))
    assert jax.jit(lambda a, b: same(a, a) and not same(a, b))(x, x)


@pytest.mark.parametrize(
    "value",
    [[], {}, set(), ([],), np.ones(2), Incomparable(), Mutable(1)],
)
def test_a_key_of_something_unhashable_is_refused(value):
    with pytest.raises(TypeError, match="unhashable type"):
        static_key(value)


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, NAN, float("inf")]),
    st.sampled_from([0j, complex(0.0, -0.0), 1 + 0j, complex(NAN, 1)]),
    st.sampled_from([np.float32(1), np.float64(1), np.int32(1), np.float32(-0.0), np.bool_(True)]),
)
HASHABLE = st.recursive(
    st.one_of(NUMBERS, st.none(), st.sampled_from(["", "a", b"a", f, int, ..., jax.nn.relu])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2).map(tuple),
        st.frozensets(inner, max_size=2),
        st.tuples(inner).map(lambda t: Point(*t)),
        inner.map(Frozen),
        inner.map(lambda x: functools.partial(f, x)),
    ),
    max_leaves=4,
)


def exact(value: Any) -> Any:
    """An independent account of everything that may matter about a value."""
    if isinstance(value, frozenset):
        return (type(value).__name__, tuple(sorted(map(repr, map(exact, value)))))
    if isinstance(value, tuple):
        return (type(value).__name__, tuple(map(exact, value)))
    if isinstance(value, functools.partial):
        # Over an object of the user's, which may hold anything, it is only itself.
        return ("partial", id(value) if "Frozen" in repr(value) else exact(value.args))
    if isinstance(value, Frozen):
        return ("Frozen", exact(value.x))
    if isinstance(value, complex):
        return ("complex", repr(value.real), repr(value.imag))
    return (type(value).__name__, repr(value))


@given(HASHABLE, HASHABLE)
def test_same_agrees_with_an_exact_account_of_the_values(a, b):
    if same(a, b):
        assert exact(a) == exact(b)
    # The `==` of a dataclass may say of NaN what it likes.
    elif "nan" not in repr(a):
        assert exact(a) != exact(b)


@given(HASHABLE, HASHABLE)
def test_equal_keys_mean_the_same_value(a, b):
    if static_key(a) == static_key(b):
        assert same(a, b)
    if same(a, b):
        assert static_key(a) == static_key(b)


@given(st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=3) | inner.map(lambda x: (x,))))
def test_every_value_is_the_same_as_a_copy(value):
    assert same(value, copy.deepcopy(value))
