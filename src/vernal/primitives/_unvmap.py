"""Reductions over all axes, batch axes included.

Inside `jax.vmap` a value stands for one element of a batch. A loop that must run until every
element is done, or an error that must be raised if any element fails, has to look across the
batch. These reductions do: their result has no batch axis, however many `vmap`s they are under.

They do not look across the devices of `jax.shard_map`, each of which may be at a different place in the program:
`jax.lax.pmax` of the result does.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._ground import new_primitive
from ._finalise import register_impl_finalisation


def _reduction(name: str, reduce: Callable[[Any], Any]) -> Any:
    """A primitive that computes `reduce`, over a batch axis of its argument too."""

    def abstract(x: Any) -> Any:
        # The whole abstract value, because the result has a sharding too.
        return jax.make_jaxpr(reduce)(x).out_avals[0]

    def batch(axis: Any, args: Any, dims: Any) -> tuple[Any, None]:
        del axis, dims
        return primitive.bind(*args), None

    primitive = new_primitive(name, reduce, batch, abstract=abstract)
    register_impl_finalisation(primitive)
    return primitive


unvmap_any_p = _reduction("unvmap_any", jnp.any)
unvmap_all_p = _reduction("unvmap_all", jnp.all)
unvmap_max_p = _reduction("unvmap_max", jnp.max)
unvmap_min_p = _reduction("unvmap_min", jnp.min)


def unvmap_any(x: Any) -> jax.Array:
    """Whether any element of `x` is true, in any element of any batch.

    Args:
        x: an array of any shape and dtype (nonzero is true), or a Python number.

    Returns:
        bool[], the same for the whole batch: under `vmap` it has no batch axis.
        Inside `jax.shard_map` it covers one device; `jax.lax.pmax(x.astype(int), axis) > 0` covers all.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import unvmap_any
        >>> jax.vmap(unvmap_any, out_axes=None)(jnp.array([False, True]))
        Array(True, dtype=bool)
    """
    return unvmap_any_p.bind(jnp.asarray(x))


def unvmap_all(x: Any) -> jax.Array:
    """Whether every element of `x` is true, in every element of every batch.

    Args:
        x: an array of any shape and dtype (nonzero is true), or a Python number.

    Returns:
        bool[], the same for the whole batch: under `vmap` it has no batch axis.
        Inside `jax.shard_map` it covers one device; `jax.lax.pmin(x.astype(int), axis) > 0` covers all.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import unvmap_all
        >>> jax.vmap(unvmap_all, out_axes=None)(jnp.array([False, True]))
        Array(False, dtype=bool)
    """
    return unvmap_all_p.bind(jnp.asarray(x))


def unvmap_max(x: Any) -> jax.Array:
    """The largest element of `x` over every element of every batch.

    Args:
        x: a nonempty array of any shape and ordered dtype, or a Python number.

    Returns:
        A scalar of the dtype of `x`, the same for the whole batch: under `vmap` it has no batch
        axis. Its derivative is zero.
        Inside `jax.shard_map` it covers one device; `jax.lax.pmax(x, axis)` covers all.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import unvmap_max
        >>> jax.vmap(unvmap_max, out_axes=None)(jnp.array([1, 3, 2]))
        Array(3, dtype=int32)
    """
    return unvmap_max_p.bind(jnp.asarray(x))


def unvmap_min(x: Any) -> jax.Array:
    """The smallest element of `x` over every element of every batch.

    Args:
        x: a nonempty array of any shape and ordered dtype, or a Python number.

    Returns:
        A scalar of the dtype of `x`, the same for the whole batch: under `vmap` it has no batch
        axis. Its derivative is zero.
        Inside `jax.shard_map` it covers one device; `jax.lax.pmin(x, axis)` covers all.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import unvmap_min
        >>> jax.vmap(unvmap_min, out_axes=None)(jnp.array([2, 1, 3]))
        Array(1, dtype=int32)
    """
    return unvmap_min_p.bind(jnp.asarray(x))
