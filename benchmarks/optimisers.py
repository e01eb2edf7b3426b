"""What an `Optimizer` costs beyond Optax itself: `python benchmarks/optimisers.py`.

The floor is a `jax.jit` of a plain Optax step on a dictionary of arrays, with the Optax object closed over: Adam, with
the gradients given. Everything else is a multiple of it. Below that, what a call costs for which the optimiser was
made anew. Prints tables and leaves with an error if a bar is missed.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _measure import Column, relative, show_grid

import vernal

SIZES, BAR, OURS = (8, 24, 200), 1.05, "Vernal `Optimizer`, `filter_jit`"
WIDTH = 64
NEW_CALLS = 7


def mlp(base: Any, arrays: int) -> Any:
    """A model of pairs of a weight and a bias, with an activation function."""

    class Layer(base):
        weight: jax.Array
        bias: jax.Array

    class Net(base):
        layers: list[Layer]
        activation: Callable[[jax.Array], jax.Array]

    key = jax.random.key(0)
    weights = jax.random.normal(key, (arrays // 2, WIDTH, WIDTH))
    return Net([Layer(w, jnp.zeros(WIDTH)) for w in weights], jax.nn.relu)


def as_dict(model: Any) -> dict[str, jax.Array]:
    return {str(i): x for i, x in enumerate(jax.tree.leaves(eqx.filter(model, eqx.is_array)))}


def with_optax(optimiser: Any, model: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    updates, state = optimiser.update(grads, state, model)
    return optax.apply_updates(model, updates), state


def with_equinox(optimiser: Any, model: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    updates, state = optimiser.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state


def with_vernal(optimiser: vernal.Optimizer, model: Any, grads: Any, state: Any) -> tuple[Any, Any]:
    return optimiser.update(model, grads, state)


def loop(step: Callable[..., Any], optimiser: Any, params: Any, like: Any) -> Callable[[], Any]:
    """A training loop, one step per call, whose gradients never change."""
    grads = jax.tree.map(jnp.ones_like, like)
    model, state = params, optimiser.init(like)

    def run() -> Any:
        nonlocal model, state
        model, state = step(model, grads, state)
        return model

    return run


def ways(arrays: int) -> dict[str, Callable[[], Any]]:
    """All ways to do the same step; the first is the floor."""
    ours, theirs = mlp(vernal.Module, arrays), mlp(eqx.Module, arrays)
    plain, optimiser = optax.adam(1e-3), vernal.Optimizer(optax.adam, 1e-3)
    params, their_arrays = as_dict(ours), eqx.filter(theirs, eqx.is_array)
    jitted, compiled = jax.jit(with_vernal), vernal.filter_jit(with_vernal)
    return {
        "Optax, `jax.jit`, a dictionary": loop(
            jax.jit(lambda *args: with_optax(plain, *args)), plain, params, params
        ),
        "Optax, `jax.jit`, a Vernal module": loop(
            jax.jit(lambda *args: with_optax(plain, *args)), plain, ours, ours
        ),
        "Vernal `Optimizer`, `jax.jit`": loop(
            lambda *args: jitted(optimiser, *args), optimiser, ours, ours
        ),
        OURS: loop(lambda *args: compiled(optimiser, *args), optimiser, ours, ours),
        "Optax, Equinox `filter_jit`": loop(
            eqx.filter_jit(lambda *args: with_equinox(plain, *args)), plain, theirs, their_arrays
        ),
    }


def check(found: dict[str, Callable[[], Any]]) -> None:
    """All ways compute the same numbers. (And are compiled.)"""
    for _ in range(3):
        sums = [sum(float(x.sum()) for x in as_dict(run()).values()) for run in found.values()]
        assert all(abs(other - sums[0]) < 1e-3 * abs(sums[0]) for other in sums), sums


def steps() -> bool:
    """The table of sizes. Returns whether every bar is met."""
    columns: list[Column] = []
    for arrays in SIZES:
        found = ways(arrays)
        check(found)
        columns.append(relative(f"{arrays} arrays", found, BAR))
    return show_grid("A step of Adam: time over that of Optax in `jax.jit`", columns, OURS)


def milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - start) * 1e3


def new_optimisers() -> None:
    """The table of calls with an optimiser made for the call."""
    ours, theirs = mlp(vernal.Module, 8), mlp(eqx.Module, 8)
    their_arrays = eqx.filter(theirs, eqx.is_array)
    compiled, their_compiled = vernal.filter_jit(with_vernal), eqx.filter_jit(with_equinox)
    state = vernal.Optimizer(optax.adam, 1e-3).init(ours)
    their_state = optax.adam(1e-3).init(their_arrays)

    calls = {
        "Vernal, `Optimizer(optax.adam, 1e-3)`": lambda: compiled(
            vernal.Optimizer(optax.adam, 1e-3), ours, ours, state
        ),
        "Equinox, `optax.adam(1e-3)`": lambda: their_compiled(
            optax.adam(1e-3), theirs, their_arrays, their_state
        )[1],
    }
    print(f"\nA call with a new optimiser of the same settings (JAX {jax.__version__}, CPU; ms)\n")
    print("| | first call | later calls |")
    print("|---|---|---|")
    for name, call in calls.items():
        first, *later = [milliseconds(call) for _ in range(1 + NEW_CALLS)]
        print(f"| {name} | {first:.1f} | {median(later):.1f} |", flush=True)


def main() -> int:
    met = steps()
    new_optimisers()
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
