"""Models go through JAX and Optax as they are: an MLP, the model of the demonstration, and a user's own."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import vernal
from vernal import nn


class Own(vernal.Module):
    """Strings, ints, functions and None among the fields, and a list that mixes layers and functions."""

    layers: list
    activation: object
    name: str
    depth: int
    nothing: None
    scale: jax.Array

    def __init__(self, key):
        self.layers = [nn.Linear(4, 4, key=key), jnp.tanh, "a remark", {"f": jnp.negative, "n": 2}]
        self.activation = jax.nn.gelu
        self.name = "own"
        self.depth = 1
        self.nothing = None
        self.scale = 2.0

    def __call__(self, x):
        linear, squash, _, rest = self.layers
        return rest["f"](self.activation(self.scale * squash(linear(x))))


def digits_model(key):
    path = Path(__file__).parent.parent / "examples" / "digits.py"
    spec = importlib.util.spec_from_file_location("digits_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Classifier(key)


MODELS = {
    "mlp": (lambda key: nn.MLP(4, 4, 8, 2, key=key), (4,)),
    "digits": (digits_model, (1, 8, 8)),
    "own": (Own, (4,)),
}


@pytest.fixture(params=MODELS)
def model_and_input(request, getkey):
    make, shape = MODELS[request.param]
    return make(getkey()), jax.random.normal(getkey(), shape)


def loss(model, x):
    return jnp.sum(model(x) ** 2)


def test_jit_of_the_model_itself(model_and_input):
    model, x = model_and_input
    assert jnp.allclose(jax.jit(model)(x), model(x), atol=1e-5)


def test_the_model_as_an_argument_of_jit(model_and_input):
    model, x = model_and_input
    assert jnp.allclose(jax.jit(lambda m, x: m(x))(model, x), model(x), atol=1e-5)


@pytest.mark.sample(3)
def test_grad_is_the_directional_derivative(model_and_input, getkey):
    model, x = model_and_input
    gradient = jax.grad(loss)(model, x)
    assert jax.tree.structure(gradient) == jax.tree.structure(model)
    leaves, treedef = jax.tree.flatten(model)
    direction = treedef.unflatten([jax.random.normal(getkey(), w.shape) for w in leaves])
    along = jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, direction)
    _, tangent = jax.jvp(lambda m: loss(m, x), (model,), (direction,))
    assert jnp.allclose(sum(jax.tree.leaves(along)), tangent, rtol=1e-3, atol=1e-3)


def test_the_model_is_carried_by_scan(model_and_input):
    model, x = model_and_input
    carried, values = jax.lax.scan(
        lambda m, _: (jax.tree.map(lambda w: 0.5 * w, m), loss(m, x)), model, None, length=3
    )
    assert jax.tree.structure(carried) == jax.tree.structure(model)
    assert vernal.tree_allclose(carried, jax.tree.map(lambda w: 0.125 * w, model))
    assert jnp.allclose(values[0], loss(model, x), rtol=1e-5)


def test_cond_chooses_between_models(model_and_input):
    model, _ = model_and_input
    other = jax.tree.map(jnp.negative, model)
    for predicate, expected in ((True, model), (False, other)):
        chosen = jax.lax.cond(predicate, lambda a, b: a, lambda a, b: b, model, other)
        assert vernal.tree_equal(chosen, expected)


def test_vmap_of_the_model_maps_its_input(model_and_input):
    model, x = model_and_input
    batch = jnp.stack([x, 2 * x, -x])
    assert jnp.allclose(jax.vmap(model)(batch)[1], model(2 * x), atol=1e-4)


@pytest.mark.sample(3)
def test_optax_takes_the_model(model_and_input):
    model, x = model_and_input
    optimiser = optax.adam(1e-3)
    state = optimiser.init(model)
    # Optax computes `b1**count`, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimiser.update(jax.grad(loss)(model, x), state, model)
    moved = optax.apply_updates(model, updates)
    assert jax.tree.structure(moved) == jax.tree.structure(model)
    assert loss(moved, x) < loss(model, x)
