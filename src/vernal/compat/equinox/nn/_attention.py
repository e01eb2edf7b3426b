"""Attention with Equinox's masks and draws, and the two functions that programs take from `equinox.nn._attention`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from .... import nn
from ._dropout import Dropout, inference_of


def dot_product_attention_weights(query: Array, key: Array, mask: Array | None = None) -> Array:
    """How much each query attends to each key.

    Args:
        query: shape `(queries, size)`.
        key: shape `(keys, size)`.
        mask: True, or any number but 0, where a query sees a key: shape `(queries, keys)`.

    Returns:
        Shape `(queries, keys)`; each row has the sum 1, also that of a query that sees nothing.
    """
    scores = (query / math.sqrt(query.shape[-1])) @ key.T
    wide = scores.astype(_wide(scores.dtype))
    if mask is not None:
        wide = jnp.where(_as_bools(mask), wide, jnp.finfo(wide.dtype).min)
    return jax.nn.softmax(wide).astype(scores.dtype)


def dot_product_attention(
    query: Array,
    key_: Array,
    value: Array,
    mask: Array | None = None,
    dropout: Any = None,
    *,
    key: PRNGKeyArray | None = None,
    inference: bool | None = None,
) -> Array:
    """The mean of the values, weighted by how much each query attends to their keys.

    Args:
        query: shape `(queries, size)`.
        key_: shape `(keys, size)`.
        value: shape `(keys, value_size)`.
        mask: as in `dot_product_attention_weights`.
        dropout: applied to the weights.
        key: for `dropout`.
        inference: for `dropout`.

    Returns:
        Shape `(queries, value_size)`.
    """
    weights = dot_product_attention_weights(query, key_, mask)
    if dropout is not None:
        weights = dropout(weights, key=key, inference=inference)
    return weights @ value


def _wide(dtype: Any) -> Any:
    """The dtype of a softmax: at least float32."""
    return dtype if dtype.itemsize >= 4 else jnp.float32


def _as_bools(mask: ArrayLike) -> Array:
    mask = jnp.asarray(mask)
    return mask if mask.dtype == jnp.bool_ else mask != 0


class MultiheadAttention(nn.MultiheadAttention):
    """`vernal.nn.MultiheadAttention` with Equinox's masks (of any dtype; a query that sees nothing gets the mean of all
    values) and with a key for the dropout of each head.

    Args:
        num_heads: as there, and so are all others.
        query_size: likewise.
        key_size: likewise.
        value_size: likewise.
        output_size: likewise.
        qk_size: likewise.
        vo_size: likewise.
        use_query_bias: likewise.
        use_key_bias: likewise.
        use_value_bias: likewise.
        use_output_bias: likewise.
        dropout_p: likewise.
        inference: likewise.
        dtype: likewise.
        key: likewise.
    """

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
        key: PRNGKeyArray,
    ):
        sizes = key_size, value_size, output_size, qk_size, vo_size
        biases = use_query_bias, use_key_bias, use_value_bias, use_output_bias
        super().__init__(
            num_heads, query_size, *sizes, *biases, dropout_p, inference, dtype, key=key
        )
        self.dropout = Dropout(dropout_p, inference)

    def __call__(
        self,
        query: ArrayLike,
        key_: ArrayLike,
        value: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        bias: ArrayLike | None = None,
        **options: Any,
    ) -> Any:
        """Attends.

        Args:
            query: as in `vernal.nn.MultiheadAttention`, and so are all others.
            key_: likewise.
            value: likewise.
            mask: likewise, of any dtype: 0 where a query does not see a key.
            key: likewise.
            inference: likewise.
            deterministic: the old name of `inference`.
            bias: likewise.
            **options: likewise.

        Returns:
            As there.
        """
        inference = inference_of(inference, deterministic, "MultiheadAttention()")
        if mask is not None:
            # A finite bias: where nothing is seen, all is seen alike.
            dtype = _wide(self.query_proj.weight.dtype)
            hidden = jnp.where(_as_bools(mask), 0, jnp.finfo(dtype).min).astype(dtype)
            bias = hidden if bias is None else bias + hidden
        return super().__call__(
            query, key_, value, key=key, inference=inference, bias=bias, **options
        )

    def _drop(
        self, key: PRNGKeyArray | None, inference: bool | None
    ) -> Callable[[Array], Array] | None:
        drop = super()._drop(key, inference)
        if drop is None or key is None:
            return drop

        def by_head(weights: Array) -> Array:
            # The axes of the heads, and of the query heads of each, stand in front of queries and keys.
            whole = weights.reshape(*weights.shape[:-4], -1, *weights.shape[-2:])
            keys = jax.random.split(key, whole.shape[-3])
            masked = jax.vmap(
                lambda w, k: self.dropout(w, key=k, inference=False), in_axes=(-3, 0), out_axes=-3
            )(whole, keys)
            return masked.reshape(weights.shape)

        return by_head
