"""The value of an array after a check has failed and the program goes on: NaN, the largest integer, or
True. Set by a primitive that is linear in the array, so its derivative and its transpose are itself.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from .._ground import UndefinedPrimal, Zero, batch_axis_in_front, by_data, new_primitive


def _poisoned(x: Any, failed: Any) -> Any:
    if x.dtype == bool:
        value: Any = True
    elif jnp.issubdtype(x.dtype, jnp.integer):
        value = jnp.iinfo(x.dtype).max
    else:
        value = jnp.nan
    return lax.select(failed, lax.full_like(x, value), x)


def _poisoned_lowered(x: Any, failed: Any) -> Any:
    y = _poisoned(x, failed)
    # A barrier between scalars: without it every check in a chain would compute the chain again, fused
    # with its condition. (For arrays fusion is better.)
    return lax.optimization_barrier(y) if y.ndim == 0 else y


def _poisoned_batched(axis: Any, args: Any, dims: Any) -> Any:
    x, failed = args
    if dims[1] is None:
        return _poison_p.bind(x, failed), dims[0]
    # A flag for each element, as for `on_error="nan"`.
    x, failed = (batch_axis_in_front(axis, x, d) for x, d in zip(args, dims, strict=True))
    shape = failed.shape + (1,) * (x.ndim - failed.ndim)
    return _poison_p.bind(x, jnp.broadcast_to(failed.reshape(shape), x.shape)), 0


def _poison_transposed(ct: Any, x: Any, failed: Any) -> Any:
    known = not isinstance(failed, UndefinedPrimal) and not isinstance(ct, Zero)
    return [_poison_p.bind(ct, failed) if known else ct, None]


# Linear, so a linear operator may hold checks, and its transpose holds them too.
_poison_p = new_primitive(
    "vernal_poison",
    _poisoned,
    _poisoned_batched,
    jvp=lambda primals, tangents: (_poison_p.bind(*primals), tangents[0]),
    transpose=_poison_transposed,
    abstract=lambda x, failed: x,
    lowered=_poisoned_lowered,
)


def poison(x: Any, failed: Any) -> Any:
    """Replaces an array by an invalid value if a flag is set.

    Args:
        x: an array.
        failed: a scalar bool.

    Returns:
        `x`; or, if `failed` holds, NaN, the largest integer, or True, by dtype. Its tangent is that
        of `x`.
    """
    return by_data(_poison_p.bind, jnp.asarray(x), failed)
