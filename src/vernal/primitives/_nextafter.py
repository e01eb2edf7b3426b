"""The floating-point numbers next to a number.

The floats of one dtype, in order, are numbered by integers, zero being number 0. Their bit patterns
nearly do that already: without the sign bit, the pattern of a larger number is a larger integer. Only
the denormals are left out, because compiled programs may treat them as zero: the number after zero
is the smallest normal one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..show import message, short

_SIGNED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def _step(x: Any, by: int) -> jax.Array:
    kind = jnp.finfo(x.dtype)
    bits = _SIGNED[x.dtype.itemsize]

    def pattern(value: Any) -> Any:
        return lax.bitcast_convert_type(jnp.asarray(value, x.dtype), bits)

    denormals = pattern(kind.smallest_normal) - 1
    # The largest integer is every bit but the sign.
    magnitude = pattern(x) & jnp.iinfo(bits).max
    number = jnp.maximum(magnitude - denormals, 0)
    number = jnp.where(pattern(x) < 0, -number, number)
    last = pattern(jnp.inf) - denormals
    number = jnp.clip(number + by, -last, last)
    magnitude = jnp.where(number == 0, 0, abs(number) + denormals)
    stepped = lax.bitcast_convert_type(magnitude, x.dtype)
    stepped = jnp.where(number < 0, -stepped, stepped)
    return jnp.where(jnp.isnan(x), x, stepped)


@jax.custom_jvp
def _next(x: Any) -> jax.Array:
    return _step(x, 1)


@jax.custom_jvp
def _previous(x: Any) -> jax.Array:
    return _step(x, -1)


_next.defjvp(lambda primals, tangents: (_next(*primals), tangents[0]))
_previous.defjvp(lambda primals, tangents: (_previous(*primals), tangents[0]))


def _floating(x: Any, name: str) -> jax.Array:
    array = jnp.asarray(x)
    if array.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise TypeError(
            message(
                f"{name} needs floating-point numbers",
                where="argument `x`",
                expected="float16, bfloat16, float32 or float64",
                got=short(x),
                instead=f"{name}(jnp.asarray(x, float))",
            )
        )
    return array


def nextafter(x: Any) -> jax.Array:
    """The next larger floating-point number.

    Denormal numbers are skipped, because compiled programs may round them to zero: after zero (and
    after a denormal number, which counts as zero) comes the smallest normal number, and after the
    largest negative normal number comes zero.

    Args:
        x: an array of any shape, or a Python float.

    Returns:
        An array of the shape and dtype of `x`. Infinity and NaN stay what they are; after minus
        infinity comes the most negative number, after the largest number infinity. The derivative
        is one.

    Raises:
        TypeError: if `x` is not float16, bfloat16, float32 or float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.primitives import nextafter
        >>> print(nextafter(jnp.float32(1.0)), nextafter(jnp.float32(0.0)))
        1.0000001 1.1754944e-38
    """
    return _next(_floating(x, "nextafter"))


def prevbefore(x: Any) -> jax.Array:
    """The next smaller floating-point number: `-nextafter(-x)`.

    Args:
        x: an array of any shape, or a Python float.

    Returns:
        An array of the shape and dtype of `x`. Minus infinity and NaN stay what they are; before
        infinity comes the largest number, before zero the largest negative normal number. The
        derivative is one.

    Raises:
        TypeError: if `x` is not float16, bfloat16, float32 or float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.primitives import nextafter, prevbefore
        >>> print(prevbefore(nextafter(jnp.float32(0.1))))
        0.1
    """
    return _previous(_floating(x, "prevbefore"))
