"""In which precision a layer computes: at least float32, whatever its input has, and back again."""

import jax.numpy as jnp
from jax import Array


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
