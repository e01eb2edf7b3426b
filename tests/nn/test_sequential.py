"""`Sequential` and `Lambda`: against Equinox, keys, plain functions, and behaving as a tuple."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn
from vernal.nn import _layer_arguments


def test_layers_and_keys_agree_with_equinox(getkey):
    k1, k2, key, x = getkey(), getkey(), getkey(), jax.random.normal(getkey(), (2,))

    def build(nn):
        return nn.Sequential(
            [
                nn.Linear(2, 30, key=k1),
                nn.Dropout(0.5),
                nn.Lambda(jax.nn.relu),
                nn.Dropout(0.2),
                nn.Linear(30, 3, key=k2),
            ]
        )

    np.testing.assert_allclose(build(nn)(x, key=key), build(eqx.nn)(x, key=key), rtol=1e-5)


class Noisy(vernal.Module):
    """Adds noise; written by somebody who passes on whatever a layer is called with."""

    inner: nn.Dropout

    def __call__(self, x, **kwargs):
        return self.inner(x, **kwargs)

    def scaled(self, x, *, key):
        return 3 * self.inner(x, key=key)


def takes_key(x, key):
    assert key is not None
    return x


def takes_no_key(x):
    return x


def takes_only_a_positional_key(x, key=7, /):
    assert key == 7
    return x


def test_every_kind_of_callable_is_given_a_key_if_and_only_if_it_takes_one(getkey):
    class Plain:
        def __call__(self, x):
            return x

    layers = [
        takes_key,
        takes_no_key,
        takes_only_a_positional_key,
        functools.partial(takes_key),
        functools.partial(takes_no_key),
        vernal.Partial(takes_key),
        vernal.Partial(takes_no_key),
        vernal.Partial(takes_key, key=1),
        lambda x: x,
        lambda x, **kwargs: takes_key(x, **kwargs),
        jax.nn.relu,
        jnp.tanh,
        jnp.ravel,
        np.negative,
        jax.jit(takes_no_key),
        Plain(),
        Noisy(nn.Dropout(0.5)),
        Noisy(nn.Dropout(0.5)).scaled,
        nn.Identity(),
    ]
    model = nn.Sequential(layers)
    for _ in range(2):
        assert model(jnp.ones(3), key=getkey()).shape == (3,)


def test_a_layer_put_in_by_surgery_is_called_as_it_wants(getkey):
    model = nn.Sequential([takes_no_key, nn.Dropout(0.5)])
    model = vernal.tree_at(lambda m: (m.layers[0], m.layers[1]), model, (takes_key, takes_no_key))
    assert (model(jnp.ones(3), key=getkey()) == 1).all()


def test_without_a_key_layers_that_need_one_say_so():
    with pytest.raises(RuntimeError, match="needs a random key"):
        nn.Sequential([nn.Dropout(0.5)])(jnp.ones(3))


def test_it_behaves_as_a_tuple_of_its_layers(getkey):
    layers = [nn.LayerNorm(2), jnp.tanh, nn.LayerNorm(2)]
    model = nn.Sequential(iter(layers))
    assert len(model) == 3
    assert all(a is b for a, b in zip(model, layers, strict=True))
    assert model[1] is jnp.tanh and model[-1] is layers[2]
    tail = model[1:]
    assert isinstance(tail, nn.Sequential) and tail.layers == tuple(layers[1:])
    with pytest.raises(IndexError, match="out of range"):
        model[3]
    x = jax.random.normal(getkey(), (2,))
    assert (model[:1](x) == layers[0](x)).all()


def test_no_layers_at_all_return_the_input(getkey):
    assert nn.Sequential([])(5, key=getkey()) == 5


def test_functions_are_structure_and_weights_keep_their_paths():
    model = nn.Sequential([jax.nn.relu, nn.LayerNorm(2), jnp.ravel])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    assert paths == [".layers[1].weight", ".layers[1].bias"]


def test_sequences_nest_and_split_their_keys(getkey):
    inner = nn.Sequential([nn.Dropout(0.5), nn.Dropout(0.5)])
    key, x = getkey(), jnp.ones(50)
    first, second = jax.random.split(key)
    expected = nn.Dropout(0.5)(inner(x, key=first), key=second)
    assert (nn.Sequential([inner, nn.Dropout(0.5)])(x, key=key) == expected).all()


def test_what_cannot_be_called_is_refused_with_its_place():
    with pytest.raises(TypeError, match=r"(?s)must be callable.*Sequential\(layers\)\[1\].*got: 3"):
        nn.Sequential([jnp.tanh, 3])


def test_lambda_drops_the_key_and_keeps_the_arrays_of_a_module(getkey):
    assert nn.Lambda(jnp.abs)(jnp.array(-1.0), key=getkey()) == 1
    assert jax.tree.leaves(nn.Lambda(jnp.abs)) == []
    assert len(jax.tree.leaves(nn.Lambda(nn.LayerNorm(2)))) == 2


class Counting(nn.StatefulLayer):
    calls: nn.Variable
    wants_state: bool = True

    def __init__(self, wants_state=True):
        self.calls = nn.Variable(0)
        self.wants_state = wants_state

    def is_stateful(self):
        return self.wants_state

    def __call__(self, x, state=None):
        if state is None:
            return -x
        calls = state.get(self.calls) + 1
        return calls + x, state.set(self.calls, calls)


def test_state_is_threaded_through_the_layers_that_want_it():
    make = lambda: nn.Sequential(  # noqa: E731
        [Counting(), jnp.negative, Counting(False), nn.Sequential([Counting()]), nn.Identity()]
    )
    model, state = nn.make_with_state(make)()
    assert model.is_stateful() and not model[1:3].is_stateful()
    y, state = model(jnp.array(10), state)
    assert y == 1 + (10 + 1)
    y, state = model(jnp.array(10), state)
    assert y == 2 + (10 + 2) and state.get(model[3][0].calls) == 2
    y, state = model[1:3](jnp.array(10), state)
    assert y == 10 and state.get(model[0].calls) == 2
    assert model(jnp.array(10)) == 10


def test_several_values_are_not_one_array():
    # (Beartype would answer for most layers, and before the first of them.)
    pair = nn.GRU(3, 3, key=jax.random.key(0))(jnp.ones((1, 3)))
    check_shape = inspect.unwrap(_layer_arguments.check_shape)
    for call in (
        lambda: _layer_arguments.as_array(nn.Dropout(0.5), pair),
        lambda: check_shape("Linear", pair, (..., 3)),
    ):
        with pytest.raises(TypeError, match="was given several values in place of one array"):
            call()


def test_a_list_of_numbers_is_to_be_made_an_array():
    check_shape = inspect.unwrap(_layer_arguments.check_shape)
    with pytest.raises(TypeError, match=r"(?s)several values.*instead: jnp\.asarray\(length\)"):
        check_shape("GRU", [1, 2], (...,), "length")
