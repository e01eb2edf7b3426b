"""Safe values for the elements of a batch that have finished.

A loop under `vmap` runs its step for finished elements too, and drops the result. A derivative drops it as well, by a
factor of zero; but where the derivative of the step is infinite, as it may be at the very point where an element has
stopped, zero times infinity is NaN. So a finished element is given a value for which the step runs anyway: that of an
active element.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .._ground import UndefinedPrimal, Zero, batch_axis_in_front, instantiate_zeros, new_primitive
from ..transforms import varying_alike
from ._finalise import register_impl_finalisation
from ._select import select_if_vmap_p


def _own(x: Any, active: Any, constant: bool) -> Any:
    del active, constant
    return x


def _batch(axis: Any, args: Any, dims: Any, *, constant: bool) -> tuple[Any, int | None]:
    x, active = args
    # An empty batch has no element to borrow from, and values do not travel between the devices of a mesh.
    alone = axis.size == 0 or axis.explicit_mesh_axis or axis.spmd_name
    if dims[1] is None or alone or dims[0] is None:
        active = active if dims[1] is None else jnp.any(active, dims[1])
        return borrow_if_vmap_p.bind(x, active, constant=constant), dims[0]
    x, active = batch_axis_in_front(axis, x, dims[0]), batch_axis_in_front(axis, active, dims[1])
    of_first = jnp.broadcast_to(x[jnp.argmax(active)], x.shape)
    x = jnp.where(active.reshape(-1, *[1] * (x.ndim - 1)), x, of_first)
    return borrow_if_vmap_p.bind(x, jnp.any(active, 0), constant=constant), 0


def _jvp(primals: Any, tangents: Any, *, constant: bool) -> tuple[Any, Any]:
    x, active = primals
    out = borrow_if_vmap_p.bind(x, active, constant=constant)
    if constant or isinstance(tangents[0], Zero):
        return out, Zero(jax.typeof(out).to_tangent_aval())
    return out, borrow_if_vmap_p.bind(tangents[0], active, constant=False)


def _transpose(cotangent: Any, x: Any, active: Any, *, constant: bool) -> tuple[Any, None]:
    if constant or isinstance(cotangent, Zero) or not isinstance(x, UndefinedPrimal):
        return None, None
    # Borrowed values do not affect the result, so they have no gradient.
    zeros = instantiate_zeros(Zero(jax.typeof(cotangent)))
    return select_if_vmap_p.bind(*varying_alike([active, cotangent, zeros])), None


borrow_if_vmap_p = new_primitive("borrow_if_vmap", _own, _batch, jvp=_jvp, transpose=_transpose)
register_impl_finalisation(borrow_if_vmap_p)


def borrow_if_vmap(active: Any, arrays: list[Any], constant: bool = False) -> list[Any]:
    """Gives each inactive element of a batch the arrays of an active one, if `vmap` maps `active`.

    Args:
        active: bool[].
        arrays: arrays of any shapes and dtypes.
        constant: whether the result has no derivative with respect to the arrays.

    Returns:
        The arrays. They are unchanged where `active` holds, where no `vmap` maps it, and where no element is active.
        Arrays that are the same for all elements stay so. Where `active` does not hold, they have no gradient.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import borrow_if_vmap
        >>> borrow = jax.vmap(lambda active, x: borrow_if_vmap(active, [x])[0])
        >>> borrow(jnp.array([False, True, False]), jnp.array([1, 2, 3]))
        Array([2, 2, 2], dtype=int32)
    """
    return [borrow_if_vmap_p.bind(x, active, constant=constant) for x in arrays]
