"""Helpers for single leaves: None, weakly typed arrays, random keys."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._jax_private import _convert_element_type


def is_none(x: Any) -> bool:
    """Whether a leaf is None; as `is_leaf`, it makes a walk keep None."""
    return x is None


def as_arrays(values: Sequence[Any]) -> list[jax.Array]:
    """Results of a program. A constant among them is, outside of `jax.jit`, of a type that JAX keeps for itself."""
    return [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]


def strong(x: Any) -> jax.Array:
    """The leaf as an array that is not weakly typed: a weakly typed one that is kept between calls would change its
    type at the first call, and compile everything again."""
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x


def weak_like(x: jax.Array, like: Any) -> jax.Array:
    """The array, weakly typed if `like` (an array or a type) is weakly typed and of the same dtype."""
    if not like.weak_type or like.dtype != x.dtype or jax.typeof(x).weak_type:
        return x
    weak: Any = _convert_element_type(x, x.dtype, weak_type=True)
    return weak


def by_data(fn: Callable[..., Any], x: Any, *args: Any) -> Any:
    """`fn(x, *args)`; for typed random keys, which most operations refuse, it is applied to their data."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = fn(jax.random.key_data(x), *args)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return fn(x, *args)
