"""Attention in memory that grows with the length, not with its square.

The difficulty: there is one score for each pair of a query and a key, the derivative needs all of them again, and they
do not fit. The plan (M. Rabe & C. Staats, "Self-attention Does Not Need O(n^2) Memory", arXiv:2112.05682; T. Dao et
al., "FlashAttention", arXiv:2205.14135): the queries are cut into blocks, and a loop treats one after another under
`jax.checkpoint`, so that the scores of one block only are alive at any time, forward and backward, where they are
computed anew.

A block has all the keys that its queries can see, so each softmax is whole: there is nothing to rescale as there is
with blocks of keys, and no wider accumulator to carry. The blocks get lower as the keys get more (`block_rows`), which
keeps their area constant, and small enough for a processor's cache: this is also faster than all scores at once.

Keys that no query of a block can see are left out where it is known which position is where (`offset`):

* causal: the blocks are dealt into a few groups one after the other, each with a loop of its own over the keys up to
  its last query. Two groups are 3/4 of the work of all pairs, four are 5/8, and the least is 1/2. But every group is
  compiled by itself, so there are more than two only where each has many blocks.
* a window: each block takes a slice of the keys, of constant length, that moves with it.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._attention_mask import Pairs, Sizes
from ._dense_attention import dense

_MOST_GROUPS, _BLOCKS_OF_A_GROUP = 4, 4
_SMALLEST_BLOCK = 64
"""So many rows keep a matrix product efficient, however many keys there are."""


def block_rows(sizes: Sizes, window: int | None) -> int:
    """How many queries make one block: as many as have about two million scores (8 MiB of cache) in all heads of the
    whole batch; more on accelerators, which need more work at a time."""
    area = 2**21 if jax.default_backend() == "cpu" else 2**25
    seen = (
        sizes.keys
        if window is None or not isinstance(sizes.keys, int)
        else min(sizes.keys, 2 * window)
    )
    # Symbolic sizes, of a program for export, are not known here: they count as one.
    others = math.prod(n for n in (*sizes.batch, sizes.heads, seen) if isinstance(n, int))
    return max(_SMALLEST_BLOCK, area // max(others, 1))


def blockwise(
    query: Array,
    keys: Array,
    values: Array,
    pairs: Pairs,
    scale: float,
    rows: int,
    offset: int | None,
) -> Array:
    """`dense`, with the scores of one block of at most `rows` queries at a time.

    Args:
        query: as for `dense`, and so are all that are not named here.
        rows: how many queries are in a block, at most.
        offset: if queries and keys are at positions without gaps, the index of the key at the position of the first
            query, so that it is known which are far apart. None if they are not.
    """
    length = query.shape[-2]
    if not length:
        return dense(query, keys, values, pairs, scale)
    n = -(-length // rows)
    rows = -(-length // n)
    # Rows are added at the end to make the blocks equal; what comes out of them is cut off.
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
    scale: float,
    rows: int,
    offset: int | None,
) -> Array:
    """One group of blocks: the loop over them."""
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

    # The scan itself keeps the forward pass from being merged with its repetition, so no barriers are needed.
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
    """The keys within the window of `rows` queries, the first of which is at the position of the key `first`; and what
    belongs to them."""
    assert pairs.window is not None
    total, reach = keys.shape[-2], pairs.window - 1
    length = min(total, rows + (reach if pairs.causal else 2 * reach))
    start = jnp.clip(first - reach, 0, total - length)

    def take(a: Array, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(a, start, length, axis)

    # An axis of size 1 stands for all keys, unless there is only one.
    parts = [take(a, a.ndim - 1) if a.shape[-1] == total else a for a in parts]
    return take(keys, keys.ndim - 2), take(values, values.ndim - 2), parts
