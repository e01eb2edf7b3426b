"""Attention on an accelerator: where the fused kernel is chosen, how exact it is, and what memory a gradient takes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vernal import nn

HEADS, GROUPS, SIZE = 8, 2, 64
LENGTHS = (1024, 4096, 16384)
# Of bfloat16: the largest difference from float32, over the largest entry.
TOLERANCE = 3e-2
# From 4 times as long a sequence to the next, of the memory for a token.
GROWTH = 1.3
KERNEL = "__cudnn$fmha"


class Case(NamedTuple):
    """A call, and whether the fused kernel must compute it where there is one."""

    name: str
    fused: bool
    dtype: Any = jnp.bfloat16
    groups: int = HEADS
    causal: bool = False
    window: int | None = None
    mask: tuple[int, ...] | None = None
    segments: bool = False


CASES = [
    Case("every key", True),
    Case("causal", True, causal=True),
    Case("causal, float16", True, jnp.float16, causal=True),
    Case("causal, grouped heads", True, groups=GROUPS, causal=True),
    Case("causal, window", True, causal=True, window=100),
    Case("mask of the keys", True, mask=(2, 1, 1, -1)),
    Case("mask of all pairs, grouped heads", True, groups=GROUPS, mask=(-1, -1)),
    Case("mask for each head, causal", True, causal=True, mask=(2, HEADS, -1, -1)),
    Case("segments", False, causal=True, segments=True),
    Case("float32", False, jnp.float32, causal=True),
]


def arguments(case: Case, length: int) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Queries, keys and values of two examples in float32, and the conditions. Some queries see no key."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, heads, SIZE) for heads in (HEADS, case.groups, case.groups)]
    operands = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    conditions: dict[str, Any] = {"causal": case.causal, "window": case.window}
    if case.mask is not None:
        mask = rng.random([length if n < 0 else n for n in case.mask]) < 0.5
        if mask.shape[-2] == length:
            mask[..., ::7, :] = False
        conditions["mask"] = jnp.asarray(mask)
    if case.segments:
        conditions["segments"] = jnp.asarray(np.arange(length) // 50)
    return operands, conditions


def loss(operands: Any, conditions: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    y = nn.attention(*operands, **conditions, **options).astype(jnp.float32)
    return jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))), y


def error(a: jax.Array, b: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def compare(case: Case, length: int) -> tuple[bool, float]:
    """Whether the fused kernel computes the gradient, and how far it is from float32 with all scores at once."""
    operands, conditions = arguments(case, length)
    rounded = tuple(x.astype(case.dtype) for x in operands)
    static = {name: conditions.pop(name) for name in ("causal", "window")}

    def both(operands: Any, conditions: Any, **options: Any) -> Any:
        return jax.value_and_grad(lambda o: loss(o, static | conditions, **options), has_aux=True)(
            operands
        )

    program = jax.jit(both).lower(rounded, conditions).compile()
    (_, y), slopes = program(rounded, conditions)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(lambda o, c: both(o, c, implementation="dense"))
        (_, expected), exact_slopes = exact(
            tuple(x.astype(jnp.float32) for x in rounded), conditions
        )
    pairs = zip([y, *slopes], [expected, *exact_slopes], strict=True)
    return KERNEL in program.as_text(), max(error(a, b) for a, b in pairs)


def temporary_memory(length: int, dtype: Any) -> int:
    """Of the gradient of causal self-attention for one sequence, in bytes, as XLA plans it. Nothing is run."""
    x = jax.ShapeDtypeStruct((1, length, HEADS, SIZE), dtype)
    program = jax.jit(jax.grad(lambda o: loss(o, {"causal": True})[0])).lower((x, x, x)).compile()
    return program.memory_analysis().temp_size_in_bytes


def table(device: jax.Device, cases: list[Case], length: int) -> Iterator[tuple[str, list[str]]]:
    yield "| gradient of attention | fused kernel | error |\n|---|---|---|", []
    for case in cases:
        fused, found = compare(case, length)
        wrong = []
        if device.platform == "gpu" and fused != case.fused:
            wrong.append(f"attention, {case.name}: the fused kernel is{' not' * case.fused} used")
        if not found <= TOLERANCE:
            wrong.append(f"attention, {case.name}: error {found:.1e} > {TOLERANCE}")
        yield f"| {case.name} | {'yes' if fused else 'no'} | {found:.1e} |", wrong


def memory(lengths: tuple[int, ...]) -> Iterator[tuple[str, list[str]]]:
    yield f"\n| temporary memory, MB | {' | '.join(map(str, lengths))} |", []
    yield "|---" * (len(lengths) + 1) + "|", []
    for dtype in (jnp.bfloat16, jnp.float32):
        used = [temporary_memory(length, dtype) for length in lengths]
        growth = used[-1] / used[0] / (lengths[-1] / lengths[0])
        wrong = f"attention: memory for a token grows {growth:.2f} times > {GROWTH}"
        cells = " | ".join(f"{size / 1e6:,.0f}" for size in used)
        name = f"{jnp.dtype(dtype).name}, gradient of causal attention"
        yield f"| {name} | {cells} |", [wrong] if growth > GROWTH else []


def run(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    yield from table(device, CASES[::4] if smoke else CASES, 64 if smoke else 512)
    yield from memory(LENGTHS[:2] if smoke else LENGTHS)
