"""Something safe to compute with, for the elements of a batch that have nothing to compute.

A loop under `vmap` runs its step for elements that have finished, too, and drops the result. A derivative drops it as
well, by a factor of zero; but where the derivative of the step is infinite, as it may be at the very point where an
element has stopped, zero times infinity is NaN. So what has finished is given a value for which the step is made
anyway: that of an element which is active.
"""

from typing import Any

import jax.numpy as jnp

from .._ground import batch_axis_in_front, new_primitive
from ._finalise import register_impl_finalisation


def _own(active: Any, *arrays: Any) -> list[Any]:
    del active
    return list(arrays)


def _batch(axis: Any, args: Any, dims: Any) -> tuple[Any, list[int | None]]:
    active, *arrays = args
    mapped = dims[0] is not None
    # Nobody is there to borrow from in an empty batch; and values do not travel between the devices of a mesh.
    alone = axis.size == 0 or axis.explicit_mesh_axis or axis.spmd_name
    if mapped and not alone:
        active = batch_axis_in_front(axis, active, dims[0])
        first = jnp.argmax(active)
        arrays = [
            x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(arrays, dims[1:], strict=True)
        ]
        dims = [0, *(None if d is None else 0 for d in dims[1:])]
        arrays = [
            x
            if d is None
            else jnp.where(
                active.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.broadcast_to(x[first], x.shape)
            )
            for x, d in zip(arrays, dims[1:], strict=True)
        ]
    if mapped:
        active = jnp.any(active)
    return borrow_if_vmap_p.bind(active, *arrays), list(dims[1:])


# Nothing depends differentiably on what is borrowed.
borrow_if_vmap_p = new_primitive(
    "borrow_if_vmap",
    _own,
    _batch,
    transpose=lambda cotangents, *args: [None] * len(args),
    multiple_results=True,
)
register_impl_finalisation(borrow_if_vmap_p)


def borrow_if_vmap(active: Any, arrays: list[Any]) -> list[Any]:
    """For each element that is not active the arrays of one that is, where `vmap` maps `active`.

    Args:
        active: bool[].
        arrays: arrays of any shapes and dtypes.

    Returns:
        The arrays, without derivative: as they were where `active` holds, where no `vmap` maps it, and where no element
        is active.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import borrow_if_vmap
        >>> borrow = jax.vmap(lambda active, x: borrow_if_vmap(active, [x])[0])
        >>> borrow(jnp.array([False, True, False]), jnp.array([1, 2, 3]))
        Array([2, 2, 2], dtype=int32)
    """
    # One by one: of an operation that is transposed, all results are what its arguments are.
    return [borrow_if_vmap_p.bind(active, x)[0] for x in arrays]
