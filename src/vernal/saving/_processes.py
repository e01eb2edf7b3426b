"""Several processes that save and load together.

Every process runs the same program, so all of them call each of these functions, in the same order
and from the main thread: they wait for one another. With one process they cost nothing, and do not
even start JAX's backends.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from .._ground import announce_joint_work, by_data
from ..show import listed, message, shown_name, value_error


def process_count() -> int:
    """How many processes there are."""
    # There are several only with `jax.distributed`. Asking JAX for the number starts its backends.
    return jax.process_count() if jax.distributed.is_initialized() else 1


def process_index() -> int:
    """The index of this process. The first, 0, writes what is written once."""
    return jax.process_index() if process_count() > 1 else 0


def _of_all(array: np.ndarray) -> np.ndarray:
    """The arrays of all processes, stacked."""
    announce_joint_work()
    return np.asarray(multihost_utils.process_allgather(array))


def agree(error: BaseException | None) -> None:
    """Raises in every process if one of them failed: its own error there, a `RuntimeError` in the others."""
    failed: list[int] = []
    if process_count() > 1:
        failed = np.flatnonzero(_of_all(np.array([error is not None]))).tolist()
    if error is not None:
        raise error
    if failed:
        raise RuntimeError(
            message(
                "another process failed to save or load a checkpoint",
                where=f"process {', '.join(map(str, failed))}",
                instead="read the error of that process",
            )
        )


def from_first(make: Callable[[], Any]) -> Any:
    """Calls a function in the first process only, and returns its result, which must be JSON, in all of them."""
    result, error = None, None
    if process_index() == 0:
        try:
            result = make()
        except BaseException as caught:
            error = caught
    agree(error)
    if process_count() == 1:
        return result
    text = np.frombuffer(json.dumps(result).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    if text.size != size:
        text = np.zeros(size, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text)).tobytes())


def is_local(leaf: Any) -> bool:
    """Whether the leaf is whole in this process, so that every process has its own."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def gathered(leaf: Any) -> Any:
    """The leaf in a form whose elements every process can read."""
    if is_local(leaf) or leaf.is_fully_replicated:
        return leaf
    return by_data(lambda x: multihost_utils.process_allgather(x, tiled=True), leaf)


def check_step(step: int) -> None:
    """Refuses, in every process, steps that differ between processes: only that of one would be used."""
    if process_count() == 1:
        return
    # Without x64, JAX has no wider integers.
    halves = np.array([step >> 32, step & 0xFFFFFFFF], np.uint32)
    every = _of_all(halves).astype(np.uint64)
    steps = (every[:, 0] << np.uint64(32)) + every[:, 1]
    if (steps != steps[0]).any():
        raise value_error(
            "the processes save different steps as one checkpoint",
            where="Checkpoints.save(step, tree)",
            expected="the same step in every process",
            got=", ".join(f"process {rank}: {one}" for rank, one in enumerate(steps)),
            instead="give every process the same number of batches: vernal.sharding.even_batches",
        )


def _form(leaf: Any) -> str:
    dtype = getattr(leaf, "dtype", type(leaf).__name__)
    return f"{dtype}{[*np.shape(leaf)]}" + ("" if is_local(leaf) else " of all processes")


def check_alike(leaves: Mapping[str, Any]) -> None:
    """Refuses, in every process, leaves of other names, shapes or dtypes, for which processes would wait in vain."""
    if process_count() == 1:
        return
    mine = {name: _form(leaf) for name, leaf in leaves.items()}
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    said = _of_all(np.array([text.size, zlib.crc32(text.data)], np.uint32))
    if (said == said[0]).all():
        return
    padded = _of_all(np.pad(text, (0, int(said[:, 0].max()) - text.size)))
    every = [json.loads(row[:size].tobytes()) for row, size in zip(padded, said[:, 0], strict=True)]
    names = dict.fromkeys(name for one in every for name in one)
    differ = [name for name in names if len({one.get(name) for one in every}) > 1]
    if differ:
        rows = [
            f"process {rank}: {listed([f'{n} {one.get(n)}' for n in differ if n in one]) or 'none'}"
            for rank, one in enumerate(every)
        ]
        raise value_error(
            "the processes save different leaves as one checkpoint",
            where=listed(map(shown_name, differ)),
            expected="a tree of the same names, shapes and dtypes in every process",
            got=listed(rows, "\n"),
            instead="make the same model and state in every process",
        )
    raise value_error(
        "the processes save the same leaves in different orders",
        where="Checkpoints.save(step, tree)",
        expected="the same order of the leaves in every process",
        got=listed([f"process {rank}: {', '.join(one)}" for rank, one in enumerate(every)], "\n"),
        instead="insert the keys of dictionaries in one order",
    )


def check_same(arrays: Mapping[str, np.ndarray]) -> None:
    """Refuses, in every process, arrays that differ between processes: only those of one are written."""
    if process_count() == 1 or not arrays:
        return
    sums = [zlib.crc32(array.reshape(-1).view(np.uint8).data) for array in arrays.values()]
    every = _of_all(np.array(sums, np.uint32))
    differ = (every != every[:1]).any(axis=0)
    if differ.any():
        names = [name for name, one in zip(arrays, differ, strict=True) if one]
        raise value_error(
            "leaves differ between the processes, and only those of one would be saved",
            where=", ".join(names),
            expected="the same values everywhere, or one array that is spread over all devices",
            instead="gather them first: jax.experimental.multihost_utils.process_allgather",
        )
