"""What costs time or memory on an accelerator: donation, the cost of a call, estimators, training."""

import math
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cold as first
import dispatch as calls
import jax
import jax.numpy as jnp
import optax
from _measure import Work, by_the_clock, relative
from _training_settings import ACCELERATOR, SMOKE
from training import OURS, steps

import vernal
from vernal import estimators, linalg, nn


def donation(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    """Whether a step of training gives the memory of the old model and state to the new ones."""
    optimiser = vernal.Optimizer(optax.adamw, learning_rate=1e-3)
    model = nn.MLP(256, 256, 256, depth=3, activation=jax.nn.relu, key=jax.random.key(0))
    state = optimiser.init(model)

    @vernal.filter_jit(donate="all-except-first")
    def step(x: jax.Array, model: Any, state: Any) -> Any:
        slopes = vernal.filter_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        return optimiser.update(model, slopes, state)

    x = jnp.ones((8, 256))
    given = vernal.filter((model, state), vernal.is_array)
    size = sum(a.nbytes for a in jax.tree.leaves(given))
    reused = step.lower(x, model, state).compile().memory_analysis().alias_size_in_bytes
    step(x, model, state)
    left = sum(not a.is_deleted() for a in jax.tree.leaves(given))
    line = f"Of {size:,} bytes of model and state a step reuses {reused:,}; {left} old arrays are left."
    yield line, [line] if left or reused < size else []


def dispatch(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    """The processor's time of a call, over that of `jax.jit` on a flat list."""
    columns = []
    for size in (10,) if smoke else (10, 100):
        found = {name: way for name, way in calls.ways(size).items() if "Flax" not in name}
        calls.check(found)
        for case in calls.BARS:
            fns = {name: calls.calls(case, way) for name, way in found.items()}
            columns.append(relative(f"{case}, {size}", fns, math.inf))
    yield f"| | {' | '.join(column.name for column in columns)} |", []
    yield "|---" * (len(columns) + 1) + "|", []
    for way in columns[0].ratios:
        yield f"| {way} | {' | '.join(f'{c.ratios[way]:.2f}' for c in columns)} |", []


def packing(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    """The time of a loop with `vernal.pack`, by the clock, over that of a flat list."""
    columns = calls.packing((100,) if smoke else (100, 300))
    yield f"| | {' | '.join(column.name for column in columns)} |", []
    yield "|---" * (len(columns) + 1) + "|", []
    for way in columns[0].ratios:
        yield f"| {way} | {' | '.join(f'{c.ratios[way]:.2f}' for c in columns)} |", []


def cold(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    """Seconds of the processor for the first step, in fresh processes."""
    names = [OURS] if smoke else list(first.MODULES)
    yield f"| | {' | '.join(names)} |", []
    yield "|---" * (len(names) + 1) + "|", []
    for kind in list(first.SIZES)[: 1 if smoke else None]:
        cells, wrong = [], []
        for name in names:
            try:
                cells.append(f"{first.in_a_new_process(name, kind, device.platform == 'cpu'):.2f}")
            except subprocess.CalledProcessError as error:
                # A library that is not installed, or a device that one process has for itself.
                cells.append("")
                reason = error.stderr.strip().splitlines()[-1:]
                wrong = [f"cold, {kind}: {reason}"] if name == OURS else wrong
        yield f"| {kind} | {' | '.join(cells)} |", wrong


ALONE = "the products alone"
METHODS = {
    "Hutchinson": estimators.Hutchinson(),
    "HutchPlusPlus": estimators.HutchPlusPlus(),
    "XTrace": estimators.XTrace(),
    "XNysTrace": estimators.XNysTrace(),
}


def decaying(size: int) -> jax.Array:
    """A positive definite matrix whose eigenvalues fall as 1 / k**2."""
    basis = jnp.linalg.qr(jax.random.normal(jax.random.key(1), (size, size)))[0]
    return (basis / jnp.arange(1.0, size + 1) ** 2) @ basis.T


def estimate(method: Any, matvecs: int, matrix: jax.Array, key: jax.Array) -> Any:
    operator = linalg.MatrixOperator(matrix, positive_semidefinite=True)
    return estimators.trace(operator, key, matvecs=matvecs, method=method)


def estimates(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    """The time of each method over that of its products alone, and its error."""
    for size, matvecs in ((200, 20),) if smoke else ((1000, 200), (4000, 60)):
        with jax.default_matmul_precision("highest"):
            matrix, key = decaying(size), jax.random.key(0)
            probes = jax.random.normal(key, (size, matvecs))
            works = {ALONE: done(jnp.matmul, matrix, probes)}
            for name, method in METHODS.items():
                works[name] = done(partial(estimate, method, matvecs), matrix, key)
            found = {name: work.start() for name, work in works.items()}
            times = by_the_clock(works, 1.0 if smoke else 3.0)
        yield f"\n| n = {size}, {matvecs} products | time | error | standard error |", []
        yield "|---|---|---|---|", []
        alone = times.pop(ALONE)
        yield f"| {ALONE} | 1 ({alone * 1e6:,.0f} us) | | |", []
        exact = float(jnp.trace(matrix))
        for name, seconds in times.items():
            wide = float(found[name].standard_error)
            away = abs(float(found[name].value) - exact)
            wrong = f"{name}, n = {size}: {away:.1e} away, standard error {wide:.1e}"
            good = away <= 5 * wide + 1e-5 * exact
            ratio = f"{seconds / alone:.2f}"
            row = f"| {name} | {ratio} | {away / exact:.1e} | {wide / exact:.1e} |"
            yield row, [] if good else [wrong]


def done(fn: Callable[..., Any], *args: Any) -> Work:
    compiled = jax.jit(fn)
    return Work(lambda: compiled(*args))


def training(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    """Tokens and images in a second."""
    settings = SMOKE if smoke else ACCELERATOR
    names = [OURS, "Equinox", "Flax NNX", "PyTorch"] + ([] if smoke else ["PyTorch, compiled"])
    yield f"| | {' | '.join(names)} | |", []
    yield "|---" * (len(names) + 2) + "|", []
    for kind, size in settings.sizes.items():
        found = steps(size, settings.half, names, 1.0 if smoke else 5.0)
        cells = [f"{size.batch / found[name]:,.0f}" if name in found else "" for name in names]
        wrong = [] if OURS in found else [f"training: {OURS} failed"]
        yield f"| {kind} | {' | '.join(cells)} | {size.unit} in a second |", wrong
