"""Attention with Equinox's masks and dropout, and two functions that programs import from `equinox.nn._attention`."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from .... import nn
from ....modules import field
from ....show import value_error
from ._dropout import Dropout, inference_of
from ._layer import LayerMeta
from ._linear import Linear


def dot_product_attention_weights(query: Array, key: Array, mask: Array | None = None) -> Array:
    """How much each query attends to each key.

    Args:
        query: shape `(queries, size)`.
        key: shape `(keys, size)`.
        mask: nonzero where a query attends to a key: shape `(queries, keys)`.

    Returns:
        Shape `(queries, keys)`. Each row sums to 1, also for a query whose keys are all masked.
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


class MultiheadAttention(nn.MultiheadAttention, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.MultiheadAttention` of one sequence by Equinox's formula.

    All scores are computed at once, a mask may have any dtype, a query whose keys are all masked gets the mean of all
    values, and the dropout of each head has its own key.

    Args:
        num_heads: as in `vernal.nn.MultiheadAttention`, like all other arguments.
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

    # Not a field in Equinox.
    num_key_value_heads: int = field(static=True, init=False, default=0)

    _linear = Linear

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

    @jax.named_scope("eqx.nn.MultiheadAttention")
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride] (Equinox's arguments)
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: ArrayLike | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[[Array, Array, Array], tuple[Array, Array, Array]] | None = None,
    ) -> Array:
        """Applies attention.

        Args:
            query: shape `(T, query_size)`.
            key_: shape `(S, key_size)`.
            value: shape `(S, value_size)`.
            mask: of any dtype, 0 where a query does not attend to a key: shape `(T, S)` or `(num_heads, T, S)`.
            key: for dropout.
            inference: overrides the setting of the dropout, for this call.
            deterministic: the old name of `inference`.
            process_heads: a function of the projected queries, keys and values, of shapes `(T, num_heads, qk_size)`,
                `(S, num_heads, qk_size)` and `(S, num_heads, vo_size)`, that returns those to use instead.

        Returns:
            Shape `(T, output_size)`.

        Raises:
            ValueError: if `process_heads` changes a shape.
        """
        inference = inference_of(inference, deterministic, "MultiheadAttention()")
        queries = self._in_heads(jax.vmap(self.query_proj)(query))
        keys = self._in_heads(jax.vmap(self.key_proj)(key_))
        values = self._in_heads(jax.vmap(self.value_proj)(value))
        if process_heads is not None:
            queries, keys, values = _process(process_heads, queries, keys, values)
        random = None if key is None else jax.random.split(key, self.num_heads)

        def one_head(q: Array, k: Array, v: Array, mask: Any, key: Any) -> Array:
            return dot_product_attention(q, k, v, mask, self.dropout, key=key, inference=inference)

        mask = None if mask is None else jnp.asarray(mask)
        each = 0 if mask is not None and mask.ndim == 3 else None
        axes = 1, 1, 1, each, None if random is None else 0
        out = jax.vmap(one_head, in_axes=axes, out_axes=1)(queries, keys, values, mask, random)
        return jax.vmap(self.output_proj)(out.reshape(len(out), -1))

    def _in_heads(self, projected: Array) -> Array:
        return projected.reshape(len(projected), self.num_heads, -1)


def _process(process_heads: Any, *heads: Array) -> tuple[Array, Array, Array]:
    """What the user's function makes of the heads."""
    out = process_heads(*heads)
    before, after = ([jnp.shape(x) for x in xs] for xs in (heads, out))
    if before != after:
        raise value_error(
            "`process_heads` must not change the shapes of the heads",
            where="argument `process_heads`",
            expected=str(before),
            got=str(after),
        )
    return out
