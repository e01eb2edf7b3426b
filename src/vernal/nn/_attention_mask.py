"""Which query sees which key: positions, segments, masks and biases in one form.

Attention is computed in the layout `(*batch, key/value heads, group, rows, features)`, where a group is the query heads
that share one key/value head. Every array over pairs of a query and a key has the axes
`(*batch, key/value heads, group, queries, keys)`, each of full size or 1. So a block of the pairs is a block of every
array, and no array of size queries x keys is made unless it was given.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..modules import Module, field
from ..show import short, type_error, value_error


class Pairs(Module):
    """The conditions on pairs of queries and keys, and the bias of their scores.

    Attributes:
        query_positions: with size 1 along the axis of keys; None if positions do not matter.
        key_positions: with size 1 along the axis of queries.
        query_segments: as the positions.
        key_segments: as the positions.
        mask: bools, True where a query sees a key.
        bias: numbers added to the scores.
        causal: whether a query sees only keys at its own position and before.
        window: a query sees only keys fewer than this many positions away; None for no limit.
        may_be_empty: whether key positions may be negative, for places that hold no key.
    """

    query_positions: Array | None
    key_positions: Array | None
    query_segments: Array | None
    key_segments: Array | None
    mask: Array | None
    bias: Array | None
    causal: bool = field(static=True)
    window: int | None = field(static=True)
    may_be_empty: bool = field(static=True)

    def visible(self) -> Array | None:
        """Which query sees which key; None if every query sees every key."""
        conditions = []
        query, key = self.query_positions, self.key_positions
        if query is not None and key is not None:
            if self.causal:
                conditions.append(query >= key)
            if self.window is not None:
                conditions.append(query - key < self.window)
                if not self.causal:
                    conditions.append(key - query < self.window)
            if self.may_be_empty:
                conditions.append(key >= 0)
        if self.query_segments is not None:
            conditions.append(self.query_segments == self.key_segments)
        if self.mask is not None:
            conditions.append(self.mask)
        if not conditions:
            return None
        seen = conditions[0]
        for condition in conditions[1:]:
            seen = jnp.logical_and(seen, condition)
        return seen


class Sizes(Module):
    """The sizes that the arrays of one attention share; symbolic in a program for export.

    Attributes:
        batch: the batch axes.
        queries: the number of queries.
        keys: the number of keys.
        key_value_heads: the number of key/value heads.
        group: the number of query heads that share one key/value head.
    """

    batch: tuple[Any, ...] = field(static=True)
    queries: Any = field(static=True)
    keys: Any = field(static=True)
    key_value_heads: int = field(static=True)
    group: int = field(static=True)

    @property
    def heads(self) -> int:
        """The number of query heads."""
        return self.key_value_heads * self.group


def _known_window(window: Any) -> int | None:
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int | np.integer):
        raise type_error(
            "`window` must be a Python int",
            where="argument `window`",
            expected="a number of positions, known while tracing",
            got=short(window),
            instead="mask=..., an array of bools, for a window that is computed",
        )
    if window < 1:
        raise value_error(
            "an attention window must hold at least the query's own position",
            where="argument `window`",
            expected="a number of positions, at least 1, or None",
            got=str(window),
        )
    return int(window)


def make_pairs(
    sizes: Sizes,
    *,
    causal: bool,
    window: Any,
    segments: Any,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    query_positions: ArrayLike | None,
    key_positions: ArrayLike | None,
) -> Pairs:
    """Checks these arguments of `vernal.nn.attention`, and converts them to `Pairs`."""
    window = _known_window(window)
    may_be_empty = key_positions is not None
    if causal or window is not None or may_be_empty:
        if query_positions is None:
            query_positions = _counted(sizes.queries)
        if key_positions is None:
            key_positions = _counted(sizes.keys)
        query_positions = _of_queries(sizes, "query_positions", query_positions)
        key_positions = _of_keys(sizes, "key_positions", key_positions)
    else:
        query_positions = key_positions = None
    query_segments, key_segments = _segments(sizes, segments)
    if mask is not None:
        mask = _of_pairs(sizes, "mask", mask)
        if mask.dtype != bool:
            raise value_error(
                "a mask must be an array of bools: True where a query sees a key",
                where="argument `mask`",
                expected="an array of bools",
                got=str(mask.dtype),
                instead="`bias=...` for numbers to add to the scores",
            )
    if bias is not None:
        bias = _of_pairs(sizes, "bias", bias)
        if bias.dtype == bool:
            raise value_error(
                "a bias must hold numbers to add to the scores, not bools",
                where="argument `bias`",
                expected="an array of numbers",
                got="bool",
                instead="`mask=...` to choose which query sees which key",
            )
    return Pairs(
        query_positions,
        key_positions,
        query_segments,
        key_segments,
        mask,
        bias,
        causal,
        window,
        may_be_empty,
    )


def _segments(sizes: Sizes, segments: Any) -> tuple[Array | None, Array | None]:
    if segments is None:
        return None, None
    both = segments if isinstance(segments, tuple) else (segments, segments)
    if len(both) != 2:
        raise value_error(
            "a tuple of segments must hold two arrays, for the queries and for the keys",
            where="argument `segments`",
            expected="one array for both, or a tuple (query_segments, key_segments)",
            got=f"a tuple of {len(both)}",
        )
    return _of_queries(sizes, "segments", both[0]), _of_keys(sizes, "segments", both[1])


def _counted(n: Any) -> ArrayLike:
    # NumPy cannot count to a symbolic size, in a program for export.
    return (np if isinstance(n, int) else jnp).arange(n, dtype=np.int32)


def _of_queries(sizes: Sizes, name: str, a: ArrayLike) -> Array:
    """One integer for each query, as a column."""
    return _line(sizes, name, a, ("queries", sizes.queries))[..., None]


def _of_keys(sizes: Sizes, name: str, a: ArrayLike) -> Array:
    """One integer for each key, as a row."""
    return _line(sizes, name, a, ("keys", sizes.keys))[..., None, :]


def _line(sizes: Sizes, name: str, a: ArrayLike, axis: tuple[str, Any]) -> Array:
    a = jnp.asarray(a)
    batch = len(sizes.batch)
    right = a.shape in ((axis[1],), (*sizes.batch, axis[1]))
    if not right or not jnp.issubdtype(a.dtype, jnp.integer):
        raise value_error(
            f"`{name}` must hold one integer for each of the {axis[0]}",
            where=f"argument `{name}`",
            expected=f"integers of shape ({axis[1]},) or {(*sizes.batch, axis[1])}",
            got=f"{a.dtype} of shape {a.shape}",
        )
    # The axes of key/value heads and of groups go between the batch and this axis.
    a = a.reshape((1,) * (batch + 1 - a.ndim) + a.shape)
    return a[..., None, None, :]


def _of_pairs(sizes: Sizes, name: str, a: ArrayLike) -> Array:
    """One number for each pair, with the axis of heads split in two."""
    a = jnp.asarray(a)
    full = (*sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    known = a.ndim in (2, 3, len(full))
    if not known or any(
        n not in (1, size) for n, size in zip(a.shape, full[-a.ndim :], strict=True)
    ):
        raise value_error(
            f"the {name} must have one entry for each pair of a query and a key",
            where=f"argument `{name}`",
            expected=f"shape {full[-2:]}, {full[-3:]} with one for each head, or {full}; "
            "any axis may have length 1",
            got=f"shape {a.shape}",
        )
    if a.ndim == 3 and a.shape[0] != 1 and sizes.batch[-1:] == a.shape[:1]:
        raise value_error(
            f"the first axis of the {name} is ambiguous: heads or batch",
            where=f"argument `{name}`",
            expected=f"{len(full)} axes, because the heads and the batch both have length {a.shape[0]}",
            got=f"shape {a.shape}",
            instead=f"{name}[:, None] for one {name} per example, {name}[None] for one per head",
        )
    a = a.reshape((1,) * (len(full) - a.ndim) + a.shape)
    if a.shape[-3] == 1:
        return a[..., None, :, :]
    heads = (sizes.key_value_heads, sizes.group)
    return a.reshape((*a.shape[:-3], *heads, *a.shape[-2:]))
