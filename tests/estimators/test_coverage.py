"""Of the 95% intervals, 93% or more hold the truth: for every method, from the smallest budget that it accepts on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from tests.estimators._spectra import KERNELS, SPECTRA, symmetric
from vernal import estimators
from vernal.estimators import Budget, Probes, Rademacher
from vernal.estimators._plan import attempts_within
from vernal.linalg import FunctionOperator, MatrixOperator

NOISES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


class RotatedSigns(Probes):
    """Signs in the basis of a matrix, as its eigenvectors see them: then its products cost next to nothing."""

    vectors: jax.Array

    def draw(self, key, size, count, dtype):
        return self.vectors.T @ Rademacher().draw(key, size, count, dtype)

    def slopes(self, probes, products):
        return Rademacher().slopes(self.vectors @ probes, self.vectors @ products)


def spectrum(name, n):
    points = np.sort(np.random.default_rng(0).uniform(0, n / 20, n))
    eigenvalues, vectors = np.linalg.eigh(KERNELS[name](points))
    return jnp.asarray(np.maximum(eigenvalues, 0)), jnp.asarray(vectors)


@pytest.mark.slow
@pytest.mark.sample(6)
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("n", "seeds", "noises"), [(200, 60, NOISES), (1000, 30, NOISES[::2])], ids=["200", "1000"]
)
@pytest.mark.parametrize("name", KERNELS)
def test_logdets_of_kernels_with_noise(name, n, seeds, noises):
    keys = jax.random.split(jax.random.key(n), seeds)

    def shares(budget):
        def one(key, eigenvalues, vectors, least):
            operator = FunctionOperator(
                lambda v: eigenvalues * v, jnp.zeros(n), positive_semidefinite=True
            )
            method = estimators.LanczosQuadrature(probes=RotatedSigns(vectors))
            found = estimators.logdet(
                operator, key, matvecs=budget, method=method, least_eigenvalue=least
            )
            low, high = found.interval()
            truth = jnp.sum(jnp.log(eigenvalues))
            return (low <= truth) & (truth <= high), found.tags_hold

        def run(eigenvalues, vectors, least):
            return lax.map(lambda key: one(key, eigenvalues, vectors, least), keys)

        return jax.jit(run)

    held = []
    with jax.enable_x64(True):
        eigenvalues, vectors = spectrum(name, n)
        for budget in (20, n // 10, n // 2):
            run = shares(budget)
            for noise in noises:
                # With and without knowing the noise.
                for least in (noise, 0.0):
                    inside, hold = run(eigenvalues + noise, vectors, jnp.asarray(least))
                    assert hold.all(), (budget, noise, least)
                    held.append(np.mean(inside))
                    # Three standard deviations of the share.
                    assert held[-1] >= 0.93 - 3 * (0.07 / seeds) ** 0.5, (budget, noise, least)
    assert np.mean(held) >= 0.93


@pytest.mark.sample(2)
# With the 94 products that are left for the last attempt, its five probes alone leave an error of 1.4% to 2.4%, but of
# 3.1% to 3.7% for the third kernel: no honest 95% interval of that one is within 5%.
@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("name", "rtol"), [("rbf", 0.05), ("clustered", 0.05), ("matern 1/2", 0.12)]
)
def test_logdets_that_claim_a_tolerance_are_within_it_and_others_say_that_they_are_not(name, rtol):
    n, most = 200, 190
    last = attempts_within(most, n, 6)[-1].most
    keys = jax.random.split(jax.random.key(1), 30)

    def one(key, eigenvalues, vectors, least):
        operator = FunctionOperator(
            lambda v: eigenvalues * v, jnp.zeros(n), positive_semidefinite=True
        )
        method = estimators.LanczosQuadrature(probes=RotatedSigns(vectors))
        options = {"method": method, "least_eigenvalue": least}
        found = estimators.logdet(operator, key, rtol=rtol, max_matvecs=most, **options)
        at_last = estimators.logdet(operator, key, matvecs=last, **options).value
        return found.value, found.tolerance_met, found.standard_error, at_last

    run = jax.jit(lambda *given: lax.map(lambda key: one(key, *given), keys))
    claims, resolved = [], 0
    with jax.enable_x64(True):
        eigenvalues, vectors = spectrum(name, n)
        for noise in NOISES:
            truth = np.sum(np.log(eigenvalues + noise))
            for least in (noise, 0.0):
                found = run(eigenvalues + noise, vectors, jnp.asarray(least))
                value, met, error, at_last = map(np.asarray, found)
                claims.extend(np.abs(value - truth)[met] <= rtol * np.abs(value)[met])
                assert np.all(error[~met] > rtol / 5 * np.abs(value)[~met])
                # A claim has to be made where the steps of the last attempt have converged and three times its error is
                # within the tolerance, and none may be made where even its error is not.
                off = (at_last - truth) / np.abs(truth)
                size = np.sqrt(np.mean(off**2))
                if 3 * size <= rtol and np.abs(np.mean(off)) < size / 3:
                    assert np.mean(met) >= 0.8, (noise, least)
                    resolved += 1
                if size > rtol:
                    assert not np.any(met), (noise, least)
    assert resolved and len(claims) > 30 and np.mean(claims) >= 0.93


def matrices(n):
    """Symmetric matrices: spectra in random directions, kernels, and blocks of very different size."""
    x = np.sort(np.random.default_rng(0).uniform(0, 10, n))
    i = np.arange(n)
    found = {name: symmetric(make(n)) for name, make in SPECTRA.items()}
    found["one"] = symmetric(np.where(i < 1, 1.0, 1e-2))
    found["slow"] = symmetric((i + 1.0) ** -0.5)
    for name in ("rbf", "matern 1/2"):
        found[name] = KERNELS[name](x) + 1e-2 * np.eye(n)
    scale = np.where(i < n // 2, 1.0, 1e-2)
    found["scaled"] = found["matern 1/2"] * scale[:, None] * scale[None, :]
    found["blocks"] = np.zeros((n, n))
    found["blocks"][: n // 2, : n // 2] = symmetric((i[: n // 2] + 1.0) ** -2)
    found["blocks"][n // 2 :, n // 2 :] = 1e-2 * symmetric(np.linspace(3, 1, n - n // 2))
    return found


METHODS = ("Hutchinson", "HutchPlusPlus", "XTrace", "XNysTrace")
DIAGONALS = ("HutchinsonDiagonal", "XDiag", "XNysDiag")


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", METHODS + DIAGONALS)
def test_every_method_from_its_smallest_budget_on(name):
    n, most, seeds = 100, 40, 300
    method = getattr(estimators, name)()
    keys = jax.random.split(jax.random.key(1), seeds)

    @jax.jit
    def run(matrix, used):
        operator = MatrixOperator(matrix, positive_semidefinite=True)

        def one(key):
            found = method.estimate(operator, key, Budget(most, used))
            return found.value, found.variance, found.degrees_of_freedom

        return lax.map(one, keys)

    with jax.enable_x64(True):
        for case, matrix in matrices(n).items():
            truth = np.diagonal(matrix) if name in DIAGONALS else np.trace(matrix)
            held = []
            for used in sorted({method.minimum, method.minimum + 2, 8, 12, 20, 40}):
                if used < method.minimum:
                    continue
                value, variance, freedom = map(np.asarray, run(jnp.asarray(matrix), used))
                freedom = freedom[:, None] if name in DIAGONALS else freedom
                half = stats.t.ppf(0.975, freedom) * np.sqrt(variance)
                inside = np.abs(value - truth) <= half + 1e-14 * np.abs(truth)
                held.append(np.mean(inside))
                # Three standard deviations of the share, of one interval for each seed.
                assert held[-1] >= 0.93 - 3 * (0.07 / seeds) ** 0.5, (case, used, held[-1])
                if name in DIAGONALS:
                    # Also where the elements are small.
                    for part in (slice(0, n // 2), slice(n // 2, n)):
                        assert np.mean(inside[:, part]) >= 0.91, (case, used, part)
            assert np.mean(held) >= 0.93, (case, held)


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("name", ["Hutchinson", "HutchPlusPlus", "XTrace"])
def test_traces_of_operators_that_are_not_symmetric(name):
    rng = np.random.default_rng(3)
    n, seeds = 60, 300
    method, keys = getattr(estimators, name)(), jax.random.split(jax.random.key(2), seeds)
    left, right = rng.normal(size=(2, n))
    for matrix in (
        rng.normal(size=(n, n)),
        np.outer(left, left) + 0.01 * rng.normal(size=(n, n)),
        np.outer(left, right),
        np.triu(np.ones((n, n))),
    ):
        for m in (method.minimum, 8, 20):

            def one(key, matrix=matrix, m=m):
                operator = MatrixOperator(jnp.asarray(matrix, jnp.float32))
                found = method.estimate(operator, key, Budget(m, m))
                return found.value, found.variance, found.degrees_of_freedom

            found = jax.jit(lambda keys, one=one: lax.map(one, keys))(keys)
            value, variance, freedom = map(np.asarray, found)
            half = stats.t.ppf(0.975, freedom) * np.sqrt(variance)
            inside = np.mean(np.abs(value - np.trace(matrix)) <= half)
            assert inside >= 0.93 - 3 * (0.07 / seeds) ** 0.5, (m, inside)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["matrix", "function"])
def test_half_precision_is_no_excuse(kind, dtype):
    """The truth is that of the matrix as it is rounded. Products of a function are rounded as well."""
    exact = symmetric(0.7 ** np.arange(60)) + 1e-2 * np.eye(60)
    low = jnp.asarray(exact, dtype)
    truth = np.asarray(low, np.float64)
    if kind == "matrix":
        operator = MatrixOperator(low, positive_semidefinite=True)
    else:
        operator = FunctionOperator(
            lambda v: (low.astype(jnp.float32) @ v.astype(jnp.float32)).astype(dtype),
            jnp.zeros(60, dtype),
            positive_semidefinite=True,
        )
    keys = jax.random.split(jax.random.key(0), 100)
    for name in METHODS + DIAGONALS:
        method = getattr(estimators, name)()
        estimate = estimators.diagonal if name in DIAGONALS else estimators.trace

        def one(key, estimate=estimate, method=method):
            found = estimate(operator, key, matvecs=24, method=method)
            return found.value, *found.interval()

        found = jax.jit(lambda keys, one=one: lax.map(one, keys))(keys)
        value, low_end, high = map(np.asarray, found)
        assert value.dtype == np.float32
        target = np.diagonal(truth) if name in DIAGONALS else np.trace(truth)
        assert np.mean((low_end <= target) & (target <= high)) >= 0.93 - 0.05, name
        assert np.max(np.abs(value - target)) < 0.5 * np.trace(truth), name


def sign_operators(n):
    """Operators with few elements off the diagonal, whose signs may agree, next to others that spoil a basis."""
    pair = np.zeros((n, n))
    pair[3, 7] = pair[7, 3] = 1
    several = pair.copy()
    several[10, 20] = several[20, 10] = 1
    direction = np.random.default_rng(0).normal(size=n)
    large = 10 * np.outer(direction, direction)
    half = np.zeros(n)
    half[:2] = 0.5**0.5
    return {
        "pair": pair,
        "several": several,
        "pair and identity": pair + np.eye(n),
        "pair and a large direction": pair + large,
        "pair and a large element": pair + np.diag(100.0 * (np.arange(n) == 20)),
        "projection": np.eye(n) - np.outer(half, half),
    }


def missed_by_signs(count):
    """How often Student's interval from some signs misses their expectation."""
    mean = np.arange(-count, count + 1, 2) / count
    half = stats.t.ppf(0.975, count - 1) * np.sqrt((1 - mean**2) / (count - 1))
    return np.sum(stats.binom.pmf(np.arange(count + 1), count, 0.5)[np.abs(mean) > half + 1e-9])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Hutchinson", "HutchPlusPlus", "LanczosQuadrature", "XTrace"])
def test_few_signs_that_agree_by_chance(name):
    """Values off by 2 had an error of zero: in half of the cases from two probes, in 13% from four."""
    n, seeds = 40, 1000
    keys = jax.random.split(jax.random.key(1), seeds)
    options = {"probes": Rademacher(), "resphered": False} if name == "XTrace" else {}
    method = getattr(estimators, name)(**options)

    @functools.partial(jax.jit, static_argnums=1)
    def run(matrix, m):
        operator = MatrixOperator(matrix, symmetric=True)

        def one(key):
            if name == "LanczosQuadrature":
                found = estimators.trace_of_function(lambda x: x, operator, key, matvecs=m)
            else:
                found = estimators.trace(operator, key, matvecs=m, method=method)
            return found.interval()

        return lax.map(one, keys, batch_size=100)

    least = method.minimum
    for case, matrix in sign_operators(n).items():
        for m in (least, least + 1, least + 2, 16, 20):
            low, high = map(np.asarray, run(jnp.asarray(matrix, jnp.float32), m))
            truth, rounding = np.trace(matrix), 1e-4 * (1 + abs(np.trace(matrix)))
            held = np.mean((low <= truth + rounding) & (truth - rounding <= high))
            # Five signs agree in one case of 16, and the mean of a few more has few values. Three standard deviations.
            missed = max(1 / 16, missed_by_signs(m) if name == "Hutchinson" else 0)
            assert held >= 1 - missed - 3 * (0.06 / seeds) ** 0.5, (case, m, held)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["XTrace", "XNysTrace"])
def test_the_error_of_a_projection_is_right_on_average(name):
    """The samples are squares of a normal number: intervals cannot hold as often as they say."""
    n, seeds = 60, 1000
    matrix = jnp.eye(n) - jnp.ones((n, n)) / n
    operator = MatrixOperator(matrix, positive_semidefinite=True)
    method = getattr(estimators, name)()

    def one(key):
        found = estimators.trace(operator, key, matvecs=20, method=method)
        low, high = found.interval()
        return found.value - (n - 1), found.standard_error, (low < n - 1) & (high > n - 1)

    keys = jax.random.split(jax.random.key(2), seeds)
    error, said, held = map(
        np.asarray, jax.jit(lambda keys: lax.map(one, keys, batch_size=100))(keys)
    )
    assert np.mean(said**2) ** 0.5 == pytest.approx(np.mean(error**2) ** 0.5, rel=0.15)
    assert abs(np.mean(error)) < 4 * np.std(error) / seeds**0.5
    assert np.mean(held) > 0.83
