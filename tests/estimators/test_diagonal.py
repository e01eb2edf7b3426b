"""`diagonal`: accepted, refused and chosen; exact answers, shared budgets, derivatives; `HutchinsonDiagonal`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vernal
from tests.estimators._spectra import ANY_OPERATOR, SPECTRA, symmetric
from vernal.estimators import (
    Budget,
    HutchinsonDiagonal,
    Normal,
    Sphere,
    XDiag,
    XNysDiag,
    diagonal,
)
from vernal.estimators._diagonal import _choose
from vernal.linalg import FunctionOperator, MatrixOperator
from vernal.transforms import TracedShapeError

N = 40
KEY = jax.random.key(0)
METHODS = {"hutchinson": HutchinsonDiagonal(), "xdiag": XDiag(), "xnysdiag": XNysDiag()}


def positive(n=N, seed=0):
    """Well conditioned, with a diagonal of about 1 to 3."""
    return symmetric(SPECTRA["flat"](n), seed)


def operator(matrix, dtype=jnp.float32):
    return MatrixOperator(jnp.asarray(matrix, dtype), positive_semidefinite=True)


def test_a_budget_of_all_rows_gives_the_exact_diagonal_and_its_exact_derivative():
    matrix = np.random.default_rng(0).standard_normal((N, N))
    for matvecs in (N, 3 * N):
        found = diagonal(jnp.asarray(matrix, jnp.float32), KEY, matvecs=matvecs)
        np.testing.assert_array_equal(found.value, np.diagonal(matrix).astype("float32"))
        np.testing.assert_array_equal(found.standard_error, np.zeros(N))
        assert (
            int(found.matvecs) == N and bool(found.tags_hold) and np.isinf(found.degrees_of_freedom)
        )
    weights = jnp.arange(1.0, N + 1)

    def f(x):
        return jnp.sum(weights * diagonal(x, KEY, matvecs=N).value)

    np.testing.assert_array_equal(jax.grad(f)(jnp.asarray(matrix, jnp.float32)), jnp.diag(weights))


def test_the_value_is_a_tree_like_the_vectors_and_real_for_a_hermitian_operator():
    rng = np.random.default_rng(0)
    half = rng.standard_normal((6, 3)) + 1j * rng.standard_normal((6, 3))
    matrix = jnp.asarray(half @ half.conj().T, jnp.complex64)
    example = {"a": jnp.zeros((2, 2), jnp.complex64), "b": [jnp.zeros(2, jnp.complex64)]}

    def product(v):
        flat = matrix @ jnp.concatenate([v["a"].ravel(), v["b"][0]])
        return {"a": flat[:4].reshape(2, 2), "b": [flat[4:]]}

    for symmetric_, dtype in ((True, jnp.float32), (False, jnp.complex64)):
        found = diagonal(FunctionOperator(product, example, symmetric=symmetric_), KEY, matvecs=6)
        np.testing.assert_allclose(found.value["a"].ravel(), jnp.diagonal(matrix)[:4].real, 1e-5)
        np.testing.assert_allclose(found.value["b"][0], jnp.diagonal(matrix)[4:].real, 1e-5)
        assert found.value["a"].dtype == dtype
        assert found.standard_error["a"].shape == (2, 2)
        assert found.standard_error["a"].dtype == jnp.float32
    estimated = diagonal(FunctionOperator(product, example, symmetric=True), KEY, matvecs=5)
    assert estimated.value["b"][0].shape == (2,) and estimated.value["a"].dtype == jnp.float32


def test_a_method_is_chosen_by_tags_and_budget():
    def chosen(matvecs, **tags):
        return type(_choose(MatrixOperator(jnp.eye(N), **tags), matvecs))

    assert chosen(5, positive_semidefinite=True) is XNysDiag
    assert chosen(4, positive_semidefinite=True) is HutchinsonDiagonal
    assert chosen(20, symmetric=True) is XDiag
    assert chosen(20) is XDiag
    assert chosen(19, symmetric=True) is HutchinsonDiagonal
    given = operator(positive())
    value = diagonal(given, KEY, matvecs=10).value
    np.testing.assert_array_equal(value, diagonal(given, KEY, matvecs=10, method=XNysDiag()).value)


def test_a_basis_that_would_fill_the_memory_is_not_chosen():
    huge = FunctionOperator(
        lambda v: 2 * v, jax.ShapeDtypeStruct((2**20,), jnp.float32), positive_semidefinite=True
    )
    # Only shapes: a basis of 200 such vectors has 800 MiB.
    assert vernal.filter_eval_shape(diagonal, huge, KEY, matvecs=200).value.shape == (2**20,)
    jaxpr = str(jax.make_jaxpr(lambda k: diagonal(huge, k, matvecs=200).value)(KEY))
    assert "cholesky" not in jaxpr


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample(3)
def test_all_budgets_below_one_maximum_share_a_compilation_and_agree_with_their_own(name):
    method, given = METHODS[name], operator(symmetric(SPECTRA["exp"](N)))
    traces = []

    @jax.jit
    def run(used):
        traces.append(used)
        return diagonal(given, KEY, matvecs=used, max_matvecs=24, method=method)

    # A number that is too small, which nobody can know while tracing, becomes the smallest one.
    least = {"hutchinson": 5, "xdiag": 10, "xnysdiag": 5}[name]
    assert int(run(jnp.asarray(2)).matvecs) == least
    for used in (12, 15, 24):
        found = run(jnp.asarray(used))
        assert int(found.matvecs) == (used - used % 2 if name == "xdiag" else used)
        assert np.all(np.isfinite(found.value)) and np.all(np.isfinite(found.standard_error))
    assert len(traces) == 1
    alone = diagonal(given, KEY, matvecs=24, method=method)
    np.testing.assert_allclose(found.value, alone.value, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.standard_error, alone.standard_error, rtol=2e-2, atol=1e-6)
    clamped = run(jnp.asarray(1000))
    np.testing.assert_array_equal(clamped.value, found.value)


def test_a_shared_budget_that_reaches_all_rows_is_exact():
    given = operator(positive())
    shared = jax.jit(lambda m: diagonal(given, KEY, matvecs=m, max_matvecs=N + 5))
    exact, found = shared(jnp.asarray(N)), shared(jnp.asarray(N - 1))
    np.testing.assert_allclose(exact.value, jnp.diagonal(given.matrix), 1e-6)
    assert int(exact.matvecs) == N and float(exact.standard_error.max()) == 0
    assert int(found.matvecs) == N - 1 and float(found.standard_error.max()) > 0


def test_wrong_budgets_and_methods_are_refused():
    given = MatrixOperator(jnp.eye(N))
    call = inspect.unwrap(diagonal)
    with pytest.raises(ValueError, match="`matvecs` is too small"):
        call(given, KEY, matvecs=0)
    with pytest.raises(ValueError, match=r"matvecs >= 10"):
        call(given, KEY, matvecs=3, method=XDiag())
    with pytest.raises(ValueError, match=r"max_matvecs >= 10"):
        call(given, KEY, matvecs=3, max_matvecs=3, method=XDiag())
    with pytest.raises(TypeError, match="not a whole number"):
        call(given, KEY, matvecs=2.5)
    with pytest.raises(
        ValueError, match=r"(?s)XNysDiag needs a positive semidefinite operator.*XDiag\(\)"
    ):
        call(given, KEY, matvecs=10, method=XNysDiag())
    with pytest.raises(TypeError, match="not an operator"):
        call("matrix", KEY, matvecs=10)
    with pytest.raises(TracedShapeError, match="`matvecs` is traced"):
        jax.jit(lambda m: call(given, KEY, matvecs=m))(10)


def test_it_works_under_jit_vmap_and_eval_shape():
    matrices = jnp.stack([jnp.asarray(positive(seed=s), jnp.float32) for s in range(3)])
    keys = jax.random.split(KEY, 3)

    def one(matrix, key):
        given = MatrixOperator(matrix, positive_semidefinite=True)
        return diagonal(given, key, matvecs=10).value

    together = jax.jit(jax.vmap(one))(matrices, keys)
    for matrix, key, value in zip(matrices, keys, together, strict=True):
        np.testing.assert_allclose(value, one(matrix, key), rtol=1e-4)
    assert vernal.filter_eval_shape(one, matrices[0], KEY).shape == (N,)


def test_hutchinson_is_the_mean_of_products_for_signs():
    with jax.enable_x64(True):
        matrix = jnp.asarray(np.random.default_rng(0).standard_normal((N, N)))
        outcome = HutchinsonDiagonal().estimate(MatrixOperator(matrix), KEY, Budget(12, 12))
        left, probes = outcome.gradient_pairs.block(ANY_OPERATOR, 0)
        each = probes * (matrix @ probes)
        np.testing.assert_allclose(left, probes / 12)
        np.testing.assert_allclose(outcome.value, each.mean(axis=1), atol=1e-12)
        np.testing.assert_allclose(outcome.variance, each.var(axis=1, ddof=1) / 12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("probes", "matvecs"),
    [(Normal(), 8), (Sphere(), 8)],
    ids=["normal", "sphere"],
)
def test_hutchinson_is_unbiased_and_honest_with_other_probes(probes, matvecs):
    with jax.enable_x64(True):
        matrix = jnp.asarray(positive() + np.diag(np.linspace(-9, 9, N)))
        method = HutchinsonDiagonal(probes)

        def one(key):
            outcome = method.estimate(MatrixOperator(matrix), key, Budget(matvecs, matvecs))
            return outcome.value - jnp.diagonal(matrix), outcome.variance

        error, variance = jax.jit(lambda keys: lax.map(one, keys))(jax.random.split(KEY, 300))
        z = error.mean(axis=0) / (error.std(axis=0, ddof=1) / 300**0.5)
        assert 0.7 < float(jnp.mean(z**2)) < 1.5
        assert 0.9 < float(jnp.sqrt(variance.mean() / (error**2).mean())) < 1.1


def test_hutchinson_adds_blocks_up_without_losing_digits(monkeypatch):
    with jax.enable_x64(True):
        # Nearly a multiple of the identity, so that sums of squares would cancel.
        matrix = jnp.asarray(1e6 * np.eye(N) + positive())
        whole = HutchinsonDiagonal(Normal()).estimate(MatrixOperator(matrix), KEY, Budget(12, 12))
        _, probes = whole.gradient_pairs.block(ANY_OPERATOR, 0)
        monkeypatch.setattr("vernal.estimators._hutchinson._BYTES", 5 * N * 8)
        blocks = HutchinsonDiagonal(Normal()).estimate(MatrixOperator(matrix), KEY, Budget(12, 12))
        assert blocks.gradient_pairs.blocks() == 3
        parts = [blocks.gradient_pairs.block(ANY_OPERATOR, i)[1] for i in range(3)]
        for outcome, w in ((whole, probes), (blocks, jnp.concatenate(parts, axis=1))):
            y = matrix @ w
            slope = jnp.sum(w * y, axis=1) / jnp.sum(w**2, axis=1)
            left = jnp.sum((y - slope[:, None] * w) ** 2, axis=1)
            np.testing.assert_allclose(outcome.value, slope, rtol=1e-12)
            np.testing.assert_allclose(
                outcome.variance, left / 11 / jnp.sum(w**2, axis=1), rtol=1e-5
            )


def test_a_false_tag_is_seen_without_nan():
    lie = operator(-positive())
    for name in ("hutchinson", "xnysdiag"):
        found = diagonal(lie, KEY, matvecs=16, method=METHODS[name])
        assert not bool(found.tags_hold)
        np.testing.assert_array_less(np.abs(found.value - jnp.diagonal(lie.matrix)), 2)
    assert not bool(diagonal(lie, KEY, matvecs=N).tags_hold)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_unbiased_in_both_directions(name):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        matrix, change = jnp.asarray(positive(12)), jnp.asarray(positive(12, seed=5))
        weights = jnp.asarray(rng.standard_normal(12))

        def value(s, key):
            given = operator(matrix + s * change, jnp.float64)
            return diagonal(given, key, matvecs=10, method=METHODS[name]).value

        def both(key):
            zero = jnp.zeros(())
            forward = jax.jvp(lambda s: value(s, key), (zero,), (jnp.ones(()),))[1]
            return forward, jax.grad(lambda s: jnp.sum(weights * value(s, key)))(zero)

        forward, reverse = jax.jit(lambda keys: lax.map(both, keys))(jax.random.split(KEY, 400))
        np.testing.assert_allclose(reverse, forward @ weights, rtol=1e-8, atol=1e-10)
    error = np.asarray(forward) - np.diagonal(change)
    z = error.mean(axis=0) / (error.std(axis=0, ddof=1) / 400**0.5)
    assert np.mean(z**2) < 2.2


def test_half_precision_works():
    given = operator(positive(), jnp.bfloat16)
    found = diagonal(given, KEY, matvecs=10)
    assert found.value.dtype == jnp.float32 and found.standard_error.dtype == jnp.float32
    error = np.abs(found.value.astype("float32") - jnp.diagonal(given.matrix).astype("float32"))
    assert float(error.max()) < 1
