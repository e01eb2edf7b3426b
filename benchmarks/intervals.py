"""Intervals on spectra that the estimators were not built on: `python benchmarks/intervals.py [--quick]`.

For kernels and matrices that no test of the project has, over noises, budgets and seeds: how often the 95% interval of
a log-determinant, of the trace of the inverse and of that of the square root holds the truth, in the whole and in the
worst cell (a noise and a budget), and the median of the reported over the true error. Prints a table and leaves with
an error if fewer than 93% hold in a row, or fewer than 80% in a cell. `--quick` has fewer seeds and one size.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from sklearn.datasets import load_digits

from vernal import estimators, linalg

NOISES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
SEEDS = {200: 100, 1000: 40}
FEW = 20
IN_ALL, IN_A_CELL = 0.93, 0.80


class Rotated(estimators.Probes):
    """Signs as the eigenvectors of a matrix see them: the matrix itself is then diagonal, and its products cheap."""

    vectors: jax.Array

    def draw(self, key, size, count, dtype):
        return self.vectors.T @ estimators.Rademacher().draw(key, size, count, dtype)

    def slopes(self, probes, products):
        return estimators.Rademacher().slopes(self.vectors @ probes, self.vectors @ products)


def distances(points: np.ndarray) -> np.ndarray:
    squares = np.sum(points**2, axis=1)
    return np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * points @ points.T, 0))


def on_a_line(n: int, rng: np.random.Generator) -> np.ndarray:
    return distances(rng.uniform(0, n / 20, (n, 1)))


def in_a_cube(n: int, rng: np.random.Generator) -> np.ndarray:
    return distances(rng.uniform(0, 3, (n, 3)))


def rational_quadratic(n: int, rng: np.random.Generator) -> np.ndarray:
    return 1 / (1 + on_a_line(n, rng) ** 2 / 4) ** 2


def compact(n: int, rng: np.random.Generator) -> np.ndarray:
    """Wendland's function, zero beyond its radius."""
    r = in_a_cube(n, rng)
    return np.maximum(1 - r, 0) ** 4 * (4 * r + 1)


def locally_periodic(n: int, rng: np.random.Generator) -> np.ndarray:
    r = on_a_line(n, rng)
    return np.exp(-2 * np.sin(3 * r) ** 2 - (r / 4) ** 2)


def exponential_in_a_cube(n: int, rng: np.random.Generator) -> np.ndarray:
    return np.exp(-in_a_cube(n, rng))


def digits(n: int, rng: np.random.Generator) -> np.ndarray:
    images = load_digits().data[:n] / 16
    return np.exp(-((distances(images) / 2) ** 2))


def random_features(n: int, rng: np.random.Generator) -> np.ndarray:
    """Marchenko and Pastur's spectrum, of half the rank."""
    features = rng.standard_normal((n, n // 2))
    return features @ features.T / n


def path_laplacian(n: int, rng: np.random.Generator) -> np.ndarray:
    return 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)


def with_spectrum(eigenvalues: Callable[[int], np.ndarray], n: int, rng: np.random.Generator):
    q = np.linalg.qr(rng.standard_normal((n, n)))[0]
    return (q * eigenvalues(n)) @ q.T


MATRICES: dict[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "rational quadratic": rational_quadratic,
    "Wendland, in a cube": compact,
    "locally periodic": locally_periodic,
    "exponential, in a cube": exponential_in_a_cube,
    "Gaussian, of digits": digits,
    "random features": random_features,
    "Laplacian of a path": path_laplacian,
    "1 / k": partial(with_spectrum, lambda n: 1 / np.arange(1.0, n + 1)),
    "log-uniform": partial(with_spectrum, lambda n: np.geomspace(1e-6, 1, n)),
    "one large": partial(with_spectrum, lambda n: np.where(np.arange(n), 1e-2, 1e2)),
}
# What is estimated: its name, the function, and whether the noise is told.
WAYS = (
    ("logdet", jnp.log, True),
    ("logdet, noise unknown", jnp.log, False),
    ("trace of the inverse", jnp.reciprocal, True),
    ("trace of the root", jnp.sqrt, True),
)


class Cell(NamedTuple):
    held: float
    ratio: float


def cells(name: str, size: int, seeds: int) -> dict[str, list[Cell]]:
    """For each way, over all budgets and noises."""
    matrix = MATRICES[name](size, np.random.default_rng(0))
    eigenvalues, vectors = map(jnp.asarray, np.linalg.eigh(matrix))
    eigenvalues = jnp.maximum(eigenvalues, 0)
    method = estimators.LanczosQuadrature(probes=Rotated(vectors))
    keys = jax.random.split(jax.random.key(size), seeds)
    found: dict[str, list[Cell]] = {}
    for way, f, told in WAYS:
        for budget in (20, size // 10, size // 2):

            @jax.jit
            def run(values, noise, f=f, told=told, budget=budget):
                operator = linalg.FunctionOperator(
                    lambda v: values * v, jnp.zeros(size), positive_semidefinite=True
                )
                options = {"matvecs": budget, "method": method}
                if told:
                    options["least_eigenvalue"] = noise

                def one(key):
                    if f is jnp.log:
                        estimate = estimators.logdet(operator, key, **options)
                    else:
                        estimate = estimators.trace_of_function(f, operator, key, **options)
                    return *estimate.interval(), estimate.value, estimate.standard_error

                return lax.map(one, keys)

            for noise in NOISES:
                values = eigenvalues + noise
                truth = float(np.sum(f(values)))
                low, high, value, error = map(np.asarray, run(values, jnp.asarray(noise)))
                off = np.sqrt(np.mean((value - truth) ** 2))
                held = float(np.mean((low <= truth) & (truth <= high)))
                cell = Cell(held, float(np.sqrt(np.mean(error**2)) / off))
                found.setdefault(way, []).append(cell)
    return found


def main() -> int:
    quick = "--quick" in sys.argv
    sizes = {200: FEW} if quick else SEEDS
    print(f"\n95% intervals on spectra kept apart, float64 (JAX {jax.__version__})\n")
    print("| matrix, rows | of | hold | worst cell | reported / true error |")
    print("|---|---|---|---|---|")
    missed = []
    for size, seeds in sizes.items():
        for name in MATRICES:
            for way, found in cells(name, size, seeds).items():
                held = float(np.mean([cell.held for cell in found]))
                worst = min(cell.held for cell in found)
                ratio = float(np.median([cell.ratio for cell in found]))
                shares = f"{held:.0%} | {worst:.0%} | {ratio:.2f}"
                print(f"| {name}, {size} | {way} | {shares} |", flush=True)
                if held < IN_ALL or worst < IN_A_CELL:
                    missed.append(f"{name}, {size}, {way}: {held:.1%}, worst cell {worst:.0%}")
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    sys.exit(main())
