"""The small operations on modules, against Equinox in the same process: `python benchmarks/modules.py`.

Prints a table of ratios and leaves with an error if a bar is missed.
"""

import os
import statistics
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
from _measure import Row, compare, show

import vernal

X = jnp.ones(3)


def tree_of_modules(base, field):
    """200 arrays in 121 modules."""

    class Pair(base):
        weight: jax.Array
        bias: jax.Array
        size: int = field(static=True, default=3)

    class Block(base):
        a: Pair
        b: Pair
        c: Pair
        d: Pair
        e: Pair

    class Net(base):
        blocks: list

    return Net([Block(*[Pair(X, X) for _ in range(5)]) for _ in range(20)])


def flattening() -> list[Row]:
    ours = tree_of_modules(vernal.Module, vernal.field)
    theirs = tree_of_modules(eqx.Module, eqx.field)
    leaves = jax.tree.leaves(ours)
    ours_def, theirs_def = jax.tree.structure(ours), jax.tree.structure(theirs)
    return [
        compare(
            "flatten, 200 arrays in 121 modules",
            lambda: jax.tree.leaves(ours),
            lambda: jax.tree.leaves(theirs),
            0.33,
        ),
        compare(
            "unflatten",
            lambda: ours_def.unflatten(leaves),
            lambda: theirs_def.unflatten(leaves),
            0.7,
        ),
        compare(
            "unflatten, and flatten what comes out for the first time",
            lambda: jax.tree.leaves(ours_def.unflatten(leaves)),
            lambda: jax.tree.leaves(theirs_def.unflatten(leaves)),
            0.6,
        ),
        compare(
            "tree.map",
            lambda: jax.tree.map(lambda x: x, ours),
            lambda: jax.tree.map(lambda x: x, theirs),
            0.45,
        ),
    ]


def small_module(base):
    class Small(base):
        weight: jax.Array
        bias: jax.Array
        size: int

        def method(self, x):
            return x

    return Small


def objects() -> list[Row]:
    Ours, Theirs = small_module(vernal.Module), small_module(eqx.Module)
    ours, theirs = Ours(X, X, 3), Theirs(X, X, 3)
    return [
        compare("attribute read", lambda: ours.weight, lambda: theirs.weight, 0.2),
        compare(
            "construct, 3 fields, generated init",
            lambda: Ours(X, X, 3),
            lambda: Theirs(X, X, 3),
            0.25,
        ),
        compare("bound method access", lambda: ours.method, lambda: theirs.method, 0.02),
    ]


def mlps() -> list[Row]:
    """A 5-layer MLP (4 hidden layers)."""
    key = jax.random.key(0)
    ours = vernal.nn.MLP(4, 4, 8, 4, key=key)
    theirs = eqx.nn.MLP(4, 4, 8, 4, key=key)
    ours_parts = vernal.partition(ours, vernal.is_array)
    theirs_parts = eqx.partition(theirs, eqx.is_array)
    updates = jax.tree.map(jnp.zeros_like, ours)
    their_updates = jax.tree.map(jnp.zeros_like, eqx.filter(theirs, eqx.is_array))
    weight = jnp.zeros((8, 8))
    return [
        compare(
            "`partition`",
            lambda: vernal.partition(ours, vernal.is_array),
            lambda: eqx.partition(theirs, eqx.is_array),
            0.33,
        ),
        compare(
            "`combine`",
            lambda: vernal.combine(*ours_parts),
            lambda: eqx.combine(*theirs_parts),
            0.33,
        ),
        compare(
            "`filter`",
            lambda: vernal.filter(ours, vernal.is_array),
            lambda: eqx.filter(theirs, eqx.is_array),
            0.33,
        ),
        compare(
            "`apply_updates`",
            lambda: vernal.apply_updates(ours, updates),
            lambda: eqx.apply_updates(theirs, their_updates),
            0.33,
        ),
        compare(
            "`tree_at`, one leaf",
            lambda: vernal.tree_at(lambda m: m.layers[1].weight, ours, weight),
            lambda: eqx.tree_at(lambda m: m.layers[1].weight, theirs, weight),
            0.33,
        ),
    ]


def tracing() -> list[Row]:
    key, x = jax.random.key(0), jnp.ones(4)
    ours = vernal.nn.MLP(4, 4, 8, 20, key=key)
    theirs = eqx.nn.MLP(4, 4, 8, 20, key=key)
    # A new function each time: JAX remembers the traces of those it has seen.
    return [
        compare(
            "trace a 21-layer MLP",
            lambda: jax.make_jaxpr(lambda x: ours(x))(x),
            lambda: jax.make_jaxpr(lambda x: theirs(x))(x),
            0.6,
        )
    ]


def _import_seconds(package: str) -> float:
    # Without this, every import would compile the sources again; installed packages never do.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    code = (
        "import jax, time; start = time.perf_counter(); "
        f"import {package}; print(time.perf_counter() - start)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return float(done.stdout)


def importing() -> list[Row]:
    """A program without layers, and one with them: `vernal.nn` is imported when it is first looked at."""
    packages = ("vernal", "vernal, vernal.nn", "equinox")
    for package in packages:
        _import_seconds(package)
    rounds = [[_import_seconds(package) for package in packages] for _ in range(11)]
    plain, layers, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    return [
        Row("import, after `import jax`", plain * 1e6, theirs * 1e6, plain / theirs, 0.7),
        Row("the same, layers included", layers * 1e6, theirs * 1e6, layers / theirs, 1.0),
    ]


def main() -> int:
    rows = [*flattening(), *objects(), *mlps(), *tracing(), *importing()]
    return 0 if show("Small operations", rows) else 1


if __name__ == "__main__":
    sys.exit(main())
