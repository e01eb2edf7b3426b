"""Intervals of `logdet` hold the truth for the spectra that are hard: kernels with little noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.estimators._spectra import KERNELS
from vernal.estimators import logdet
from vernal.linalg import MatrixOperator, kernel_operator


def coverage(matrix, budget, least, tries=100):
    truth = np.linalg.slogdet(matrix)[1]
    operator = MatrixOperator(jnp.asarray(matrix), positive_semidefinite=True)

    def one(key):
        found = logdet(operator, key, matvecs=budget, least_eigenvalue=least)
        return *found.interval(), found.value, found.standard_error

    keys = jax.random.split(jax.random.key(budget), tries)
    low, high, value, error = jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=20))(keys)
    return np.mean((low <= truth) & (truth <= high)), np.abs(value - truth), error


@pytest.mark.parametrize("bits", [32, 64])
def test_the_case_that_was_wrong_in_ninety_of_a_hundred(bits):
    """Much of the spectrum at the noise, of which few steps see little."""
    x = np.linspace(0, 10, 200)
    matrix = KERNELS["rbf"](x) + 1e-3 * np.eye(200)
    with jax.enable_x64(bits == 64):
        for least in (None, 1e-3):
            held, off, error = coverage(matrix.astype(f"float{bits}"), 100, least, tries=60)
            assert held >= 0.93
        # A known noise makes the bound from below as good as that from above.
        assert np.mean(error) < 30 and np.mean(off) < 30


def test_the_noise_of_a_kernel_is_known_to_be_a_bound():
    x = jnp.linspace(0, 10, 150)

    def kernel(a, b):
        return jnp.exp(-((a - b) ** 2) / 2)

    def error(operator, **options):
        return logdet(operator, jax.random.key(0), matvecs=32, **options).standard_error

    operator = kernel_operator(kernel, x, noise=jnp.full(150, 1e-2).at[3].set(1.0))
    stored = MatrixOperator(operator.matmul(jnp.eye(150)), positive_semidefinite=True)
    assert error(operator) < error(stored) / 3
    np.testing.assert_allclose(error(operator), error(stored, least_eigenvalue=1e-2), rtol=1e-2)


@pytest.mark.parametrize("matvecs", [20, 60])
def test_a_bound_that_is_none_is_reported(matvecs):
    operator = MatrixOperator(jnp.diag(jnp.linspace(1.0, 2.0, 60)), positive_semidefinite=True)
    key = jax.random.key(0)
    right = logdet(operator, key, matvecs=matvecs, least_eigenvalue=0.9)
    wrong = logdet(operator, key, matvecs=matvecs, least_eigenvalue=1.5)
    assert right.tags_hold and not wrong.tags_hold
    # It is not used either.
    np.testing.assert_allclose(wrong.value, right.value, rtol=1e-4)
    low, high = wrong.interval(0.999)
    assert low < np.sum(np.log(np.linspace(1.0, 2.0, 60))) < high


@pytest.mark.parametrize("bound", ["a", 1j, True, jnp.ones(3), np.array(1j)])
def test_a_bound_that_is_no_number_is_refused(bound):
    operator = MatrixOperator(jnp.eye(9), positive_semidefinite=True)
    with pytest.raises(TypeError, match="`least_eigenvalue` is not a number"):
        logdet(operator, jax.random.key(0), matvecs=9, least_eigenvalue=bound)


def test_the_rounding_of_an_exact_answer_is_reported():
    """In single precision, of a matrix that has lost half of its digits: twenty of them."""
    rng = np.random.default_rng(1)
    off = []
    for _ in range(20):
        q = np.linalg.qr(rng.normal(size=(80, 80)))[0]
        matrix = (q * np.geomspace(1e-4, 1.0, 80)) @ q.T
        single = ((matrix + matrix.T) / 2).astype(np.float32)
        operator = MatrixOperator(jnp.asarray(single), positive_semidefinite=True)
        found = logdet(operator, jax.random.key(0), matvecs=80)
        truth = np.linalg.slogdet(single.astype(np.float64))[1]
        off.append((found.value - truth) / found.standard_error)
    assert 0.02 < np.sqrt(np.mean(np.square(off))) < 1.5
