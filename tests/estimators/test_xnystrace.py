"""`XNysTrace`: leave-one-out as defined, exact where it can be, unbiased, honest, differentiable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.estimators._naive import left_out, mean_and_variance, with_nystrom
from tests.estimators._spectra import SPECTRA, errors_of, rotated, symmetric
from vernal.estimators import Budget, MatrixOperator, Signs, XNysTrace, trace

METHOD = XNysTrace()
SEEDS = 200


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


def test_the_scale_of_the_operator_changes_nothing():
    matrix = positive(40)
    probes = probes_for(matrix, 7)
    scales = (1.0, 1e-100, 1e100)
    with jax.enable_x64(True):
        outcomes = [
            from_sketch(operator_of(matrix * scale), jnp.asarray(probes)) for scale in scales
        ]
        values = [o.value / s for o, s in zip(outcomes, scales, strict=True)]
        errors = [o.variance**0.5 / s for o, s in zip(outcomes, scales, strict=True)]
        np.testing.assert_allclose(values, values[0], rtol=1e-12)
        np.testing.assert_allclose(errors, errors[0], rtol=1e-8)


def test_single_precision_keeps_seven_digits_where_the_condition_is_beyond_them():
    matrix = np.asarray(positive(200, 0.7), np.float32)
    outcome = from_sketch(operator_of(matrix), jnp.asarray(probes_for(matrix, 80), jnp.float32))
    assert outcome.consistent
    error = abs(float(outcome.value) - np.trace(matrix.astype(np.float64)))
    assert error < 2e-6 * np.trace(matrix)
    assert error < 4 * float(outcome.variance) ** 0.5


def test_probes_that_are_not_used_change_nothing():
    operator = operator_of(positive(40), jnp.float32)
    key = jax.random.key(3)

    @jax.jit
    def shared(used):
        return METHOD.estimate(operator, key, Budget(20, used))

    alone = jax.jit(lambda: METHOD.estimate(operator, key, Budget(11, 11)))()
    outcome = shared(11)
    assert outcome.matvecs == alone.matvecs == 11
    np.testing.assert_allclose(outcome.value, alone.value, rtol=1e-5)
    np.testing.assert_allclose(outcome.variance, alone.variance, rtol=1e-3)
    np.testing.assert_allclose(outcome.degrees_of_freedom, alone.degrees_of_freedom, rtol=1e-2)
    assert bool(jnp.isfinite(shared(2).variance))


@pytest.mark.parametrize(
    "method", [METHOD, XNysTrace(probes=Signs(), resphered=False)], ids=["normal", "signs"]
)
def test_the_estimate_is_unbiased(method):
    matrix = symmetric(0.8 ** np.arange(24))
    operator = operator_of(matrix, jnp.float32)
    keys = jax.random.split(jax.random.key(0), 2000)
    budget = Budget(6, 6)
    run = jax.jit(
        lambda keys: lax.map(lambda key: method.estimate(operator, key, budget).value, keys)
    )
    errors = np.asarray(run(keys)) - np.trace(matrix)
    assert abs(errors.mean()) < 3.5 * errors.std() / len(errors) ** 0.5


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


def test_the_derivative_is_unbiased_and_as_good_as_the_estimate_where_the_direction_is_the_operator():
    n, m, seeds = 40, 12, 300
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(symmetric(0.7 ** np.arange(n)), jnp.float32)
    other = jnp.asarray(symmetric(rng.normal(size=n), seed=1), jnp.float32)

    def value(weights, key):
        operator = operator_of(matrix + weights[0] * matrix + weights[1] * other)
        return trace(operator, key, matvecs=m, method=METHOD).value

    zero = jnp.zeros(2)
    keys = jax.random.split(jax.random.key(0), seeds)
    gradient = jax.jit(lambda keys: lax.map(lambda key: jax.grad(value)(zero, key), keys))(keys)
    errors = np.asarray(gradient) - np.array([np.trace(matrix), np.trace(other)])
    spread = errors.std(axis=0)
    assert np.all(np.abs(errors.mean(axis=0)) < 3.5 * spread / seeds**0.5)
    assert spread[1] < 1.3 * (2 / m * np.sum(np.asarray(other) ** 2)) ** 0.5
    assert spread[0] < 0.05 * np.trace(matrix)


def test_signs_cannot_be_resphered():
    with pytest.raises(ValueError, match="signs cannot be resphered"):
        XNysTrace(probes=Signs())


@pytest.mark.slow
def test_the_error_is_honest_on_every_spectrum():
    operators = {}
    for name in SPECTRA:
        operator = rotated(name, 200, jnp.float32)
        operators[name] = operator, float(np.sum(np.asarray(operator.eigenvalues, np.float64)))
    # 93%, less two standard deviations of the number of intervals.
    least = 0.93 - 2 * (0.07 / SEEDS) ** 0.5
    for matvecs in (20, 40):
        for name, errors in errors_of(METHOD, operators, matvecs, SEEDS, most=40).items():
            assert 0.8 <= errors.ratio <= 1.5, (name, matvecs, errors)
            assert errors.inside >= least, (name, matvecs, errors)
            assert abs(errors.bias) < 4, (name, matvecs, errors)
