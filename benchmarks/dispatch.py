"""What a call costs before anything is computed: `python benchmarks/dispatch.py [--quick]`.

The floor is `jax.jit` on a flat list of the same arrays; every other way to call the same program is a multiple of it.
A model has N array leaves: N/10 blocks, each of five pairs of weight and bias and an activation function. The arrays
are tiny, and the program is the same for all. All ways run in one process and in turns. Prints tables and leaves with
an error if a bar is missed; `--quick` leaves out the 1,000 leaves and the static variants.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _measure import Column, Work, by_the_clock, relative, show_grid
from flax import nnx

import vernal

SIZES = (10, 100, 1000)
FLAT, OURS = "`jax.jit`, flat list", "Vernal `filter_jit`"
BARS = {
    "number": (1.3, 1.15, 1.15),
    "model": (1.3, 1.2, 1.1),
    "loop": (1.3, 1.2, 1.1),
}
VARIANTS, VARIANTS_BAR, MANY = 1_000, 1.5, "1,000 variants"
PACKED, PACKED_BARS = "`vernal.pack`", {100: 0.6, 300: 0.4, 1000: 0.25}
IDLE_BAR, ADAM = 1.05, optax.adam(1e-3)
DICT, CAPTURED_BAR = "a dict of 2,000 floats", 1.1


def blocks(pair: Any, block: Any, count: int) -> list[Any]:
    """The layers of a model, each array of it with other values."""
    arrays = iter(jnp.arange(30.0 * count).reshape(-1, 3))
    return [
        block(*[pair(next(arrays), next(arrays)) for _ in range(5)], jnp.tanh) for _ in range(count)
    ]


def module_model(base: Any, count: int) -> Any:
    """The model as modules of Vernal or of Equinox."""

    class Pair(base):
        weight: jax.Array
        bias: jax.Array

    class Block(base):
        a: Pair
        b: Pair
        c: Pair
        d: Pair
        e: Pair
        activation: Callable[[jax.Array], jax.Array]

    class Net(base):
        blocks: list[Block]

    return Net(blocks(Pair, Block, count))


def nnx_model(count: int) -> Any:
    """The model as modules of Flax NNX."""

    class Pair(nnx.Module):
        def __init__(self, weight, bias):
            self.weight = nnx.Param(weight)
            self.bias = nnx.Param(bias)

    class Block(nnx.Module):
        def __init__(self, a, b, c, d, e, activation):
            self.a, self.b, self.c, self.d, self.e = a, b, c, d, e
            self.activation = activation

    class Net(nnx.Module):
        def __init__(self, blocks):
            self.blocks = nnx.List(blocks)

    return Net(blocks(Pair, Block, count))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array)


def number(model: Any) -> jax.Array:
    """The sum of the first element of every array."""
    return sum(x[0] for x in jax.tree.leaves(model) if _is_array(x))


def updated(model: Any) -> Any:
    """The model one step nearer to ones, where it stays however often this is called."""
    return jax.tree.map(lambda x: (x + 1) * 0.5 if _is_array(x) else x, model)


class Way(NamedTuple):
    """A model, and how to call what is compiled for it."""

    model: Any
    number: Callable[[Any], jax.Array]
    updated: Callable[[Any], Any]


def nnx_ways(count: int) -> dict[str, Way]:
    """NNX updates a model in place; what a step returns here is the same object."""
    numbered = nnx.jit(lambda m: number(nnx.state(m, nnx.Param)))
    moved = nnx.jit(lambda m: nnx.update(m, updated(nnx.state(m, nnx.Param))))
    model, bound = nnx_model(count), nnx_model(count)
    bound_numbered, bound_moved = (nnx.cached_partial(fn, bound) for fn in (numbered, moved))

    def step(model: Any) -> Any:
        moved(model)
        return model

    def bound_step(model: Any) -> Any:
        bound_moved()
        return model

    return {
        "Flax `nnx.jit`": Way(model, numbered, step),
        "Flax `nnx.cached_partial`": Way(bound, lambda model: bound_numbered(), bound_step),
    }


def ways(size: int) -> dict[str, Way]:
    """All ways to call the same two programs; the first is the floor."""
    ours = module_model(vernal.Module, size // 10)
    theirs = module_model(eqx.Module, size // 10)
    return {
        FLAT: Way(jax.tree.leaves(ours), jax.jit(number), jax.jit(updated)),
        "`jax.jit`, Vernal modules": Way(ours, jax.jit(number), jax.jit(updated)),
        OURS: Way(ours, vernal.filter_jit(number), vernal.filter_jit(updated)),
        "Equinox `filter_jit`": Way(theirs, eqx.filter_jit(number), eqx.filter_jit(updated)),
        **nnx_ways(size // 10),
    }


def check(found: dict[str, Way]) -> None:
    """All ways compute the same numbers. (And are compiled.)"""
    before = [float(way.number(way.model)) for way in found.values()]
    after = [float(way.number(way.updated(way.model))) for way in found.values()]
    for numbers in (before, after):
        assert all(abs(x / numbers[0] - 1) < 1e-5 for x in numbers), numbers


def training(way: Way) -> Callable[[], Any]:
    """One step of a loop, whose argument is the result of the one before."""
    model = way.model

    def step() -> Any:
        nonlocal model
        model = way.updated(model)
        return model

    return step


def calls(case: str, way: Way) -> Callable[[], Any]:
    if case == "number":
        return lambda: way.number(way.model)
    if case == "model":
        return lambda: way.updated(way.model)
    return training(way)


def dispatch(sizes: Sequence[int]) -> bool:
    """The table of all cases and sizes. Returns whether every bar is met."""
    columns: dict[str, list[Column]] = {case: [] for case in BARS}
    for i, size in enumerate(sizes):
        found = ways(size)
        check(found)
        for case, bars in BARS.items():
            fns = {name: calls(case, way) for name, way in found.items()}
            columns[case].append(relative(f"{case}, {size}", fns, bars[i]))
    return show_grid(
        "Dispatch: time over that of `jax.jit` on a flat list, by what a call returns and the number of arrays",
        [column for case in BARS for column in columns[case]],
        OURS,
    )


class Sized(vernal.Module):
    """A model with structure besides its arrays."""

    weight: jax.Array
    size: int = vernal.field(static=True)


def among_variants(name: str, arguments: Callable[[int], tuple[Any, ...]]) -> Column:
    """A hit where there are many variants, over one where there is a single one. Both go round sixteen
    calls, and the many are hit far from each other in the order of their compilation."""
    alone, among = (vernal.filter_jit(lambda model, *size: model) for _ in range(2))
    variants = [arguments(i) for i in range(VARIANTS)]
    for given in variants:
        among(*given)
    one = itertools.cycle([arguments(0) for _ in range(16)])
    some = itertools.cycle(variants[:: VARIANTS // 16][:16])
    fns = {"1 variant": lambda: alone(*next(one)), MANY: lambda: among(*next(some))}
    return relative(name, fns, VARIANTS_BAR)


def variants() -> bool:
    """The table of static variants. Returns whether every bar is met."""
    columns = [
        among_variants("in an argument", lambda i: (jnp.ones(3), i)),
        among_variants("in a field of a module", lambda i: (Sized(jnp.ones(3), i),)),
        among_variants("captured by a function", lambda i: (jnp.ones(3), lambda: i)),
    ]
    return show_grid("`filter_jit`: a hit among static variants", columns, MANY)


def closures() -> bool:
    """The table of what functions capture that are arguments. Returns whether the bar is met."""
    table, x = {str(i): float(i) for i in range(2_000)}, jnp.ones(3)
    call = vernal.filter_jit(lambda fn, x: fn(x))

    def alone(x: jax.Array) -> jax.Array:
        return 2.0 * x

    def beside(x: jax.Array) -> jax.Array:
        return table["2"] * x

    fns = {"nothing": lambda: call(alone, x), DICT: lambda: call(beside, x)}
    columns = [relative("a hit", fns, CAPTURED_BAR)]
    return show_grid("`filter_jit`: what a function captures that is an argument", columns, DICT)


def packed(step: Callable[[Any], Any], tree: Any) -> dict[str, Callable[[], Any]]:
    """A loop over a step of a tree in `jax.jit`: as a flat list, and packed."""
    leaves, structure = jax.tree.flatten(tree)

    def flat(leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves(step(jax.tree.unflatten(structure, leaves)))

    ours = jax.jit(lambda packed: vernal.pack(step(packed.unpack())))
    floor, packed = Way(leaves, number, jax.jit(flat)), Way(vernal.pack(tree), number, ours)
    return {FLAT: training(floor), PACKED: training(packed)}


def waited(name: str, fns: dict[str, Callable[[], Any]], bar: float) -> Column:
    """Time over the first one's, by the clock and with what is computed: a packed call returns before the rest."""
    for fn in fns.values():
        fn()
    seconds = by_the_clock({way: Work(fn) for way, fn in fns.items()}, budget=5)
    return Column(name, {way: taken / seconds[FLAT] for way, taken in seconds.items()}, bar)


def with_adam(both: Any) -> Any:
    model, state = both
    changes, state = ADAM.update(jax.tree.map(jnp.ones_like, model), state)
    return optax.apply_updates(model, changes), state


def packing(sizes: Sequence[int]) -> list[Column]:
    """The columns of `vernal.pack`: a step of a model, and a step of Adam, for each number of arrays, and where packing
    cannot help: for large arrays, which stay as they are, and for two."""
    cases = {
        f"{n} arrays": (jax.tree.leaves(module_model(vernal.Module, n // 10)), PACKED_BARS[n])
        for n in sizes
    }
    cases["10 large arrays"] = ([jnp.ones((64, 128)) for _ in range(10)], IDLE_BAR)
    cases["2 arrays"] = ([jnp.ones(3), jnp.ones(3)], IDLE_BAR)
    columns: list[Column] = []
    for name, (arrays, bar) in cases.items():
        columns.append(waited(name, packed(updated, arrays), bar))
        if len(arrays) < 1000:  # which XLA would compile for minutes
            columns.append(
                waited(f"Adam on {name}", packed(with_adam, (arrays, ADAM.init(arrays))), bar)
            )
    return columns


def packs(sizes: Sequence[int]) -> bool:
    """The table of `vernal.pack`. Returns whether every bar is met."""
    return show_grid(
        "`vernal.pack` in a loop, with what is computed: time over that of a flat list",
        packing(sizes),
        PACKED,
    )


def main() -> int:
    quick = "--quick" in sys.argv
    sizes = SIZES[:2] if quick else SIZES
    met = [dispatch(sizes), closures(), packs((100,) if quick else tuple(PACKED_BARS))]
    met.append(quick or variants())
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
