"""`PixelShuffle` and `PixelUnshuffle`: move channels into pixels, and pixels into channels."""

import jax
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import value_error
from ._batch import batched
from ._layer_arguments import as_array, check_shape, check_size, image_shape


# One axis at a time: for more, JAX cannot infer the sharding of the result on a mesh.
def _split(x: Array, axis: int, inner: int) -> Array:
    """`x` with one axis split into two, the second of length `inner`."""
    return x.reshape(*x.shape[:axis], x.shape[axis] // inner, inner, *x.shape[axis + 1 :])


def _merged(x: Array, axis: int) -> Array:
    """`x` with an axis and the next one merged."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


class PixelShuffle(Module):
    """Makes a larger image with fewer channels: every `factor**2` channels become a square of pixels.

    Entry `(c * factor**2 + i * factor + j, y, x)` of an input of shape `(channels * factor**2, height, width)` becomes
    entry `(c, y * factor + i, x * factor + j)`, as in PyTorch. `PixelUnshuffle` is the inverse.
    Shi et al., "Real-Time Single Image and Video Super-Resolution Using an Efficient Sub-Pixel Convolutional Neural
    Network", CVPR 2016, arXiv:1609.05158.

    Args:
        factor: the factor by which height and width grow.

    Raises:
        ValueError: for a factor below 1; when called, for an input of the wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.PixelShuffle(2)(jnp.arange(4).reshape(4, 1, 1))
        Array([[[0, 1],
                [2, 3]]], dtype=int32)
    """

    factor: int = field(static=True)

    def __init__(self, factor: int):
        self.factor = check_size("PixelShuffle", "factor", factor)

    @jax.named_scope("vernal.nn.PixelShuffle")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Moves channels into pixels.

        Args:
            x: shape `(..., channels * factor**2, height, width)`, where `...` are batch axes: any number of them, or
                none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., channels, height * factor, width * factor)`, of the dtype of `x`.
        """
        r = self.factor
        check_shape("PixelShuffle", x, image_shape("channels", 2))
        x = as_array(self, x)
        channels = x.shape[-3]
        if channels % r**2:
            raise value_error(
                "`PixelShuffle` cannot arrange the channels in squares",
                where="argument `x`",
                expected=f"a number of channels divisible by factor**2={r**2}",
                got=f"{channels} channels, of shape {x.shape}",
            )

        def shuffled(image: Array) -> Array:
            image = _split(_split(image, 0, r), 0, r).transpose(0, 3, 1, 4, 2)
            return _merged(_merged(image, 3), 1)

        return batched(shuffled, x, 3)


class PixelUnshuffle(Module):
    """Makes a smaller image with more channels: each square of pixels becomes channels of one pixel.

    The inverse of `PixelShuffle`, which describes the order.

    Args:
        factor: the factor by which height and width shrink.

    Raises:
        ValueError: for a factor below 1; when called, for an input of the wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.PixelUnshuffle(2)(jnp.ones((3, 8, 6))).shape
        (12, 4, 3)
    """

    factor: int = field(static=True)

    def __init__(self, factor: int):
        self.factor = check_size("PixelUnshuffle", "factor", factor)

    @jax.named_scope("vernal.nn.PixelUnshuffle")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Moves pixels into channels.

        Args:
            x: shape `(..., channels, height * factor, width * factor)`, where `...` are batch axes: any number of
                them, or none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., channels * factor**2, height, width)`, of the dtype of `x`.
        """
        r = self.factor
        check_shape("PixelUnshuffle", x, image_shape("channels", 2))
        x = as_array(self, x)
        height, width = x.shape[-2:]
        if height % r or width % r:
            raise value_error(
                "`PixelUnshuffle` cannot divide the image into whole squares",
                where="argument `x`",
                expected=f"a height and a width divisible by factor={r}",
                got=f"{height} and {width}, of shape {x.shape}",
            )

        def unshuffled(image: Array) -> Array:
            image = _split(_split(image, 2, r), 1, r).transpose(0, 2, 4, 1, 3)
            return _merged(_merged(image, 0), 0)

        return batched(unshuffled, x, 3)
