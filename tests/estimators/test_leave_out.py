"""What `XTrace` and `XNysTrace` share: no bias, no scale, probes that are not used, honest errors, refusals."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.estimators._spectra import SPECTRA, errors_of, rotated, symmetric
from vernal.estimators import Budget, Rademacher, XNysTrace, XTrace, trace
from vernal.linalg import MatrixOperator

SEEDS = 200


class Case(NamedTuple):
    """A method, a matrix for it, how many products a probe takes, and the last digits of its variance."""

    method: type
    matrix: np.ndarray
    per_probe: int
    rtol: float

    def operator(self, matrix):
        return MatrixOperator(matrix, positive_semidefinite=self.per_probe == 1)


def decaying(n=40):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, n)) * 0.8 ** np.arange(n)


CASES = [
    pytest.param(Case(XTrace, decaying(), 2, 1e-10), id="XTrace"),
    pytest.param(Case(XNysTrace, symmetric(0.8 ** np.arange(40)), 1, 1e-8), id="XNysTrace"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_scale_of_the_operator_changes_nothing(case):
    scales = (1.0, 1e-100, 1e100)
    with jax.enable_x64(True):

        @jax.jit
        def found(matrix):
            probes = jax.random.normal(jax.random.key(1), (40, 7))
            outcome = case.method().from_sketch(case.operator(matrix), probes, matrix @ probes, 7)
            return outcome.value, outcome.variance**0.5

        values, errors = zip(*(found(jnp.asarray(case.matrix * s)) for s in scales), strict=True)
        values, errors = (np.asarray(x) / scales for x in (values, errors))
    np.testing.assert_allclose(values, values[0], rtol=1e-12)
    np.testing.assert_allclose(errors, errors[0], rtol=case.rtol)


@pytest.mark.parametrize("case", CASES)
def test_probes_that_are_not_used_change_nothing(case):
    method, key = case.method(), jax.random.key(3)
    operator = case.operator(jnp.asarray(case.matrix, jnp.float32))
    shared = jax.jit(lambda used: method.estimate(operator, key, Budget(20, used)))
    alone = jax.jit(lambda: method.estimate(operator, key, Budget(11, 11)))()
    outcome = shared(11)
    assert outcome.matvecs == alone.matvecs == 11 // case.per_probe * case.per_probe
    np.testing.assert_allclose(outcome.value, alone.value, rtol=1e-5)
    np.testing.assert_allclose(outcome.variance, alone.variance, rtol=1e-3)
    np.testing.assert_allclose(outcome.degrees_of_freedom, alone.degrees_of_freedom, rtol=1e-2)
    assert bool(jnp.isfinite(shared(method.minimum).variance))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("settings", [{}, {"probes": Rademacher(), "resphered": False}], ids=str)
def test_the_estimate_is_unbiased(case, settings):
    matrix = jnp.asarray(case.matrix[:24, :24], jnp.float32)
    operator, method = case.operator(matrix), case.method(**settings)
    budget = Budget(*2 * [6 + case.per_probe])
    keys = jax.random.split(jax.random.key(0), 2000)
    run = jax.jit(
        lambda keys: lax.map(lambda key: method.estimate(operator, key, budget).value, keys)
    )
    errors = np.asarray(run(keys)) - float(jnp.trace(matrix))
    assert abs(errors.mean()) < 3.5 * errors.std() / len(errors) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_the_derivative_is_unbiased_and_as_good_as_the_estimate_where_the_direction_is_the_operator(
    case,
):
    n, m, seeds = 40, 8 * case.per_probe, 300
    rng = np.random.default_rng(0)
    matrix = jnp.asarray(symmetric(0.7 ** np.arange(n)), jnp.float32)
    other = symmetric(rng.normal(size=n), seed=1)
    if case.per_probe == 2:
        other = rng.normal(size=(n, n))
    other = jnp.asarray(other, jnp.float32)

    def value(weights, key):
        operator = case.operator(matrix + weights[0] * matrix + weights[1] * other)
        return trace(operator, key, matvecs=m, method=case.method()).value

    zero, along = jnp.zeros(2), jnp.asarray([0.0, 1.0])
    keys = jax.random.split(jax.random.key(0), seeds)

    def both(key):
        return jax.grad(value)(zero, key), jax.jvp(lambda w: value(w, key), (zero,), (along,))[1]

    gradient, direction = map(np.asarray, jax.jit(lambda keys: lax.map(both, keys))(keys))
    np.testing.assert_allclose(direction, gradient[:, 1], rtol=1e-3, atol=1e-3)
    errors = gradient - np.array([np.trace(matrix), np.trace(other)])
    spread = errors.std(axis=0)
    assert np.all(np.abs(errors.mean(axis=0)) < 3.5 * spread / seeds**0.5)
    plain = (2 / m * np.sum(np.asarray(other + other.T) ** 2) / 4) ** 0.5
    assert spread[1] < (1.3 if case.per_probe == 1 else 1.7) * plain
    assert spread[0] < 0.05 * np.trace(matrix)


@pytest.mark.parametrize("case", CASES)
def test_probes_that_would_bias_the_estimate_are_refused(case):
    with pytest.raises(ValueError, match="signs cannot be resphered"):
        case.method(probes=Rademacher())


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("case", CASES)
def test_the_error_is_honest_on_every_spectrum(case):
    operators = {}
    for name in SPECTRA:
        operator = rotated(name, 200, jnp.float32)
        operators[name] = operator, float(np.sum(np.asarray(operator.eigenvalues, np.float64)))
    # 93%, less two standard deviations of the number of intervals.
    least = 0.93 - 2 * (0.07 / SEEDS) ** 0.5
    most = 60 if case.per_probe == 2 else 40
    for matvecs in (20, most):
        for name, errors in errors_of(case.method(), operators, matvecs, SEEDS, most=most).items():
            assert 0.8 <= errors.ratio <= 1.5, (name, matvecs, errors)
            assert errors.inside >= least, (name, matvecs, errors)
            assert abs(errors.bias) < 4, (name, matvecs, errors)
