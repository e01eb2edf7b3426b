"""`MultiheadAttention`."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, type_error, value_error
from ..trees import check_key
from ._attention import Implementation, attend
from ._batch import batched
from ._dropout import Dropout, drops
from ._init import weight_dtype
from ._kv_cache import KVCache
from ._layer_arguments import as_flag, check_shape, check_size
from ._linear import Linear
from ._mesh import in_heads
from ._random import split_keys
from ._rotary import RotaryPositionalEmbedding

ProcessHeads = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


class MultiheadAttention(Module):
    r"""Attention with several heads, each with its own linear projection of queries, keys and values.

    See `vernal.nn.attention` for what each head computes, and how.
    A. Vaswani et al., "Attention Is All You Need", arXiv:1706.03762.

    Args:
        num_heads: the number of heads.
        query_size: features of a query.
        key_size: features of a key; `query_size` by default.
        value_size: features of a value; `query_size` by default.
        output_size: features of the output; `query_size` by default.
        qk_size: features of each head's queries and keys; `query_size // num_heads` by default.
        vo_size: features of each head's values and output; `query_size // num_heads` by default.
        use_query_bias: whether the projection of the queries adds a bias.
        use_key_bias: likewise for the keys.
        use_value_bias: likewise for the values.
        use_output_bias: likewise for the output.
        dropout_p: the probability that an attention weight is set to zero while training. All weights are then in
            memory at once.
        inference: switches dropout off; see `vernal.nn.inference_mode`.
        dtype: of the weights; `float32` by default (`float64` if JAX has 64-bit numbers switched on).
        num_key_value_heads: the number of key/value heads, each shared by equally many query heads; `num_heads` by
            default. Fewer make a smaller cache (J. Ainslie et al., "GQA", arXiv:2305.13245).
        key: a JAX random key for the initial weights.

    Attributes:
        query_proj: a `Linear` to `num_heads * qk_size`.
        key_proj: a `Linear` to `num_key_value_heads * qk_size`.
        value_proj: a `Linear` to `num_key_value_heads * vo_size`.
        output_proj: a `Linear` from `num_heads * vo_size`.
        dropout: a `Dropout`.

    Raises:
        ValueError: for sizes that are not positive integers, or heads that cannot be shared evenly.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> attention = nn.MultiheadAttention(4, 8, num_key_value_heads=2, key=jax.random.key(0))
        >>> rotary = nn.RotaryPositionalEmbedding(2)
        >>> x = jax.random.normal(jax.random.key(1), (6, 8))
        >>> whole = attention(x, x, x, causal=True, rotary=rotary)
        >>> cache = attention.make_cache(6)
        >>> first, cache = attention(x[:4], x[:4], x[:4], cache=cache, rotary=rotary)
        >>> rest, cache = attention(x[4:], x[4:], x[4:], cache=cache, rotary=rotary)
        >>> bool(jnp.allclose(jnp.concatenate([first, rest]), whole, atol=1e-5))
        True
    """

    query_proj: Linear
    key_proj: Linear
    value_proj: Linear
    output_proj: Linear
    dropout: Dropout
    num_heads: int = field(static=True)
    num_key_value_heads: int = field(static=True)
    query_size: int = field(static=True)
    key_size: int = field(static=True)
    value_size: int = field(static=True)
    output_size: int = field(static=True)
    qk_size: int = field(static=True)
    vo_size: int = field(static=True)
    use_query_bias: bool = field(static=True)
    use_key_bias: bool = field(static=True)
    use_value_bias: bool = field(static=True)
    use_output_bias: bool = field(static=True)

    _linear: ClassVar[type[Linear]] = Linear

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        *,
        num_key_value_heads: int | None = None,
        key: PRNGKeyArray,
    ):
        name = "MultiheadAttention"

        def size(argument: str, given: int | None, default: int) -> int:
            return check_size(name, argument, default if given is None else given)

        self.num_heads = check_size(name, "num_heads", num_heads)
        self.num_key_value_heads = size("num_key_value_heads", num_key_value_heads, num_heads)
        self.query_size = check_size(name, "query_size", query_size)
        if None in (qk_size, vo_size):
            _check_heads(self.num_heads, self.query_size)
        self.key_size = size("key_size", key_size, query_size)
        self.value_size = size("value_size", value_size, query_size)
        self.output_size = size("output_size", output_size, query_size)
        self.qk_size = size("qk_size", qk_size, query_size // num_heads)
        self.vo_size = size("vo_size", vo_size, query_size // num_heads)
        if self.num_heads % self.num_key_value_heads:
            raise value_error(
                "the query heads cannot share the key and value heads evenly",
                where="argument `num_key_value_heads` of MultiheadAttention",
                expected=f"a divisor of num_heads={num_heads}",
                got=short(num_key_value_heads),
            )
        self.use_query_bias = as_flag("MultiheadAttention", "use_query_bias", use_query_bias)
        self.use_key_bias = as_flag("MultiheadAttention", "use_key_bias", use_key_bias)
        self.use_value_bias = as_flag("MultiheadAttention", "use_value_bias", use_value_bias)
        self.use_output_bias = as_flag("MultiheadAttention", "use_output_bias", use_output_bias)
        dtype = weight_dtype(name, dtype)
        shapes = (
            (self.query_size, self.num_heads * self.qk_size, use_query_bias),
            (self.key_size, self.num_key_value_heads * self.qk_size, use_key_bias),
            (self.value_size, self.num_key_value_heads * self.vo_size, use_value_bias),
            (self.num_heads * self.vo_size, self.output_size, use_output_bias),
        )
        self.query_proj, self.key_proj, self.value_proj, self.output_proj = (
            self._linear(*shape, dtype, key=k)
            for shape, k in zip(shapes, split_keys(check_key(name, key), 4), strict=True)
        )
        self.dropout = Dropout(dropout_p, inference)

    # Long: the argument list, which is most of it.
    @jax.named_scope("vernal.nn.MultiheadAttention")
    def __call__(
        self,
        query: ArrayLike,
        key_: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        process_heads: ProcessHeads | None = None,
        causal: bool | None = None,
        window: int | None = None,
        segments: ArrayLike | tuple[ArrayLike, ...] | None = None,
        bias: ArrayLike | None = None,
        query_positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        rotary: RotaryPositionalEmbedding | None = None,
        cache: KVCache | None = None,
        implementation: Implementation | None = None,
    ) -> Array | tuple[Array, KVCache]:
        """Attends.

        Args:
            query: shape `(..., T, query_size)`, with any number of batch axes in front.
            key_: shape `(..., S, key_size)`.
            value: shape `(..., S, value_size)`.
            mask: bools of shape `(T, S)`, `(num_heads, T, S)` or `(..., num_heads, T, S)`, where any axis may be 1;
                True where a query sees a key. A query that sees nothing gives zeros (before the output projection).
            key: a random key for dropout; by default the one stored in the `Dropout`.
            inference: overrides the setting of the `Dropout` for this call.
            process_heads: a function that is given the projected queries, keys and values, of shapes
                `(T, num_heads, qk_size)`, `(S, num_key_value_heads, qk_size)` and `(S, num_key_value_heads, vo_size)`,
                and returns those to use instead, of the same shapes.
            causal: whether a query sees only keys at its own position and before; by default True with a cache, and
                False without.
            window: a query sees only keys fewer than `window` positions away; by default the size of the cache if that
                is a ring, otherwise no limit.
            segments: see `vernal.nn.attention`.
            bias: numbers added to the scores, of one of the shapes of `mask`.
            query_positions: integers of shape `(T,)` or `(..., T)`; 0, 1, 2, ... by default.
            key_positions: likewise for the keys.
            rotary: rotates queries and keys by their positions, before `process_heads`.
            cache: the earlier tokens, which those of this call follow. T must then equal S, `mask` and `bias` refer to
                the entries of the cache (`S = max_length`), and the cache counts the positions.
            implementation: see `vernal.nn.attention`.

        Returns:
            Shape `(..., T, output_size)`; with a cache, a tuple of this and the cache that also holds this call's
            tokens.

        Raises:
            ValueError: if shapes do not fit, or an argument cannot be combined with a cache.
            RuntimeError: if dropout needs a key, and none is given or stored.
        """
        name = "MultiheadAttention"
        check_shape(name, query, (..., "T", ("query_size", self.query_size)), "query")
        check_shape(name, key_, (..., "S", ("key_size", self.key_size)), "key_")
        check_shape(name, value, (..., "S", ("value_size", self.value_size)), "value")
        projected = self.query_proj(query), self.key_proj(key_), self.value_proj(value)
        queries, keys, values = in_heads(projected, self.num_key_value_heads)
        queries = _heads(queries, self.num_heads)
        keys = _heads(keys, self.num_key_value_heads)
        values = _heads(values, self.num_key_value_heads)
        if cache is not None:
            given = {"segments": segments, "query_positions": query_positions}
            given |= {"key_positions": key_positions}
            causal, window = _check_cache(cache, queries, keys, causal, window, mask, bias, given)
            query_positions = key_positions = cache.next_positions(keys.shape[-3])
        if rotary is not None:
            queries = _rotate(rotary, queries, query_positions)
            keys = _rotate(rotary, keys, key_positions)
        if process_heads is not None:
            queries, keys, values = _process(process_heads, queries, keys, values)
        offset, after = None, cache
        if cache is not None:
            keys, values, key_positions, offset, after = cache.extend(keys, values, window)
            keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
        out = attend(
            queries,
            keys,
            values,
            causal=False if causal is None else causal,
            window=window,
            segments=segments,
            mask=mask,
            bias=bias,
            query_positions=query_positions,
            key_positions=key_positions,
            implementation=implementation,
            drop=self._drop(key, inference),
            offset=offset,
        )
        y = self.output_proj(out.reshape((*out.shape[:-2], out.shape[-2] * out.shape[-1])))
        return y if after is None else (y, after)

    def make_cache(
        self,
        max_length: int,
        dtype: DTypeLike | None = None,
        batch: tuple[int, ...] = (),
        *,
        ring: bool = False,
    ) -> KVCache:
        """An empty cache of the right shape for this layer.

        Args:
            max_length: the number of tokens that fit.
            dtype: of keys and values; that of the layer's weights by default.
            batch: the sizes of leading batch axes.
            ring: whether new tokens overwrite the oldest ones, for attention with a window.

        Returns:
            The `KVCache`.
        """
        dtype = self.key_proj.weight.dtype if dtype is None else dtype
        sizes = self.num_key_value_heads, self.qk_size, self.vo_size
        return KVCache(max_length, *sizes, ring=ring, dtype=dtype, batch=batch)

    def _drop(
        self, key: PRNGKeyArray | None, inference: bool | None
    ) -> Callable[[Array], Array] | None:
        """The function that drops weights; None if dropout is off, so that the weights need not be kept."""
        if not drops(self.dropout, inference):
            return None
        return lambda weights: self.dropout(weights, key=key, inference=False)


def _heads(x: Array, heads: int) -> Array:
    """`(..., T, heads * size)` as `(..., T, heads, size)`."""
    return x.reshape((*x.shape[:-1], heads, x.shape[-1] // heads))


def _rotate(rotary: RotaryPositionalEmbedding, x: Array, positions: ArrayLike | None) -> Array:
    """Rotates all heads of all rows."""
    if positions is not None:
        at = jnp.asarray(positions)
        # The heads are one more batch axis, with the same positions in each.
        positions = at[..., None, :] if at.ndim > 1 else at
    return jnp.swapaxes(rotary(jnp.swapaxes(x, -2, -3), positions=positions), -2, -3)


def _process(
    process_heads: ProcessHeads, queries: Array, keys: Array, values: Array
) -> tuple[Array, Array, Array]:
    """Applies the user's function to the heads of each example."""
    before = queries.shape, keys.shape, values.shape
    heads = batched(process_heads, queries, 3, keys, values)
    after = tuple(jnp.shape(a) for a in heads)
    if after != before:
        raise value_error(
            "`process_heads` must not change the shapes of the heads",
            where="MultiheadAttention.__call__(process_heads=...)",
            expected=str(before),
            got=str(after),
        )
    return heads


def _check_cache(
    cache: Any,
    queries: Array,
    keys: Array,
    causal: bool | None,
    window: int | None,
    mask: ArrayLike | None,
    bias: ArrayLike | None,
    given: dict[str, object],
) -> tuple[bool, int | None]:
    """Refuses what cannot be combined with a cache; returns `causal` and `window` with their defaults for it."""
    if not isinstance(cache, KVCache):
        raise type_error(
            "`cache` must be a KVCache",
            where="MultiheadAttention.__call__(cache=...)",
            expected="the cache that `make_cache` or the previous call returned",
            got=short(cache),
            instead="cache = layer.make_cache(max_length)",
        )
    if cache.ring:
        given = given | {"mask": mask, "bias": bias}
        window = cache.max_length if window is None else window
    wrong = [f"`{name}`" for name, a in given.items() if a is not None]
    if cache.ring and causal is False:
        wrong.append("`causal=False`")
    if cache.ring and window is not None and window > cache.max_length:
        wrong.append(f"a window of {window}, where {cache.max_length} tokens are kept,")
    if queries.shape[-3] != keys.shape[-3]:
        wrong.append(f"{queries.shape[-3]} queries for {keys.shape[-3]} keys")
    if wrong:
        raise value_error(
            f"{' and '.join(wrong)} cannot be combined with a {'ring ' if cache.ring else ''}cache",
            where="MultiheadAttention.__call__(cache=...)",
            expected="tokens that follow those of the cache, each a query and a key; the cache counts positions",
            instead="`vernal.nn.attention` on `cache.keys` and `cache.values`, for anything else",
        )
    return (True if causal is None else causal), window


def _check_heads(num_heads: int, query_size: int) -> None:
    if query_size < num_heads:
        raise value_error(
            "there are more heads than features to divide among them",
            where=f"MultiheadAttention(num_heads={num_heads}, query_size={query_size})",
            expected="a query_size of at least num_heads, or both qk_size and vo_size",
            got=f"query_size={query_size}",
            instead="the number of heads first: MultiheadAttention(num_heads, query_size)",
        )
