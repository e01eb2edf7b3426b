"""`XNysTrace`: leave-one-out as defined, exact where it can be. More in `test_leave_out.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.estimators._naive import left_out, mean_and_variance, with_nystrom
from vernal.estimators import XNysTrace
from vernal.linalg import MatrixOperator

METHOD = XNysTrace()


def positive(n, decay=0.8, *, is_complex=False, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n)) + 1j * is_complex * rng.normal(size=(n, n))
    q = np.linalg.qr(x)[0]
    matrix = (q * decay ** np.arange(n)) @ q.conj().T
    return matrix if is_complex else matrix.real


def probes_for(matrix, k, seed=1):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(len(matrix), k))
    if not np.iscomplexobj(matrix):
        return real
    return (real + 1j * rng.normal(size=real.shape)) / 2**0.5


@jax.jit
def from_sketch(operator, probes):
    return METHOD.from_sketch(operator, probes, operator.matmul(probes), probes.shape[1])


def operator_of(matrix, dtype=None):
    return MatrixOperator(jnp.asarray(matrix, dtype), positive_semidefinite=True)


@pytest.mark.parametrize(
    ("is_complex", "k"),
    [(False, 7), (True, 7), (False, 25)],
    ids=["real", "complex", "more than half"],
)
def test_value_and_variance_are_those_of_one_factorisation_for_every_estimate(is_complex, k):
    matrix = positive(40, is_complex=is_complex)
    probes = probes_for(matrix, k)
    value, variance = mean_and_variance(*left_out(with_nystrom, matrix, probes))
    with jax.enable_x64(True):
        outcome = from_sketch(operator_of(matrix), jnp.asarray(probes))
        np.testing.assert_allclose(outcome.value, value, rtol=1e-10)
        np.testing.assert_allclose(outcome.variance, variance, rtol=1e-5)
        assert bool(outcome.consistent)
        assert outcome.matvecs == k
        assert not jnp.iscomplexobj(outcome.value)


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8], ids=["one", "small", "large"])
def test_low_rank_zero_and_multiples_of_the_identity_are_exact_at_every_scale(scale):
    n = 60
    u = np.random.default_rng(0).normal(size=(n, 4))
    low = u @ u.T
    probes = jnp.asarray(probes_for(low, 9), jnp.float32)
    for matrix in (low, 3 * np.eye(n), np.zeros((n, n))):
        outcome = from_sketch(operator_of(scale * matrix, jnp.float32), probes)
        assert outcome.consistent
        assert abs(outcome.value - scale * np.trace(matrix)) <= 4e-6 * scale * np.trace(matrix)
        assert jnp.sqrt(outcome.variance) <= 4e-6 * scale * np.trace(matrix)


def test_single_precision_keeps_seven_digits_where_the_condition_is_beyond_them():
    matrix = np.asarray(positive(200, 0.7), np.float32)
    outcome = from_sketch(operator_of(matrix), jnp.asarray(probes_for(matrix, 80), jnp.float32))
    assert outcome.consistent
    error = abs(float(outcome.value) - np.trace(matrix.astype(np.float64)))
    assert error < 2e-6 * np.trace(matrix)
    assert error < 4 * float(outcome.variance) ** 0.5


@pytest.mark.parametrize("kind", ["indefinite", "not symmetric"])
def test_a_tag_that_is_false_gives_the_plain_estimate_from_the_same_products(kind):
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(40, 40))
    matrix = (matrix + matrix.T) / 2 if kind == "indefinite" else matrix + 30 * np.eye(40)
    probes = probes_for(matrix, 7)
    outcome = from_sketch(operator_of(matrix, jnp.float32), jnp.asarray(probes, jnp.float32))
    forms = np.sum(probes * (matrix @ probes), axis=0)
    assert not outcome.consistent
    np.testing.assert_allclose(outcome.value, forms.mean(), rtol=1e-4)
    np.testing.assert_allclose(outcome.variance, forms.var(ddof=1) / 7, rtol=1e-4)
    assert outcome.degrees_of_freedom == 6


def test_products_with_more_noise_than_rounding_are_not_taken_for_a_false_tag():
    matrix = positive(60, 0.5)
    probes = probes_for(matrix, 20)
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(60, 60))
    noisy = matrix + 3e-7 * (noise + noise.T)
    outcome = from_sketch(operator_of(noisy, jnp.float32), jnp.asarray(probes, jnp.float32))
    assert np.linalg.eigvalsh(noisy)[0] < -1e-6
    assert outcome.consistent
    assert abs(outcome.value - np.trace(matrix)) < 1e-3 * np.trace(matrix)
