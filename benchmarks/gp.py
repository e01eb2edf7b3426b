"""The likelihood of a Gaussian process with its gradient, from products: `python benchmarks/gp.py [--quick]`.

The data are pixels of a photograph that ships inside scikit-learn: a pixel's place is a point, its grey value the
target. One step of learning (the marginal log-likelihood and its derivatives by the kernel's two lengths, its height
and the noise) is made by Cholesky's factorisation and from products with the kernel, which is never stored; times, the
memory that XLA plans, and how far the two are apart are printed as a table. Leaves with an error if a value is more
than four of its standard errors from the exact one, or the memory of the estimate grows faster than the data.
`--quick` stops at 1,000 points.
"""

import math
import os
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_factor, cho_solve
from sklearn.datasets import load_sample_image

import vernal
from vernal import estimators, linalg

SIZES = (1000, 4000, 16000)
RANK, MATVECS = 100, 150


class Kernel(vernal.Module):
    log_lengths: jax.Array
    log_height: jax.Array

    def __call__(self, x, y):
        # The root has no derivative at zero, where a point meets itself.
        squared = jnp.sum(((x - y) * jnp.exp(-self.log_lengths)) ** 2)
        distance = jnp.sqrt(3 * squared + 1e-12)
        return jnp.exp(2 * self.log_height) * (1 + distance) * jnp.exp(-distance)


class Process(vernal.Module):
    kernel: Kernel
    log_noise: jax.Array

    def variance(self):
        return jnp.exp(2 * self.log_noise)


def process() -> Process:
    kernel = Kernel(jnp.full(2, math.log(0.15)), jnp.zeros(()))
    return Process(kernel, jnp.full((), math.log(0.2)))


def exact(process, key, points, targets):
    kernel = jax.vmap(lambda x: jax.vmap(lambda y: process.kernel(x, y))(points))(points)
    factor = cho_factor(kernel + process.variance() * jnp.eye(len(points)), lower=True)
    logdet = 2 * jnp.sum(jnp.log(jnp.diag(factor[0])))
    fit = targets @ cho_solve(factor, targets)
    return -(fit + logdet + len(targets) * jnp.log(2 * jnp.pi)) / 2, jnp.zeros(())


def estimated(process, key, points, targets):
    operator = linalg.kernel_operator(process.kernel, points, noise=process.variance())
    near = linalg.pivoted_cholesky(operator, RANK)
    solver = jax.lax.stop_gradient(near)
    solution = linalg.solve(
        operator, targets, rtol=1e-3, preconditioner=solver.solve, max_steps=100
    )
    logdet = estimators.logdet(operator, key, matvecs=MATVECS, preconditioner=near)
    value = -(targets @ solution.value + logdet.value + len(targets) * jnp.log(2 * jnp.pi)) / 2
    return value, logdet.standard_error / 2


class Run(NamedTuple):
    """One compiled step: seconds of a call, bytes beside arguments and results, and what it gave."""

    seconds: float
    memory: int
    value: float
    error: float
    gradient: np.ndarray


def run(likelihood: Any, *args: Any) -> Run:
    step = jax.jit(jax.value_and_grad(likelihood, has_aux=True)).lower(*args).compile()
    jax.block_until_ready(step(*args))
    start = time.perf_counter()
    (value, error), gradient = jax.block_until_ready(step(*args))
    seconds = time.perf_counter() - start
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)])
    memory = step.memory_analysis().temp_size_in_bytes
    return Run(seconds, memory, float(value), float(error), flat)


def data(size: int) -> tuple[jax.Array, jax.Array]:
    """Pixels of the photograph, drawn at random, both centred and scaled."""
    grey = load_sample_image("china.jpg").mean(axis=2)
    chosen = np.random.default_rng(0).choice(grey.size, size, replace=False)
    points = np.stack(np.unravel_index(chosen, grey.shape), axis=1) / max(grey.shape)
    targets = (grey.ravel()[chosen] - grey.mean()) / grey.std()
    return jnp.asarray(points, jnp.float32), jnp.asarray(targets, jnp.float32)


def main() -> int:
    # XLA's runtime may hang in batched triangular solves on two processors. It reads this when it starts.
    os.environ.setdefault("NPROC", "4")
    sizes = SIZES[:1] if "--quick" in sys.argv else SIZES
    print(
        f"JAX {jax.__version__}, CPU; float32, {MATVECS} products, a preconditioner of rank {RANK}\n"
    )
    print(
        "| points | Cholesky | from products | value: off by | gradient: off by |\n|---|---|---|---|---|"
    )
    runs, missed = {}, []
    for size in sizes:
        args = (process(), jax.random.key(0), *data(size))
        truth, found = run(exact, *args), run(estimated, *args)
        runs[size] = found
        off = abs(found.value - truth.value) / found.error
        gradient = np.linalg.norm(found.gradient - truth.gradient) / np.linalg.norm(truth.gradient)
        cells = [f"{one.seconds:.1f} s, {one.memory / 1e6:,.0f} MB" for one in (truth, found)]
        value = f"{abs(found.value - truth.value):.2f} of {abs(truth.value):.0f}, {off:.1f} standard errors"
        print(f"| {size:,} | {cells[0]} | {cells[1]} | {value} | {gradient:.1%} |", flush=True)
        if off > 4:
            missed.append(f"{size} points: {off:.1f} standard errors from the exact value")
    growth = runs[sizes[-1]].memory / runs[sizes[0]].memory / (sizes[-1] / sizes[0])
    if growth > 1.5:
        missed.append(f"memory grows {growth:.1f} times as fast as the data")
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
