"""The dtype and the random initial values of weights."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..show import is_traced, value_error


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


def uniforms(
    key: PRNGKeyArray, shapes: tuple[tuple[int, ...] | None, ...], lim: float, dtype: Any
) -> tuple[Any, ...]:
    """For each shape, uniform numbers between `-lim` and `lim`, from a key of its own; None for None.

    They are those of `jax.random.uniform`, which takes a quarter of a second to compile for each shape. Here one draw
    of a round size serves all layers that are smaller, where that gives the same numbers.
    """
    sizes = [math.prod(shape) for shape in shapes if shape is not None]
    size = next((most for most in _ROUND_SIZES if max(sizes) <= most), None)
    if size is None or not jnp.issubdtype(dtype, jnp.floating) or not _draws_begin_alike(key):
        return _by_shape(key, shapes, lim, dtype)
    return _cut(_draw(key, len(shapes), size, dtype), shapes, lim)


_ROUND_SIZES = (2**12, 2**16)


def _draws_begin_alike(key: PRNGKeyArray) -> bool:
    """Whether a longer draw from the key begins with the numbers of a shorter one, and is compiled by itself.

    (Inside of a program, where draws may be sharded, each array is drawn in its own shape.)
    """
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        kind = jax.random.key_impl(key)
    else:
        kind = getattr(jax.config, "jax_default_prng_impl", None)
    prefixes = getattr(jax.config, "jax_threefry_partitionable", False)
    return kind == "threefry2x32" and prefixes and not is_traced(key)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _draw(key: PRNGKeyArray, count: int, size: int, dtype: Any) -> jax.Array:
    """Numbers between 0 and 1, of shape `(count, size)`, each row from a key of its own."""
    keys = jax.random.split(key, count)
    return jax.vmap(lambda key: jax.random.uniform(key, (size,), dtype))(keys)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut(
    rows: jax.Array, shapes: tuple[tuple[int, ...] | None, ...], lim: float
) -> tuple[jax.Array | None, ...]:
    """The beginning of each row in its shape, between `-lim` and `lim` as `jax.random.uniform` scales it."""
    low, high = (jnp.asarray(x, rows.dtype) for x in (-lim, lim))
    return tuple(
        None
        if shape is None
        else jnp.maximum(low, row[: math.prod(shape)] * (high - low) + low).reshape(shape)
        for row, shape in zip(rows, shapes, strict=True)
    )


@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _by_shape(
    key: PRNGKeyArray, shapes: tuple[tuple[int, ...] | None, ...], lim: float, dtype: Any
) -> tuple[jax.Array | None, ...]:
    """`uniforms`, in one program."""
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
