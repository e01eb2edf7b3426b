"""`pivoted_cholesky`, and the log-determinants that it makes better."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import estimators, linalg
from vernal.linalg import FunctionOperator, MatrixOperator, pivoted_cholesky

POINTS = jnp.asarray(np.random.default_rng(0).uniform(size=(120, 2)), jnp.float32)
THETA = jnp.array([0.4, 0.02])


def kernel(theta, points=POINTS):
    return linalg.kernel_operator(
        lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2) / theta[0] ** 2), points, noise=theta[1]
    )


def dense(theta):
    squares = jnp.sum((POINTS[:, None] - POINTS[None]) ** 2, axis=-1)
    return jnp.exp(-squares / theta[0] ** 2) + theta[1] * jnp.eye(len(POINTS))


def matrix_p(made):
    """P, from the factors that the preconditioner keeps."""
    lower = made.root[:, None] * made.low_rank
    return lower @ lower.T + jnp.diag(made.root**2)


@pytest.mark.parametrize("rank", [1, 5, 40, 120])
@pytest.mark.parametrize("as_matrix", [True, False])
@pytest.mark.sample(6)
def test_the_factors_divide_by_what_they_multiply_to(rank, as_matrix):
    full = dense(THETA)
    if as_matrix:
        operator = MatrixOperator(full, positive_semidefinite=True)
        made = pivoted_cholesky(operator, rank, noise=THETA[1])
    else:
        made = pivoted_cholesky(kernel(THETA), rank)
    p, eye = matrix_p(made), jnp.eye(120)
    # What is left is positive semidefinite, and less with every row.
    left = np.linalg.eigvalsh(np.asarray(full - p, np.float64))
    assert left.min() > -1e-4
    assert left.max() < {1: 60, 5: 25, 40: 0.02, 120: 1e-3}[rank]
    inverse = made.divide_adjoint(made.divide(eye))
    np.testing.assert_allclose(p @ inverse, eye, atol=5e-3)
    np.testing.assert_allclose(made.divide(eye).T, made.divide_adjoint(eye), atol=1e-3)
    np.testing.assert_allclose(
        made.logdet(), np.linalg.slogdet(np.asarray(p, np.float64))[1], rtol=1e-3
    )
    white = made.whitened(made.operator)
    assert white.positive_semidefinite and white.least_eigenvalue() > 0.3
    spectrum = np.linalg.eigvalsh(white.matmul(eye))
    assert spectrum.min() > white.least_eigenvalue() - 1e-3


def test_copies_of_points_and_noise_of_each_point():
    points, noise = jnp.concatenate([POINTS[:10]] * 3), jnp.linspace(0.1, 0.2, 30)
    operator = linalg.kernel_operator(
        lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)), points, noise=noise
    )
    made = pivoted_cholesky(operator, 20)
    assert jnp.all(jnp.isfinite(made.low_rank))
    np.testing.assert_allclose(matrix_p(made), operator.matmul(jnp.eye(30)), atol=1e-3)


@pytest.mark.parametrize("rank", [3, 20])
def test_log_determinants_keep_their_value_and_lose_their_error(rank):
    exact = np.linalg.slogdet(np.asarray(dense(THETA), np.float64))[1]
    plain = estimators.logdet(kernel(THETA), jax.random.key(0), matvecs=60)
    operator = kernel(THETA)
    made = pivoted_cholesky(operator, rank)
    found = estimators.logdet(operator, jax.random.key(0), matvecs=60, preconditioner=made)
    assert found.tags_hold and found.is_finite
    assert found.standard_error < plain.standard_error / (1 if rank == 3 else 5)
    assert abs(found.value - exact) < 4 * found.standard_error + 1e-2
    # One that was made for other parameters is worse, and no less true.
    other = pivoted_cholesky(kernel(1.3 * THETA), rank)
    stale = estimators.logdet(operator, jax.random.key(0), matvecs=60, preconditioner=other)
    assert stale.tags_hold and abs(stale.value - exact) < 4 * stale.standard_error + 1e-2
    whole = estimators.logdet(operator, jax.random.key(0), matvecs=120, preconditioner=made)
    np.testing.assert_allclose(whole.value, exact, rtol=1e-4)


def test_gradients_go_through_all_of_it():
    def value(theta, key):
        operator = kernel(theta)
        made = pivoted_cholesky(operator, 60)
        return estimators.logdet(operator, key, matvecs=60, preconditioner=made).value

    exact = jax.grad(lambda theta: jnp.linalg.slogdet(dense(theta))[1])(THETA)
    got = jax.lax.map(
        lambda key: jax.grad(value)(THETA, key), jax.random.split(jax.random.key(0), 4)
    )
    np.testing.assert_allclose(jnp.mean(got, 0), exact, rtol=0.03)

    def of_p(theta):
        return pivoted_cholesky(kernel(theta), 6).logdet()

    for i, step in enumerate([1e-2, 1e-3]):
        move = jnp.zeros(2).at[i].set(step)
        numeric = (of_p(THETA + move) - of_p(THETA - move)) / (2 * step)
        np.testing.assert_allclose(jax.grad(of_p)(THETA)[i], numeric, rtol=2e-2)


def test_bad_kernels_are_not_fine():
    spoilt = kernel(THETA * jnp.array([jnp.nan, 1.0]))
    made = pivoted_cholesky(spoilt, 3)
    found = estimators.logdet(spoilt, jax.random.key(0), matvecs=60, preconditioner=made)
    assert not found.is_finite or not found.tags_hold


def test_what_makes_no_preconditioner_is_refused():
    operator, matrix = kernel(THETA), MatrixOperator(dense(THETA), positive_semidefinite=True)
    with pytest.raises(TypeError, match="the operator cannot compute single rows"):
        pivoted_cholesky(FunctionOperator(lambda v: v, jnp.ones(3), positive_semidefinite=True), 2)
    with pytest.raises(ValueError, match="as a Cholesky factorisation needs"):
        pivoted_cholesky(MatrixOperator(jnp.eye(3)), 2, noise=0.1)
    with pytest.raises(ValueError, match="the rank is larger than the size"):
        pivoted_cholesky(operator, 121)
    with pytest.raises(
        ValueError, match="the noise must be given for a matrix, and only for a matrix"
    ):
        pivoted_cholesky(operator, 2, noise=0.1)
    with pytest.raises(
        ValueError, match="the noise must be given for a matrix, and only for a matrix"
    ):
        pivoted_cholesky(matrix, 2)
    with pytest.raises(ValueError, match="the noise does not fit the operator"):
        pivoted_cholesky(matrix, 2, noise=jnp.ones(3))
    made = pivoted_cholesky(operator, 2)
    with pytest.raises(ValueError, match="`least_eigenvalue` would be ignored"):
        estimators.logdet(
            operator, jax.random.key(0), matvecs=60, preconditioner=made, least_eigenvalue=0.1
        )
    with pytest.raises(ValueError, match="the preconditioner was made for another operator"):
        estimators.logdet(
            kernel(THETA, POINTS[:50]), jax.random.key(0), matvecs=40, preconditioner=made
        )


def test_negative_noise_is_refused():
    operator = MatrixOperator(jnp.eye(3), positive_semidefinite=True)
    for noise in (-1.0, jnp.array([0.1, 0.1, -0.1])):
        with pytest.raises(ValueError, match="the noise is negative"):
            pivoted_cholesky(operator, 2, noise=noise)


def test_noise_that_a_compiled_function_closes_over():
    noise = jnp.full(3, 0.5)
    made = jax.jit(lambda a: pivoted_cholesky(a, 2, noise=noise).logdet())
    operator = MatrixOperator(jnp.diag(jnp.array([3.0, 2.0, 0.5])), positive_semidefinite=True)
    assert made(operator) == pytest.approx(np.log(3.0), rel=1e-5)


@pytest.mark.parametrize("noise", ["a", 1j, True, ["a"], np.ones(3, object), {}], ids=str)
def test_noise_that_is_not_real_numbers_is_refused(noise):
    matrix = MatrixOperator(jnp.eye(3), positive_semidefinite=True)
    with pytest.raises(TypeError, match="`noise` is not real numbers"):
        pivoted_cholesky(matrix, 2, noise=noise)
    with pytest.raises(TypeError, match="`noise` is not real numbers"):
        linalg.kernel_operator(lambda a, b: jnp.exp(-((a - b) ** 2)), jnp.arange(3.0), noise=noise)


def test_noise_may_be_a_list():
    matrix = MatrixOperator(2 * jnp.eye(3), positive_semidefinite=True)
    some = [
        pivoted_cholesky(matrix, 2, noise=x).logdet()
        for x in ([0.1, 0.2, 0.3], jnp.array([0.1, 0.2, 0.3]))
    ]
    assert some[0] == some[1]
