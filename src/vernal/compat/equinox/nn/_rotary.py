"""`RotaryPositionalEmbedding` with Equinox's default dtype and its two static methods."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from .... import nn
from ._layer import LayerMeta


class RotaryPositionalEmbedding(nn.RotaryPositionalEmbedding, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.RotaryPositionalEmbedding` with Equinox's default dtype, that of JAX.

    Args:
        embedding_size: as in `vernal.nn.RotaryPositionalEmbedding`, like all other arguments.
        theta: likewise.
        dtype: likewise.
    """

    def __init__(
        self, embedding_size: int, theta: float = 10_000.0, dtype: DTypeLike | None = None
    ):
        dtype = jnp.result_type(float) if dtype is None else dtype
        super().__init__(embedding_size, theta, dtype)

    @staticmethod
    def rotate_half(x: Array) -> Array:
        """Moves the second half of the features, negated, in front of the first half.

        Args:
            x: shape `(..., size)`.

        Returns:
            The same shape.
        """
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([-second, first], axis=-1)

    @staticmethod
    def precompute_freqs_cis(
        embedding_size: int, end: int, theta: float, dtype: DTypeLike
    ) -> tuple[Array, Array]:
        """Computes the cosines and sines of all angles.

        Args:
            embedding_size: the number of features.
            end: the number of positions.
            theta: the base of the wavelengths.
            dtype: of the result.

        Returns:
            Two arrays of shape `(end, embedding_size // 2)`.
        """
        frequencies = theta ** -(jnp.arange(0.0, embedding_size, 2.0) / embedding_size)
        angles = jnp.outer(jnp.arange(float(end)), frequencies)
        return jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
