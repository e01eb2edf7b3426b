"""The floating-point numbers next to a number.

The floats of one dtype, in order, are numbered by integers, with zero as number 0. Their bit patterns
nearly are such numbers: without the sign bit, the pattern of a larger number is a larger integer. Only
the denormals are skipped, because compiled programs may treat them as zero: the number after zero is
the smallest normal one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..show import short, type_error
from ..transforms import call_with_jvp

_SIGNED = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def _step(x: Any, by: int) -> jax.Array:
    bits = _SIGNED[x.dtype.itemsize]

    def pattern(value: Any) -> int:
        return int(np.asarray(value, x.dtype).view(bits))

    denormals = pattern(jnp.finfo(x.dtype).smallest_normal) - 1
    last = pattern(np.inf) - denormals
    signed = lax.bitcast_convert_type(x, bits)
    # The largest integer has every bit set except the sign.
    number = jnp.maximum((signed & jnp.iinfo(bits).max) - denormals, 0)
    number = jnp.clip(jnp.where(signed < 0, -number, number) + by, -last, last)
    magnitude = jnp.where(number == 0, 0, abs(number) + denormals)
    stepped = lax.bitcast_convert_type(magnitude, x.dtype)
    stepped = jnp.where(number < 0, -stepped, stepped)
    return jnp.where(jnp.isnan(x), x, stepped)


def _neighbour(by: int) -> Callable[[Any], jax.Array]:
    """Jitted as a whole, so that a program that calls it a hundred times, as one of Diffrax does, traces it once."""

    def step(x: Any) -> jax.Array:
        return _step(x, by)

    def rule(primals: Any, tangents: Any) -> Any:
        return compiled(*primals), tangents[0]

    compiled = jax.jit(lambda x: call_with_jvp(step, rule, x))
    return compiled


_next, _previous = _neighbour(1), _neighbour(-1)


def _floating(x: Any, name: str) -> jax.Array:
    array = jnp.asarray(x)
    if array.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise type_error(
            f"{name} needs floating-point numbers",
            where="argument `x`",
            expected="float16, bfloat16, float32 or float64",
            got=short(x),
            instead=f"{name}(jnp.asarray(x, float))",
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
        An array of the shape and dtype of `x`. Infinity and NaN stay unchanged; after minus infinity
        comes the most negative number, after the largest number infinity. The derivative is one.

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
        An array of the shape and dtype of `x`. Minus infinity and NaN stay unchanged; before infinity
        comes the largest number, before zero the largest negative normal number. The derivative is
        one.

    Raises:
        TypeError: if `x` is not float16, bfloat16, float32 or float64.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.primitives import nextafter, prevbefore
        >>> print(prevbefore(nextafter(jnp.float32(0.1))))
        0.1
    """
    return _previous(_floating(x, "prevbefore"))
