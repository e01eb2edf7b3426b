"""`RotaryPositionalEmbedding`."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, value_error
from ._batch import in_front
from ._layer_arguments import as_array, check_shape, check_size, wrong_shape
from ._precision import widen


class RotaryPositionalEmbedding(Module):
    r"""Rotates pairs of features by angles that grow with the position, so that products of queries and keys depend
    only on the difference of their positions.

    Feature `i` of the first half and feature `i` of the second half (as in GPT-NeoX and Llama) are rotated by the angle
    `position * theta ** (-2 i / embedding_size)`. Angles are computed in at least float32 from absolute positions, so a
    token has the same embedding whether it comes with the whole sequence or alone, after a cache.

    J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864.

    Args:
        embedding_size: the number of features; must be even.
        theta: the base of the wavelengths.
        dtype: of the angles' sines and cosines; the input's by default.

    Raises:
        ValueError: for an odd `embedding_size`; when called, for an input of the wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> rope = nn.RotaryPositionalEmbedding(4)
        >>> x = jnp.ones((10, 4))
        >>> later = rope(x[7:], positions=jnp.arange(7, 10))
        >>> bool(jnp.allclose(rope(x)[7:], later))
        True
    """

    embedding_size: int = field(static=True)
    theta: float = field(static=True)
    dtype: DTypeLike | None = field(static=True)

    def __init__(
        self, embedding_size: int, theta: float = 10_000.0, dtype: DTypeLike | None = None
    ):
        name = "RotaryPositionalEmbedding"
        self.embedding_size = check_size(name, "embedding_size", embedding_size, minimum=0)
        self.theta = theta
        self.dtype = None if dtype is None else jnp.dtype(dtype)
        if self.embedding_size % 2:
            raise value_error(
                "the number of features must be even: they are rotated in pairs",
                where="RotaryPositionalEmbedding(embedding_size=...)",
                expected="an even number",
                got=short(embedding_size),
            )

    @jax.named_scope("vernal.nn.RotaryPositionalEmbedding")
    def __call__(
        self,
        x: ArrayLike,
        *,
        positions: ArrayLike | None = None,
        key: PRNGKeyArray | None = None,
    ) -> Array:
        """Rotates every row.

        Args:
            x: of shape `(..., length, embedding_size)`, with any number of batch axes in front.
            positions: of the rows, of shape `(length,)` or, if they differ within the batch, `(..., length)`, where
                batch axes may be 1; or a scalar, the position of the first row, from which the others count up. None
                means 0.
            key: ignored; here so that all layers are called alike.

        Returns:
            An array of the shape and dtype of `x`. (An integer input gives floats.)
        """
        name = "RotaryPositionalEmbedding"
        check_shape(name, x, (..., "length", ("embedding_size", self.embedding_size)))
        x = as_array(self, x)
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else widen(x)
        dtype = self.dtype or x.dtype
        angle_dtype = widen(jnp.zeros((), dtype)).dtype
        at = jnp.asarray(0 if positions is None else positions)
        if at.ndim == 0:
            # A narrow dtype may not hold the last position.
            if jnp.issubdtype(at.dtype, jnp.inexact):
                at = widen(at)
            elif at.dtype.itemsize < 4:
                at = at.astype(jnp.int32)
            at = at + jnp.arange(x.shape[-2], dtype=at.dtype)
        self._check_positions(at, x)
        half = self.embedding_size // 2
        exponents = jnp.arange(half, dtype=angle_dtype) / max(half, 1)
        frequencies = jnp.power(jnp.asarray(self.theta, angle_dtype), -exponents)
        angles = at.astype(angle_dtype)[..., None] * in_front(frequencies, at.ndim + 1)
        cos, sin = (in_front(f(angles).astype(dtype), x.ndim) for f in (jnp.cos, jnp.sin))
        first, second = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
        turned = first * cos - second * sin, second * cos + first * sin
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    def _check_positions(self, at: Array, x: Array) -> None:
        """Refuses positions that are not those of the rows of `x`."""
        rows = x.shape[:-1]
        one_by_one = len(at.shape) == len(rows) and at.shape[-1] == rows[-1]
        fits_batch = one_by_one and all(
            n in (1, size) for n, size in zip(at.shape, rows, strict=True)
        )
        if at.shape != rows[-1:] and not fits_batch:
            raise wrong_shape(
                "RotaryPositionalEmbedding", at.shape, (..., ("length", rows[-1])), "positions"
            )
