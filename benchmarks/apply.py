"""`nn.apply` against a plain call of the same model: `python benchmarks/apply.py`.

Three models: layers without state; dropout, whose keys the plain call splits by hand; BatchNorm, whose statistics the
plain call threads as a `State`. A training step (a gradient on a batch) is measured compiled, and while it is traced.
Prints time over that of the plain call and leaves with an error if a bar is missed.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from _measure import compare

import vernal
from vernal import nn

COMPILED_BAR, TRACING_BAR = 1.02, 1.3
WIDTH, BATCH, DEPTH = 256, 128, 8


class Case(NamedTuple):
    """Two training losses with their arguments, which compute the same."""

    name: str
    plain: Callable[..., Any]
    plain_arguments: tuple[Any, ...]
    applied: Callable[..., Any]
    applied_arguments: tuple[Any, ...]


def layers(between: Callable[[], Any]) -> nn.Sequential:
    keys = jax.random.split(jax.random.key(0), DEPTH)
    parts = [(nn.Linear(WIDTH, WIDTH, key=key), between(), jax.nn.relu) for key in keys]
    return nn.Sequential([part for three in parts for part in three])


def data() -> jax.Array:
    return jax.random.normal(jax.random.key(2), (BATCH, WIDTH))


def without_state() -> Case:
    def plain(model: Any, x: jax.Array) -> Any:
        return jnp.sum(model(x) ** 2), None

    def applied(model: Any, x: jax.Array) -> Any:
        return jnp.sum(nn.apply(model, x)[0] ** 2), None

    arguments = layers(lambda: nn.LayerNorm(WIDTH)), data()
    return Case("no state", plain, arguments, applied, arguments)


def with_keys() -> Case:
    def plain(model: Any, key: Any, x: jax.Array) -> Any:
        return jnp.sum(model(x, key=key) ** 2), None

    def applied(model: Any, key: Any, x: jax.Array) -> Any:
        return jnp.sum(nn.apply(model, x, key=key)[0] ** 2), None

    arguments = layers(lambda: nn.Dropout(0.5)), jax.random.key(1), data()
    return Case("dropout", plain, arguments, applied, arguments)


def with_state() -> Case:
    def plain(model: Any, state: Any, x: jax.Array) -> Any:
        y, state = model(x, state)
        # The model too, because `apply` returns it.
        return jnp.sum(y**2), (model, state)

    def applied(model: Any, x: jax.Array) -> Any:
        y, model = nn.apply(model, x)
        return jnp.sum(y**2), model

    def make() -> nn.Sequential:
        return layers(lambda: nn.BatchNorm(WIDTH))

    arguments = *nn.make_with_state(make)(), data()
    return Case("BatchNorm", plain, arguments, applied, (make(), data()))


def gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
    return vernal.filter_value_and_grad(loss, has_aux=True)


def compiled(loss: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    step = vernal.filter_jit(gradient(loss))
    return lambda: jax.block_until_ready(step(*arguments))


def tracing(loss: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[[], Any]:
    def trace() -> Any:
        # A new function, or JAX would remember the old trace.
        step = gradient(loss)
        return vernal.filter_make_jaxpr(lambda *args: step(*args))(*arguments)[0]

    return trace


def main() -> int:
    print(f"\nTraining with `nn.apply` over a plain call (JAX {jax.__version__}; medians)\n")
    print("| | compiled | tracing |\n|---|---|---|")
    missed: list[str] = []
    for make in (without_state, with_keys, with_state):
        name, plain, plain_arguments, applied, applied_arguments = make()
        rows = [
            compare(
                f"{name}, {what}", way(applied, applied_arguments), way(plain, plain_arguments), bar
            )
            for what, way, bar in (
                ("compiled", compiled, COMPILED_BAR),
                ("tracing", tracing, TRACING_BAR),
            )
        ]
        print(f"| {name} | {rows[0].ratio:.3f} | {rows[1].ratio:.3f} |", flush=True)
        missed += [f"{row.name}: {row.ratio:.3f} > {row.bar}" for row in rows if not row.met]
    print(f"| bar | {COMPILED_BAR} | {TRACING_BAR} |")
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
