"""The precision in which layers compute: at least float32, then back to the dtype of the input."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax


def widen(x: Array) -> Array:
    """`x` in the precision to compute in: at least float32 for half precision, the default float for integers.

    Converted explicitly, because JAX's promotion refuses mixed types where users have set it to "strict".
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.result_type(float))
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def narrow(y: Array, x: Array) -> Array:
    """`y` in the dtype of the input `x` that it was computed from; unchanged if that would round it to integers."""
    return y.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else y


def largest_entry(x: Array, axes: Sequence[int] | None = None) -> Array:
    """The largest absolute value along these axes, which are kept; along all axes if None.

    Divide by it before squaring: in float32 the square of a number below 1e-20 is zero, and that of one above 1e19
    infinite. It is constant under differentiation, for results that do not depend on the scale. It is capped at an
    eighth of the dtype's maximum, because XLA multiplies by the reciprocal, which underflows for larger numbers.
    """
    sizes = lax.stop_gradient(jnp.abs(x))
    axes = None if axes is None else tuple(axes)
    largest = jnp.max(sizes, axis=axes, keepdims=True, initial=0)
    return jnp.minimum(largest, float(jnp.finfo(sizes.dtype).max) / 8)
