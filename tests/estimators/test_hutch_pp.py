"""`HutchPlusPlus` is unbiased, exact where it should be, and uses the whole budget."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.estimators._spectra import ANY_OPERATOR, SPECTRA, rotated, symmetric
from vernal import estimators
from vernal.estimators import Budget, HutchPlusPlus
from vernal.linalg import FunctionOperator, MatrixOperator

METHOD = HutchPlusPlus()
RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(16, 16)) + 2 * np.eye(16)
COMPLEX = REAL + 1j * RNG.normal(size=(16, 16))
CASES = {
    "complex": (COMPLEX, False),
    "hermitian": (COMPLEX + COMPLEX.conj().T, True),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_unbiased(case):
    matrix, tag = CASES[case]
    dtype = jnp.complex64 if np.iscomplexobj(matrix) else jnp.float32
    matrix = jnp.asarray(matrix, dtype)

    def estimate(scale, key):
        operator = MatrixOperator(scale.astype(dtype) * matrix, symmetric=tag)
        found = estimators.trace(operator, key, matvecs=9, method=METHOD)
        # The real part, so that one gradient is enough.
        return jnp.real(found.value), found

    keys = jax.random.split(jax.random.key(1), 2000)
    run = jax.value_and_grad(estimate, has_aux=True)
    (_, found), slopes = jax.jit(lambda keys: lax.map(lambda key: run(jnp.ones(()), key), keys))(
        keys
    )
    values, truth = np.asarray(found.value), np.trace(np.asarray(matrix))
    assert np.iscomplexobj(values) == (case == "complex") and np.all(found.tags_hold)
    for error in (values - truth, np.asarray(slopes) - truth.real):
        assert abs(error.mean()) < 4 * error.std() / 2000**0.5
    ratio = np.mean(np.asarray(found.standard_error) ** 2) / np.mean(np.abs(values - truth) ** 2)
    # Of an operator that is not symmetric, the variance is never too small.
    assert 0.8 < ratio < (1.25 if tag else 2.5)


def test_low_rank_zero_and_multiples_of_the_identity_are_exact():
    n, method = 60, METHOD
    left, right = RNG.normal(size=(n, 4)), RNG.normal(size=(4, n))
    low_rank = left @ right / n

    @jax.jit
    def run(matrix):
        return estimators.trace(matrix, jax.random.key(2), matvecs=30, method=method)

    for matrix in (low_rank, 1e-8 * low_rank, 1e8 * low_rank, 0 * low_rank, -3 * np.eye(n)):
        found = run(jnp.asarray(matrix, jnp.float32))
        size = 10 * np.linalg.norm(np.asarray(matrix, np.float32), "nuc")
        assert abs(float(found.value) - np.trace(matrix)) <= 3e-6 * size
        assert float(found.standard_error) <= 1e-5 * size and bool(found.tags_hold)


def test_as_many_products_are_made_as_the_budget_has():
    made = []

    class Counting(MatrixOperator):
        def matmul(self, block):
            made.append(block.shape[1])
            return super().matmul(block)

        def adjoint_matmul(self, block):
            made.append(block.shape[1])
            return super().adjoint_matmul(block)

    for operator in (Counting(jnp.eye(40)), Counting(jnp.eye(40), symmetric=True)):
        made.clear()

        def run(operator=operator):
            return METHOD.estimate(operator, jax.random.key(0), Budget(20, 20)).value

        jax.make_jaxpr(run)()
        assert sum(made) == 20
        # What can be made together is.
        assert len(made) == 2


def test_a_budget_that_shares_a_compilation_gives_the_same_estimate():
    operator, key, method = rotated("poly", 100, jnp.float32), jax.random.key(3), METHOD

    @jax.jit
    def run(used):
        found = method.estimate(operator, key, Budget(41, used))
        left, right = found.gradient_pairs.block(ANY_OPERATOR, 0)
        return found.value, found.variance, found.matvecs, jnp.sum(left * operator.matmul(right))

    for used in (7, 20):

        @jax.jit
        def alone(used=used):
            found = method.estimate(operator, key, Budget(used, used))
            left, right = found.gradient_pairs.block(ANY_OPERATOR, 0)
            return found.value, found.variance, used, jnp.sum(left * operator.matmul(right))

        for a, b in zip(run(jnp.asarray(used)), alone(), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3)


def test_a_false_tag_is_seen():
    matrix = jnp.asarray(RNG.normal(size=(60, 60)), jnp.float32)
    for tags in ({"symmetric": True}, {"positive_semidefinite": True}):
        operator = MatrixOperator(matrix, **tags)
        found = estimators.trace(operator, jax.random.key(0), matvecs=30, method=METHOD)
        assert not bool(found.tags_hold)
        assert np.isfinite(found.value) and np.isfinite(found.standard_error)
    negative = MatrixOperator(jnp.diag(jnp.linspace(-1.0, 0.5, 60)), positive_semidefinite=True)
    assert not estimators.trace(negative, jax.random.key(0), matvecs=30, method=METHOD).tags_hold


def test_too_few_products_are_refused():
    with pytest.raises(ValueError, match="matvecs >= 7"):
        estimators.trace(jnp.eye(60), jax.random.key(0), matvecs=6, method=METHOD)


def test_functions_of_trees_have_a_trace():
    matrix = jnp.asarray(symmetric(SPECTRA["exp"](60)), jnp.float32)

    def fn(v):
        flat = matrix @ jnp.concatenate([v["a"].ravel(), v["b"]])
        return {"a": flat[:20].reshape(4, 5), "b": flat[20:]}

    operator = FunctionOperator(fn, {"a": jnp.zeros((4, 5)), "b": jnp.zeros(40)})
    found = estimators.trace(operator, jax.random.key(0), matvecs=50, method=HutchPlusPlus())
    assert abs(float(found.value) - 10 / 3) < 4 * float(found.standard_error) + 1e-5 < 0.2
