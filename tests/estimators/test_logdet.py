"""`logdet`: against dense algebra, over seeds, and its derivatives of first and second order."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from vernal import filter_eval_shape
from vernal.estimators import LanczosQuadrature, Rademacher, Steinhaus, _quadrature, logdet
from vernal.linalg import FunctionOperator, MatrixOperator

SIZE = 60


def rotation(rng, size=SIZE):
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def positive(eigenvalues, rng):
    q = rotation(rng, len(eigenvalues))
    matrix = (q * eigenvalues) @ q.T
    return (matrix + matrix.T) / 2


def dense(matrix):
    return MatrixOperator(matrix, positive_semidefinite=True)


@pytest.mark.slow
def test_it_is_unbiased_and_its_error_is_honest_as_is_its_gradient():
    rng = np.random.default_rng(0)
    matrix = positive(np.linspace(1.0, 3.0, SIZE), rng)
    way = positive(rng.normal(size=SIZE), rng)
    with jax.enable_x64(True):
        a, d = jnp.asarray(matrix), jnp.asarray(way)

        def one(key):
            estimate = logdet(dense(a), key, matvecs=40)
            slope = jax.grad(lambda t: logdet(dense(a + t * d), key, matvecs=40).value)
            return estimate.value, estimate.standard_error, slope(jnp.asarray(0.0))

        keys = jax.random.split(jax.random.key(0), 300)
        values, errors, slopes = map(np.asarray, jax.jit(lambda ks: jax.lax.map(one, ks))(keys))
    off = values - np.linalg.slogdet(matrix)[1]
    assert abs(stats.ttest_1samp(off, 0.0).statistic) < 3
    assert 0.8 < np.sqrt(np.mean(errors**2) / np.mean(off**2)) < 1.3
    assert np.mean(np.abs(off) < stats.t.ppf(0.975, 3) * errors) >= 0.93
    wrong = slopes - np.trace(np.linalg.solve(matrix, way))
    assert abs(stats.ttest_1samp(wrong, 0.0).statistic) < 3


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_with_all_steps_each_probe_is_exact_and_so_are_its_derivatives(dtype):
    """The quadrature of n nodes is w^* log(A) w, whose derivatives dense algebra knows."""
    size, count = 8, 5
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        x = rng.normal(size=(3, size, size))
        if dtype == "complex128":
            x = x + 1j * rng.normal(size=x.shape)
        x = x + np.swapaxes(x.conj(), 1, 2)
        a, e, f = jnp.asarray(x[0] @ x[0] + np.eye(size)), jnp.asarray(x[1]), jnp.asarray(x[2])
        key = jax.random.key(1)
        probes = Steinhaus() if dtype == "complex128" else Rademacher()
        # Decoupled dimensions besides, so that the budget does not reach the size, which would be another way.
        wide = (size + 1) * count + 1
        pad = jnp.zeros((wide, wide), a.dtype)

        def embedded(m, rest):
            return (pad + rest * jnp.eye(wide, dtype=a.dtype)).at[:size, :size].set(m)

        method = LanczosQuadrature(steps=size + 1, probes=probes)
        w = np.asarray(probes.draw(key, wide, count, a.dtype))

        def value(s, t):
            matrix = embedded(a + s.astype(a.dtype) * e + t.astype(a.dtype) * f, 1.0)
            return logdet(dense(matrix), key, matvecs=wide - 1, method=method).value

        def slope(t):
            """The mean of <w, A^-1 E w>, the derivative for these probes."""
            inverse = np.linalg.inv(np.asarray(a + t * f))
            top = w[:size]
            return (
                np.real(np.einsum("ik,ij,jk->", top.conj(), inverse @ np.asarray(e), top)) / count
            )

        zero = jnp.asarray(0.0)
        first = lambda t: jax.grad(value)(zero, t)  # noqa: E731 (a name for three uses)
        got = jax.jit(
            lambda t: (
                value(zero, t),
                first(t),
                jax.grad(first)(t),
                jax.jvp(first, (t,), (t + 1,))[1],
            )
        )
        found = got(zero)
        eigenvalues, v = np.linalg.eigh(np.asarray(a))
        inside = np.abs(v.conj().T @ w[:size]) ** 2
        np.testing.assert_allclose(found[0], np.mean(np.log(eigenvalues) @ inside), rtol=1e-12)
        np.testing.assert_allclose(found[1], slope(0.0), rtol=1e-9)
        want = (slope(1e-5) - slope(-1e-5)) / 2e-5
        np.testing.assert_allclose(found[2:], (want, want), rtol=1e-6)


def test_derivatives_survive_a_multiple_of_the_identity():
    """Lanczos stops after one step there; first and second derivatives are still those of the trace."""
    rng = np.random.default_rng(2)
    with jax.enable_x64(True):
        eye, e, f = jnp.eye(SIZE), *(jnp.asarray(x + x.T) for x in rng.normal(size=(2, SIZE, SIZE)))
        key = jax.random.key(0)
        w = np.asarray(Rademacher().draw(key, SIZE, 5, jnp.float64))

        def value(s, t):
            return logdet(dense(2 * eye + s * e + t * f), key, matvecs=40).value

        zero = jnp.asarray(0.0)
        first = jax.grad(value)
        got = jax.jit(lambda t: (value(zero, t), first(zero, t), jax.grad(first, 1)(zero, t)))(zero)
        np.testing.assert_allclose(got[0], SIZE * np.log(2), rtol=1e-14)
        np.testing.assert_allclose(got[1], np.sum(w * (np.asarray(e) @ w)) / 5 / 2, rtol=1e-12)
        # d <w, A^-1 E w> = -<w, A^-1 F A^-1 E w>.
        want = -np.sum(w * (np.asarray(f) @ np.asarray(e) @ w)) / 5 / 4
        np.testing.assert_allclose(got[2], want, rtol=1e-12)


def test_it_is_exact_when_the_budget_reaches_the_size():
    rng = np.random.default_rng(3)
    matrix = positive(np.geomspace(1e-3, 1.0, SIZE), rng)
    way = rng.normal(size=(2, SIZE, SIZE))
    way = way + np.swapaxes(way, 1, 2)
    with jax.enable_x64(True):
        a, e, f = jnp.asarray(matrix), jnp.asarray(way[0]), jnp.asarray(way[1])

        def estimate(s, t):
            return logdet(dense(a + s * e + t * f), jax.random.key(0), matvecs=SIZE + 5)

        zero = jnp.asarray(0.0)
        first = jax.grad(lambda s, t: estimate(s, t).value)
        found, slope, second = jax.jit(
            lambda t: (estimate(t, t), first(t, t), jax.grad(first, 1)(t, t))
        )(zero)
        np.testing.assert_allclose(found.value, np.linalg.slogdet(matrix)[1], rtol=1e-12)
        assert found.matvecs == SIZE and found.tags_hold
        # That of rounding: the smallest eigenvalue is a thousandth of the largest.
        assert 1e-14 < found.standard_error < 1e-11
        assert np.isinf(found.degrees_of_freedom)
        inverse = np.linalg.inv(matrix)
        np.testing.assert_allclose(slope, np.trace(inverse @ way[0]), rtol=1e-9)
        np.testing.assert_allclose(
            second, -np.trace(inverse @ way[0] @ inverse @ way[1]), rtol=1e-8
        )


@pytest.mark.parametrize("bits", [32, 64])
def test_a_factor_adds_its_logarithm(bits):
    with jax.enable_x64(bits == 64):
        factors = [1e-8, 1.0, 1e8] if bits == 32 else [1e-100, 1.0, 1e100]
        matrix = jnp.asarray(positive(np.linspace(1.0, 2.0, SIZE), np.random.default_rng(4)), float)

        def run(factor):
            found = logdet(dense(factor * matrix), jax.random.key(0), matvecs=30)
            return found.value, found.standard_error, found.tags_hold

        values, errors, hold = jax.jit(lambda c: jax.lax.map(run, c))(jnp.asarray(factors))
        assert hold.all()
        rtol = 2e-5 if bits == 32 else 1e-12
        np.testing.assert_allclose(
            values - SIZE * np.log(factors), np.full(3, values[1]), rtol=rtol * 20
        )
        np.testing.assert_allclose(
            errors, np.full(3, errors[1]), rtol=1e-3 if bits == 32 else 1e-10
        )


def test_what_is_visibly_false_is_reported_and_the_value_is_finite():
    rng = np.random.default_rng(5)
    cases = {
        "indefinite": positive(np.linspace(-1.0, 1.0, SIZE), rng),
        "negative": -np.eye(SIZE),
        "singular": positive(np.arange(SIZE) < 5, rng),
        "zero": np.zeros((SIZE, SIZE)),
        "asymmetric": np.eye(SIZE) * 20 + rng.normal(size=(SIZE, SIZE)),
        "right": positive(np.linspace(1.0, 2.0, SIZE), rng),
    }
    matrices = jnp.asarray(np.stack(list(cases.values())), jnp.float32)
    for matvecs in (30, SIZE):

        def run(matrix, matvecs=matvecs):
            return logdet(dense(matrix), jax.random.key(0), matvecs=matvecs)

        found = jax.jit(functools.partial(jax.lax.map, run))(matrices)
        assert np.isfinite(found.value).all() and np.isfinite(found.standard_error).all()
        assert found.tags_hold.tolist() == [False] * 5 + [True]


def test_it_works_inside_transformations_and_under_eval_shape():
    matrix = jnp.asarray(
        positive(np.linspace(1.0, 2.0, SIZE), np.random.default_rng(6)), jnp.float32
    )
    keys = jax.random.split(jax.random.key(0), 2)
    run = lambda m, k: logdet(dense(m), k, matvecs=20).value  # noqa: E731 (a name for three uses)
    both = jax.vmap(run)(jnp.stack([matrix, 2 * matrix]), keys)
    np.testing.assert_allclose(both[0], run(matrix, keys[0]), rtol=1e-5)
    shape = filter_eval_shape(logdet, dense(matrix), keys[0], matvecs=20)
    assert shape.value.shape == () and shape.value.dtype == jnp.float32


def test_the_gradient_keeps_nothing_of_the_products():
    size, width = 64, 4096

    def loss(theta):
        def fn(v):
            # What a product keeps is much larger than its result.
            return jnp.mean(jnp.exp(theta * jnp.ones((size, width))), axis=1) * v

        operator = FunctionOperator(fn, jnp.zeros(size), positive_semidefinite=True, batch_size=1)
        return logdet(operator, jax.random.key(0), matvecs=60).value

    used = jax.jit(jax.grad(loss)).lower(jnp.float32(0.3)).compile().memory_analysis()
    assert used.temp_size_in_bytes < 4 * size * width * 4


def test_the_memory_of_the_gradient_does_not_grow_with_the_number_of_probes(monkeypatch):
    # More rows than products, of which there are 1500: otherwise the answer would be exact.
    size, steps = 1600, 6
    monkeypatch.setattr(_quadrature, "_BYTES", 16 * size * steps * 4)
    eigenvalues = jnp.linspace(1.0, 2.0, size)

    def compiled(probes):
        def loss(theta):
            operator = FunctionOperator(
                lambda v: v * (1 + theta) * eigenvalues, jnp.zeros(size), positive_semidefinite=True
            )
            method = LanczosQuadrature(steps=steps)
            found = logdet(operator, jax.random.key(0), matvecs=probes * steps, method=method)
            return found.value

        return loss, jax.jit(jax.value_and_grad(loss)).lower(jnp.float32(0)).compile()

    (_, few), (loss, many) = compiled(32), compiled(250)
    used = [run.memory_analysis().temp_size_in_bytes for run in (few, many)]
    assert used[1] < 1.2 * used[0]
    # With signs, the trace of a diagonal matrix has no error.
    zero = jnp.float32(0)
    value, first = many(zero)
    np.testing.assert_allclose(value, jnp.sum(jnp.log(eigenvalues)), rtol=1e-4)
    np.testing.assert_allclose(first, size, rtol=1e-4)
    second = jax.jit(lambda t: jax.jvp(jax.grad(loss), (t,), (t + 1,))[1])(zero)
    np.testing.assert_allclose(second, -size, rtol=1e-3)


def test_it_says_what_it_cannot_do():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="not declared positive semidefinite"):
        logdet(MatrixOperator(jnp.eye(9), symmetric=True), key, matvecs=9)
    with pytest.raises(ValueError, match="matvecs >= 15"):
        logdet(dense(jnp.eye(20)), key, matvecs=14)
    with pytest.raises(ValueError, match="`matvecs` is too small"):
        logdet(dense(jnp.eye(9)), key, matvecs=0)
    with pytest.raises(ValueError, match="needs at least two steps"):
        LanczosQuadrature(steps=1)


@pytest.mark.parametrize(
    "matvecs, want", [(15, (5, 3)), (40, (5, 8)), (200, (5, 40)), (3000, (50, 60))]
)
def test_the_budget_is_split_as_documented(matvecs, want):
    assert LanczosQuadrature().split(matvecs) == want
