"""Budgets that share a compilation, and may be traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import estimators
from vernal.estimators import Hutchinson, XNysTrace, XTrace
from vernal.linalg import FunctionOperator, MatrixOperator

KEY = jax.random.key(0)


def low_rank(n: int) -> jax.Array:
    """Of rank 3: methods with a basis are exact from 4 columns on."""
    factor = np.random.default_rng(0).standard_normal((n, 3))
    return jnp.asarray(factor @ factor.T, jnp.float32)


# Not captured by the function: functions with equal captured values stand for each other.
TRACES: list[None] = []


def traced_product(vector: jax.Array) -> jax.Array:
    TRACES.append(None)
    return 3 * vector


@pytest.mark.parametrize(("method", "n"), [(Hutchinson(), 50), (XTrace(), 51), (XNysTrace(), 52)])
@pytest.mark.sample(3)
def test_all_budgets_below_one_maximum_share_one_trace(method, n):
    with jax.enable_x64(True):
        operator = FunctionOperator(traced_product, jnp.zeros(n), positive_semidefinite=True)
        counts = [len(TRACES)]
        for matvecs in (8, 11, 20, 33, 40):
            got = estimators.trace(operator, KEY, matvecs=matvecs, max_matvecs=40, method=method)
            assert got.value.dtype == jnp.float64
            np.testing.assert_allclose(got.value, 3 * n, rtol=1e-12)
            counts.append(len(TRACES))
        assert counts[1] > counts[0] and len(set(counts[1:])) == 1


def test_a_budget_may_be_traced_and_is_clamped():
    matrix = low_rank(50)

    @jax.jit
    def estimate(k):
        return estimators.trace(matrix, KEY, matvecs=k, max_matvecs=30, method=XTrace())

    for k, made in (
        (-3, 10),
        (0, 10),
        (6, 10),
        (10, 10),
        (13, 12),
        (30, 30),
        (31, 30),
        (10**6, 30),
    ):
        got = estimate(k)
        assert got.matvecs == made
        np.testing.assert_allclose(got.value, jnp.trace(matrix), rtol=1e-4)


def test_a_shared_budget_that_reaches_the_size_gives_the_exact_trace():
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((30, 30)), jnp.float32)

    @jax.jit
    def estimate(k):
        def value(matrix):
            got = estimators.trace(matrix, KEY, matvecs=k, max_matvecs=100, method=Hutchinson())
            return got.value, got

        return jax.grad(value, has_aux=True)(matrix)

    gradient, got = estimate(30)
    np.testing.assert_allclose(got.value, jnp.trace(matrix), rtol=1e-5)
    np.testing.assert_array_equal(gradient, np.eye(30))
    assert got.standard_error == 0 and got.matvecs == 30 and got.degrees_of_freedom == jnp.inf
    gradient, got = estimate(29)
    assert got.standard_error > 0 and got.matvecs == 29
    np.testing.assert_allclose(jnp.sum(gradient * matrix), got.value, rtol=1e-4)
    assert jnp.any(gradient != np.eye(30))


def test_a_tiny_operator_is_always_known_exactly():
    got = jax.jit(
        lambda k: estimators.trace(3 * jnp.eye(3), KEY, matvecs=k, max_matvecs=50, method=XTrace())
    )(1)
    assert got.value == 9 and got.matvecs == 3


def test_budgets_can_be_mapped():
    estimate = jax.vmap(
        lambda k: estimators.trace(low_rank(50), KEY, matvecs=k, max_matvecs=40, method=XTrace())
    )
    got = estimate(jnp.asarray([10, 25, 40]))
    np.testing.assert_allclose(got.value, jnp.broadcast_to(jnp.trace(low_rank(50)), 3), rtol=1e-4)
    np.testing.assert_array_equal(got.matvecs, [10, 24, 40])


def test_the_gradient_of_a_shared_budget_is_that_of_its_own_products():
    def value(scale):
        operator = MatrixOperator(scale * low_rank(50), positive_semidefinite=True)
        return estimators.trace(
            operator, KEY, matvecs=jnp.asarray(13), max_matvecs=40, method=Hutchinson()
        ).value

    np.testing.assert_allclose(jax.grad(value)(1.0), value(1.0), rtol=1e-5)
