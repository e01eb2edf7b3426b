"""`XDiag`: equal to leaving each probe out by hand; exact cases; unbiased; honest errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from matfree import stochtrace

from tests.estimators._spectra import ANY_OPERATOR, SPECTRA, symmetric
from vernal import filter_jit
from vernal.estimators import Budget, XDiag, diagonal
from vernal.linalg import MatrixOperator

N, M = 40, 16
KEY = jax.random.key(0)


def by_hand(matrix, probes):
    """The mean of the leave-one-out estimates with the identity as a control, each from a new factorisation."""
    n, k = probes.shape

    def projector(left_out):
        q, _ = np.linalg.qr(matrix @ np.delete(probes, left_out, axis=1))
        return q @ q.conj().T

    total = np.zeros(n, matrix.dtype)
    for i in range(k):
        w, p = probes[:, i], projector([i])

        def estimate(a, w=w, p=p):
            return np.diagonal(p @ a) + w.conj() * ((np.eye(n) - p) @ (a @ w))

        above = below = 0
        for j in range(k):
            if j != i:
                rest = probes[:, j].conj() @ (np.eye(n) - projector([i, j]))
                above, below = (
                    above + rest @ matrix @ probes[:, j],
                    below + (rest @ probes[:, j]).real,
                )
        total += estimate(matrix) - above / below * (estimate(np.eye(n)) - 1)
    return total / k


def test_it_equals_leaving_out_each_probe_by_hand():
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((N, N))
    matrix = matrix + 1j * rng.standard_normal((N, N))
    matrix = matrix * 0.8 ** np.arange(N)
    with jax.enable_x64(True):
        outcome = filter_jit(XDiag().estimate)(
            MatrixOperator(jnp.asarray(matrix)), KEY, Budget(M, M)
        )
        probes = np.asarray(outcome.gradient_pairs.block(ANY_OPERATOR, 0)[1])
    assert probes.shape == (N, M // 2) and int(outcome.matvecs) == M
    np.testing.assert_allclose(outcome.value, by_hand(matrix, probes), atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_low_rank_zero_and_multiples_of_the_identity_are_exact(dtype):
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((2, N, 5)).astype(dtype)
    if dtype.startswith("complex"):
        left = left + (1j * rng.standard_normal((N, 5))).astype(dtype)
    eps = np.finfo(dtype).eps
    with jax.enable_x64(True):
        for matrix in (
            left @ right.T,
            np.ones((N, N), dtype),
            -3 * np.eye(N, dtype=dtype),
            np.zeros((N, N), dtype),
        ):
            found = diagonal(jnp.asarray(matrix), KEY, matvecs=M, method=XDiag())
            scale = np.abs(matrix).max()
            assert found.value.dtype == dtype
            error = np.abs(found.value - np.diagonal(matrix))
            assert error.max() <= 50 * eps * scale
            assert float(found.standard_error.max()) <= 50 * eps * scale
            assert np.all(error <= 6 * found.standard_error)


@pytest.mark.parametrize(
    ("dtype", "scales"), [("float32", (1e-8, 1e8)), ("float64", (1e-100, 1e100))]
)
def test_scaling_changes_nothing(dtype, scales):
    with jax.enable_x64(True):
        matrix = jnp.asarray(symmetric(SPECTRA["poly"](N)), dtype)
        one = diagonal(matrix, KEY, matvecs=M, method=XDiag())
        for scale in scales:
            other = diagonal(matrix * jnp.asarray(scale, dtype), KEY, matvecs=M, method=XDiag())
            tolerance = 1e3 * np.finfo(dtype).eps
            np.testing.assert_allclose(other.value / scale, one.value, rtol=tolerance)
            np.testing.assert_allclose(
                other.standard_error / scale, one.standard_error, rtol=10 * tolerance
            )


@pytest.mark.parametrize("matvecs", [10, 12, 40])
@pytest.mark.parametrize("largest", [11, 1001])
@pytest.mark.sample(2)
def test_it_is_honest_where_few_signs_agree_by_chance(largest, matvecs):
    # Five or six estimates of the ones are often equal, and wrong.
    matrix = jnp.eye(100).at[0, 0].set(largest)
    run = jax.jit(jax.vmap(lambda key: diagonal(matrix, key, matvecs=matvecs, method=XDiag())))
    low, high = map(np.asarray, run(jax.random.split(KEY, 500)).interval(0.95))
    holds = (low <= np.diagonal(matrix)) & (np.diagonal(matrix) <= high)
    assert np.mean(holds[:, 1:]) >= 0.93
    # Alone of its size, it knows little of its own error.
    assert np.mean(holds[:, 0]) >= 0.85


@pytest.mark.slow
def test_it_is_unbiased_and_its_error_is_honest_for_an_indefinite_nonsymmetric_operator():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        matrix = jnp.asarray(rng.standard_normal((N, N)) * 0.9 ** np.arange(N)[:, None])

        def one(key):
            outcome = XDiag().estimate(MatrixOperator(matrix), key, Budget(M, M))
            return outcome.value - jnp.diagonal(matrix), outcome.variance

        error, variance = jax.jit(lambda keys: lax.map(one, keys))(jax.random.split(KEY, 400))
        z = error.mean(axis=0) / (error.std(axis=0, ddof=1) / 400**0.5)
        assert 0.5 < float(jnp.mean(z**2)) < 1.6
        assert 0.8 < float(jnp.sqrt(variance.mean() / (error**2).mean())) < 1.25


@pytest.mark.slow
def test_it_is_never_worse_than_the_peer():
    sampler = stochtrace.sampler_signs(jnp.zeros(100), num=20)
    peer = stochtrace.estimator_leave_one_out(stochtrace.leave_one_out_xdiag(), sampler)

    @jax.jit
    def both(a, keys):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            theirs = lax.map(lambda k: peer(lambda v: a @ v, k), keys)
        return lax.map(lambda k: diagonal(a, k, matvecs=40, method=XDiag()).value, keys), theirs

    for name, factor in (("flat", 0.8), ("poly", 1.1), ("exp", 1.2), ("step", 1.1)):
        matrix = symmetric(SPECTRA[name](100))
        found = both(jnp.asarray(matrix, jnp.float32), jax.random.split(KEY, 40))
        errors = (np.abs(np.asarray(x) - np.diagonal(matrix)).max(axis=1) for x in found)
        ours, theirs = map(np.median, errors)
        assert ours <= factor * theirs
