"""Without compat: Vernal's modules and the real libraries with the real Equinox, in one program."""

import diffrax
import equinox
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import optimistix
import pytest

import vernal


class Field(vernal.Module):
    weight: jax.Array
    activation: object

    def __call__(self, t, y, args):
        return self.activation(self.weight @ y)


@pytest.fixture(autouse=True)
def ordinary_promotion():
    """These libraries rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def end(field):
    term = diffrax.ODETerm(field)
    return diffrax.diffeqsolve(term, diffrax.Tsit5(), 0.0, 1.0, 0.1, jnp.array([1.0, -1.0])).ys


def test_a_module_is_the_vector_field_of_diffrax():
    field = Field(jnp.array([[0.1, 0.4], [-0.4, 0.2]]), jnp.tanh)

    @equinox.filter_jit
    def loss(field):
        return jnp.sum(end(field) ** 2)

    gradient = jax.grad(loss)(field)
    assert isinstance(gradient, Field)
    step = 1e-2 * jnp.ones((2, 2))
    ahead, behind = (
        loss(vernal.tree_at(lambda f: f.weight, field, field.weight + sign * step))
        for sign in (1, -1)
    )
    np.testing.assert_allclose(2 * jnp.sum(gradient.weight * step), ahead - behind, rtol=1e-3)


def test_a_module_is_the_unknown_of_optimistix_and_optax():
    target = Field(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.tanh)
    start = vernal.tree_at(lambda f: f.weight, target, jnp.zeros((2, 2)))

    def misfit(field, args):
        return field.weight - target.weight

    solver = optimistix.LevenbergMarquardt(rtol=1e-5, atol=1e-5)
    found = optimistix.least_squares(misfit, solver, start).value
    np.testing.assert_allclose(found.weight, target.weight, rtol=1e-4)
    assert found.activation is jnp.tanh

    optimiser = optax.adam(0.1)
    gradient = jax.grad(lambda f: jnp.sum(misfit(f, None) ** 2))(start)
    updates, _ = optimiser.update(gradient, optimiser.init(start))
    assert isinstance(optax.apply_updates(start, updates), Field)


def test_a_module_is_inside_an_equinox_module_and_the_other_way_round():
    class Theirs(equinox.Module):
        inner: object
        name: str

    class Ours(vernal.Module):
        inner: object

    model = Theirs(Ours(equinox.nn.Linear(2, 2, key=jax.random.key(0))), "model")
    out = equinox.filter_jit(lambda m, x: m.inner.inner(x))(model, jnp.ones(2))
    same = vernal.filter_jit(lambda m, x: m.inner.inner(x))(model, jnp.ones(2))
    np.testing.assert_array_equal(out, same)
    gradient = vernal.filter_grad(lambda m: m.inner.inner(jnp.ones(2)).sum())(model)
    np.testing.assert_allclose(gradient.inner.inner.bias, 1.0)


def test_modules_in_jaxtyping_annotations():
    @jaxtyping.jaxtyped(typechecker=__import__("beartype").beartype)
    def weights(model: jaxtyping.PyTree[jaxtyping.Float[jax.Array, "..."]]) -> int:
        return len(jax.tree.leaves(model))

    assert weights(Field(jnp.ones((2, 2)), jnp.tanh)) == 1
