"""The small things on the ground floor: caches, names, signatures, publishing, leaves."""

import functools
import operator
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal._ground import (
    by_data,
    callable_name,
    clear_caches,
    flatten_none_is_leaf,
    is_none,
    publish,
    register_cache,
    signature_of,
    strong,
)


def named(x, y=1):
    return x


class Callable:
    def __call__(self, z):
        return z

    def method(self, w):
        return w


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (named, "named"),
        (functools.partial(named, 1), "named"),
        (functools.partial(functools.partial(Callable()), 1), "Callable"),
        (Callable, "Callable"),
        (Callable(), "Callable"),
        (Callable().method, "method"),
        (jax.jit(named), "named"),
        (len, "len"),
        (lambda: 1, "<lambda>"),
        (jnp.tanh, "tanh"),
    ],
)
def test_a_callable_has_the_name_people_know_it_by(fn, name):
    assert callable_name(fn) == name


def test_signatures_are_found_where_python_can_tell():
    assert list(signature_of(named).parameters) == ["x", "y"]
    assert list(signature_of(Callable().method).parameters) == ["w"]
    assert list(signature_of(Callable()).parameters) == ["z"]
    assert list(signature_of(jax.jit(named)).parameters) == ["x", "y"]
    assert signature_of(operator.attrgetter("x").__call__) is not None
    assert signature_of(type) is None


def test_clearing_empties_every_registered_cache():
    cache = {"a": 1}
    register_cache(cache.clear)
    clear_caches()
    assert cache == {}
    clear_caches()


def test_a_cleared_function_compiles_again_and_gives_the_same():
    traces = []

    @vernal.filter_jit
    def f(x):
        traces.append(1)
        return x + 1

    f(jnp.ones(2))
    f(jnp.ones(2))
    vernal.clear_caches()
    assert (f(jnp.ones(2)) == 2).all()
    assert len(traces) == f.trace_count == 2


def test_publishing_stamps_what_the_room_defines_and_nothing_else():
    mine = types.FunctionType(named.__code__, globals(), "mine")
    mine.__module__ = "house.room._file"
    other = types.FunctionType(named.__code__, globals(), "other")
    other.__module__ = "elsewhere"
    hidden = types.FunctionType(named.__code__, globals(), "_hidden")
    hidden.__module__ = "house.room._file"
    room = type("Room", (), {"__module__": "house.room._other"})
    publish(
        "house.room",
        {"mine": mine, "other": other, "_hidden": hidden, "Room": room, "m": types, "n": 1},
    )
    assert mine.__module__ == room.__module__ == "house.room"
    assert other.__module__ == "elsewhere"
    assert hidden.__module__ == "house.room._file"


def test_flattening_with_none_as_a_leaf_round_trips():
    leaves, treedef = flatten_none_is_leaf({"a": None, "b": (1, None)})
    assert leaves == [None, 1, None]
    assert treedef.unflatten(leaves) == {"a": None, "b": (1, None)}


def test_none_is_a_leaf_where_a_walk_is_told_so():
    assert jax.tree.leaves({"a": None, "b": 1}, is_leaf=is_none) == [None, 1]


@pytest.mark.parametrize(
    "x", [1.0, np.float16(1), jnp.array(1.0), jnp.arange(2), jax.random.key(0)]
)
def test_a_strong_leaf_has_its_dtype_and_keeps_it(x):
    got = strong(x)
    assert got.dtype == jnp.asarray(x).dtype
    assert not jax.typeof(got).weak_type
    assert (got == x).all()


def test_random_keys_are_changed_by_their_data():
    keys = jax.random.split(jax.random.key(0), 3)
    assert (by_data(jnp.flip, keys, 0) == keys[::-1]).all()
    assert (by_data(jnp.flip, jnp.arange(3), 0) == jnp.array([2, 1, 0])).all()
