"""`attention`: one function for grouped heads and all kinds of masks, which chooses how to compute."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..show import is_traced, short, value_error
from ._attention_mask import Pairs, Sizes, make_pairs
from ._blockwise_attention import block_rows, blockwise
from ._dense_attention import dense
from ._layer_arguments import as_flag, as_number

Implementation = Literal["dense", "blockwise", "cudnn"]


@jax.named_scope("vernal.nn.attention")
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    causal: bool = False,
    window: int | None = None,
    segments: ArrayLike | tuple[ArrayLike, ...] | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
    implementation: Implementation | None = None,
) -> Array:
    r"""Dot-product attention: `softmax(scale * query @ key.T + bias) @ value`, for each head.

    Where you can, say which query sees which key by `causal`, `window` and `segments`, rather than by a mask of shape
    `(T, S)`. A query sees the keys for which all given conditions hold; a query that sees no key gives zeros.

    A. Vaswani et al., "Attention Is All You Need", arXiv:1706.03762; for grouped heads, J. Ainslie et al., "GQA",
    arXiv:2305.13245.

    Args:
        query: shape `(..., T, heads, size)`, with any number of batch axes in front.
        key: shape `(..., S, key_value_heads, size)`. `heads` is a multiple of `key_value_heads`: the first
            `heads // key_value_heads` query heads share the first key/value head, and so on.
        value: shape `(..., S, key_value_heads, value_size)`.
        causal: whether a query sees only keys at its own position and before.
        window: a query sees only keys fewer than `window` positions away. With `causal`, these are the last `window`
            positions, its own included.
        segments: integers of shape `(T,)` or `(..., T)` for both queries and keys (T = S), or a tuple
            `(query_segments, key_segments)`. A query sees only keys of its own segment.
        mask: bools of shape `(T, S)`, `(heads, T, S)` or `(..., heads, T, S)`, where any axis may be 1. True where a
            query sees a key.
        bias: numbers that are added to the scores, of one of the shapes of `mask`.
        scale: one number, the factor of the products of queries and keys before the bias is added; `1 / sqrt(size)` by
            default. (To scale each head by its own, multiply the queries.)
        query_positions: integers of shape `(T,)` or `(..., T)`, for `causal` and `window`; 0, 1, 2, ... by default.
        key_positions: integers of shape `(S,)` or `(..., S)` likewise. A negative position marks an empty place,
            which no query sees.
        implementation: how to compute. By default the choice depends on sizes, dtypes and device:

            * `"dense"`: all scores at once; chosen if they are few.
            * `"blockwise"`: a block of queries at a time; chosen if the scores are many. Memory grows linearly with the
              length, also for the derivative, and it takes no more time.
            * `"cudnn"`: the fused kernel for NVIDIA GPUs, by `jax.nn.dot_product_attention`; for half precision, head
              sizes up to 128 that are multiples of 8, and no conditions but `causal` (with T = S), with or without
              `window`, and `mask` (with T and S even). It has no forward-mode derivative.

    Returns:
        Shape `(..., T, heads, value_size)`, of the dtype of `query`. Scores and sums are computed in at least float32.

    Raises:
        ValueError: if shapes or dtypes do not fit each other, `window` is below 1, `mask` is not bool, or the requested
            implementation is unknown or cannot compute this attention.
        TypeError: if `window` is not a Python int, `causal` is not True or False, or `scale` is not a number.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> query = jax.random.normal(jax.random.key(0), (5, 4, 8))
        >>> key, value = jax.random.normal(jax.random.key(1), (2, 5, 2, 8))
        >>> y = nn.attention(query, key, value, causal=True)
        >>> y.shape
        (5, 4, 8)
        >>> bool(jnp.allclose(y[0], jnp.repeat(value[0], 2, axis=0)))  # the first sees only itself
        True
    """
    return attend(
        query,
        key,
        value,
        causal=causal,
        window=window,
        segments=segments,
        mask=mask,
        bias=bias,
        scale=scale,
        query_positions=query_positions,
        key_positions=key_positions,
        implementation=implementation,
    )


def attend(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    causal: Any,
    window: Any,
    scale: ArrayLike | None = None,
    implementation: Any = None,
    drop: Callable[[Array], Array] | None = None,
    offset: int | None = None,
    **conditions: Any,
) -> Array:
    """`attention`, with two more arguments.

    Args:
        query: as for `attention`, as are all arguments not listed here.
        key: likewise.
        value: likewise.
        drop: a function of the weights, of shape `(*batch, key_value_heads, group, T, S)`, that returns the weights to
            use.
        offset: states that the given positions of queries and of keys each have no gaps, and that the first query is at
            the position of the key with this index.
    """
    _check_implementation(implementation)
    causal = as_flag("attention", "causal", causal, "`mask=` for a condition that is traced")
    query, key, value = jnp.asarray(query), jnp.asarray(key), jnp.asarray(value)
    sizes = check_sizes(query, key, value)
    pairs = make_pairs(sizes, causal=causal, window=window, **conditions)
    given = conditions["query_positions"] is not None or conditions["key_positions"] is not None
    offset = offset if given else 0
    rows = block_rows(sizes, pairs.window)
    factor = _one_number(1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale)
    obstacle = _obstacle_to_cudnn(query, value, sizes, pairs, given)
    if is_traced(factor):
        obstacle = obstacle or "a scale that is known while tracing"
    if implementation == "cudnn" and obstacle is not None:
        raise value_error(
            "the fused kernel cannot compute this attention",
            where="argument `implementation`",
            expected=obstacle,
            got='implementation="cudnn"',
            instead="implementation=None, which chooses one that can",
        )
    if drop is not None:
        implementation = _for_dropout(implementation)
    if implementation is None and jax.default_backend() == "gpu" and obstacle is None:
        implementation = "cudnn"
    if implementation is None:
        # A symbolic number of queries, in a program for export, cannot be split into blocks.
        whole = not isinstance(sizes.queries, int) or sizes.queries <= rows
        implementation = "dense" if whole else "blockwise"
    if implementation == "cudnn":
        return _cudnn(query, key, value, sizes, pairs, factor)
    # (..., T, heads, size) -> (..., key/value heads, group, T, size)
    heads = (sizes.key_value_heads, sizes.group)
    grouped = query.reshape((*query.shape[:-2], *heads, query.shape[-1]))
    grouped = jnp.moveaxis(grouped, -4, -2)
    key, value = jnp.moveaxis(key, -3, -2), jnp.moveaxis(value, -3, -2)
    if implementation == "dense":
        out = dense(grouped, key, value, pairs, factor, drop)
    else:
        out = blockwise(grouped, key, value, pairs, factor, rows, offset)
    out = jnp.moveaxis(out, -2, -4)
    return out.reshape((*query.shape[:-1], value.shape[-1]))


def _for_dropout(implementation: Any) -> str:
    if implementation in (None, "dense"):
        return "dense"
    raise value_error(
        "dropout of attention weights needs the dense implementation",
        where="argument `implementation`",
        expected='"dense" or None, while dropout is active',
        got=short(implementation),
        instead="inference=True, or dropout of the outputs instead of the weights",
    )


def _one_number(scale: Any) -> Any:
    """The scale as a Python number, or as the tracer that it is. An array of scales would be broadcast against the
    scores, whose last axis is that of the keys."""
    number = as_number("attention", "scale", scale, "one real number")
    if not jnp.issubdtype(jnp.result_type(number), jnp.complexfloating):
        return number
    raise value_error(
        "the scale of attention must be real",
        where="argument `scale`",
        expected="one real number",
        got=short(scale),
    )


def _check_implementation(implementation: Any) -> None:
    if implementation not in (None, *get_args(Implementation)):
        raise value_error(
            "attention was given an unknown implementation",
            where="argument `implementation`",
            expected='"dense", "blockwise", "cudnn" or None',
            got=short(implementation),
        )


def check_sizes(query: Array, key: Array, value: Array) -> Sizes:
    """Checks that queries, keys and values fit each other."""
    fit = (
        min(query.ndim, key.ndim, value.ndim) >= 3
        and query.shape[:-3] == key.shape[:-3]
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[-1] == key.shape[-1]
        and key.shape[-2] > 0
        and query.shape[-2] % key.shape[-2] == 0
    )
    if not fit:
        raise value_error(
            "the shapes of the queries, keys and values do not match",
            where="arguments `query`, `key`, `value`",
            expected="shapes (..., T, heads, size), (..., S, key_value_heads, size) and "
            "(..., S, key_value_heads, value_size), with heads a multiple of key_value_heads",
            got=f"{query.shape}, {key.shape}, {value.shape}",
        )
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) > 1 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise value_error(
            "the queries, keys and values must have the same floating-point dtype",
            where="arguments `query`, `key`, `value`",
            got=", ".join(str(a.dtype) for a in (query, key, value)),
            instead="cast them with `.astype(...)` to the dtype to compute in",
        )
    *batch, queries, heads, _ = query.shape
    keys, key_value_heads = key.shape[-3:-1]
    return Sizes(tuple(batch), queries, keys, key_value_heads, heads // key_value_heads)


def _obstacle_to_cudnn(
    query: Array, value: Array, sizes: Sizes, pairs: Pairs, given: bool
) -> str | None:
    """The condition that the fused kernel needs and this attention does not meet; None if there is none."""
    size = query.shape[-1]
    if query.dtype not in (jnp.float16, jnp.bfloat16):
        return f"float16 or bfloat16, not {query.dtype}"
    if size % 8 or not 0 < size <= 128 or value.shape[-1] != size:
        return (
            f"a head size up to 128 that is a multiple of 8, not {short((size, value.shape[-1]))}"
        )
    if 0 in (*sizes.batch, sizes.queries, sizes.keys):
        return "arrays that are not empty"
    if given or pairs.query_segments is not None or pairs.bias is not None:
        return "no positions, segments or bias"
    if pairs.mask is not None and (sizes.queries % 2 or sizes.keys % 2):
        return "even numbers of queries and of keys, beside a mask"
    if pairs.window is not None and not pairs.causal:
        return "`causal=True` together with a window"
    if pairs.causal and sizes.queries != sizes.keys:
        return "as many queries as keys, with `causal=True`"
    return None


def _cudnn(query: Array, key: Array, value: Array, sizes: Sizes, pairs: Pairs, scale: Any) -> Array:
    """The fused kernel, which takes one batch axis."""
    n = math.prod(sizes.batch)
    flat = (a.reshape((n, *a.shape[-3:])) for a in (query, key, value))
    out = jax.nn.dot_product_attention(
        *flat,
        mask=None if pairs.mask is None else _with_one_batch_axis(pairs.mask, sizes),
        scale=scale,
        is_causal=pairs.causal,
        local_window_size=None if pairs.window is None else (pairs.window - 1, 0),
        implementation="cudnn",
    )
    out = out.reshape((*query.shape[:-1], value.shape[-1]))
    visible = None if pairs.mask is None else pairs.visible()
    if visible is None:
        return out
    # A query that sees no key gets the mean of all values from the kernel.
    sees = jnp.any(visible, axis=-1, keepdims=True)
    sees = jnp.moveaxis(sees, -2, -4)
    heads = (sizes.key_value_heads, sizes.group)
    sees = jnp.broadcast_to(sees, (*sees.shape[:-3], *heads, 1))
    return jnp.where(sees.reshape((*sees.shape[:-3], sizes.heads, 1)), out, 0)


def _with_one_batch_axis(mask: Array, sizes: Sizes) -> Array:
    """A mask of shape `(n, heads, T, S)`, where the first two axes stay 1 if the mask does not depend on them."""
    *batch, key_value_heads, group, _, _ = mask.shape
    full_batch = (1,) * len(batch) if math.prod(batch) == 1 else sizes.batch
    heads = (1, 1) if key_value_heads * group == 1 else (sizes.key_value_heads, sizes.group)
    pairs = (sizes.queries, sizes.keys)
    mask = jnp.broadcast_to(mask, (*full_batch, *heads, *pairs))
    return mask.reshape((math.prod(full_batch), math.prod(heads), *pairs))
