"""Attention in memory that grows with the length, not with its square.

There is one score for each pair of a query and a key, the derivative needs all of them again, and they do not fit in
memory. So (M. Rabe & C. Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682; T. Dao et al.,
"FlashAttention", arXiv:2205.14135) the queries are split into blocks, and a loop computes one block after another under
`jax.checkpoint`. Only the scores of one block are alive at any time, in the forward pass and in the backward pass,
which recomputes them.

A block has all the keys that its queries can see, so each softmax is complete: unlike blocks of keys, it needs no
rescaling and no wider accumulator in the carry. The more keys, the fewer queries in a block (`block_rows`): its number
of scores stays constant, and small enough for a processor's cache, which is also faster than all scores at once.

Keys that no query of a block can see are left out where the positions are known (`offset`):

* causal: consecutive blocks form a few groups, each with its own loop over the keys up to its last query. Two groups do
  3/4 of the work of all pairs, four do 5/8, and the limit is 1/2. But every group is compiled separately, so there are
  more than two only where each has many blocks.
* window: each block takes a slice of the keys, of constant length, that moves with it.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ._attention_mask import Pairs, Sizes
from ._dense_attention import dense

_MOST_GROUPS, _BLOCKS_OF_A_GROUP = 4, 4
_SMALLEST_BLOCK = 64
"""So many rows keep a matrix product efficient, however many keys there are."""


def block_rows(sizes: Sizes, window: int | None) -> int:
    """The number of queries in one block: as many as have about two million scores (8 MiB of cache) in all heads of the
    whole batch; more on accelerators, which need more work at a time."""
    area = 2**21 if jax.default_backend() == "cpu" else 2**25
    seen = (
        sizes.keys
        if window is None or not isinstance(sizes.keys, int)
        else min(sizes.keys, 2 * window)
    )
    # Symbolic sizes, in a program for export, are unknown here: they count as one.
    others = math.prod(n for n in (*sizes.batch, sizes.heads, seen) if isinstance(n, int))
    return max(_SMALLEST_BLOCK, area // max(others, 1))


def blockwise(
    query: Array,
    keys: Array,
    values: Array,
    pairs: Pairs,
    scale: ArrayLike,
    rows: int,
    offset: int | None,
) -> Array:
    """`dense`, with the scores of one block of at most `rows` queries at a time.

    Args:
        query: as for `dense`, as are all arguments not listed here.
        rows: the maximal number of queries in a block.
        offset: if the positions of queries and of keys have no gaps, the index of the key at the position of the first
            query, which tells which pairs are far apart; else None.
    """
    length = query.shape[-2]
    if not length:
        return dense(query, keys, values, pairs, scale)
    n = -(-length // rows)
    rows = -(-length // n)
    # Rows are added at the end to make the blocks equal; their results are cut off.
    query = _with_rows(query, n * rows)
    parts, structure = jax.tree.flatten(pairs)
    parts = [_with_rows(a, n * rows) if a.shape[-2] > 1 else a for a in parts]
    n_groups = 1
    if offset is not None and pairs.causal and pairs.window is None:
        n_groups = min(n, max(2, min(n // _BLOCKS_OF_A_GROUP, _MOST_GROUPS)))
    borders = [n * i // n_groups for i in range(n_groups + 1)]
    out = []
    for first, last in zip(borders[:-1], borders[1:], strict=True):
        at = slice(first * rows, last * rows)
        seen = keys.shape[-2]
        if offset is not None and pairs.causal:
            seen = min(seen, offset + last * rows)
        here = [a[..., at, :] if a.shape[-2] > 1 else a for a in parts]
        here = [a[..., :seen] if a.shape[-1] > 1 else a for a in here]
        group = query[..., at, :], keys[..., :seen, :], values[..., :seen, :]
        out.append(_loop(*group, structure.unflatten(here), scale, rows, offset))
    return jnp.concatenate(out, axis=-2)[..., :length, :]


def _with_rows(a: Array, rows: int) -> Array:
    missing = rows - a.shape[-2]
    if not missing:
        return a
    return jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, missing), (0, 0)])


def _loop(
    query: Array,
    keys: Array,
    values: Array,
    pairs: Pairs,
    scale: ArrayLike,
    rows: int,
    offset: int | None,
) -> Array:
    """The loop over one group of blocks."""
    n = query.shape[-2] // rows
    parts, structure = jax.tree.flatten(pairs)
    by_block = [_blocks(a, n) if a.shape[-2] > 1 else None for a in parts]

    def block(_: None, x: tuple[Array, list[Array | None], Array]) -> tuple[None, Array]:
        query, here, index = x
        here = [a if b is None else b for a, b in zip(parts, here, strict=True)]
        around = keys, values, here
        if offset is not None and pairs.window is not None:
            around = _near(keys, values, here, offset + index * rows, rows, pairs)
        near_keys, near_values, here = around
        return None, dense(query, near_keys, near_values, structure.unflatten(here), scale)

    # The scan itself keeps XLA from merging the forward pass with its recomputation, so no barriers are needed.
    block = jax.checkpoint(block, prevent_cse=False)
    _, out = lax.scan(block, None, (_blocks(query, n), by_block, jnp.arange(n, dtype=jnp.int32)))
    out = jnp.moveaxis(out, 0, -3)
    return out.reshape((*out.shape[:-3], n * rows, out.shape[-1]))


def _blocks(a: Array, n: int) -> Array:
    """`n` blocks of rows, along a new first axis."""
    a = a.reshape((*a.shape[:-2], n, a.shape[-2] // n, a.shape[-1]))
    return jnp.moveaxis(a, -3, 0)


def _near(
    keys: Array, values: Array, parts: list[Array], first: Array, rows: int, pairs: Pairs
) -> tuple[Array, Array, list[Array]]:
    """The keys, values and parts within the window of `rows` queries, the first of which is at the position of the key
    `first`."""
    assert pairs.window is not None
    total, reach = keys.shape[-2], pairs.window - 1
    length = min(total, rows + (reach if pairs.causal else 2 * reach))
    start = jnp.clip(first - reach, 0, total - length)

    def take(a: Array, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(a, start, length, axis)

    # An axis of size 1 stands for all keys, unless there is only one.
    parts = [take(a, a.ndim - 1) if a.shape[-1] == total else a for a in parts]
    return take(keys, keys.ndim - 2), take(values, values.ndim - 2), parts
