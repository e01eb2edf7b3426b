"""A traced value that reaches a shape is explained by every transformation alike."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal.transforms import TracedShapeError

N = 4
MATRIX = jnp.diag(jnp.arange(1.0, N + 1))


def trace(matrix: jax.Array, k: Any, key: jax.Array) -> jax.Array:
    """Hutchinson's estimator of a trace."""
    k = jnp.minimum(jnp.maximum(k, 1), N)
    probes = jax.random.normal(key, (k, N))  # the line
    return jnp.mean(jnp.einsum("ki,ij,kj->k", probes, matrix, probes))


class Hutchinson(vernal.Module):
    k: jax.Array

    def __call__(self, matrix: jax.Array, key: jax.Array) -> jax.Array:
        return trace(matrix, self.k, key)


class Settings(vernal.Module):
    estimators: list[Hutchinson]


def by_argument(matrix: jax.Array, k: jax.Array, key: jax.Array) -> jax.Array:
    return trace(matrix, k, key)


def by_field(settings: Settings, matrix: jax.Array, key: jax.Array) -> jax.Array:
    return settings.estimators[0](matrix, key)


K = jnp.array(3)
KEY = jax.random.key(0)
SETTINGS = Settings([Hutchinson(K)])

CALLS = [
    (by_argument, (MATRIX, K, KEY), "`k`"),
    (by_field, (SETTINGS, MATRIX, KEY), "`settings.estimators[0].k`"),
    (Hutchinson(K), (MATRIX, KEY), "`Hutchinson.k`"),
]

TRANSFORMS = {
    "filter_jit": vernal.filter_jit,
    "filter_eval_shape": lambda f: lambda *args: vernal.filter_eval_shape(f, *args),
    "filter_make_jaxpr": vernal.filter_make_jaxpr,
    "filter_checkpoint": vernal.filter_checkpoint,
    "filter_grad under filter_jit": lambda f: vernal.filter_jit(vernal.filter_grad(f)),
    "filter_jvp under filter_jit": lambda f: vernal.filter_jit(
        lambda *args: vernal.filter_jvp(f, args, jax.tree.map(lambda _: None, args))
    ),
    "filter_vjp under filter_jit": lambda f: vernal.filter_jit(
        lambda *args: vernal.filter_vjp(f, *args)[0]
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("fn", "args", "where"), CALLS, ids=["argument", "field", "module"])
def test_the_message_names_the_argument_the_line_and_the_way_out(transform, fn, args, where):
    if fn is by_field and transform == "filter_grad under filter_jit":
        # The first argument must have something to differentiate.
        fn, args = (
            lambda matrix, settings, key: by_field(settings, matrix, key),
            (MATRIX, SETTINGS, KEY),
        )
    with pytest.raises(TracedShapeError, match="a traced value was used as a shape") as info:
        TRANSFORMS[transform](fn)(*args)
    text = str(info.value)
    assert where in text
    assert "probes = jax.random.normal(key, (k, N))" in text
    assert "test_traced_sizes.py" in text
    assert "Python's `min`, `max`" in text
    assert "a traced int32[]" in text


@pytest.mark.parametrize("transform", [vernal.filter_grad, vernal.filter_jacfwd])
def test_a_differentiated_size_is_explained(transform):
    with pytest.raises(TracedShapeError, match="computed from the argument `p\\['k'\\]`"):
        transform(lambda p: jnp.sum(jnp.ones(p["k"])) * p["x"])(
            {"k": jnp.array(2.0), "x": jnp.array(1.0)}
        )


def test_a_size_that_is_a_python_number_is_fine():
    class Estimator(vernal.Module):
        k: int

        def __call__(self, matrix: jax.Array, key: jax.Array) -> jax.Array:
            k = min(max(self.k, 1), matrix.shape[0])
            probes = jax.random.normal(key, (k, matrix.shape[0]))
            return jnp.mean(jnp.einsum("ki,ij,kj->k", probes, matrix, probes))

    out = vernal.filter_jit(vernal.filter_grad(Estimator(30)))(MATRIX, KEY)
    assert out.shape == MATRIX.shape
