"""Whether compiled functions that are gone are really gone: `python benchmarks/leaks.py [--quick]`.

10,000 times: make a model and a function of it, compile, call, drop both. Prints what is left after every tenth of
that: executables that XLA holds, functions that are alive, objects that Python's collector knows, and the memory
of the process. Leaves with an error unless all of them stay where they were after the first tenth. `--quick` does
500.
"""

import gc
import sys
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import vernal

CYCLES = 500 if "--quick" in sys.argv else 10_000
TENTH = CYCLES // 10
# JAX keeps the types and structures of its latest 4,096 traces; a few small objects for each.
OBJECTS_FOR_EACH, MEGABYTES = 30, 100


class Model(vernal.Module):
    weight: jax.Array
    size: int = vernal.field(static=True)


class Left(NamedTuple):
    """What is left."""

    executables: int
    functions: int
    objects: int
    megabytes: int


def cycle(i: int, x: jax.Array) -> weakref.ref[Any]:
    """One function, compiled and called."""

    def step(model: Model, x: jax.Array) -> tuple[Model, jax.Array]:
        return Model(model.weight * i, model.size), model.weight * x

    compiled = vernal.filter_jit(step)
    model, product = compiled(Model(x, i % 7), x)
    assert model.size == i % 7
    assert float(model.weight[1]) == i
    assert float(product[2]) == 4
    return weakref.ref(step)


def megabytes() -> int:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return pages * 4096 // 2**20


def left(refs: list[weakref.ref[Any]], x: jax.Array) -> Left:
    gc.collect()
    return Left(
        len(x.device.client.live_executables()),
        sum(ref() is not None for ref in refs),
        len(gc.get_objects()),
        megabytes(),
    )


def main() -> int:
    print(
        f"\nAfter making, compiling, calling and dropping functions (JAX {jax.__version__}, CPU)\n"
    )
    print("| functions | executables | functions alive | objects | MB |")
    print("|---|---|---|---|---|")
    x, found, refs = jnp.arange(3.0), [], []
    for i in range(CYCLES):
        refs.append(cycle(i, x))
        if (i + 1) % TENTH == 0:
            found.append(left(refs, x))
            print(f"| {i + 1} | {' | '.join(map(str, found[-1]))} |", flush=True)
            refs.clear()
    first, last = found[0], found[-1]
    flat = (
        last.functions == 0
        and last.executables <= first.executables + 5
        and last.objects - first.objects < OBJECTS_FOR_EACH * min(CYCLES, 4096)
        and last.megabytes - first.megabytes < MEGABYTES
    )
    print("\nNothing is left behind." if flat else "\nMISSED: something is left behind.")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
