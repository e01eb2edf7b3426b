"""Pickling functions that Python's pickle cannot."""

import collections
import copy
import functools
import pickle
import sys
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.trees import by_name


class Pair(NamedTuple):
    first: Any
    second: Any


IMPORTABLE = [jax.nn.relu, jax.nn.gelu, jnp.tanh, jnp.ravel, jax.nn.silu, jnp.add, jax.nn.softplus]


@pytest.mark.parametrize("fn", IMPORTABLE, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_importable_callable_comes_back_as_itself(fn, copier):
    assert copier(by_name(fn)) is fn
    assert copier(by_name([fn, (fn, 1)]))[1][0] is fn
    assert copier(by_name({"f": {"g": fn}}))["f"]["g"] is fn
    assert copier(by_name(Pair(1, fn))) == Pair(1, fn)
    assert copier(by_name(collections.OrderedDict(b=fn, a=1))) == collections.OrderedDict(b=fn, a=1)
    assert copier(by_name(collections.defaultdict(list, f=fn))) == collections.defaultdict(
        list, f=fn
    )
    assert copier(by_name(frozenset({fn}))) == frozenset({fn})
    partial = copier(by_name(functools.partial(fn, 1, k=[fn])))
    assert (partial.func, partial.args, partial.keywords) == (fn, (1,), {"k": [fn]})


@pytest.mark.parametrize("value", [1, "text", None, len, int, copy.copy, np.ones(2), 1j])
def test_everything_else_is_left_as_it_is(value):
    assert by_name(value) is value


def test_a_callable_that_cannot_be_found_by_its_name_is_left_as_it_is():
    @jax.jit
    def local(x):
        return x

    assert by_name(local) is local
    moved = jax.jit(lambda x: x)
    moved.__qualname__ = "relu_that_is_not_there"
    assert by_name(moved) is moved


def test_a_callable_hidden_by_another_of_its_name_is_left_as_it_is():
    impostor = jax.jit(lambda x: x)
    impostor.__module__, impostor.__qualname__ = jax.nn.relu.__module__, "relu"
    assert by_name(impostor) is impostor


def test_a_partial_is_its_own_deep_copy():
    partial = functools.partial(jax.nn.gelu, approximate=False)
    assert copy.deepcopy(by_name(partial)) is partial


def test_callables_of_the_running_script_are_left_to_the_pickler():
    main = sys.modules["__main__"]
    fn = jax.jit(lambda x: x)
    fn.__module__, fn.__qualname__ = "__main__", "a_function_of_the_script"
    main.a_function_of_the_script = fn
    try:
        assert copy.deepcopy(by_name(fn)) is fn
        with pytest.raises((pickle.PicklingError, AttributeError), match="pickle"):
            pickle.dumps(by_name(fn))
        again = pickle.loads(cloudpickle.dumps(by_name(fn)))
        assert again is not fn
        assert again(1.0) == 1
    finally:
        del main.a_function_of_the_script
