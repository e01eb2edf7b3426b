"""Attention of some queries to some keys, with all their scores in memory at once.

It computes a small attention as a whole, and each block of a large one (`_blockwise_attention.py`).
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ..transforms import call_with_jvp
from ._attention_mask import Pairs
from ._precision import widen


def dense(
    query: Array,
    keys: Array,
    values: Array,
    pairs: Pairs,
    scale: ArrayLike,
    drop: Callable[[Array], Array] | None = None,
) -> Array:
    """Attention with all scores at once.

    Args:
        query: shape `(*batch, key/value heads, group, T, size)`.
        keys: shape `(*batch, key/value heads, S, size)`.
        values: shape `(*batch, key/value heads, S, value_size)`.
        pairs: which query sees which key, and the bias.
        scale: the factor of the scores.
        drop: a function applied to the weights before they are used, for dropout.

    Returns:
        Shape `(*batch, key/value heads, group, T, value_size)`, of the dtype of `query`.
    """
    wide = widen(jnp.zeros((), query.dtype)).dtype
    scores = jnp.einsum("...kgth,...ksh->...kgts", query, keys, preferred_element_type=wide)
    scores = scores * jnp.asarray(scale, wide)
    if pairs.bias is not None:
        scores = scores + pairs.bias.astype(wide)
    visible = pairs.visible()
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = _softmax(scores)
    if drop is not None:
        weights = drop(weights)
    weights = weights.astype(values.dtype)
    out = jnp.einsum("...kgts,...ksv->...kgtv", weights, values, preferred_element_type=wide)
    return out.astype(query.dtype)


def _softmax(scores: Array) -> Array:
    """The softmax of every row; zeros, not NaN, for a row of only minus infinity: a query that sees no key."""
    return call_with_jvp(_softmax_itself, _softmax_jvp, scores)


def _softmax_itself(scores: Array) -> Array:
    top = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    powers = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(powers, axis=-1, keepdims=True)
    return powers / jnp.where(total == 0, 1, total)


def _softmax_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # By hand, because it needs only the weights; JAX's own derivative keeps the powers as well.
    (scores,), (tangent,) = primals, tangents
    weights = _softmax(scores)
    mean = jnp.sum(weights * tangent, axis=-1, keepdims=True)
    return weights, weights * (tangent - mean)
