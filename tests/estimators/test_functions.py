"""Traces of functions, and norms: against dense algebra, and over seeds."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from vernal import loops
from vernal.estimators import (
    LanczosQuadrature,
    Normal,
    Rademacher,
    Steinhaus,
    frobenius_norm,
    schatten_norm,
    trace_of_function,
)
from vernal.estimators._samples import Scatter
from vernal.linalg import FunctionOperator, MatrixOperator

SIZE = 60
KEY = jax.random.key(0)


def symmetric(eigenvalues, rng):
    q = np.linalg.qr(rng.normal(size=(len(eigenvalues),) * 2))[0]
    matrix = (q * eigenvalues) @ q.T
    return (matrix + matrix.T) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exp", "square", "resolvent"])
def test_functions_of_indefinite_operators_are_unbiased_with_honest_errors(name):
    f = {"exp": jnp.exp, "square": jnp.square, "resolvent": lambda x: 1 / (3 + x)}[name]
    eigenvalues = np.linspace(-2.0, 1.0, SIZE)
    with jax.enable_x64(True):
        operator = MatrixOperator(symmetric(eigenvalues, np.random.default_rng(0)), symmetric=True)

        def one(key):
            found = trace_of_function(f, operator, key, matvecs=50)
            return found.value, found.standard_error, found.degrees_of_freedom

        keys = jax.random.split(KEY, 300)
        values, errors, freedom = map(np.asarray, jax.jit(lambda ks: jax.lax.map(one, ks))(keys))
        off = values - np.sum(np.asarray(f(jnp.asarray(eigenvalues))))
    assert abs(stats.ttest_1samp(off, 0.0).statistic) < 3
    assert 0.8 < np.sqrt(np.mean(errors**2) / np.mean(off**2)) < 1.5
    assert np.mean(np.abs(off) < stats.t.ppf(0.975, freedom) * errors) >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize(
    "eigenvalues",
    [
        np.linspace(1.0, 3.0, 1000),
        1 / np.arange(1.0, 1001) + 0.01,
        0.7 ** np.arange(1000.0) + 1e-3,
        np.where(np.arange(1000) < 50, 1.0, 1e-3),
        np.logspace(-6, 0, 1000),
    ],
    ids=["flat", "harmonic", "exp", "step", "six decades"],
)
def test_the_error_is_honest_whether_probes_or_steps_are_too_few(eigenvalues):
    """A product of a few reflections and a diagonal matrix costs nothing, and has a basis that signs do not know."""
    with jax.enable_x64(True):
        axes = np.random.default_rng(1).normal(size=(3, 1000))
        axes = jnp.asarray(axes / np.linalg.norm(axes, axis=1, keepdims=True))

        def turned(v, order):
            for i in order:
                v = v - 2 * axes[i] * (axes[i] @ v)
            return v

        def fn(v):
            return turned(jnp.asarray(eigenvalues) * turned(v, (2, 1, 0)), (0, 1, 2))

        operator = FunctionOperator(fn, jnp.zeros(1000), positive_semidefinite=True, batch_size=32)
        exact = np.sum(np.log(eigenvalues))
        for matvecs in (60, 200):

            def one(key, matvecs=matvecs):
                found = trace_of_function(jnp.log, operator, key, matvecs=matvecs)
                return found.value, found.standard_error, found.degrees_of_freedom

            keys = jax.random.split(KEY, 100)
            found = jax.jit(lambda ks, one=one: jax.lax.map(one, ks))(keys)
            values, errors, freedom = map(np.asarray, found)
            off = values - exact
            assert 0.8 < np.sqrt(np.mean(errors**2) / np.mean(off**2)) < 1.5
            assert np.mean(np.abs(off) < stats.t.ppf(0.975, freedom) * errors) >= 0.93


@pytest.mark.parametrize("unit", [1.0, 1e-15, 1e15])
@pytest.mark.sample(3)
def test_degrees_of_freedom_are_those_of_directions_and_lengths(unit):
    used, number = jnp.arange(6) < 5, jnp.asarray(5.0)
    # Five slopes of one length in as many directions as they can show; in one direction, where lengths vary, too.
    apart, along = jnp.eye(40, 6), jnp.outer(jnp.ones(40), jnp.arange(6.0))
    lengths = (jnp.arange(5.0) - 2) ** 2
    varied = jnp.var(lengths, ddof=1) / (5 * jnp.mean(lengths) ** 2)
    for slopes, freedom in ((apart, 16.0), (along, max(2 / (2 / 4 + varied), 4.0))):
        found = Scatter.of(slopes * unit, used).freedom(number)
        np.testing.assert_allclose(found, freedom, rtol=1e-5)
    # Blocks are put together; without any slope there is nothing to be noisy.
    both = Scatter.of(apart[:, :3], used[:3]).joined(Scatter.of(apart[:, 3:], used[3:]))
    assert 4 < both.freedom(number) < 16
    assert Scatter.of(0 * apart, used).freedom(number) == 4


@pytest.mark.parametrize("tag", ["symmetric", "positive_semidefinite"])
def test_arrays_that_the_function_closes_over_have_derivatives(tag):
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        eigenvalues = np.linspace(0.5, 2.0, SIZE)
        operator = MatrixOperator(symmetric(eigenvalues, rng), **{tag: True})

        def value(power, matvecs):
            return trace_of_function(lambda x: x**power, operator, KEY, matvecs=matvecs).value

        slope = jax.grad(value)(jnp.asarray(2.0), SIZE)
        np.testing.assert_allclose(slope, np.sum(eigenvalues**2 * np.log(eigenvalues)), rtol=1e-10)
        slope = jax.grad(value)(jnp.asarray(2.0), 40)
        differences = (
            value(jnp.asarray(2.0 + 1e-6), 40) - value(jnp.asarray(2.0 - 1e-6), 40)
        ) / 2e-6
        np.testing.assert_allclose(slope, differences, rtol=1e-6)


@pytest.mark.parametrize("f", [lambda x: 1 / x, jnp.log, jnp.sqrt], ids=["inverse", "log", "root"])
@pytest.mark.sample(3)
def test_a_known_least_eigenvalue_brings_the_bounds_together(f):
    eigenvalues = np.geomspace(1e-3, 1.0, SIZE)
    with jax.enable_x64(True):
        matrix = symmetric(eigenvalues, np.random.default_rng(9))
        operator = MatrixOperator(jnp.asarray(matrix), positive_semidefinite=True)
        truth, errors = np.sum(np.asarray(f(jnp.asarray(eigenvalues)))), []
        for least in (None, 1e-3):
            found = trace_of_function(f, operator, KEY, matvecs=50, least_eigenvalue=least)
            low, high = found.interval(0.999)
            assert low < truth < high and found.tags_hold
            errors.append(found.standard_error)
        assert errors[1] < errors[0]
        wrong = trace_of_function(f, operator, KEY, matvecs=50, least_eigenvalue=0.1)
        assert not wrong.tags_hold


def test_an_operator_that_is_declared_positive_has_no_negative_eigenvalues():
    rng = np.random.default_rng(4)
    low_rank = symmetric(np.arange(SIZE) < 5, rng)
    operator = MatrixOperator(jnp.asarray(low_rank, jnp.float32), positive_semidefinite=True)
    for matvecs in (40, SIZE):
        found = trace_of_function(jnp.sqrt, operator, KEY, matvecs=matvecs)
        assert found.tags_hold
        assert abs(found.value - 5) <= 4 * found.standard_error + 0.05
    wrong = MatrixOperator(
        jnp.asarray(low_rank - 0.1 * np.eye(SIZE), jnp.float32), positive_semidefinite=True
    )
    for matvecs in (40, SIZE):
        assert not trace_of_function(jnp.sqrt, wrong, KEY, matvecs=matvecs).tags_hold


@pytest.mark.parametrize("p", [1, 3.5])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.sample(3)
def test_schatten_norms_are_those_of_the_singular_values(p, is_symmetric):
    rng = np.random.default_rng(5)
    matrix = rng.normal(size=(SIZE, SIZE))
    matrix = matrix + matrix.T if is_symmetric else matrix
    exact = np.sum(np.linalg.svd(matrix)[1] ** p) ** (1 / p)
    with jax.enable_x64(True):
        operator = MatrixOperator(jnp.asarray(matrix), symmetric=is_symmetric)
        found = schatten_norm(operator, KEY, p, matvecs=2 * SIZE + 1)
        np.testing.assert_allclose(found.value, exact, rtol=1e-8)
        # Rounding is reported.
        assert 0 < found.standard_error < 1e-11 * exact
        assert found.matvecs == (SIZE + 1 if is_symmetric else 2 * SIZE + 1)
        rough = schatten_norm(operator, KEY, p, matvecs=55)
        assert rough.matvecs <= 55 and abs(rough.value - exact) < 5 * rough.standard_error


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [30, 41, 60])
@pytest.mark.parametrize("p", [1, 1.2, 2, 3])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.sample(8)
def test_exact_schatten_norms_of_low_rank_are_within_their_rounding(is_symmetric, p, size, dtype):
    """The roots of rounding errors of `A^* A` were added up: 118.14 plus or minus 0.17 for 117.95."""
    rng = np.random.default_rng(0)
    left, right = (np.linalg.qr(rng.normal(size=(size, size)))[0] for _ in range(2))
    few = 1.0 * (np.arange(size) < 3)
    matrices = [left * values @ right for values in (few, few + 1e-7)]
    for rank in (1, 2, 3, size // 2, size):
        matrices.append(rng.normal(size=(size, rank)) @ rng.normal(size=(rank, size)))
    given = np.asarray(matrices, np.float32)
    given = (given + np.swapaxes(given, 1, 2)) / 2 if is_symmetric else given
    values = np.linalg.svd(given.astype(np.float64))[1]
    exact = np.sum(values**p, axis=1) ** (1 / p)

    def norm(matrix):
        operator = MatrixOperator(matrix, symmetric=is_symmetric)
        found = schatten_norm(operator, KEY, p, matvecs=2 * size + 10)
        return found.value, found.standard_error, *found.interval()

    with jax.enable_x64(dtype == "float64"):
        value, error, low, high = jax.vmap(norm)(jnp.asarray(given, dtype))
        assert np.all((low <= exact) & (exact <= high)), (value - exact) / error
        assert np.all(error <= 4 * size**1.5 * jnp.finfo(dtype).eps * exact)


@pytest.mark.parametrize("p", [1, 2.5, 9])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_the_norm_of_zero_is_zero(p, is_symmetric):
    """From few products it was 1.6e-18."""
    for matvecs in (31, 61) if p < 9 else (37, 81):
        operator = MatrixOperator(jnp.zeros((30, 30)), symmetric=is_symmetric)
        found = schatten_norm(operator, KEY, p, matvecs=matvecs)
        assert found.value == 0 and found.standard_error == 0
    lost = MatrixOperator(jnp.full((30, 30), jnp.nan), symmetric=is_symmetric)
    assert jnp.isnan(schatten_norm(lost, KEY, p, matvecs=37).value)


def test_schatten_norms_have_the_derivative_of_the_norm():
    rng = np.random.default_rng(6)
    with jax.enable_x64(True):
        matrix = jnp.asarray(rng.normal(size=(9, 9)))
        slope = jax.grad(lambda m: schatten_norm(m, KEY, 3, matvecs=19).value)(matrix)
        u, s, v = np.linalg.svd(matrix)
        want = (u * s**2) @ v / np.sum(s**3) ** (2 / 3)
        np.testing.assert_allclose(slope, want, atol=1e-10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("p", [8, 9, 40, 200, 1e3, 1e5])
@pytest.mark.parametrize("kind", ["orthogonal", "spread", "rank one", "general"])
@pytest.mark.sample(4)
def test_large_powers_neither_overflow_nor_vanish(kind, p, dtype):
    rng, n = np.random.default_rng(9), 60
    orthogonal = np.linalg.qr(rng.normal(size=(n, n)))[0]
    matrix = {
        "orthogonal": orthogonal + orthogonal.T,
        "spread": orthogonal @ np.diag(np.arange(n) - 20.0) @ orthogonal.T,
        "rank one": 1e3 * np.ones((n, n)),
        "general": rng.normal(size=(n, n)),
    }[kind]
    with jax.enable_x64(dtype == "float64"):
        given = jnp.asarray(matrix, dtype)
        rounded = np.asarray(given, np.float64)
        values = np.linalg.svd(rounded)[1]
        exact = values[0] * np.sum((values / values[0]) ** p) ** (1 / p)
        operator = MatrixOperator(given, symmetric=kind != "general")
        cost = 2 if kind == "general" else 1
        steps = 0 if p == 8 else min(n, int(np.ceil((p / cost) ** 0.5)))
        found = schatten_norm(operator, KEY, p, matvecs=cost * (n + steps) + 1)
        assert found.matvecs == cost * (n + steps) + 1
        tolerance = {"bfloat16": 2e-2, "float32": 1e-4, "float64": 1e-9}[dtype]
        np.testing.assert_allclose(found.value, exact, rtol=tolerance)
        with pytest.raises(ValueError, match="`matvecs` is too small"):
            least = cost * (LanczosQuadrature().minimum + steps) + 1
            schatten_norm(operator, KEY, p, matvecs=least - 1)
        if dtype != "bfloat16":

            def norm(scale):
                scaled = MatrixOperator(scale * given, symmetric=operator.symmetric)
                return schatten_norm(scaled, KEY, p, matvecs=cost * (n + steps) + 1).value

            np.testing.assert_allclose(
                jax.grad(norm)(jnp.ones((), dtype)), exact, rtol=10 * tolerance
            )


@pytest.mark.parametrize("p", [3, 8, 200])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_norms_of_operators_that_take_signs_to_zero(p, is_symmetric):
    """Whose scale was measured as zero: the norm was 0 or infinity for half of the keys."""
    for scale in (1e-20, 1.0, 1e15):
        matrix = scale * jnp.array([[1.0, -1.0], [-1.0, 1.0]])
        operator = MatrixOperator(matrix, symmetric=is_symmetric)
        for seed in range(4):
            found = schatten_norm(operator, jax.random.key(seed), p, matvecs=9)
            np.testing.assert_allclose(found.value, 2 * scale, rtol=1e-5)


def test_a_large_power_of_a_zero_operator_and_what_no_power_can_hold():
    operator = MatrixOperator(jnp.zeros((20, 20)), symmetric=True)
    assert schatten_norm(operator, KEY, 100, matvecs=40).value == 0
    spread = MatrixOperator(jnp.diag(jnp.arange(1.0, 21.0)), symmetric=True)
    lost = schatten_norm(spread, KEY, 1e30, matvecs=41)
    assert not lost.is_finite or abs(lost.value - 20) < 1e-3


@pytest.mark.parametrize("p", [1, 1.5, 2, 2.5, 3, 4, 5])
@pytest.mark.parametrize("kind", ["general", "symmetric", "positive"])
def test_schatten_norms_of_low_rank_have_derivatives(kind, p):
    """Zero singular values add to none of the first derivatives, and to the second ones only where p is 2."""
    rng = np.random.default_rng(7)
    x, y, direction = (
        rng.normal(size=(6, 2)),
        rng.normal(size=(6, 2)),
        rng.normal(size=(6, 6)),
    )

    def matrix(t):
        if kind == "positive":
            factor = np.pad(x, ((0, 0), (0, 4))) + t * direction
            return factor @ factor.T
        if kind == "symmetric":
            return x @ np.diag([1.0, -1.0]) @ x.T + t * (direction + direction.T)
        return x @ y.T + t * direction

    def exact(t):
        return np.sum(np.linalg.svd(np.asarray(matrix(t)))[1] ** p) ** (1 / p)

    def ours(t):
        operator = MatrixOperator(
            matrix(t), symmetric=kind != "general", positive_semidefinite=kind == "positive"
        )
        return schatten_norm(operator, KEY, p, matvecs=13).value

    with jax.enable_x64(True):
        zero, step = jnp.zeros(()), 1e-4
        np.testing.assert_allclose(ours(zero), exact(0.0), rtol=1e-7)
        u, s, v = np.linalg.svd(np.asarray(matrix(0.0)))
        along = np.asarray(jax.jacfwd(matrix)(0.0))
        slope = np.sum(s[:2] ** (p - 1) * np.einsum("ik,ij,kj->k", u[:, :2], along, v[:2]))
        slope /= exact(0.0) ** (p - 1)
        np.testing.assert_allclose(jax.jit(jax.grad(ours))(zero), slope, rtol=1e-6)
        curvature = jax.jit(jax.jacfwd(jax.grad(ours)))(zero)
        if p < 2 and (kind, p) != ("positive", 1):
            assert jnp.isnan(curvature)
        else:
            wanted = (exact(step) - 2 * exact(0.0) + exact(-step)) / step**2
            np.testing.assert_allclose(curvature, wanted, rtol=1e-2)


@pytest.mark.parametrize("matvecs", [16, 15])
@pytest.mark.parametrize("positive", [True, False])
def test_second_derivatives_mix_the_operator_and_what_the_function_closes_over(positive, matvecs):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 16, 16))
    a, b = a @ a.T + 16 * np.eye(16), b + b.T

    def matrix(s):
        return jnp.asarray(a) * jnp.exp(s) + s**2 * jnp.asarray(b)

    def estimate(s, t, matvecs):
        operator = MatrixOperator(matrix(s), symmetric=True, positive_semidefinite=positive)
        fn = lambda x: jnp.exp(-t * x / 10)  # noqa: E731 (what is tested closes over t)
        return trace_of_function(fn, operator, KEY, matvecs=matvecs).value

    def exact(s, t):
        return jnp.sum(jnp.exp(-t * jnp.linalg.eigvalsh(matrix(s)) / 10))

    with jax.enable_x64(True):
        at = jnp.asarray(0.3), jnp.asarray(0.7)
        ours = lambda s, t: estimate(s, t, matvecs)  # noqa: E731 (a name for six uses)
        found = np.asarray(jax.jit(jax.hessian(ours, (0, 1)))(*at))
        np.testing.assert_allclose(found, found.T, rtol=1e-10)
        reverse = jax.jit(jax.grad(jax.grad(ours, 1), 0))(*at)
        forward = jax.jit(jax.jacfwd(jax.jacfwd(ours, 1), 0))(*at)
        np.testing.assert_allclose([reverse, forward], [found[0, 1]] * 2, rtol=1e-10)
        both = jax.jit(jax.grad(jax.grad(lambda t: ours(t, t))))(at[0])
        parts = np.asarray(jax.jit(jax.hessian(ours, (0, 1)))(at[0], at[0]))
        np.testing.assert_allclose(both, parts.sum(), rtol=1e-10)
        if matvecs == 16:
            wanted = np.asarray(jax.hessian(exact, (0, 1))(*at))
            np.testing.assert_allclose(found, wanted, rtol=1e-9)


def divided_twice(nodes):
    """Divided differences of the derivative of log(1 + x), from sums that cancel nothing."""
    return -1 / ((1 + nodes[:, None]) * (1 + nodes[None, :]))


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("kind", ["one", "low rank", "rounded", "decaying", "far below rounding"])
@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-8), ("float32", 1e-4)])
def test_second_derivatives_where_many_eigenvalues_are_zero_up_to_rounding(
    kind, positive, dtype, rtol
):
    """Both `log1p` and a function that rounds, as users write it, whose values near zero are off by an eps of one."""
    rng = np.random.default_rng(3)
    direction = rng.normal(size=(8, 8))
    direction = direction + direction.T
    factor = rng.normal(size=(8, 2))
    matrix = {
        "one": np.full((8, 8), 0.1),
        "low rank": factor @ factor.T / 9,
        "rounded": np.diag([*(1e-17 * np.arange(6)), 1.0, 2.0]),
        "decaying": np.diag(10.0 ** -np.arange(0, 16, 2)),
        "far below rounding": np.diag(10.0 ** -np.arange(8, 24, 2) * 2),
    }[kind]
    nodes, vectors = np.linalg.eigh(matrix)
    inside = vectors.T @ direction @ vectors
    wanted = np.sum(divided_twice(nodes) * inside**2)
    with jax.enable_x64(dtype == "float64"):
        x, e = jnp.asarray(matrix, dtype), jnp.asarray(direction, dtype)

        def of(f):
            def value(t):
                operator = MatrixOperator(x + t * e, symmetric=True, positive_semidefinite=positive)
                return trace_of_function(f, operator, KEY, matvecs=8).value

            return jax.jit(jax.jacfwd(jax.grad(value)))(jnp.zeros((), dtype))

        np.testing.assert_allclose(of(jnp.log1p), wanted, rtol=rtol)
        np.testing.assert_allclose(of(lambda x: jnp.log(1 + x)), wanted, rtol=rtol)


@pytest.mark.parametrize("order", [(0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 1, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
@pytest.mark.sample(2)
def test_third_derivatives_where_eigenvalues_are_zero_up_to_rounding(mode, order):
    """Eigenvectors have no derivatives there."""
    rng = np.random.default_rng(0)
    direction, factor = rng.normal(size=(6, 6)), rng.normal(size=(6, 2))

    def matrix(t):
        return jnp.asarray(factor @ factor.T / 9) + t * jnp.asarray(direction + direction.T)

    def found(t, c):
        operator = MatrixOperator(matrix(t), symmetric=True)
        return trace_of_function(lambda x: jnp.exp(c * x), operator, KEY, matvecs=6).value

    def wanted(t, c):
        return jnp.trace(jax.scipy.linalg.expm(c * matrix(t)))

    with jax.enable_x64(True):
        for argument in order:
            found, wanted = mode(found, argument), jax.jacfwd(wanted, argument)
        at = jnp.asarray(0.0), jnp.asarray(1.3)
        np.testing.assert_allclose(jax.jit(found)(*at), jax.jit(wanted)(*at), rtol=1e-9)


@pytest.mark.parametrize("inner", [jax.grad, jax.jacfwd])
@pytest.mark.parametrize("outer", [jax.grad, jax.jacfwd])
@pytest.mark.parametrize("order", list(itertools.product((0, 1), repeat=3)), ids=str)
@pytest.mark.sample(3)
def test_third_derivatives_by_the_operator_and_what_the_function_closes_over(inner, outer, order):
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=(2, 16, 16))
    a, b = a @ a.T + 16 * np.eye(16), b + b.T

    def matrix(s):
        return jnp.asarray(a) * jnp.exp(s) + s**2 * jnp.asarray(b)

    def estimate(s, t, matvecs):
        operator = MatrixOperator(matrix(s), symmetric=True)
        fn = lambda x: jnp.exp(-t * x / 10)  # noqa: E731 (what is tested closes over t)
        return trace_of_function(fn, operator, KEY, matvecs=matvecs).value

    def exact(s, t):
        return jnp.sum(jnp.exp(-t * jnp.linalg.eigvalsh(matrix(s)) / 10))

    def third(f, *modes):
        for mode, argument in zip(modes, order, strict=True):
            f = mode(f, argument)
        return jax.jit(f)

    with jax.enable_x64(True):
        at = jnp.asarray(0.3), jnp.asarray(0.7)
        wanted = third(exact, jax.grad, jax.grad, jax.grad)(*at)
        found = third(lambda s, t: estimate(s, t, 16), inner, inner, outer)(*at)
        np.testing.assert_allclose(found, wanted, rtol=1e-8)
        # An estimate has the same derivatives in any order.
        rough = third(lambda s, t: estimate(s, t, 15), inner, inner, outer)(*at)
        same = sorted(order)
        other = lambda s, t: estimate(s, t, 15)  # noqa: E731 (differentiated in a loop)
        for argument in same:
            other = jax.grad(other, argument)
        np.testing.assert_allclose(rough, jax.jit(other)(*at), rtol=1e-6)


@pytest.mark.parametrize("scan", [jax.lax.scan, loops.scan], ids=["jax", "ours"])
def test_mixed_second_derivatives_in_a_scan(scan):
    rng = np.random.default_rng(4)
    a = rng.normal(size=(6, 6))
    a = a @ a.T + np.eye(6)

    def total(one, scan):
        def run(s, t):
            return scan(lambda c, y: (c + one(s * y, t * y), None), s, jnp.asarray([0.5, 1.0]))[0]

        return run

    def estimate(s, t):
        operator = MatrixOperator(jnp.asarray(a) * jnp.exp(s), symmetric=True)
        return trace_of_function(lambda x: jnp.exp(-t * x), operator, KEY, matvecs=6).value

    def exact(s, t):
        return jnp.sum(jnp.exp(-t * jnp.linalg.eigvalsh(jnp.asarray(a) * jnp.exp(s))))

    with jax.enable_x64(True):
        at = jnp.asarray(0.3), jnp.asarray(0.7)
        wanted = np.asarray(jax.hessian(total(exact, jax.lax.scan), (0, 1))(*at))
        for inner, outer in [
            (jax.jacrev, jax.jacrev),
            (jax.grad, jax.jacfwd),
            (jax.jacfwd, jax.jacfwd),
        ]:
            derivative = jax.jit(outer(inner(total(estimate, scan), (0, 1)), (0, 1)))
            np.testing.assert_allclose(np.asarray(derivative(*at)), wanted, rtol=1e-9)


def test_what_a_function_closes_over_may_make_its_slope_infinite():
    operator = MatrixOperator(jnp.diag(jnp.array([0.0, 1.0, 4.0])), positive_semidefinite=True)
    scale = jnp.float32(2)
    found = trace_of_function(lambda x: scale * jnp.sqrt(x), operator, KEY, matvecs=3)
    np.testing.assert_allclose(found.value, 6, rtol=1e-5)


def test_norms_scale_with_the_operator_and_are_zero_for_zero():
    matrix = jnp.asarray(np.random.default_rng(7).normal(size=(SIZE, SIZE)), jnp.float32)

    @jax.jit
    def norms(scale):
        a = schatten_norm(scale * matrix, KEY, 3, matvecs=41)
        b = frobenius_norm(scale * matrix, KEY, matvecs=20)
        return jnp.stack([a.value, a.standard_error, b.value, b.standard_error])

    plain = norms(1.0)
    for scale in (2.0**-27, 2.0**27):
        np.testing.assert_allclose(norms(scale) / scale, plain, rtol=1e-4)
    np.testing.assert_array_equal(norms(0.0), np.zeros(4))


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("probes", [None, Normal()], ids=repr)
def test_the_frobenius_norm_is_honest_and_its_derivatives_are_right(dtype, probes):
    rng = np.random.default_rng(8)
    x = rng.normal(size=(2, SIZE, SIZE))
    x = x if dtype == "float64" else x + 1j * rng.normal(size=x.shape)
    with jax.enable_x64(True):
        matrix, way = jnp.asarray(x)

        def value(t, matvecs, key=KEY):
            moved = matrix + t.astype(matrix.dtype) * way
            return frobenius_norm(moved, key, matvecs=matvecs, probes=probes)

        def one(key):
            found = value(jnp.asarray(0.0), 30, key)
            return found.value, found.standard_error

        values, errors = jax.jit(lambda ks: jax.lax.map(one, ks))(jax.random.split(KEY, 300))
        off = np.asarray(values) - np.linalg.norm(x[0])
        assert 0.8 < np.sqrt(np.mean(np.asarray(errors) ** 2) / np.mean(off**2)) < 1.3
        at, h = jnp.asarray(0.3), 1e-5
        slope = jax.grad(lambda t: value(t, SIZE).value)
        exact = lambda t: np.linalg.norm(x[0] + t * x[1])  # noqa: E731 (a name for five uses)
        np.testing.assert_allclose(value(at, SIZE).value, exact(0.3), rtol=1e-12)
        np.testing.assert_allclose(
            slope(at), (exact(0.3 + h) - exact(0.3 - h)) / (2 * h), rtol=1e-8
        )
        want = (exact(0.3 + 1e-3) - 2 * exact(0.3) + exact(0.3 - 1e-3)) / 1e-6
        np.testing.assert_allclose(jax.grad(slope)(at), want, rtol=1e-4)


def hard_norms():
    """Operators whose `|A w|^2` is far from normal."""
    rng = np.random.default_rng(9)
    base = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    half = np.full(SIZE, 0.5 / SIZE)
    half[0] = 1
    spectra = {"one": np.arange(SIZE) == 0, "half": half, "poly": (1 + np.arange(SIZE)) ** -2.0}
    found = {name: np.sqrt(squares)[:, None] * base for name, squares in spectra.items()}
    row, pair = np.eye(SIZE), np.zeros((SIZE, SIZE))
    row[0], pair[0, :2] = 3, 1
    return found | {"row": row, "pair": pair}


@pytest.mark.parametrize("matvecs", [5, 6, 8, 10, 20, 50])
@pytest.mark.parametrize("probes", [Rademacher(), Normal(), Steinhaus()], ids=repr)
@pytest.mark.sample(3)
def test_intervals_of_the_frobenius_norm_hold_where_one_singular_value_dominates(probes, matvecs):
    dtype = jnp.complex64 if isinstance(probes, Steinhaus) else jnp.float32

    @jax.jit
    def holds(matrix):
        def one(key):
            low, high = frobenius_norm(matrix, key, matvecs=matvecs, probes=probes).interval(0.95)
            norm = jnp.linalg.norm(matrix)
            return (low <= norm) & (norm <= high)

        return jnp.mean(jax.vmap(one)(jax.random.split(KEY, 2000)).astype(float))

    shares = {name: float(holds(jnp.asarray(a, dtype))) for name, a in hard_norms().items()}
    assert min(shares.values()) >= 0.93, shares


def test_they_say_what_they_cannot_do():
    operator = MatrixOperator(jnp.eye(9), symmetric=True)
    with pytest.raises(ValueError, match="not declared symmetric"):
        trace_of_function(jnp.exp, jnp.eye(9), KEY, matvecs=9)
    with pytest.raises(ValueError, match="`least_eigenvalue` would be ignored"):
        trace_of_function(jnp.exp, operator, KEY, matvecs=9, least_eigenvalue=0.1)
    with pytest.raises(TypeError, match="element by element"):
        trace_of_function(jnp.sum, operator, KEY, matvecs=9)
    with pytest.raises(TypeError, match="element by element"):
        trace_of_function(lambda x: x > 0, operator, KEY, matvecs=9)
    with pytest.raises(ValueError, match="not a valid order of a norm"):
        schatten_norm(operator, KEY, 0.5, matvecs=9)
    with pytest.raises(ValueError, match=r"not a valid order of a norm(.|\n)*got: p=True"):
        schatten_norm(operator, KEY, True, matvecs=9)
    with pytest.raises(ValueError, match="`matvecs` is too small"):
        frobenius_norm(operator, KEY, matvecs=4)


@pytest.mark.parametrize("matvecs", [15, 16])
def test_a_rule_for_derivatives_closes_over_its_tangent(matvecs):
    """The value is linear in the tangent, so nothing may depend on whether it is finite."""
    with jax.enable_x64(True):
        operator = MatrixOperator(jnp.diag(jnp.arange(16.0) / 16), symmetric=True)
        key = jax.random.key(0)

        def trace(f):
            return trace_of_function(f, operator, key, matvecs=matvecs).value

        @jax.custom_jvp
        def ours(t):
            return trace(lambda x: jnp.exp(t * x))

        @ours.defjvp
        def _(primals, tangents):
            (t,), (dot,) = primals, tangents
            return ours(t), trace(lambda x: dot * x * jnp.exp(t * x))

        for mode, order in itertools.product((jax.grad, jax.jacfwd), (1, 2, 3)):
            found = functools.reduce(lambda g, _: mode(g), range(order), ours)(0.7)
            want = trace(lambda x, order=order: x**order * jnp.exp(0.7 * x))
            np.testing.assert_allclose(found, want, rtol=1e-9)


@pytest.mark.parametrize("eigenvalues", [[1.0], [1.0, 2.0], [0.5, 1.0, 2.0], [1.0, 1 + 1e-7]])
def test_third_derivatives_of_an_exhausted_space_are_not_a_number(eigenvalues):
    """Rounding errors, over the squares of residuals that are rounding errors, too."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q = np.linalg.qr(rng.standard_normal((36, 36)))[0]
        a = jnp.asarray((q * np.repeat(eigenvalues, 36 // len(eigenvalues))) @ q.T)
        e = jnp.asarray(q + q.T)

        def trace(t, key):
            operator = MatrixOperator(a + t * e, symmetric=True)
            method = LanczosQuadrature(steps=5)
            return trace_of_function(jnp.exp, operator, key, matvecs=25, method=method).value

        third = jax.jit(jax.vmap(jax.grad(jax.grad(jax.grad(trace))), in_axes=(None, 0)))
        second = jax.jit(jax.vmap(jax.grad(jax.grad(trace)), in_axes=(None, 0)))
        keys = jax.random.split(KEY, 20)
        assert np.all(np.isnan(third(0.0, keys))) and np.all(np.isfinite(second(0.0, keys)))


SATURATED = {
    "sigmoid": lambda x: jax.nn.sigmoid(20 * (1 - x)),
    "tanh": lambda x: 0.5 - 0.5 * jnp.tanh(10 * (x - 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SATURATED)
def test_functions_whose_derivatives_have_errors_larger_than_themselves(name):
    """JAX's derivative of `tanh` near 1 is wrong by eps, which the quotients of close eigenvalues made large."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q = np.linalg.qr(rng.standard_normal((6, 6)))[0]
        e = jnp.asarray(q + q.T)

        def third(f):
            def trace(t, a):
                operator = MatrixOperator(a + t * e, symmetric=True)
                return trace_of_function(f, operator, KEY, matvecs=6).value

            return jax.jit(jax.jacfwd(jax.jacfwd(jax.grad(trace))))

        found, wanted = third(SATURATED[name]), third(lambda x: 1 / (1 + jnp.exp(20 * (x - 1))))
        for gap in (1e-7, 1e-8, 1e-10, 1e-12):
            a = (q * np.array([0.1, 0.1 + gap, 0.1 + 2.5 * gap, 1.0, 1.02, 0.45])) @ q.T
            a = jnp.asarray((a + a.T) / 2)
            np.testing.assert_allclose(found(0.0, a), wanted(0.0, a), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_third_derivatives_of_tanh_at_tiny_matrices(dtype):
    """JAX's second derivative is zero there: 2 x is lost next to 1."""
    with jax.enable_x64(True):
        e = jnp.array([[2.0, 1.0, -0.5], [1.0, 1.5, 0.7], [-0.5, 0.7, -1.0]], dtype)

        def trace(t, scale):
            a = scale * jnp.diag(jnp.array([1.0, 2.0, 3.0], dtype)) + t * e
            operator = MatrixOperator(a, symmetric=True)
            return trace_of_function(jnp.tanh, operator, KEY, matvecs=3).value

        third = jax.jit(jax.jacfwd(jax.jacfwd(jax.grad(trace))))
        for scale in (1e-5, 1e-7, 1e-8, 1e-9, 1e-17, 1e-20):
            found = third(jnp.zeros((), dtype), jnp.asarray(scale, dtype))
            np.testing.assert_allclose(found, -2 * jnp.trace(e @ e @ e), rtol=1e-3)


@pytest.mark.parametrize("mode", [jax.grad, jax.jacfwd])
def test_third_derivatives_of_a_complex_operator_in_a_scan(mode):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x = rng.standard_normal((2, 4, 4)) + 1j * rng.standard_normal((2, 4, 4))
        a, b = jnp.asarray(x + np.swapaxes(x.conj(), 1, 2)) / 2

        def ours(t):
            operator = MatrixOperator(a + t.astype(a.dtype) * b, symmetric=True)
            return trace_of_function(jnp.exp, operator, KEY, matvecs=4).value

        def dense(t):
            return jnp.trace(jax.scipy.linalg.expm(a + t.astype(a.dtype) * b)).real

        def third(f, mode):
            def total(t):
                return jnp.sum(jax.lax.scan(lambda c, _: (0.9 * c, f(c)), t, None, length=2)[1])

            return jax.jit(mode(mode(mode(total))))(jnp.asarray(0.3))

        np.testing.assert_allclose(third(ours, mode), third(dense, jax.jacfwd), rtol=1e-9)
