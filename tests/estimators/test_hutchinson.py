"""`Hutchinson` is unbiased, says its error honestly, and needs no memory for many products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.estimators._spectra import SPECTRA, errors_of, rotated
from vernal import estimators
from vernal.estimators import Budget, Hutchinson, Normal, Rademacher, _hutchinson
from vernal.linalg import FunctionOperator, MatrixOperator

RNG = np.random.default_rng(0)
REAL = RNG.normal(size=(12, 12)) + 2 * np.eye(12)
COMPLEX = REAL + 1j * RNG.normal(size=(12, 12))
CASES = {
    "nonsymmetric": (REAL, False),
    "symmetric": (REAL + REAL.T, True),
    "complex": (COMPLEX, False),
    "hermitian": (COMPLEX + COMPLEX.conj().T, True),
}


def outcomes(method, operator, budget, seeds):
    """Values, variances and flags over seeds, one after the other."""

    @jax.jit
    def run(operator, keys):
        def one(key):
            found = method.estimate(operator, key, budget)
            return found.value, found.variance, found.consistent

        return lax.map(one, keys)

    return map(np.asarray, run(operator, jax.random.split(jax.random.key(0), seeds)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "probes"),
    [*((case, None) for case in CASES), ("hermitian", Normal())],
    ids=[*CASES, "normal"],
)
def test_value_and_variance_are_unbiased(case, probes):
    matrix, symmetric = CASES[case]
    dtype = jnp.complex64 if np.iscomplexobj(matrix) else jnp.float32
    operator = MatrixOperator(jnp.asarray(matrix, dtype), symmetric=symmetric)
    values, variances, fine = outcomes(Hutchinson(probes), operator, Budget(5, 5), 4000)
    assert np.iscomplexobj(values) == (case == "complex") and np.all(fine)
    error = values - np.trace(matrix)
    assert abs(error.mean()) < 4 * error.std() / 4000**0.5
    ratio = variances.mean() / np.mean(np.abs(error) ** 2)
    # Real forms are those of the symmetric part, which varies no more than what the slopes are of.
    assert 0.9 < ratio < (2 if case == "nonsymmetric" else 1.1)


def test_the_variance_of_signs_is_that_of_the_literature():
    matrix, _ = CASES["symmetric"]
    operator = MatrixOperator(jnp.asarray(matrix, jnp.float32), symmetric=True)
    _, variances, _ = outcomes(Hutchinson(Rademacher()), operator, Budget(5, 5), 4000)
    off = np.sum(matrix**2) - np.sum(np.diagonal(matrix) ** 2)
    np.testing.assert_allclose(variances.mean(), 2 * off / 5, rtol=0.02)


def small_blocks(monkeypatch, columns, size):
    monkeypatch.setattr(_hutchinson, "_BYTES", 4 * size * columns)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["any", "symmetric"])
@pytest.mark.sample(3)
def test_blocks_give_the_mean_and_the_variance_of_all_forms(monkeypatch, symmetric, shared):
    small_blocks(monkeypatch, 4, 12)
    matrix = REAL + REAL.T
    operator = MatrixOperator(jnp.asarray(matrix, jnp.float32), symmetric=symmetric)
    budget = Budget(11, jnp.asarray(10)) if shared else Budget(10, 10)
    outcome = Hutchinson().estimate(operator, jax.random.key(1), budget)
    drawn = outcome.gradient_pairs
    assert int(drawn.blocks()) == 3
    w = np.concatenate([np.asarray(drawn.vectors(i)[0]) for i in range(3)], axis=1)
    w = w[:, np.any(w != 0, axis=0)].astype(np.float64)
    assert w.shape == (12, 10)
    np.testing.assert_allclose(outcome.value, np.sum(w * (matrix @ w)) / 10, rtol=1e-5)
    variance = 2 * np.sum((w * (matrix @ w)).var(axis=1, ddof=1)) / 10
    np.testing.assert_allclose(outcome.variance, variance, rtol=1e-4)
    assert int(outcome.matvecs) == 10 and float(outcome.degrees_of_freedom) == 9


@pytest.mark.parametrize("used", [5, 17, 40])
@pytest.mark.sample(3)
def test_a_budget_that_shares_a_compilation_gives_the_same_estimate(used):
    operator = rotated("poly", 60, jnp.float32)
    key = jax.random.key(2)
    alone = estimators.trace(operator, key, matvecs=used, method=Hutchinson())
    shared = estimators.trace(operator, key, matvecs=used, max_matvecs=40, method=Hutchinson())
    np.testing.assert_allclose(shared.value, alone.value, rtol=1e-5)
    np.testing.assert_allclose(shared.standard_error, alone.standard_error, rtol=1e-4)


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8, 0.0])
def test_diagonals_are_exact_at_every_scale(scale):
    diagonal = jnp.asarray(RNG.normal(size=200), jnp.float32) * jnp.float32(scale)
    operator = MatrixOperator(jnp.diag(diagonal), symmetric=True)
    estimate = estimators.trace(operator, jax.random.key(0), matvecs=10, method=Hutchinson())
    size = float(jnp.sum(jnp.abs(diagonal)))
    assert (
        abs(float(estimate.value) - float(np.sum(np.asarray(diagonal, np.float64)))) <= 1e-6 * size
    )
    assert float(estimate.standard_error) <= 1e-6 * size


@pytest.mark.slow
def test_intervals_hold_the_truth_even_for_one_large_eigenvalue():
    n = 60
    found = {name: (rotated(name, n, jnp.float32), f(n).sum()) for name, f in SPECTRA.items()}
    one = rotated("poly", n, jnp.float32)
    one = one.__class__(jnp.zeros(n).at[7].set(1.0), one.left, one.right)
    found["one"] = one, 1.0
    for errors in errors_of(Hutchinson(), found, 8, 1000).values():
        assert errors.inside >= 0.93 and 0.85 < errors.ratio < 1.15 and abs(errors.bias) < 4


def test_a_false_tag_is_seen():
    negative = jnp.diag(jnp.linspace(-1.0, 0.5, 50))
    skew = jnp.asarray(RNG.normal(size=(50, 50)), jnp.float32)
    complex_one = skew.astype(jnp.complex64) * 1j + jnp.eye(50, dtype=jnp.complex64)
    cases = [
        (MatrixOperator(negative, positive_semidefinite=True), False),
        (MatrixOperator(negative, symmetric=True), True),
        (MatrixOperator(skew, symmetric=True), False),
        (MatrixOperator(skew), True),
        (MatrixOperator(complex_one, symmetric=True), False),
    ]
    for operator, fine in cases:
        estimate = estimators.trace(operator, jax.random.key(0), matvecs=20, method=Hutchinson())
        assert bool(estimate.tags_hold) == fine
        assert np.isfinite(estimate.value) and np.isfinite(estimate.standard_error)


def test_operators_of_low_precision_are_summed_in_single():
    matrix = jnp.asarray(np.diag(np.linspace(1, 2, 300)) + 0.01, jnp.bfloat16)
    operator = MatrixOperator(matrix, symmetric=True)
    estimate = estimators.trace(operator, jax.random.key(0), matvecs=30, method=Hutchinson())
    truth = np.trace(np.asarray(matrix, np.float64))
    assert abs(float(estimate.value) - truth) < 4 * float(estimate.standard_error) + 4e-3 * truth


def test_the_gradient_is_unbiased():
    basis = jnp.asarray(RNG.normal(size=(12, 12)), jnp.float32)

    def estimate(x, key):
        operator = MatrixOperator((basis * jnp.sin(x)[None, :]) @ basis.T, symmetric=True)
        return estimators.trace(operator, key, matvecs=5, method=Hutchinson()).value

    x = jnp.asarray(RNG.normal(size=12), jnp.float32)
    keys = jax.random.split(jax.random.key(3), 2000)
    found = np.asarray(jax.jit(lambda x: lax.map(lambda key: jax.grad(estimate)(x, key), keys))(x))
    truth = np.cos(x) * np.sum(np.asarray(basis) ** 2, axis=0)
    assert np.all(np.abs(found.mean(axis=0) - truth) < 4 * found.std(axis=0) / 2000**0.5)


def test_memory_of_the_gradient_does_not_grow_with_the_number_of_products(monkeypatch):
    n = 2000
    small_blocks(monkeypatch, 16, n)

    def memory(matvecs):
        def loss(x):
            operator = FunctionOperator(lambda v: jnp.roll(x * v, 1) + v, jnp.zeros(n))
            key = jax.random.key(0)
            return estimators.trace(operator, key, matvecs=matvecs, method=Hutchinson()).value

        compiled = jax.jit(jax.grad(loss)).lower(jnp.ones(n)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = memory(32), memory(1600)
    assert many <= 1.05 * few < 4 * n * 400
