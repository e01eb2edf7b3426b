"""`even_batches`: the end of an epoch, when some processes have more examples than others."""

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Literal, TypeVar

import jax.tree_util as jtu
import numpy as np
from jax import Array
from jax.sharding import Mesh

from ..show import listed, path_text, short, type_error, value_error
from ..trees import is_array
from ._agreement import over_processes
from ._place import shard_batch

T = TypeVar("T")
_WHERE = "even_batches(batches, mesh, axis, rows=...)"


def even_batches(
    batches: Iterable[T],
    mesh: Mesh,
    axis: str | tuple[str, ...],
    *,
    rows: int,
    steps: int | None = None,
    last: Literal["pad", "drop"] = "pad",
) -> Iterator[tuple[T, Array]]:
    """Shards the batches of an epoch over a mesh, with the same number and size of batches in every process.

    A batch with fewer than `rows` examples is padded with copies of its last one. A process that has no batches left
    repeats its last one, as padding. The mask says which examples are real: compute a mean over them as
    `jnp.sum(mask * losses) / jnp.sum(mask)`.

    Args:
        batches: the batches of this process: any trees, whose arrays have one example per row.
        mesh: see `make_mesh`.
        axis: as for `shard_batch`.
        rows: the number of examples of a process in each batch; a multiple of the number of its parts.
        steps: the number of batches of this process. Default: `len(batches)`.
        last: `"pad"` continues until every process is done; `"drop"` stops when the first is.

    Yields:
        `(batch, mask)`, sharded over the mesh. `mask` is a bool for each example of all processes.

    Raises:
        TypeError: if the number of batches is neither given nor known.
        ValueError: for a batch with more than `rows` examples, with none, or whose arrays differ in their number of
            examples; for a process without any batch, when others have some; and as for `shard_batch`.

    Example:
        >>> import numpy as np
        >>> from vernal.sharding import even_batches, make_mesh
        >>> mesh = make_mesh(data=1, devices=__import__("jax").devices()[:1])
        >>> data = [np.ones(4), np.ones(4), np.ones(1)]
        >>> [int(mask.sum()) for batch, mask in even_batches(data, mesh, "data", rows=4)]
        [4, 4, 1]
    """
    if steps is None and not isinstance(batches, Sized):
        raise type_error(
            "the number of batches is unknown",
            where=_WHERE,
            expected="`batches` with a length, or `steps`",
            got=short(batches),
            instead="even_batches(..., steps=n), where n is the number of batches of this process",
        )
    if last not in ("pad", "drop"):
        raise value_error(
            "unknown value of `last`", where=_WHERE, expected="'pad' or 'drop'", got=repr(last)
        )
    own = len(batches) if steps is None else steps  # pyright: ignore[reportArgumentType] (it is `Sized`)
    return _even(iter(batches), mesh, axis, rows, own, max if last == "pad" else min)


def _even(batches: Any, mesh: Mesh, axis: Any, rows: int, own: int, choose: Any) -> Iterator[Any]:
    total = choose(over_processes(mesh, own).values())
    batch, count = None, 0
    for step in range(total):
        new = next(batches, None) if step < own else None
        if new is not None:
            batch, count = _padded(new, rows)
        elif batch is not None:
            count = 0
        else:
            raise value_error(
                "this process has no batch, but others do",
                where=_WHERE,
                expected="at least one, whose copies are padding",
                got="none",
                instead="spread the examples over the processes, or last='drop'",
            )
        yield shard_batch((batch, np.arange(rows) < count), mesh, axis)


def _padded(batch: Any, rows: int) -> tuple[Any, int]:
    """A batch padded to `rows` rows, and how many of them are real."""
    found = [(path, x) for path, x in jtu.tree_leaves_with_path(batch) if is_array(x)]
    counts = {np.shape(x)[0] if np.ndim(x) else 0 for _, x in found}
    count = min(counts, default=0)
    if len(counts) != 1 or not 0 < count <= rows:
        raise value_error(
            "a batch cannot be padded",
            where=_WHERE,
            expected=f"arrays with the same number of rows, 1 to {rows}",
            got=listed([f"{path_text(path, 'batch')}, {short(x)}" for path, x in found], "\n")
            or "no array",
        )
    index: Any = np.minimum(np.arange(rows), count - 1)

    def pad(x: Any) -> Any:
        return x[index] if is_array(x) else x  # pyright: ignore[reportIndexIssue] (it has rows)

    return jtu.tree_map(pad, batch), count
