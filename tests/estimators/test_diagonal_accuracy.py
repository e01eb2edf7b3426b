"""Diagonals of the spectra of Epperly, Tropp and Webber (2024): errors, and honest error bars."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from scipy import stats

from tests.estimators._spectra import SPECTRA, rotation
from vernal.estimators import Budget, HutchinsonDiagonal, XDiag, XNysDiag
from vernal.linalg import MatrixOperator

N, SEEDS = 1000, 100
# What shapes are made for, and the budgets that share them.
BUDGETS = ((60, (20, 60)), (200, (120, 200)))
MATVECS = (20, 60, 120, 200)
# Median over 100 trials of the maximum norm of the error, over that of the diagonal; by a NumPy program in float64.
HUTCHINSON = {
    "flat": (0.217, 0.124, 0.0834, 0.0660),
    "poly": (2.87, 1.77, 1.25, 0.943),
    "exp": (3.12, 1.95, 1.30, 1.12),
    "step": (1.90, 1.07, 0.739, 0.567),
}
XDIAG = {
    "flat": (0.342, 0.226, 0.194, 0.177),
    "poly": (0.133, 0.0131, 0.00286, 0.00104),
    "exp": (0.501, 3.83e-4, 9.97e-9, 1.17e-14),
    "step": (2.41, 0.988, 0.0186, 0.00489),
}


@pytest.fixture(scope="module")
def matrices():
    """As the reference has them: one stream of random bases, on which the largest element of a diagonal depends."""
    stream = np.random.default_rng(42)
    found = {}
    for name, spectrum in SPECTRA.items():
        basis = rotation(stream, N)
        matrix = (basis * spectrum(N)) @ basis.T
        found[name] = (matrix + matrix.T) / 2
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("method", "reference"),
    [(HutchinsonDiagonal(), HUTCHINSON), (XDiag(), XDIAG), (XNysDiag(), XDIAG)],
    ids=["HutchinsonDiagonal", "XDiag", "XNysDiag"],
)
def test_errors_are_those_of_the_reference_and_are_known(method, reference, matrices):
    with jax.enable_x64(True):
        for most, matvecs in BUDGETS:
            run = compiled(method, most)
            for name, matrix in matrices.items():
                for used in matvecs:
                    found = run(jnp.asarray(matrix), jnp.asarray(used))
                    bound = 1.3 * reference[name][MATVECS.index(used)]
                    check(
                        np.diagonal(matrix),
                        *map(np.asarray, found),
                        bound,
                        f"{name}, {used} products",
                    )


def compiled(method, most):
    """Values, variances and degrees of freedom of a matrix over all seeds."""

    @jax.jit
    def run(matrix, used):
        operator = MatrixOperator(matrix, positive_semidefinite=True)

        def one(key):
            outcome = method.estimate(operator, key, Budget(most, used))
            return outcome.value, outcome.variance, outcome.degrees_of_freedom

        return lax.map(one, jax.random.split(jax.random.key(1), SEEDS))

    return run


def check(truth, value, variance, freedom, bound, cell):
    """The median of the error, the ratio of reported to true errors, and the share of intervals that hold."""
    error = np.abs(value - truth)
    median = np.median(error.max(axis=1)) / np.abs(truth).max()
    assert median <= bound, cell
    ratio = np.sqrt(variance.mean() / np.mean(error**2))
    assert 0.8 <= ratio <= 1.5, cell
    inside = error <= stats.t.ppf(0.975, freedom)[:, None] * np.sqrt(variance)
    assert inside.mean() >= 0.93, cell
