"""`NystromPlusPlus` is unbiased, exact where it should be, and says if an operator is not positive semidefinite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.estimators._spectra import rotated
from vernal import estimators
from vernal.estimators import Budget, NystromPlusPlus, Orthogonal, _nystrom_pp
from vernal.linalg import MatrixOperator

METHOD = NystromPlusPlus()
RNG = np.random.default_rng(0)
FACTOR = RNG.normal(size=(16, 16)) / 4
COMPLEX = FACTOR + 1j * RNG.normal(size=(16, 16)) / 4


@pytest.mark.slow
@pytest.mark.parametrize("factor", [FACTOR, COMPLEX], ids=["real", "hermitian"])
def test_value_and_gradient_are_unbiased(factor):
    dtype = jnp.complex64 if np.iscomplexobj(factor) else jnp.float32
    matrix = jnp.asarray(factor @ factor.conj().T, dtype)
    change = jnp.asarray((factor + factor.conj().T) / 2, dtype)

    def estimate(t, key):
        operator = MatrixOperator(matrix + t.astype(dtype) * change, positive_semidefinite=True)
        found = estimators.trace(operator, key, matvecs=9, method=METHOD)
        return found.value, found

    keys = jax.random.split(jax.random.key(1), 2000)
    run = jax.value_and_grad(estimate, has_aux=True)
    (_, found), slopes = jax.jit(lambda keys: lax.map(lambda key: run(jnp.zeros(()), key), keys))(
        keys
    )
    values = np.asarray(found.value)
    assert not np.iscomplexobj(values) and np.all(found.tags_hold)
    for x, truth in ((values, np.trace(matrix).real), (np.asarray(slopes), np.trace(change).real)):
        assert abs(x.mean() - truth) < 4 * x.std() / 2000**0.5
    ratio = np.mean(np.asarray(found.standard_error) ** 2) / values.var()
    assert 0.8 < ratio < 1.25


def test_low_rank_zero_and_multiples_of_the_identity_are_exact():
    n = 60
    low_rank = RNG.normal(size=(n, 4))
    low_rank = low_rank @ low_rank.T

    @jax.jit
    def run(matrix):
        operator = MatrixOperator(matrix, positive_semidefinite=True)
        return estimators.trace(operator, jax.random.key(2), matvecs=30, method=METHOD)

    for matrix in (low_rank, 1e-8 * low_rank, 1e8 * low_rank, 0 * low_rank, 3 * np.eye(n)):
        found = run(jnp.asarray(matrix, jnp.float32))
        truth = np.trace(matrix)
        assert abs(float(found.value) - truth) <= 1e-5 * truth
        assert float(found.standard_error) <= 2e-5 * truth and bool(found.tags_hold)


def test_every_product_of_the_budget_is_made():
    for matvecs in range(3, 300):
        parts = _nystrom_pp._halves(matvecs)
        assert sum(parts) == matvecs and parts[0] >= 1 and parts[1] >= 2


def test_a_budget_that_shares_a_compilation_gives_the_same_estimate():
    operator, key = rotated("poly", 100, jnp.float32), jax.random.key(3)

    @jax.jit
    def run(used):
        found = METHOD.estimate(operator, key, Budget(41, used))
        return found.value, found.variance, found.matvecs

    for used in (3, 20):
        alone = jax.jit(lambda used=used: METHOD.estimate(operator, key, Budget(used, used)))()
        want = alone.value, alone.variance, used
        for a, b in zip(run(jnp.asarray(used)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3)


@pytest.mark.parametrize("probes", [None, Orthogonal()], ids=["signs", "orthogonal"])
def test_an_operator_that_is_not_what_it_promises_has_the_mean_of_all_forms(probes):
    eigenvalues = np.linspace(-1.0, 0.5, 60)
    basis, _ = np.linalg.qr(RNG.normal(size=(60, 60)))
    indefinite = jnp.asarray((basis * eigenvalues) @ basis.T, jnp.float32)
    skew = jnp.asarray(RNG.normal(size=(60, 60)), jnp.float32)
    for matrix in (indefinite, skew):
        operator = MatrixOperator(matrix, positive_semidefinite=True)
        method = NystromPlusPlus(probes)
        found = estimators.trace(operator, jax.random.key(0), matvecs=30, method=method)
        assert not bool(found.tags_hold)
        assert abs(float(found.value) - np.trace(matrix)) < 4 * float(found.standard_error)
        assert float(found.degrees_of_freedom) == 29


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match="NystromPlusPlus needs a positive semidefinite operator"):
        estimators.trace(jnp.eye(60), jax.random.key(0), matvecs=20, method=METHOD)
    operator = MatrixOperator(jnp.eye(60), positive_semidefinite=True)
    with pytest.raises(ValueError, match="matvecs >= 3"):
        estimators.trace(operator, jax.random.key(0), matvecs=2, method=METHOD)
