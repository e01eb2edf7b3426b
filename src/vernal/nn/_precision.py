"""In which precision a layer computes: at least float32, whatever its input has, and back again."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax


def widen(x: Array) -> Array:
    """`x` in the precision to compute in: at least float32 for half precision, the default float
    for integers.

    By hand rather than by JAX's promotion, which refuses mixed types where users have set it to
    "strict".
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.result_type(float))
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def narrow(y: Array, x: Array) -> Array:
    """`y` in the type of the input `x` that it was computed from, unless rounding to integers
    would spoil it."""
    return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else y


def largest_entry(x: Array, axes: Sequence[int] | None = None) -> Array:
    """The largest entry along these axes, which are kept; all axes if None. Over it, numbers have squares: that of one
    below 1e-20 is zero in float32, and that of one above 1e19 infinite.

    It is a constant to derivatives, for what does not depend on what it is scaled by. And not quite the largest at the
    end of the range, where it has no reciprocal, by which XLA multiplies.
    """
    sizes = lax.stop_gradient(jnp.abs(x))
    axes = None if axes is None else tuple(axes)
    largest = jnp.max(sizes, axis=axes, keepdims=True, initial=0)
    return jnp.minimum(largest, float(jnp.finfo(sizes.dtype).max) / 8)
