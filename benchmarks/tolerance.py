"""Traces to a tolerance: `python benchmarks/tolerance.py [--quick]`.

For each spectrum and each tolerance, over many seeds: how often the true error is within the tolerance, and how many
products that took, beside those of Hutchinson's method. Prints a table and leaves with an error if fewer than 95% are
within, where the tolerance was met. `--quick` has fewer seeds.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _trace_methods import matrix_of, spectra
from jax import lax

from vernal import estimators, linalg

SIZE, SEEDS, FEW = 1000, 200, 20
RTOLS = (1e-2, 1e-4)
INSIDE_BAR = 0.95


def over_seeds(method: estimators.TraceMethod | None, seeds: int) -> Any:
    """The compiled function of a matrix and a tolerance: value and products for each seed."""
    keys = jax.random.split(jax.random.key(0), seeds)

    def run(matrix: jax.Array, rtol: jax.Array) -> tuple[jax.Array, jax.Array]:
        operator = linalg.MatrixOperator(matrix, symmetric=True, positive_semidefinite=True)

        def one(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = estimators.trace(operator, key, rtol=rtol, max_matvecs=2 * SIZE, method=method)
            return found.value, found.matvecs

        return lax.map(one, keys)

    return jax.jit(run)


def main() -> int:
    seeds = FEW if "--quick" in sys.argv else SEEDS
    print(f"\nTraces to a tolerance, n = {SIZE}, {seeds} seeds, float64 (JAX {jax.__version__})\n")
    print("| | tolerance | within it | products: median, most | Hutchinson: median, most |")
    print("|---|---|---|---|---|")
    missed = []
    chosen, plain = over_seeds(None, seeds), over_seeds(estimators.Hutchinson(), seeds)
    for name, spectrum in spectra(SIZE).items():
        matrix = jnp.asarray(matrix_of(spectrum))
        truth = float(np.sum(spectrum))
        for rtol in RTOLS:
            value, made = map(np.asarray, chosen(matrix, jnp.asarray(rtol)))
            _, most = map(np.asarray, plain(matrix, jnp.asarray(rtol)))
            inside = float(np.mean(np.abs(value - truth) <= rtol * truth))
            counts = [f"{np.median(x):.0f}, {np.max(x)}" for x in (made, most)]
            print(f"| {name} | {rtol:.0e} | {inside:.0%} | {' | '.join(counts)} |", flush=True)
            if inside < INSIDE_BAR:
                missed.append(f"{name}, {rtol:.0e}: {inside:.0%} within the tolerance")
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    sys.exit(main())
