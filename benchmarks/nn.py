"""Layers against those of Equinox and Flax NNX: `python benchmarks/nn.py [--quick]`.

Every library is written as its own documentation would have it: Equinox under `jax.vmap` and `eqx.filter_jit`, NNX
on batches and `nnx.jit`, Vernal on batches and `filter_jit`. All three hold the same weights and compute the same
numbers in the same precision, in one process and in turns. Images come and go with their channels first; NNX, which
wants them last, stands between two transpositions. Prints the shortest times (of the processor, all threads together;
what else the machine does can only lengthen them), our time over that of the faster of the two, and the temporary
memory of the gradient of attention; leaves with an error if a bar is missed. `--quick` leaves out the long rows. Where
JAX finds a GPU, that is what is measured, by the clock, with larger sizes.
"""

import gc
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx

import vernal
from vernal import nn

GPU = jax.default_backend() == "gpu"
# The fused kernels for attention exist in half precision only.
HALF = jnp.bfloat16 if GPU else jnp.float32
OURS, EQUINOX, NNX = "Vernal", "Equinox", "Flax NNX"
BAR, GROWTH_BAR = 1.05, 1.3
STEPS, HEADS, SIZE = 256, 8, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384)
MIN_ROUNDS, MAX_ROUNDS, SECONDS = 5, 31, 4.0


class Way(NamedTuple):
    """A layer, how it is called on a batch, and the batch in the layout that it takes."""

    layer: Any
    call: Callable[[Any, jax.Array], jax.Array]
    x: jax.Array


class Case(NamedTuple):
    """A row: how to make the layers, whether the gradient is measured too, and whether it takes long."""

    name: str
    ways: Callable[[], dict[str, Way]]
    backward: bool
    long: bool = False


class Result(NamedTuple):
    """Seconds of a call, and of the first one, which traces and compiles."""

    call: float
    first: float


def draw(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.Array]:
    """Weights: normal numbers, smaller where more of them are added up."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        jax.random.normal(key, shape, dtype) / math.sqrt(math.prod(shape[1:]))
        for key, shape in zip(keys, shapes, strict=True)
    ]


def numbers(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Data."""
    return jax.random.normal(jax.random.key(1), shape, dtype)


def recurrent(kind: str, features: int) -> dict[str, Way]:
    """As many features in as out, over 256 steps."""
    rows = {"LSTM": 4, "GRU": 3}[kind] * features
    weights = draw((rows, features), (rows, features), (rows,))
    if kind == "GRU":  # The bias that NNX has not.
        weights.append(jnp.zeros(features))
    x = numbers(256 if GPU else 32, STEPS, features)

    def where(cell: Any) -> list[Any]:
        return [
            cell.weight_ih,
            cell.weight_hh,
            cell.bias,
            *([cell.bias_n] if kind == "GRU" else []),
        ]

    key = jax.random.key(0)
    ours = getattr(nn, kind)(features, features, key=key)
    ours = vernal.tree_at(lambda layer: where(layer.cells[0][0]), ours, weights)
    theirs = eqx.tree_at(
        where, getattr(eqx.nn, f"{kind}Cell")(features, features, key=key), weights
    )
    makers = {"LSTM": nnx.OptimizedLSTMCell, "GRU": nnx.GRUCell}
    cell = makers[kind](features, features, rngs=nnx.Rngs(0))
    cell.dense_i.kernel[...], cell.dense_h.kernel[...] = weights[0].T, weights[1].T
    (cell.dense_h if kind == "LSTM" else cell.dense_i).bias[...] = weights[2]

    def scan(cell: Any, xs: jax.Array) -> jax.Array:
        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            state = cell(x, state)
            return state, state[0] if kind == "LSTM" else state

        zero = jnp.zeros(features)
        return jax.lax.scan(step, (zero, zero) if kind == "LSTM" else zero, xs)[1]

    return {
        OURS: Way(ours, lambda layer, x: layer(x)[0], x),
        EQUINOX: Way(theirs, lambda cell, x: jax.vmap(partial(scan, cell))(x), x),
        NNX: Way(nnx.RNN(cell, rngs=nnx.Rngs(0)), lambda layer, x: layer(x), x),
    }


def attention(batch: int, length: int, causal: bool) -> dict[str, Way]:
    """Multi-head self-attention, with its projections."""
    features = HEADS * SIZE
    weights = draw(*[(features, features)] * 4, dtype=HALF)
    x = numbers(batch, length, features, dtype=HALF)

    def where(layer: Any) -> list[Any]:
        layers = layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj
        return [layer.weight for layer in layers]

    key = jax.random.key(0)
    ours = nn.MultiheadAttention(HEADS, features, dtype=HALF, key=key)
    ours = vernal.tree_at(where, ours, weights)
    theirs = eqx.nn.MultiheadAttention(HEADS, features, dtype=HALF, key=key)
    theirs = eqx.tree_at(where, theirs, weights)
    flax = nnx.MultiHeadAttention(
        HEADS,
        features,
        dtype=HALF,
        param_dtype=HALF,
        use_bias=False,
        decode=False,
        rngs=nnx.Rngs(0),
    )
    for part, weight in zip((flax.query, flax.key, flax.value), weights, strict=False):
        part.kernel[...] = weight.T.reshape(features, HEADS, SIZE)
    flax.out.kernel[...] = weights[3].T.reshape(HEADS, SIZE, features)

    def equinox(layer: Any, x: jax.Array) -> jax.Array:
        mask = jnp.tril(jnp.ones((length, length), bool)) if causal else None
        return jax.vmap(lambda x: layer(x, x, x, mask))(x)

    return {
        OURS: Way(ours, lambda layer, x: layer(x, x, x, causal=causal), x),
        EQUINOX: Way(theirs, equinox, x),
        NNX: Way(flax, lambda layer, x: layer(x, is_causal=causal), x),
    }


def convolution(stride: int, groups: int) -> dict[str, Way]:
    """3x3, 64 channels in and out, 32x32 pixels."""
    channels = 64
    weight, bias = draw((channels, channels // groups, 3, 3), (channels,))
    x = numbers(256 if GPU else 32, channels, 32, 32)
    key, settings = jax.random.key(0), {"stride": stride, "padding": 1, "groups": groups}

    def where(layer: Any) -> list[Any]:
        return [layer.weight, layer.bias]

    values = [weight, bias.reshape(channels, 1, 1)]
    ours = nn.Conv2d(channels, channels, 3, **settings, key=key)
    theirs = eqx.nn.Conv2d(channels, channels, 3, **settings, key=key)
    flax = nnx.Conv(
        *(channels, channels, (3, 3), stride),
        padding=1,
        feature_group_count=groups,
        rngs=nnx.Rngs(0),
    )
    flax.kernel[...], flax.bias[...] = jnp.transpose(weight, (2, 3, 1, 0)), bias

    def channels_first(layer: Any, x: jax.Array) -> jax.Array:
        return jnp.transpose(layer(jnp.transpose(x, (0, 2, 3, 1))), (0, 3, 1, 2))

    return {
        OURS: Way(vernal.tree_at(where, ours, values), lambda layer, x: layer(x), x),
        EQUINOX: Way(eqx.tree_at(where, theirs, values), lambda layer, x: jax.vmap(layer)(x), x),
        NNX: Way(flax, channels_first, x),
    }


def loss(call: Callable[..., jax.Array], layer: Any, x: jax.Array) -> jax.Array:
    """A number of which every output is a part, whatever its layout."""
    return jnp.mean(jnp.square(call(layer, x).astype(jnp.float32)))


def gradient(name: str, call: Callable[..., jax.Array]) -> Callable[[Any, jax.Array], Any]:
    """The loss and its gradients for weights and input, as the library takes them."""
    if name == NNX:
        return nnx.value_and_grad(partial(loss, call), argnums=(0, 1))
    library = vernal if name == OURS else eqx
    of_both = library.filter_value_and_grad(lambda both: loss(call, *both))
    return lambda layer, x: of_both((layer, x))


def compiled(name: str, way: Way, backward: bool) -> Callable[[], Any]:
    """One call on the batch: the outputs, or the loss and its gradients."""
    jit = {OURS: vernal.filter_jit, EQUINOX: eqx.filter_jit, NNX: nnx.jit}[name]
    fn = jit(gradient(name, way.call) if backward else way.call)
    return lambda: jax.block_until_ready(fn(way.layer, way.x))


def seconds(fn: Callable[[], Any]) -> float:
    """How long a call takes: on a CPU the time of the processor, all threads together, which other programs on the
    machine do not lengthen by taking it away."""
    clock = time.perf_counter if GPU else time.process_time
    start = clock()
    fn()
    return clock() - start


def check(case: Case, results: list[Any]) -> None:
    """All compute the same: the size of the outputs, or the loss and the size of the gradient for the input."""
    leaves = [jax.tree.leaves(result) for result in results]
    for end in (0, -1):
        sizes = [float(jnp.linalg.norm(found[end].astype(jnp.float32))) for found in leaves]
        tolerance = 3e-2 if leaves[0][end].dtype == jnp.bfloat16 else 1e-3
        assert all(abs(size / sizes[0] - 1) < tolerance for size in sizes), (case.name, sizes)


def measure(case: Case) -> dict[str, Result]:
    """All libraries in turns, for about as long as is set above: the shortest times."""
    ways = case.ways()
    fns = {name: compiled(name, way, case.backward) for name, way in ways.items()}
    first = {name: seconds(fn) for name, fn in fns.items()}
    check(case, [fn() for fn in fns.values()])
    once = sum(map(seconds, fns.values()))
    rounds = min(max(int(SECONDS / once), MIN_ROUNDS), MAX_ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in fns}
    names = list(fns)
    gc.collect()
    for i in range(rounds):
        # Every round begins with another one: what comes after a slow call may find its time slice used up.
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            times[name].append(seconds(fns[name]))
    return {name: Result(min(times[name]), first[name]) for name in fns}


def cases() -> list[Case]:
    found = []
    for kind in ("LSTM", "GRU"):
        for features in (512, 1024) if GPU else (128, 256):
            for backward in (False, True):
                name = f"{kind}, {features} features"
                long = features == 256 and backward
                found.append(Case(name, partial(recurrent, kind, features), backward, long))
    for length, batch in ((128, 4), (512, 2), (1024, 1), (4096, 1)):
        for causal in (False, True):
            for backward in (False, True):
                name = f"attention, T = {length}{', causal' if causal else ''}"
                make = partial(attention, batch * (8 if GPU else 1), length, causal)
                found.append(Case(name, make, backward, length > 1024))
    for name, stride, groups in (("", 1, 1), (", stride 2", 2, 1), (", depthwise", 1, 64)):
        make = partial(convolution, stride, groups)
        found += [Case(f"convolution 3x3{name}", make, backward) for backward in (False, True)]
    return found


def times(chosen: list[Case]) -> list[str]:
    """The table of times. Returns what is missed."""
    print("| | | Vernal, ms | Equinox, ms | Flax NNX, ms | time | bar | | first call |")
    print("|---" * 9 + "|")
    missed = []
    for case in chosen:
        results = measure(case)
        mine, *others = (results[name] for name in (OURS, EQUINOX, NNX))
        ratio = mine.call / min(other.call for other in others)
        first = mine.first / min(other.first for other in others)
        cells = " | ".join(f"{result.call * 1e3:.2f}" for result in (mine, *others))
        what = "forward, backward" if case.backward else "forward"
        met = "ok" if ratio <= BAR else "MISS"
        print(
            f"| {case.name} | {what} | {cells} | {ratio:.2f} | {BAR} | {met} | {first:.2f} |",
            flush=True,
        )
        if ratio > BAR:
            missed.append(f"{case.name}, {what}: time {ratio:.2f} > {BAR}")
    return missed


def temporary_memory(name: str, way: Way) -> int:
    """Of the gradient, in bytes, as XLA plans it. Nothing is run."""
    fn = gradient(name, way.call)
    x = jax.ShapeDtypeStruct(way.x.shape, way.x.dtype)
    if name == NNX:
        graph, arrays = nnx.split(way.layer)
        program = jax.jit(lambda arrays, x: fn(nnx.merge(graph, arrays), x))
    else:
        arrays, rest = eqx.partition(way.layer, eqx.is_array)
        program = jax.jit(lambda arrays, x: fn(eqx.combine(arrays, rest), x))
    return program.lower(arrays, x).compile().memory_analysis().temp_size_in_bytes


def memory(lengths: tuple[int, ...]) -> list[str]:
    """The table of temporary memory. Returns what is missed."""
    print("\nTemporary memory of the gradient of causal attention, one sequence, in MB\n")
    print(f"| | {' | '.join(f'T = {length:,}' for length in lengths)} |")
    print("|---" * (len(lengths) + 1) + "|")
    used: dict[str, list[float]] = {name: [] for name in (OURS, EQUINOX, NNX)}
    for length in lengths:
        for name, way in attention(1, length, True).items():
            used[name].append(temporary_memory(name, way) / 1e6)
    for name, sizes in used.items():
        print(f"| {name} | {' | '.join(f'{size:,.0f}' for size in sizes)} |")
    missed = []
    for length, *sizes in zip(lengths, *used.values(), strict=True):
        if sizes[0] > min(sizes[1:]):
            missed.append(f"T = {length}: {sizes[0]:,.0f} MB > {min(sizes[1:]):,.0f} MB")
    growth = used[OURS][-1] / used[OURS][0] / (lengths[-1] / lengths[0])
    print(f"\nfrom the shortest to the longest: {growth:.2f} times as much for a token")
    if growth > GROWTH_BAR:
        missed.append(f"memory for a token grows {growth:.2f} times > {GROWTH_BAR}")
    return missed


def main() -> int:
    quick = "--quick" in sys.argv
    device = jax.devices()[0].device_kind if GPU else "CPU"
    print(
        f"\nLayers (JAX {jax.__version__}, {device}): milliseconds, and our time and first call "
        "(with tracing and compiling)\nover those of the faster of the two others; the shortest of each\n"
    )
    missed = times([case for case in cases() if not (quick and case.long)])
    missed += memory(LENGTHS[:3] if quick else LENGTHS)
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
