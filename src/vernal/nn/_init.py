"""The dtype and the random initial values of weights."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..show import value_error


def weight_dtype(layer: str, dtype: DTypeLike | None) -> Any:
    """The dtype of a layer's weights: by default `float32`, or `float64` if JAX has 64-bit numbers
    switched on."""
    if dtype is None:
        return jnp.result_type(float)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise value_error(
            f"the weights of `{layer}` must be floating-point or complex numbers",
            where="argument `dtype`",
            expected="for example jnp.float32, jnp.bfloat16 or jnp.complex64",
            got=str(jnp.dtype(dtype)),
        )
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        # JAX warns that it has no such numbers; from inside of `uniforms` it would warn once only.
        part = jnp.finfo(dtype).dtype if jnp.issubdtype(dtype, jnp.complexfloating) else dtype
        jnp.array([], part)
        return jax.dtypes.canonicalize_dtype(dtype)
    return dtype


def limit(fan_in: int) -> float:
    """`1/sqrt(fan_in)`, where `fan_in` is the number of inputs of each output; 1 if there are
    none."""
    return 1 / math.sqrt(fan_in) if fan_in else 1.0


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def uniforms(
    key: PRNGKeyArray, shapes: tuple[tuple[int, ...] | None, ...], lim: float, dtype: Any
) -> tuple[jax.Array | None, ...]:
    """For each shape, uniform numbers between `-lim` and `lim`, from a key of its own; None for None.

    (One program to compile, in place of one for the keys and one for each array.)
    """
    keys = jax.random.split(key, len(shapes))
    return tuple(
        None if shape is None else _uniform(keys[i], shape, lim, dtype)
        for i, shape in enumerate(shapes)
    )


def _uniform(key: PRNGKeyArray, shape: tuple[int, ...], lim: float, dtype: Any) -> jax.Array:
    """For a complex dtype, both the real and the imaginary part are between `-lim` and `lim`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.finfo(dtype).dtype
        real, imag = (
            jax.random.uniform(k, shape, part, minval=-lim, maxval=lim)
            for k in jax.random.split(key)
        )
        return jax.lax.complex(real, imag)
    return jax.random.uniform(key, shape, dtype, minval=-lim, maxval=lim)
