"""`XTrace`: leave-one-out as defined, exact where it can be. More in `test_leave_out.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.estimators._naive import left_out, mean_and_variance, with_basis
from vernal.estimators import XTrace
from vernal.linalg import MatrixOperator

METHOD = XTrace()


def matrix_of_kind(kind, n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n)) * 0.8 ** np.arange(n)
    if "complex" in kind:
        x = x + 1j * rng.normal(size=(n, n)) * 0.8 ** np.arange(n)
    return x if "any" in kind else x + x.conj().T


def probes_for(matrix, k, seed=1):
    rng = np.random.default_rng(seed)
    real = rng.normal(size=(len(matrix), k))
    if not np.iscomplexobj(matrix):
        return real
    return (real + 1j * rng.normal(size=real.shape)) / 2**0.5


@jax.jit
def from_sketch(operator, probes):
    return METHOD.from_sketch(operator, probes, operator.matmul(probes), probes.shape[1])


@pytest.mark.parametrize("kind", ["real any", "real Hermitian", "complex any", "complex Hermitian"])
@pytest.mark.sample(3)
def test_value_and_variance_are_those_of_one_factorisation_for_every_estimate(kind):
    matrix = matrix_of_kind(kind, 40)
    probes = probes_for(matrix, 7)
    value, variance = mean_and_variance(*left_out(with_basis, matrix, probes))
    with jax.enable_x64(True):
        operator = MatrixOperator(jnp.asarray(matrix), symmetric="Hermitian" in kind)
        outcome = from_sketch(operator, jnp.asarray(probes))
        np.testing.assert_allclose(outcome.value, value, rtol=1e-10)
        np.testing.assert_allclose(outcome.variance, variance, rtol=1e-8)
        assert bool(outcome.consistent)
        assert outcome.matvecs == 14
        assert jnp.iscomplexobj(outcome.value) == (kind == "complex any")


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8], ids=["one", "small", "large"])
def test_low_rank_zero_and_multiples_of_the_identity_are_exact_at_every_scale(scale):
    n, rng = 60, np.random.default_rng(0)
    u, v = rng.normal(size=(2, n, 4))
    low = u @ v.T
    truth = np.trace(low)
    probes = jnp.asarray(probes_for(low, 9), jnp.float32)
    for matrix, exact, size in (
        (low, truth, np.linalg.norm(low, "nuc")),
        (np.eye(n), n, n),
        (-3 * np.eye(n), -3 * n, 3 * n),
        (np.zeros((n, n)), 0, 0),
    ):
        outcome = from_sketch(MatrixOperator(jnp.asarray(scale * matrix, jnp.float32)), probes)
        assert abs(outcome.value - scale * exact) <= 2e-6 * scale * size
        assert jnp.sqrt(outcome.variance) <= 2e-6 * scale * size


def test_a_tag_that_is_false_gives_the_plain_estimate_from_the_same_products():
    matrix = matrix_of_kind("real any", 40)
    probes = probes_for(matrix, 7)
    operator = MatrixOperator(jnp.asarray(matrix, jnp.float32), symmetric=True)
    outcome = from_sketch(operator, jnp.asarray(probes, jnp.float32))
    forms = np.sum(probes * (matrix @ probes), axis=0)
    assert not outcome.consistent
    np.testing.assert_allclose(outcome.value, forms.mean(), rtol=1e-4)
    np.testing.assert_allclose(outcome.variance, forms.var(ddof=1) / 7, rtol=1e-4)
    assert outcome.degrees_of_freedom == 6
