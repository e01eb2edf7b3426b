"""`XNysDiag`: equal to leaving each probe out by hand; exact cases; unbiased; honest errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matfree import stochtrace

from tests.estimators._spectra import ANY_OPERATOR, SPECTRA, symmetric
from vernal import filter_jit
from vernal.estimators import Budget, XNysDiag, diagonal
from vernal.linalg import MatrixOperator

N, M = 40, 10
KEY = jax.random.key(0)


def operator(matrix, dtype=None):
    return MatrixOperator(jnp.asarray(matrix, dtype), positive_semidefinite=True)


def by_hand(matrix, probes):
    """The mean of the leave-one-out estimates with the identity as a control, each from a new factorisation."""
    n, k = probes.shape

    def rest(a, left_out):
        w = np.delete(probes, left_out, axis=1)
        return a - a @ w @ np.linalg.solve(w.conj().T @ a @ w, w.conj().T @ a)

    total = np.zeros(n)
    for i in range(k):
        w = probes[:, i]

        def estimate(a, i=i, w=w):
            left = rest(a, [i])
            return (np.diagonal(a - left) + w.conj() * (left @ w)).real

        above, below = (
            sum(
                (probes[:, j].conj() @ rest(a, [i, j]) @ probes[:, j]).real
                for j in range(k)
                if j != i
            )
            for a in (matrix, np.eye(n))
        )
        total += estimate(matrix) - above / below * (estimate(np.eye(n)) - 1)
    return total / k


def test_it_equals_leaving_out_each_probe_by_hand():
    rng = np.random.default_rng(0)
    half = rng.standard_normal((N, N))
    half = half + 1j * rng.standard_normal((N, N))
    matrix = half * 0.8 ** np.arange(N) @ half.conj().T
    with jax.enable_x64(True):
        outcome = filter_jit(XNysDiag().estimate)(operator(matrix), KEY, Budget(M, M))
        probes = np.asarray(outcome.gradient_pairs.block(ANY_OPERATOR, 0)[1])
    assert probes.shape == (N, M) and int(outcome.matvecs) == M
    np.testing.assert_allclose(outcome.value, by_hand(matrix, probes), rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_low_rank_zero_and_multiples_of_the_identity_are_exact(dtype):
    half = np.random.default_rng(0).standard_normal((N, 5)).astype(dtype)
    if dtype.startswith("complex"):
        half = half + 1j * half[::-1]
    eps = np.finfo(dtype).eps
    ones, eye = np.ones((N, N), dtype), np.eye(N, dtype=dtype)
    with jax.enable_x64(True):
        for matrix in (half @ half.conj().T, ones, 3 * eye, 0 * eye):
            found = diagonal(operator(matrix), KEY, matvecs=M, method=XNysDiag())
            scale = np.abs(matrix).max()
            error = np.abs(found.value - np.diagonal(matrix).real)
            assert error.max() <= 100 * eps * scale
            assert float(found.standard_error.max()) <= 100 * eps * scale
            assert np.all(error <= 6 * found.standard_error)
            assert bool(found.tags_hold) and not jnp.iscomplexobj(found.value)


@pytest.mark.parametrize(
    ("dtype", "scales"), [("float32", (1e-8, 1e8)), ("float64", (1e-100, 1e100))]
)
def test_scaling_changes_nothing(dtype, scales):
    with jax.enable_x64(True):
        matrix = jnp.asarray(symmetric(SPECTRA["poly"](N)), dtype)
        one = diagonal(operator(matrix), KEY, matvecs=M, method=XNysDiag())
        for scale in scales:
            scaled = operator(matrix * jnp.asarray(scale, dtype))
            other = diagonal(scaled, KEY, matvecs=M, method=XNysDiag())
            tolerance = 1e3 * np.finfo(dtype).eps
            np.testing.assert_allclose(other.value / scale, one.value, rtol=tolerance)
            np.testing.assert_allclose(
                other.standard_error / scale, one.standard_error, rtol=10 * tolerance
            )


@pytest.mark.parametrize("size", [6, 7, 8])
@pytest.mark.sample(3)
def test_probes_that_depend_on_each_other_do_no_harm(size):
    # Signs in so few dimensions are often equal.
    matrix = np.diag(np.arange(1.0, size + 1)) + 1
    with jax.enable_x64(True):
        keys = jax.random.split(KEY, 60)
        found = jax.jit(
            lambda keys: lax.map(
                lambda k: diagonal(operator(matrix), k, matvecs=size - 1, method=XNysDiag()), keys
            )
        )(keys)
    assert np.all(found.tags_hold) and np.all(np.isfinite(found.standard_error))
    error = np.asarray(found.value) - np.diagonal(matrix)
    assert np.abs(error).max() < 3 * size


@pytest.mark.slow
def test_it_is_unbiased_and_its_error_is_honest():
    with jax.enable_x64(True):
        matrix = jnp.asarray(symmetric(SPECTRA["poly"](N)))

        def one(key):
            outcome = XNysDiag().estimate(operator(matrix), key, Budget(M, M))
            return outcome.value, outcome.variance, outcome.consistent

        value, variance, consistent = jax.jit(lambda keys: lax.map(one, keys))(
            jax.random.split(KEY, 400)
        )
    error = np.asarray(value) - np.diagonal(matrix)
    z = error.mean(axis=0) / (error.std(axis=0, ddof=1) / 400**0.5)
    assert 0.5 < np.mean(z**2) < 1.6
    assert 0.8 < np.sqrt(np.mean(np.asarray(variance)) / np.mean(error**2)) < 1.25
    assert np.all(consistent)


def test_a_false_tag_gives_the_plain_estimate_of_the_same_products():
    rng = np.random.default_rng(0)
    half = rng.standard_normal((N, N))
    for matrix in (half + half.T, half @ half.T + 5 * half):
        with jax.enable_x64(True):
            outcome = filter_jit(XNysDiag().estimate)(operator(matrix), KEY, Budget(M, M))
            _, probes = outcome.gradient_pairs.block(ANY_OPERATOR, 0)
        each = np.asarray(probes) * (matrix @ np.asarray(probes))
        assert not bool(outcome.consistent)
        np.testing.assert_allclose(outcome.value, each.mean(axis=1), rtol=1e-8)
        np.testing.assert_allclose(outcome.variance, each.var(axis=1, ddof=1) / M, rtol=1e-8)


@pytest.mark.slow
def test_it_is_never_worse_than_the_peer():
    sampler = stochtrace.sampler_signs(jnp.zeros(100), num=20)
    peer = stochtrace.estimator_leave_one_out(stochtrace.leave_one_out_xnysdiag(), sampler)

    @jax.jit
    def both(a, keys):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            theirs = lax.map(lambda k: peer(lambda v: a @ v, k), keys)
        return lax.map(
            lambda k: diagonal(operator(a), k, matvecs=20, method=XNysDiag()).value, keys
        ), theirs

    for name, factor in (("flat", 0.8), ("poly", 1.1), ("exp", 1.2), ("step", 1.1)):
        matrix = symmetric(SPECTRA[name](100))
        found = both(jnp.asarray(matrix, jnp.float32), jax.random.split(KEY, 40))
        errors = (np.abs(np.asarray(x) - np.diagonal(matrix)).max(axis=1) for x in found)
        ours, theirs = map(np.median, errors)
        assert ours <= factor * theirs
