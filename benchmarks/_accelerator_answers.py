"""Whether an accelerator gives the CPU's answers: every layer, loop, operation, check and estimator, with gradients.

The rows are those of the tests' tables (`tests/sharding`), which refuse a public name without a row. Each is computed
by one program on the CPU and one on the accelerator, from the same arrays and random keys.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import vernal
from tests.sharding._same import Computation, derivatives
from tests.sharding.test_layers_on_a_mesh import CASES
from tests.sharding.test_operations_on_a_mesh import ESTIMATES, OPERATIONS, computation
from vernal import loops, nn, runtime, saving


class Group(NamedTuple):
    """Rows with one tolerance: of the largest difference, over the largest entry of the array.

    Attributes:
        name: as the table calls it.
        rows: what makes the computation of each name.
        precision: of products of float32; "default" may be 10 bits of mantissa, on an accelerator.
        tolerance: as above.
    """

    name: str
    rows: dict[str, Callable[[str], Computation]]
    precision: str
    tolerance: float


GROUPS = [
    Group("layers", CASES, "highest", 1e-4),
    Group("loops, checks and operations", dict.fromkeys(OPERATIONS, computation), "highest", 1e-4),
    Group("estimators", dict.fromkeys(ESTIMATES, computation), "highest", 1e-3),
    Group("layers, default precision", CASES, "default", 2e-2),
]


# Trying out the fastest way for each product takes longer than all else, and says nothing of answers.
OPTIONS = {"gpu": {"xla_gpu_autotune_level": 0}}


def on(device: jax.Device, row: Computation) -> Any:
    """The results and gradients of a computation, on one device, as NumPy arrays."""
    with jax.default_device(device):
        given = jax.device_put((row.model, row.xs), device)
        compiled = jax.jit(derivatives(row.run), compiler_options=OPTIONS.get(device.platform))
        return jax.device_get(compiled(*given))


def difference(a: Any, b: Any) -> float:
    """The largest over the arrays of two results; infinite where shapes, dtypes or what is not finite differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if not a.size:
        return 0.0
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0 if np.array_equal(a, b) else math.inf
    a, b = (x.astype(np.complex128 if np.iscomplexobj(x) else np.float64) for x in (a, b))
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return math.inf
    a, b = np.nan_to_num(a), np.nan_to_num(b)
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-6))


def compare(group: Group, device: jax.Device, name: str) -> float | str:
    """How far the accelerator is from the CPU; or what it raised."""
    try:
        row = group.rows[name](name)
        with jax.default_matmul_precision(group.precision):
            found = jax.tree.leaves(on(device, row))
        with jax.default_matmul_precision("highest"):
            expected = jax.tree.leaves(on(jax.devices("cpu")[0], row))
        return max(difference(a, b) for a, b in zip(found, expected, strict=True))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def answers(device: jax.Device, every: int) -> Iterator[tuple[str, list[str]]]:
    """The rows of the table, and what is wrong. `every`: only each that many-th row is computed."""
    yield "| | compared | worst | | tolerance |\n|---|---|---|---|---|", []
    for group in GROUPS:
        names = list(group.rows)[::every]
        # Compiling does not hold Python's lock: most of the time is spent there.
        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(partial(compare, group, device), names))
        numbers = {n: x for n, x in zip(names, found, strict=True) if not isinstance(x, str)}
        worst = max(numbers, key=lambda name: numbers[name], default="")
        wrong = [
            f"{group.name}, {name}: {x}"
            for name, x in zip(names, found, strict=True)
            if isinstance(x, str) or not x <= group.tolerance
        ]
        cells = f"{numbers[worst]:.1e} | {worst}" if numbers else " | "
        yield f"| {group.name} | {len(names)} | {cells} | {group.tolerance:.0e} |", wrong


def raised(call: Callable[[], Any]) -> str:
    try:
        jax.block_until_ready(call())
    except RuntimeError as error:
        return str(error)
    return ""


def checks_raise() -> list[str]:
    """Checks stop a program that runs on the accelerator. Returns those that do not."""

    def checked(x: jax.Array) -> jax.Array:
        return runtime.error_if(x, x > 2, "x is too large")

    def scanned(x: jax.Array) -> Any:
        return loops.scan(lambda x, _: (checked(x + 1), x), x, None, length=3)

    calls = {
        "error_if": lambda: vernal.filter_jit(checked)(jnp.float32(3)),
        "error_if in a scan": lambda: vernal.filter_jit(scanned)(jnp.float32(1)),
        "error_if under vmap": lambda: vernal.filter_jit(jax.vmap(checked))(jnp.arange(4.0)),
        "error_if in a gradient": lambda: jax.jit(jax.value_and_grad(checked))(jnp.float32(3)),
    }
    return [name for name, call in calls.items() if "x is too large" not in raised(call)]


def some_model(seed: int) -> Any:
    key = jax.random.key(seed)
    dtypes = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.uint32, jnp.bool_, jnp.complex64
    arrays = [jax.random.normal(key, (5, 3)).astype(dtype) for dtype in dtypes]
    return nn.MLP(5, 3, 7, depth=2, activation=jnp.tanh, key=key), nn.BatchNorm(4), arrays


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.device_get(jax.tree.leaves(tree))]


FORMATS = {
    "save and load": (saving.save, saving.load),
    "tree_serialise_leaves and tree_deserialise_leaves": (
        saving.tree_serialise_leaves,
        saving.tree_deserialise_leaves,
    ),
}


def files_agree(device: jax.Device) -> list[str]:
    """A model saved on one device is the same to the bit on the other. Returns where it is not."""
    cpu, wrong = jax.devices("cpu")[0], []
    for source, target in ((device, cpu), (cpu, device)):
        for name, (save, load) in FORMATS.items():
            where = f"{name}, from {source.platform} to {target.platform}"
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "model"
                with jax.default_device(source):
                    saved = some_model(0)
                    save(path, saved)
                with jax.default_device(target):
                    loaded = load(path, some_model(1))
            if bits(loaded) != bits(saved):
                wrong.append(f"{where}: other bits")
            found = {d.platform for x in jax.tree.leaves(loaded) for d in x.devices()}
            if found != {target.platform}:
                wrong.append(f"{where}: loaded to {found}")
    return wrong


def run(device: jax.Device, smoke: bool) -> Iterator[tuple[str, list[str]]]:
    silent, unequal = checks_raise(), files_agree(device)
    wrong = [f"a check does not raise: {name}" for name in silent]
    wrong += [f"a file differs: {where}" for where in unequal]
    yield f"Checks that stop a compiled program: {4 - len(silent)} of 4.", wrong
    same = "no" if unequal else "all"
    yield f"Files that are the same to the bit on the other device: {same}.\n", []
    yield from answers(device, 12 if smoke else 1)
