"""Operators so small that the squares of their elements are zero: an error is never told as smaller than it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import estimators, linalg

G = np.random.default_rng(0).normal(size=(60, 60))
P = G @ G.T / 60
KEY = jax.random.key(0)
SCALES = [1e-30, 1e-25, 1e-20, 1e-18, 1e-14]


def general(scale):
    return linalg.MatrixOperator(jnp.asarray(G * scale, jnp.float32)), G * scale


def positive(scale):
    matrix = jnp.asarray(P * scale, jnp.float32)
    return linalg.MatrixOperator((matrix + matrix.T) / 2, positive_semidefinite=True), P * scale


TRACES = {
    "XTrace": (general, estimators.XTrace()),
    "Hutchinson": (general, estimators.Hutchinson()),
    "HutchPlusPlus": (general, estimators.HutchPlusPlus()),
    "XNysTrace": (positive, estimators.XNysTrace()),
}
DIAGONALS = {
    "XDiag": (general, estimators.XDiag()),
    "HutchinsonDiagonal": (general, estimators.HutchinsonDiagonal()),
    "XNysDiag": (positive, estimators.XNysDiag()),
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", [*TRACES, *DIAGONALS])
def test_the_error_of_a_small_operator_is_not_too_small(name, scale):
    operator, matrix = (TRACES | DIAGONALS)[name][0](scale)
    method = (TRACES | DIAGONALS)[name][1]
    estimate = estimators.trace if name in TRACES else estimators.diagonal
    found = estimate(operator, KEY, matvecs=30, method=method)
    truth = np.trace(matrix) if name in TRACES else np.diag(matrix)
    assert found.is_finite
    assert np.all(np.abs(found.value - truth) <= 5 * np.asarray(found.standard_error, float))
    # Where squares are representable the error is that of the same operator at the scale of 1.
    if scale >= 1e-14:
        usual = estimate((TRACES | DIAGONALS)[name][0](1.0)[0], KEY, matvecs=30, method=method)
        np.testing.assert_allclose(
            found.standard_error, scale * np.asarray(usual.standard_error, float), rtol=1e-3
        )


def test_a_tolerance_is_not_met_by_an_error_that_is_unknown():
    found = estimators.trace(general(1e-30)[0], KEY, rtol=1e-2, max_matvecs=50)
    assert not found.tolerance_met


def test_zero_is_exact():
    found = estimators.trace(jnp.zeros((60, 60)), KEY, matvecs=30)
    assert found.value == 0 and found.standard_error == 0


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ["indefinite", "skew", "general", "negative"])
def test_a_wrong_promise_gives_no_nan(name, bits):
    matrices = {"indefinite": (G + G.T) / 2, "skew": G - G.T, "general": G, "negative": -P}
    with jax.enable_x64(bits == 64):
        matrix = jnp.asarray(matrices[name], f"float{bits}")
        operator = linalg.MatrixOperator(matrix, positive_semidefinite=True)
        for f in (jnp.exp, jnp.sqrt):
            found = estimators.trace_of_function(f, operator, jax.random.key(0), matvecs=20)
            assert np.isfinite(found.value) and not found.tags_hold


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_schatten_norms_of_any_size(symmetric, scale):
    matrix = jax.random.normal(jax.random.key(0), (30, 30))
    matrix = matrix + matrix.T if symmetric else matrix
    values = jnp.linalg.svdvals(matrix)
    operator = linalg.MatrixOperator(matrix * scale, symmetric=symmetric)

    def norm(operator):
        return estimators.schatten_norm(operator, jax.random.key(1), 3, matvecs=61)

    found = norm(operator)
    assert found.is_finite and found.tags_hold
    assert found.value == pytest.approx(scale * float(jnp.sum(values**3) ** (1 / 3)), rel=1e-5)
    slope = jax.grad(lambda a: norm(a).value, allow_int=True)(operator).matrix
    one = jax.grad(lambda a: jnp.sum(jnp.linalg.svdvals(a) ** 3) ** (1 / 3))(matrix)
    assert jnp.allclose(slope, one, atol=1e-5)
