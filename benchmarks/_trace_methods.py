"""Methods of trace estimation to compare: ours, and those of traceax and matfree, as functions of one shape."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import traceax
from matfree import stochtrace

from vernal import estimators, linalg

METHODS = {
    "Hutchinson": estimators.Hutchinson(),
    "Hutch++": estimators.HutchPlusPlus(),
    "XTrace": estimators.XTrace(),
    "XNysTrace": estimators.XNysTrace(),
}
TIMED = ("Hutchinson", "Hutch++", "XTrace", "XNysTrace")


class Found(NamedTuple):
    """An estimate with what its library says of its error; nan where it says nothing."""

    value: jax.Array
    standard_error: jax.Array
    degrees_of_freedom: jax.Array


class Way(NamedTuple):
    """A method of a library: `run(matrix, key, matvecs)` for a positive semidefinite matrix."""

    library: str
    method: str
    run: Callable[[jax.Array, jax.Array, int], Found]

    @property
    def name(self) -> str:
        return f"{self.library} {self.method}"


def vernal_way(name: str) -> Way:
    method = METHODS[name]

    def run(matrix: jax.Array, key: jax.Array, matvecs: int) -> Found:
        operator = linalg.MatrixOperator(matrix, positive_semidefinite=True)
        found = estimators.trace(operator, key, matvecs=matvecs, method=method)
        return Found(found.value, found.standard_error, found.degrees_of_freedom)

    return Way("Vernal", name, run)


def traceax_way(name: str, estimator: Any, sampler: Any) -> Way:
    def run(matrix: jax.Array, key: jax.Array, matvecs: int) -> Found:
        operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
        # Its default sampler draws integers or float32, whatever the operator.
        value, more = estimator(sampler(matrix.dtype)).estimate(key, operator, matvecs)
        silent = jnp.asarray(jnp.nan, matrix.dtype)
        samples = jnp.asarray(matvecs if name == "XNysTrace" else matvecs // 2, matrix.dtype)
        return Found(value, more.get("std.err", silent), samples - 1)

    return Way("traceax", name, run)


def matfree_way(name: str, integrand: Any, per_sample: int) -> Way:
    loo = name != "Hutchinson"

    def run(matrix: jax.Array, key: jax.Array, matvecs: int) -> Found:
        samples = matvecs // per_sample
        like = jnp.ones(len(matrix), matrix.dtype)
        if loo:
            sampler = stochtrace.sampler_normal(like, num=samples)
            estimate = stochtrace.estimator_leave_one_out_mean_and_sem(integrand, sampler)
        else:
            sampler = stochtrace.sampler_signs(like, num=samples)
            estimate = stochtrace.estimator_monte_carlo_mean_and_sem(integrand, sampler)
        value, error = estimate(lambda v, a: a @ v, key, matrix)
        return Found(value, error, jnp.asarray(samples - 1, matrix.dtype))

    return Way("matfree", name, run)


OURS = [vernal_way(name) for name in METHODS]
PEERS = [
    traceax_way("Hutchinson", traceax.HutchinsonEstimator, traceax.RademacherSampler),
    traceax_way("Hutch++", traceax.HutchPlusPlusEstimator, traceax.RademacherSampler),
    traceax_way("XTrace", traceax.XTraceEstimator, traceax.SphereSampler),
    traceax_way("XNysTrace", traceax.XNysTraceEstimator, traceax.SphereSampler),
    matfree_way("Hutchinson", stochtrace.monte_carlo_trace(), 1),
    matfree_way("XTrace", stochtrace.leave_one_out_xtrace(), 2),
    matfree_way(
        "XNysTrace",
        # The default loses digits in float32.
        stochtrace.leave_one_out_xnystrace(nystrom=stochtrace.nystrom_shifted_cholesky()),
        1,
    ),
]


def spectra(size: int) -> dict[str, np.ndarray]:
    """Those of Epperly, Tropp and Webber (2024), in which the methods differ most; largest first."""
    i = np.arange(size)
    return {
        "flat": np.linspace(3.0, 1.0, size),
        "poly": 1.0 / (i + 1.0) ** 2,
        "exp": 0.7**i,
        "step": np.where(i < 50, 1.0, 1e-3),
    }


def matrix_of(spectrum: np.ndarray, seed: int = 0) -> np.ndarray:
    """A symmetric matrix with these eigenvalues and a random basis."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(spectrum),) * 2))
    matrix = (basis * spectrum) @ basis.T
    return (matrix + matrix.T) / 2
