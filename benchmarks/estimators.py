"""Trace estimation: `python benchmarks/estimators.py [--quick]`.

Time of each method over that of the bare products, ours and those of traceax and matfree in turns; products with the
Hessian of a network in blocks of several sizes; what it costs to share one compilation between budgets; errors, how
honest the reported ones are, and gradients. Prints tables, writes `docs/images/error-against-products.png`, and leaves
with an error if a bar is missed. `--quick` has fewer seeds and repeats, and leaves out the large matrix and the
picture.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import _measure
import jax
import jax.numpy as jnp
from _measure import relative
from _trace_accuracy import accuracy, draw, gradients
from _trace_methods import METHODS, OURS, PEERS, TIMED, matrix_of, spectra

import vernal
from vernal import estimators, linalg, nn

CLOCKS = {"processor": time.process_time, "clock": time.perf_counter}
# Of the processor's time over that of the bare products.
SPEED = {
    (1000, 200): dict(zip(TIMED, (1.8, 2.4, 3.0, 4.0), strict=True)),
    (4000, 60): dict(zip(TIMED, (1.1, 1.1, 1.4, 1.4), strict=True)),
}
# Of the time of blocks of automatic size over the best of the others; of a shared budget over one of its own.
BLOCKS_BAR, SHARED_BAR = 1.15, 1.06
HESSIAN_MATVECS = 60
MOST, SHARED = 200, (60, 120, 192)


def done(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A call that is over when its results are there."""
    compiled = jax.jit(fn)
    return lambda: jax.block_until_ready(compiled(*args))


def check(what: str, value: float, bar: float) -> list[str]:
    return [] if value <= bar else [f"{what}: {value:.2f} > {bar}"]


def speed(size: int, matvecs: int) -> list[str]:
    """Every method over the same number of products as one blocked product."""
    matrix = jnp.asarray(matrix_of(spectra(size)["poly"]), jnp.float32)
    key = jax.random.key(0)
    probes = jax.random.normal(key, (size, matvecs))
    ways = {"products": done(lambda a, x: a @ x, matrix, probes)}
    for way in [*OURS, *PEERS]:
        if way.method in TIMED:
            ways[way.name] = done(lambda a, key, run=way.run: run(a, key, matvecs), matrix, key)
    columns = [relative(name, ways, math.inf, clock).ratios for name, clock in CLOCKS.items()]
    bars, missed = SPEED[size, matvecs], []
    print(f"\nTime over that of the bare products, n = {size}, {matvecs} products, float32\n")
    print("| | " + " | ".join(CLOCKS) + " | bar |\n|---|---|---|---|")
    for name in ways:
        library, _, method = name.partition(" ")
        bar = bars[method] if library == "Vernal" else None
        print(f"| {name} | " + " | ".join(f"{c[name]:.2f}" for c in columns) + f" | {bar or ''} |")
        missed += check(f"{name}, n = {size}", columns[0][name], bar) if bar else []
    return missed


class Network(NamedTuple):
    """A regression, whose loss has a Hessian."""

    model: Any
    inputs: jax.Array
    targets: jax.Array

    def hessian(self, batch_size: int | None) -> linalg.Operator:
        def loss(model: Any) -> jax.Array:
            return jnp.mean((jax.vmap(model)(self.inputs)[:, 0] - self.targets) ** 2)

        return linalg.hessian_operator(loss, self.model, batch_size=batch_size)


def network() -> Network:
    """2,361 parameters and 256 examples."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = nn.MLP(16, 1, 40, depth=2, activation=jnp.tanh, key=keys[0])
    return Network(model, jax.random.normal(keys[1], (256, 16)), jax.random.normal(keys[2], (256,)))


def hessian() -> list[str]:
    """Products in blocks of several sizes, and the methods over the best of these."""
    case, key, matvecs = network(), jax.random.key(1), HESSIAN_MATVECS
    size = case.hessian(None).size
    probes = jax.random.normal(key, (size, matvecs))
    sizes = {
        "automatic blocks": None,
        "one at a time": 1,
        "blocks of 10": 10,
        "all at once": matvecs,
    }
    ways = {
        name: done(lambda case, x, b=batch: case.hessian(b).matmul(x), case, probes)
        for name, batch in sizes.items()
    }
    for name in ("Hutchinson", "Hutch++", "XTrace"):

        def run(case: Network, key: jax.Array, method: Any = METHODS[name]) -> Any:
            return estimators.trace(case.hessian(None), key, matvecs=matvecs, method=method)

        ways[f"Vernal {name}"] = done(run, case, key)
    ratios = relative("", ways, math.inf).ratios
    best = min(ratios[name] for name in sizes if name != "automatic blocks")
    print(
        f"\n{matvecs} products with the Hessian of a network of {size:,} parameters, processor time\n"
    )
    print("| | over the best block |\n|---|---|")
    for name, ratio in ratios.items():
        print(f"| {name} | {ratio / best:.2f} |")
    return check("automatic blocks over the best", ratios["automatic blocks"] / best, BLOCKS_BAR)


def shared() -> list[str]:
    """Budgets below one `max_matvecs`, which share a compilation, against one compilation for each."""
    case, key, missed = network(), jax.random.key(1), []
    print(
        f"\nOne compilation for every budget up to {MOST}, over one for the budget; the Hessian\n"
    )
    print(
        "| | "
        + " | ".join(f"{m} products" for m in SHARED)
        + " | compiled |\n|---|---|---|---|---|"
    )
    for name in ("Hutchinson", "XTrace"):
        method = METHODS[name]

        @vernal.filter_jit
        def one(case: Network, key: jax.Array, matvecs: jax.Array, method: Any = method) -> Any:
            operator = case.hessian(None)
            return estimators.trace(
                operator, key, matvecs=matvecs, max_matvecs=MOST, method=method
            ).value

        cells = []
        for matvecs in SHARED:

            def own(case: Network, key: jax.Array, m: int = matvecs, method: Any = method) -> Any:
                return estimators.trace(case.hessian(None), key, matvecs=m, method=method).value

            m = jnp.asarray(matvecs)
            ways = {
                "own": done(own, case, key),
                "shared": lambda m=m, one=one: one(case, key, m).block_until_ready(),
            }
            cells.append(relative("", ways, math.inf).ratios["shared"])
        print(f"| {name} | " + " | ".join(f"{x:.2f}" for x in cells) + f" | {one.trace_count} |")
        missed += check(f"{name}, compilations of a shared budget", one.trace_count, 1)
        missed += check(f"{name}, shared budget of {SHARED[-1]}", cells[-1], SHARED_BAR)
    return missed


def main() -> int:
    # XLA's runtime may hang in batched triangular solves on two processors. It reads this when it starts.
    os.environ.setdefault("NPROC", "4")
    quick = "--quick" in sys.argv
    if quick:
        _measure.REPEATS = 3
    print(f"JAX {jax.__version__}, CPU")
    missed = []
    for case in list(SPEED)[: 1 if quick else None]:
        missed += speed(*case)
    missed += hessian()
    missed += shared()
    tables, found = accuracy(seeds=10 if quick else 50)
    missed += found
    missed += gradients(seeds=30 if quick else 150)
    if not quick:
        draw(tables)
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
