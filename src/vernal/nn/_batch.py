"""Leading batch axes: every layer takes any number of them, with the meaning of `jax.vmap(layer)` over each.

Most layers compute a whole batch as they compute one example. This is for the others, and for weights beside a batch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array, lax

from ._mesh import in_step

_T = TypeVar("_T")


def batched(function: Callable[..., _T], x: Array, ndim: int, *others: Any) -> _T:
    """Calls a function of one example for every example of a batch; for a single one, just calls it.

    Args:
        function: called as `function(x, *others)`.
        x: its first argument, with batch axes in front.
        ndim: how many axes one example of `x` has.
        *others: its further arguments: arrays, or pytrees of them, all with the same batch axes in front (or None).

    Returns:
        What `function` returns, every array with the batch axes in front.
    """
    batch = x.ndim - ndim
    if batch and others:
        leaves, structure = jax.tree.flatten((x, others))
        x, others = structure.unflatten(in_step(leaves, batch))
    for _ in range(batch):
        function = jax.vmap(function)
    return function(x, *others)


def in_front(a: Array, ndim: int) -> Array:
    """`a` with axes of size 1 in front, `ndim` in all: beside a batch, where JAX may refuse to add them by itself."""
    return a if a.ndim == ndim else lax.expand_dims(a, range(ndim - a.ndim))
