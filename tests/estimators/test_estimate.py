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
