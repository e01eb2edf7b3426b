import copy
import inspect
import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal

STRUCT = jax.ShapeDtypeStruct((3, 2), jnp.float32)


class Model(vernal.Module):
    weight: jax.Array
    name: str = "model"

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.weight


def gram(x: jax.Array, text: str, *, scale: float = 2.0) -> dict[str, Any]:
    """Inner products."""
    return {"gram": scale * x.T @ x, "text": text, "n": x.shape[0], "f": gram, "none": None}


@pytest.mark.parametrize("x", [STRUCT, jnp.ones((3, 2)), np.ones((3, 2), np.float32)])
def test_shapes_of_arrays_and_everything_else_as_it_is(x):
    out = vernal.filter_eval_shape(gram, x, "text", scale=3.0)
    assert out == {
        "gram": jax.ShapeDtypeStruct((2, 2), jnp.float32),
        "text": "text",
        "n": 3,
        "f": gram,
        "none": None,
    }
    assert out == eqx.filter_eval_shape(gram, x, "text", scale=3.0)


def test_nothing_is_computed():
    huge = jax.ShapeDtypeStruct((1_000_000, 1_000_000), jnp.float32)
    assert vernal.filter_eval_shape(lambda x: x @ x, huge).shape == (1_000_000, 1_000_000)


def test_a_model_without_memory():
    def make(key: jax.Array) -> Model:
        return Model(jax.random.normal(key, (2, 4)))

    model = vernal.filter_eval_shape(make, jax.random.key(0))
    assert type(model) is Model
    assert model.weight == jax.ShapeDtypeStruct((2, 4), jnp.float32)
    assert model.name == "model"
    out = vernal.filter_eval_shape(model, STRUCT)
    assert out == jax.ShapeDtypeStruct((3, 4), jnp.float32)
    out = vernal.filter_eval_shape(lambda m, x: m(x), model, x=STRUCT)
    assert out.shape == (3, 4)
    assert vernal.filter_eval_shape(Model, jnp.ones((2, 4))).weight.shape == (2, 4)


def test_an_argument_may_be_called_fn():
    assert vernal.filter_eval_shape(lambda fn: fn, fn=STRUCT) == STRUCT


def test_random_keys_keep_their_type():
    out = vernal.filter_eval_shape(lambda k: jax.random.split(k, 3), jax.random.key(0))
    assert out.shape == (3,)
    assert jnp.issubdtype(out.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("x", [STRUCT, jnp.ones((3, 2))])
def test_the_jaxpr_and_both_halves_of_the_result_agree_with_equinox(x):
    jaxpr, structs, static = vernal.filter_make_jaxpr(gram)(x, "text")
    expected, their_structs, their_static = eqx.filter_make_jaxpr(gram)(x, "text")
    assert [e.primitive for e in jaxpr.eqns] == [e.primitive for e in expected.eqns]
    assert structs == their_structs
    assert static == their_static
    assert vernal.combine(structs, static) == vernal.filter_eval_shape(gram, x, "text")


def test_the_inputs_of_the_jaxpr_are_the_arrays_in_order():
    model = Model(jnp.ones((2, 4)))
    jaxpr, _, _ = vernal.filter_make_jaxpr(model)(STRUCT)
    assert [v.aval.shape for v in jaxpr.jaxpr.invars] == [(2, 4), (3, 2)]
    (out,) = jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, model.weight, jnp.ones((3, 2)))
    np.testing.assert_array_equal(out, model(jnp.ones((3, 2))))


def test_make_jaxpr_keeps_name_documentation_pickle_and_methods():
    make = vernal.filter_make_jaxpr(gram)
    assert make.__name__ == "gram"
    assert make.__doc__ == "Inner products."
    for again in (pickle.loads(pickle.dumps(make)), copy.deepcopy(make)):
        assert again(STRUCT, "text")[2]["text"] == "text"

    class Other(vernal.Module):
        weight: jax.Array

        @vernal.filter_make_jaxpr
        def method(self, x: jax.Array) -> jax.Array:
            return x * self.weight

    jaxpr, structs, static = Other(jnp.array(2.0)).method(jnp.array(3.0))
    assert [e.primitive.name for e in jaxpr.eqns] == ["mul"]
    assert structs.shape == ()
    assert static is None


def test_what_cannot_be_called_is_refused():
    # Around the type checks that this suite runs under, which would refuse it first.
    with pytest.raises(TypeError, match="filter_eval_shape needs a function"):
        inspect.unwrap(vernal.filter_eval_shape)(1.0)
    with pytest.raises(TypeError, match="filter_make_jaxpr needs a function"):
        inspect.unwrap(vernal.filter_make_jaxpr)(1.0)
