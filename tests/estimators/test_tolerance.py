"""As many products as a tolerance needs, for traces, diagonals and log-determinants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import estimators
from vernal.estimators import HutchPlusPlus, LanczosQuadrature, XNysTrace, XTrace
from vernal.estimators._plan import attempts_within
from vernal.linalg import FunctionOperator, MatrixOperator

KEY = jax.random.key(0)
N = 100


def spectral(eigenvalues: np.ndarray, seed: int = 0) -> np.ndarray:
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((eigenvalues.size,) * 2))
    return (basis * eigenvalues) @ basis.T


def trace(matrix, *, positive=True, rtol=0.0, atol=0.0, most=96, method=None, key=KEY):
    """One size and one budget wherever they do: what was compiled for one test serves the others."""
    operator = MatrixOperator(
        jnp.asarray(matrix, jnp.float32), symmetric=True, positive_semidefinite=positive
    )
    tolerances = {"rtol": jnp.asarray(rtol), "atol": jnp.asarray(atol)}
    return estimators.trace(operator, key, max_matvecs=most, method=method, **tolerances)


@pytest.mark.parametrize(
    ("most", "size", "least", "want"),
    [
        (200, 1000, 2, (32, 64, 104)),
        (96, 100, 2, (32, 64)),
        (2000, 1000, 2, (32, 64, 128, 256, 512, 1000)),
        (200, 100, 2, (32, 64, 100)),
        (60, 1000, 2, (60,)),
        (5, 1000, 2, (5,)),
        (50, 20, 2, (20,)),
        (1000, 10_000, 120, (120, 240, 640)),
    ],
)
def test_attempts_double_and_stay_within_the_budget(most, size, least, want):
    attempts = attempts_within(most, size, least)
    assert tuple(budget.most for budget in attempts) == want
    assert sum(want) <= most and all(budget.used == budget.most for budget in attempts)


@pytest.mark.parametrize(
    "method", [None, XNysTrace(), XTrace(), HutchPlusPlus()], ids=lambda x: type(x).__name__
)
@pytest.mark.sample(3)
def test_every_method_can_be_given_a_tolerance(method):
    matrix = spectral(0.7 ** np.arange(N))
    got = trace(matrix, rtol=1e-2, method=method)
    assert got.tolerance_met and got.matvecs in (32, 96)
    assert abs(got.value - np.trace(matrix)) <= 1e-2 * np.trace(matrix)


def test_it_ends_as_soon_as_the_error_is_small_enough():
    matrix = spectral(np.linspace(3, 1, N))
    few, more, all_of_them = (trace(matrix, rtol=r, most=200) for r in (0.1, 5e-3, 1e-5))
    assert few.matvecs == 32 and 0 < few.standard_error
    assert more.matvecs in (96, 196) and all_of_them.matvecs == 196
    # The last attempt may be the exact answer.
    assert all_of_them.standard_error == 0
    assert few.tolerance_met and more.tolerance_met and all_of_them.tolerance_met
    np.testing.assert_allclose(all_of_them.value, 200, rtol=2e-6)


def test_without_success_the_last_attempt_is_returned():
    got = trace(spectral(np.linspace(3, 1, N)), rtol=1e-6)
    assert not got.tolerance_met and got.matvecs == 96
    assert abs(got.value - 200) <= 5 * got.standard_error


def test_an_absolute_tolerance_is_met():
    matrix = spectral(np.concatenate([np.ones(50), -np.ones(50)]))
    got = trace(matrix, positive=False, atol=10.0)
    assert got.tolerance_met and abs(got.value) <= 10


def test_a_false_tag_is_reported_and_nan_meets_nothing():
    matrix = spectral(np.concatenate([np.full(50, 2.0), np.full(50, -1.0)]))
    got = trace(matrix, rtol=0.01)
    assert not got.tags_hold and abs(got.value - 50) <= 5 * got.standard_error
    got = trace(np.full((N, N), np.nan), rtol=0.5, atol=1e3)
    assert not got.tolerance_met and not got.is_finite and got.matvecs == 96


def test_a_small_operator_is_known_exactly():
    got = estimators.trace(jnp.eye(3), KEY, rtol=0.1)
    assert got.value == 3 and got.matvecs == 3 and got.tolerance_met


# Not captured by the function: functions with equal captured values stand for each other.
TRACES: list[None] = []


def traced_product(vector: jax.Array) -> jax.Array:
    TRACES.append(None)
    return vector * jnp.arange(1.0, 101)


def test_one_compilation_serves_every_tolerance():
    operator = FunctionOperator(traced_product, jnp.zeros(N), positive_semidefinite=True)
    estimators.trace(operator, KEY, rtol=1e-2, max_matvecs=40)
    count = len(TRACES)
    estimators.trace(operator, KEY, rtol=0.5, atol=2.0, max_matvecs=40)
    assert len(TRACES) == count > 0


@pytest.mark.parametrize("positive", [True, False])
def test_the_gradient_in_the_direction_of_the_operator_is_the_value(positive):
    eigenvalues = np.concatenate([np.linspace(20, 10, 4), np.full(96, 1e-1)])
    matrix = jnp.asarray(spectral(eigenvalues), jnp.float32)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value(scale, rtol):
        operator = MatrixOperator(scale * matrix, symmetric=True, positive_semidefinite=positive)
        found = estimators.trace(operator, KEY, rtol=rtol, max_matvecs=200)
        return found.value, found

    for rtol in (1.0, 1e-9):
        (got, found), gradient = value(jnp.asarray(1.0), jnp.asarray(rtol))
        assert (found.matvecs == 32) == (rtol == 1)
        np.testing.assert_allclose(gradient, got, rtol=1e-3)


def test_in_a_batch_each_has_its_own_attempt():
    matrices = np.stack([spectral(0.5 ** np.arange(N)), spectral(np.linspace(3, 1, N))])

    def one(matrix):
        return trace(matrix, rtol=2e-3, most=200)

    batch = jax.vmap(one)(jnp.asarray(matrices, jnp.float32))
    assert batch.matvecs[0] == 32 < batch.matvecs[1] and batch.tolerance_met.all()
    for i, matrix in enumerate(matrices):
        np.testing.assert_allclose(batch.value[i], one(matrix).value, rtol=1e-5)
        assert batch.matvecs[i] == one(matrix).matvecs


@pytest.mark.parametrize("rtol", [0.3, 1e-3])
def test_a_diagonal_is_known_to_a_tolerance(rtol):
    matrix = jnp.asarray(spectral(np.linspace(3, 1, N)), jnp.float32)
    operator = MatrixOperator(matrix, positive_semidefinite=True)
    got = estimators.diagonal(operator, KEY, rtol=rtol)
    assert got.tolerance_met and got.matvecs == (32 if rtol == 0.3 else 196)
    off = jnp.abs(got.value - jnp.diagonal(matrix))
    assert jnp.mean(off <= rtol * jnp.max(jnp.abs(got.value))) >= 0.95


def test_a_logdet_is_known_to_a_tolerance_with_its_gradient():
    matrix = jnp.asarray(spectral(np.linspace(3, 1, 400)), jnp.float32)
    truth = np.log(np.linspace(3, 1, 400)).sum()

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def value(scale, rtol):
        operator = MatrixOperator(scale * matrix, positive_semidefinite=True)
        method = LanczosQuadrature(steps=10)
        found = estimators.logdet(operator, KEY, rtol=rtol, max_matvecs=900, method=method)
        return found.value, found

    made = []
    for rtol in (0.1, 1e-6):
        (got, found), gradient = value(jnp.asarray(1.0), jnp.asarray(rtol))
        assert found.tolerance_met == (rtol > 1e-3 or found.standard_error < 1e-3)
        assert abs(got - truth) <= max(rtol, 1e-5) * truth
        np.testing.assert_allclose(gradient, 400, rtol=2e-2)
        made.append(int(found.matvecs))
    assert made[0] < 100 < made[1]


def test_what_does_not_go_together_is_refused():
    key, eye = KEY, MatrixOperator(jnp.eye(50), positive_semidefinite=True)
    for estimate in (estimators.trace, estimators.diagonal, estimators.logdet):
        with pytest.raises(ValueError, match=r"both a number of products and a tolerance"):
            estimate(eye, key, matvecs=10, rtol=0.1)
        with pytest.raises(ValueError, match=r"neither a number of products nor a tolerance"):
            estimate(eye, key)
        with pytest.raises(ValueError, match="`rtol` is not a tolerance"):
            estimate(eye, key, rtol=-0.1)
    with pytest.raises(ValueError, match=r"`max_matvecs` goes with a tolerance only"):
        estimators.logdet(eye, key, matvecs=10, max_matvecs=20)
    with pytest.raises(ValueError, match=r"`max_matvecs` is too small[\s\S]*max_matvecs >= 5"):
        estimators.trace(eye, key, rtol=0.1, max_matvecs=4)


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("positive", [True, False])
def test_tolerances_are_met_and_intervals_hold_in_spite_of_the_search(positive):
    n, seeds = 300, 100
    sign = 1 if positive else np.where(np.arange(n) % 3, 1, -0.5)
    spectra = {
        "flat": np.linspace(3, 1, n) * sign,
        "poly": np.arange(1, n + 1.0) ** -2 * sign,
        "slow": np.arange(1, n + 1.0) ** -0.5 * sign,
        "exp": 0.7 ** np.arange(n) * sign,
        "step": np.concatenate([np.ones(n // 20), np.full(n - n // 20, 1e-3)]) * sign,
    }
    keys = jax.random.split(KEY, seeds)

    def one(matrix, rtol, key):
        operator = MatrixOperator(matrix, symmetric=True, positive_semidefinite=positive)
        got = estimators.trace(operator, key, rtol=rtol, max_matvecs=224)
        return got.value, *got.interval(), got.tolerance_met

    run = jax.jit(lambda matrix, rtol: jax.lax.map(lambda key: one(matrix, rtol, key), keys))
    held, within = [], []
    with jax.enable_x64(True):
        for name, eigenvalues in spectra.items():
            truth = eigenvalues.sum()
            for rtol in (1e-1, 1e-2, 1e-3):
                value, low, high, met = map(
                    np.asarray, run(jnp.asarray(spectral(eigenvalues)), jnp.asarray(rtol))
                )
                held.append(np.mean((low <= truth) & (truth <= high)))
                assert held[-1] >= 0.93 - 0.05, (name, rtol, held[-1])
                if met.any():
                    within.append(np.mean(np.abs(value - truth)[met] <= rtol * abs(truth)))
                    assert within[-1] >= 0.95 - 0.04, (name, rtol, within[-1])
    assert np.mean(held) >= 0.93 and np.mean(within) >= 0.95
