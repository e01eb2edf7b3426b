"""What a random key is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..show import short, type_error


def check_key(what: str, key: Any) -> Any:
    """Returns `key` if it is one random key: typed, or of uint32 with the shape of JAX's default kind. Refuses anything
    else."""
    if isinstance(key, jax.Array | np.ndarray) and (
        key.ndim == 0
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        else key.dtype == np.uint32 and key.shape == _raw_shape(_default_kind())
    ):
        return key
    raise type_error(
        f"`{what}` was not given a random key",
        where="argument `key`",
        expected="one random key",
        got=short(key),
        instead="jax.random.key(0); for each of several, one of jax.random.split(key, n)",
    )


def _default_kind() -> str:
    """The kind that JAX assumes for a random key that is not typed."""
    config: Any = jax.config  # Its options are attributes that it makes at run time.
    return config.jax_default_prng_impl


@functools.cache
def _raw_shape(kind: str) -> tuple[int, ...]:
    """The shape of a random key that is not typed."""
    return jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=kind))).shape
