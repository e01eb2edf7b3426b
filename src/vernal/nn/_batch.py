"""Leading batch axes: every layer takes any number of them, with the meaning of `jax.vmap(layer)` over each.

Most layers compute a whole batch as they compute one example. This module is for the others, and for weights that are
combined with a batch.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array, lax

from ._mesh import in_step

_T = TypeVar("_T")


def batched(function: Callable[..., _T], x: Array, ndim: int, *others: Any) -> _T:
    """Calls `function(x, *others)` for every example of a batch, or once if `x` is a single example, which has `ndim`
    axes. `others` are arrays, pytrees of arrays or None, with the same batch axes in front, as are the results."""
    batch = x.ndim - ndim
    if batch and others:
        leaves, structure = jax.tree.flatten((x, others))
        x, others = structure.unflatten(in_step(leaves, batch))
    for _ in range(batch):
        function = jax.vmap(function)
    return function(x, *others)


def in_front(a: Array, ndim: int) -> Array:
    """`a` with axes of size 1 in front, `ndim` in all, to combine it with a batch: JAX may refuse to add them
    itself."""
    return a if a.ndim == ndim else lax.expand_dims(a, range(ndim - a.ndim))
