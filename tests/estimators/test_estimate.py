"""What an estimator returns: intervals by Student's distribution."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from vernal import estimators, linalg
from vernal.estimators import Estimate
from vernal.estimators._estimate import quantile_of_many, student_quantile

DEGREES = np.asarray([1, 1.5, 2, 3, 4, 7, 12.5, 19, 30, 49.9, 50.1, 80, 400, 1e6, np.inf])


def estimate(value, error, degrees):
    yes = jnp.asarray(True)
    return Estimate.of(
        value, error, matvecs=jnp.asarray(9), degrees_of_freedom=jnp.asarray(degrees), tags_hold=yes
    )


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
@pytest.mark.sample(3)
def test_quantiles_are_those_of_scipy_in_single_precision(level):
    got = jax.jit(lambda v: student_quantile(level, v))(jnp.asarray(DEGREES, jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, scipy.stats.t.ppf((1 + level) / 2, DEGREES), rtol=1e-4)


def test_quantiles_are_those_of_scipy_in_double_precision():
    with jax.enable_x64(True):
        got = student_quantile(0.95, jnp.asarray(DEGREES, jnp.float64))
        np.testing.assert_allclose(got, scipy.stats.t.ppf(0.975, DEGREES), rtol=1e-7)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.99])
def test_the_series_is_within_a_hundredth_from_four_degrees_on(level):
    few = jnp.asarray(DEGREES[DEGREES >= 4], jnp.float32)
    np.testing.assert_allclose(
        quantile_of_many(level, few), scipy.stats.t.ppf((1 + level) / 2, few), rtol=0.01
    )


def test_an_interval_is_that_of_students_distribution():
    low, high = estimate(jnp.asarray(3.0), jnp.asarray(0.5), 7.0).interval(0.9)
    np.testing.assert_allclose((low, high), scipy.stats.t.interval(0.9, 7, 3, 0.5), rtol=1e-5)


def test_an_interval_of_a_tree_is_a_tree():
    value = {"a": jnp.arange(3.0), "b": [jnp.asarray(1.0)]}
    error = {"a": jnp.asarray([0.0, 1.0, 2.0]), "b": [jnp.asarray(3.0)]}
    low, high = estimate(value, error, 5.0).interval()
    quantile = scipy.stats.t.ppf(0.975, 5)
    np.testing.assert_allclose(high["a"], value["a"] + quantile * error["a"], rtol=1e-5)
    np.testing.assert_allclose(low["b"][0], 1 - quantile * 3, rtol=1e-5)


def test_an_exact_value_is_its_own_interval():
    low, high = estimate(jnp.asarray(3.0), jnp.asarray(0.0), jnp.inf).interval()
    assert low == 3 and high == 3


def test_an_interval_can_be_compiled_and_mapped():
    batch = jnp.arange(3.0)
    low, high = jax.jit(jax.vmap(lambda v, d: estimate(v, v, d).interval()))(batch, batch + 2)
    np.testing.assert_allclose(high - batch, batch * scipy.stats.t.ppf(0.975, batch + 2), rtol=1e-5)
    np.testing.assert_allclose(low + high, 2 * batch, atol=1e-6)


def test_a_complex_value_has_no_interval():
    with pytest.raises(
        TypeError, match=r"a complex estimate has no interval[\s\S]*c64\[\][\s\S]*symmetric=True"
    ):
        estimate(jnp.asarray(1j), jnp.asarray(0.5), 7.0).interval()


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, -0.5, float("nan")])
def test_a_level_is_a_probability(level):
    with pytest.raises(ValueError, match=r"`level` is not a probability[\s\S]*0 < level < 1"):
        estimate(jnp.asarray(1.0), jnp.asarray(0.5), 7.0).interval(level)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_are_never_fine(bad):
    """By every kind of estimate, from few products and exact."""
    matrix = jnp.eye(40).at[3, 3].set(bad)
    operator = linalg.MatrixOperator(matrix, positive_semidefinite=True)
    key = jax.random.key(0)
    estimates = [
        estimate(operator, key, matvecs=matvecs)
        for matvecs in (20, 40)
        for estimate in (
            estimators.trace,
            estimators.diagonal,
            estimators.logdet,
            functools.partial(estimators.trace_of_function, jnp.sqrt),
            estimators.frobenius_norm,
            functools.partial(estimators.schatten_norm, p=1),
        )
    ]
    for method in (
        "Hutchinson",
        "HutchPlusPlus",
        "XTrace",
        "XNysTrace",
    ):
        chosen = getattr(estimators, method)()
        estimates.append(estimators.trace(operator, key, matvecs=20, method=chosen))
    for method in ("HutchinsonDiagonal", "XDiag", "XNysDiag"):
        chosen = getattr(estimators, method)()
        estimates.append(estimators.diagonal(operator, key, matvecs=20, method=chosen))
    estimates.append(estimators.trace(operator, key, rtol=0.1, max_matvecs=20))
    assert not any(found.is_finite or np.isfinite(found.value).all() for found in estimates)
    assert not estimates[-1].tolerance_met
    assert estimators.trace(jnp.eye(40), key, rtol=0.1, max_matvecs=20).is_finite


STEPS = {
    "constant": jnp.ones_like,
    "in pieces": lambda x: jnp.where(x > 0.5, 1.0, 0.0),
    "bounded": lambda x: 1 / (1 + x**2),
}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("is_positive", [True, False])
@pytest.mark.sample(3)
def test_no_finite_number_comes_from_products_that_are_not(bad, is_positive):
    """An element of a diagonal was 0 plus or minus 1e-153, and a trace of a function in pieces 0 plus or minus 0."""
    key, exact = jax.random.key(0), jnp.eye(24)
    methods = [estimators.HutchinsonDiagonal(), estimators.XDiag()]
    methods += [estimators.XNysDiag()] if is_positive else []
    for matrix in (exact.at[3, 3].set(bad), exact.at[3, 5].set(bad).at[5, 3].set(bad)):
        operator = linalg.MatrixOperator(matrix, symmetric=True, positive_semidefinite=is_positive)
        found = [estimators.diagonal(operator, key, matvecs=12, method=m) for m in methods]
        for f in STEPS.values():
            for matvecs in (16, 24):
                found.append(estimators.trace_of_function(f, operator, key, matvecs=matvecs))
        for one in found:
            assert not np.any(np.isfinite(one.value) & np.isfinite(one.standard_error))
            assert not one.is_finite
        points = jnp.linspace(0, 2, 5)
        density = estimators.spectral_density(operator, key, matvecs=20, points=points, width=0.1)
        assert not np.any(np.isfinite(density.density))


def test_what_is_lost_keeps_its_derivative_where_it_is_not_lost():
    def sums(scale):
        operator = linalg.MatrixOperator(scale * jnp.eye(24), positive_semidefinite=True)
        found = estimators.diagonal(operator, jax.random.key(0), matvecs=12)
        return jnp.sum(found.value)

    np.testing.assert_allclose(jax.grad(sums)(2.0), 24, rtol=1e-5)


def test_the_intervals_of_a_batch_of_diagonals_are_those_of_each():
    matrix = jnp.diag(jnp.array([9.0, *[1.0] * 11])).at[0, 1].set(2.0)

    def run(key):
        return estimators.diagonal(matrix, key, matvecs=10, method=estimators.XDiag())

    keys = jax.random.split(jax.random.key(0), 12)  # as many as elements
    batch = jax.vmap(run)(keys)
    assert len(np.unique(np.asarray(batch.degrees_of_freedom))) > 1
    each = jax.vmap(lambda key: run(key).interval())(keys)
    for ours, theirs in zip(batch.interval(), each, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
