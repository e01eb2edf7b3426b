"""Pickling functions that Python's pickle cannot."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal._ground import by_name

IMPORTABLE = [jax.nn.relu, jax.nn.gelu, jnp.tanh, jnp.ravel, jax.nn.silu, jnp.add, jax.nn.softplus]


@pytest.mark.parametrize("fn", IMPORTABLE, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_an_importable_callable_comes_back_as_itself(fn, copier):
    assert copier(by_name(fn)) is fn
    assert copier(by_name([fn, (fn, 1)]))[1][0] is fn
    assert copier(by_name({"f": {"g": fn}}))["f"]["g"] is fn


@pytest.mark.parametrize("value", [1, "text", None, len, int, copy.copy, np.ones(2), {1, 2}], ids=repr)
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
