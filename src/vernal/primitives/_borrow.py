"""Something safe to compute with, for the elements of a batch that have nothing to compute.

A loop under `vmap` runs its step for elements that have finished, too, and drops the result. A derivative drops it as
well, by a factor of zero; but where the derivative of the step is infinite, as it may be at the very point where an
element has stopped, zero times infinity is NaN. So what has finished is given a value for which the step is made
anyway: that of an element which is active.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._ground import (
    Primitive,
    Zero,
    batch_axis_in_front,
    fancy_primitive_batchers,
    lower_fun,
    primitive_jvps,
    primitive_transposes,
    register_lowering,
)
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


def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    del tangents
    out = borrow_if_vmap_p.bind(*primals)
    return out, [Zero(jax.typeof(x).to_tangent_aval()) for x in out]


borrow_if_vmap_p = Primitive("borrow_if_vmap")
borrow_if_vmap_p.multiple_results = True
borrow_if_vmap_p.def_impl(_own)
borrow_if_vmap_p.def_abstract_eval(_own)
register_lowering(borrow_if_vmap_p, lower_fun(_own, multiple_results=True))
register_impl_finalisation(borrow_if_vmap_p)
fancy_primitive_batchers[borrow_if_vmap_p] = _batch
primitive_jvps[borrow_if_vmap_p] = _jvp
# Nothing depends differentiably on what is borrowed.
primitive_transposes[borrow_if_vmap_p] = lambda cotangents, *args: [None] * len(args)


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
