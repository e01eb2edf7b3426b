"""Gradients through loops: `python benchmarks/loops.py [--quick]`.

Time, XLA's compile time and compiled temporary memory, against Equinox's checkpointed loop at its default and
`jax.lax.scan` with `jax.checkpoint` (which needs to know the number of steps and keeps every state), in one
process and in turns. Prints a table and leaves with an error if a bar is missed; `--quick` leaves out the slow
rows, and `--schedule` prints instead what a number of checkpoints costs. A second table has the second call of a loop
outside of compiled code, against `jax.lax`.
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox.internal as eqxi
import jax
import jax.numpy as jnp

import vernal
from vernal.loops._plan import default_checkpoints, make_plan, recomputed

NEWEST = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
BODIES = {
    "small": lambda w, y: y + 0.01 * jnp.tanh(w @ y),
    "1 MB": lambda w, y: y + w * y * (1 - y) * 0.01,
    "16 KB MLP": lambda w, y: jnp.tanh(jnp.tanh(y @ w[0]) @ w[1]),
}


class Case(NamedTuple):
    """A body, how many steps, how often it is timed, and the largest ratio of times allowed."""

    body: str
    steps: int
    repeats: int
    bar: float

    @property
    def name(self) -> str:
        return f"{self.body}, N={self.steps:.0e}".replace("e+0", "e")


CASES = [
    Case("small", 10_000, 31, 1.0 if NEWEST else 0.5),
    Case("small", 100_000, 9, 1.0 if NEWEST else 0.5),
    Case("1 MB", 1_000, 5, 0.5),
    Case("1 MB", 10_000, 1, 0.5),
    Case("16 KB MLP", 1_000, 15, 0.65),
]
COMPILE_BAR, COMPILE_REPEATS = 0.7, 5
EAGER_BAR, EAGER_CALLS = 2.0, 200


def inputs(body: str) -> tuple[Any, jax.Array]:
    """The weights and the initial state."""
    keys = jax.random.split(jax.random.key(0), 3)
    if body == "small":
        return jax.random.normal(keys[0], (8, 8)), jnp.full(8, 0.1)
    if body == "1 MB":
        return jnp.full(2**18, 0.3), jnp.full(2**18, 0.1)
    return [jax.random.normal(key, (64, 64)) / 10 for key in keys[:2]], jnp.ones((64, 64))


def loops(body: str, steps: int) -> dict[str, Callable[..., Any]]:
    """The loop by each of the ways to write it; the first is what the others are compared with."""
    fn = BODIES[body]

    def equinox(w: Any, y: Any) -> Any:
        return eqxi.while_loop(
            lambda c: c[0] < steps,
            lambda c: (c[0] + 1, fn(w, c[1])),
            (jnp.int32(0), y),
            max_steps=steps,
            kind="checkpointed",
        )[1]

    def scan(w: Any, y: Any) -> Any:
        step = jax.checkpoint(lambda y, _: (fn(w, y), None), prevent_cse=False)
        return jax.lax.scan(step, y, None, length=steps)[0]

    def ours(max_steps: int | None) -> Callable[..., Any]:
        return lambda w, y: vernal.loops.while_loop(
            lambda c: c[0] < steps,
            lambda c: (c[0] + 1, fn(w, c[1])),
            (jnp.int32(0), y),
            max_steps=max_steps,
            kind="checkpointed",
        )[1]

    return {
        "Equinox": equinox,
        "scan + checkpoint": scan,
        "Vernal": ours(steps),
        "Vernal, max_steps=None": ours(None),
    }


class Result(NamedTuple):
    seconds: float
    compiling: float
    states: float


def _compile(fn: Callable[..., Any], w: Any, y: Any) -> tuple[Any, float]:
    lowered = jax.jit(jax.grad(lambda w, y: jnp.sum(fn(w, y)), (0, 1))).lower(w, y)
    start = time.perf_counter()
    return lowered.compile(), time.perf_counter() - start


def measure(case: Case) -> dict[str, Result]:
    """Each loop of a case, compiled and run in turns: medians."""
    w, y = inputs(case.body)
    variants = loops(case.body, case.steps)
    compiling: dict[str, list[float]] = {name: [] for name in variants}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    programs = {}
    for _ in range(COMPILE_REPEATS):
        for name, fn in variants.items():
            programs[name], taken = _compile(fn, w, y)
            compiling[name].append(taken)
    for program in programs.values():
        jax.block_until_ready(program(w, y))
    gc.collect()
    for _ in range(case.repeats):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(w, y))
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Result(
            statistics.median(seconds[name]),
            statistics.median(compiling[name]),
            programs[name].memory_analysis().temp_size_in_bytes / y.nbytes,
        )
        for name in variants
    }


def report(case: Case) -> tuple[str, list[str]]:
    """A row of the table, and what is missed in it."""
    results = measure(case)
    theirs = results["Equinox"]
    cells, missed = [], []
    for name, result in results.items():
        time_ratio = result.seconds / theirs.seconds
        compile_ratio = result.compiling / theirs.compiling
        cells.append(f"{time_ratio:.2f} ({result.states:.0f}), {compile_ratio:.2f}")
        if name.startswith("Vernal"):
            if time_ratio > case.bar:
                missed.append(f"{case.name}, {name}: time {time_ratio:.2f} > {case.bar}")
            if compile_ratio > COMPILE_BAR:
                missed.append(f"{case.name}, {name}: compile {compile_ratio:.2f} > {COMPILE_BAR}")
            if result.states > theirs.states:
                missed.append(
                    f"{case.name}, {name}: {result.states:.0f} states > {theirs.states:.0f}"
                )
    return f"| {case.name} | {' | '.join(cells)} | {case.bar} |", missed


def _going(carry: Any) -> Any:
    return carry[0] < 10


def _next(carry: Any) -> Any:
    return carry[0] + 1, jnp.tanh(carry[1])


def _scanned(x: Any, _: Any) -> Any:
    return jnp.tanh(x), None


def eager_cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Loops outside of compiled code: ours, and that of `jax.lax`."""
    x = jnp.ones(8)
    state = jnp.int32(0), x

    def scan_of(scan: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda x: jnp.sum(scan(_scanned, x, None, length=10)[0])

    return {
        "while_loop": (
            lambda: vernal.loops.while_loop(_going, _next, state),
            lambda: jax.lax.while_loop(_going, _next, state),
        ),
        "scan": (
            lambda: vernal.loops.scan(_scanned, x, None, length=10),
            lambda: jax.lax.scan(_scanned, x, None, length=10),
        ),
        "gradient of a scan": (
            lambda: jax.grad(scan_of(vernal.loops.scan))(x),
            lambda: jax.grad(scan_of(jax.lax.scan))(x),
        ),
    }


def report_eager() -> list[str]:
    """The table of eager loops; returns what is missed."""
    print(
        f"\nThe same loop again, outside of compiled code: time relative to jax.lax (bar {EAGER_BAR})\n"
    )
    print("| loop | time | ours, ms |\n|---|---|---|")
    missed = []
    for name, pair in eager_cases().items():
        for call in pair:
            jax.block_until_ready([call(), call()])
        calls = EAGER_CALLS if "gradient" not in name else EAGER_CALLS // 10
        times: list[list[float]] = [[], []]
        for _ in range(calls):
            for call, taken in zip(pair, times, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(call())
                taken.append(time.perf_counter() - start)
        ours, theirs = map(statistics.median, times)
        print(f"| {name} | {ours / theirs:.2f} | {1e3 * ours:.2f} |", flush=True)
        if ours / theirs > EAGER_BAR:
            missed.append(f"eager {name}: {ours / theirs:.2f} > {EAGER_BAR}")
    return missed


def schedule() -> None:
    """What `checkpoints=` buys: forward evaluations of each step, the first one included."""
    steps = [10**k for k in range(2, 7)]
    print("\nForward evaluations per step: `max_steps` given and reached / `max_steps=None`\n")
    print("| checkpoints | " + " | ".join(f"{n:,} steps" for n in steps) + " |")
    print("|---" * (len(steps) + 1) + "|")
    for checkpoints in (4, 8, 16, 32, 64, 128, 256):
        costs = [
            [1 + recomputed(make_plan(bound, checkpoints), n) / n for bound in (n, None)]
            for n in steps
        ]
        cells = " | ".join(f"{given:.2f} / {unknown:.2f}" for given, unknown in costs)
        print(f"| {checkpoints} | {cells} |")
    defaults = " | ".join(f"{default_checkpoints(n)} / {default_checkpoints(None)}" for n in steps)
    print(f"| default number | {defaults} |")


def main() -> int:
    if "--schedule" in sys.argv:
        schedule()
        return 0
    cases = [case for case in CASES if case.repeats > 5] if "--quick" in sys.argv else CASES
    print(
        f"\nGradients through loops (JAX {jax.__version__}, CPU): time relative to Equinox "
        "(temporary memory in states), compile time relative to Equinox; medians\n"
    )
    names = list(loops("small", 1))
    print(f"| | {' | '.join(names)} | bar |")
    print("|---" * (len(names) + 2) + "|")
    missed = []
    for case in cases:
        row, found = report(case)
        print(row, flush=True)
        missed += found
    missed += report_eager()
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
