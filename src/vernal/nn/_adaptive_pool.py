"""Pooling to a given size, whatever the size of the input."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import value_error
from ._layer_arguments import check_shape, check_size, image_shape, per_dim


class AdaptivePool(Module):
    """Divides each spatial dimension into a given number of parts, and reduces each part to one
    number.

    The parts do not overlap. If a dimension of size `n` cannot be divided evenly into `t` parts,
    the first `n % t` of them are one longer than the others. Dimensions are reduced one after the
    other.

    Args:
        target_shape: the number of parts: one integer, or one for each dimension.
        num_spatial_dims: the number of spatial dimensions.
        operation: a function from an array of shape `(length,)` to a number, such as
            `jax.numpy.mean`.

    Raises:
        ValueError: for sizes that are not positive integers, or a sequence of the wrong length;
            when called, for an input of the wrong shape, or smaller than the target.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.AdaptivePool(3, num_spatial_dims=1, operation=jnp.max)
        >>> layer(jnp.arange(8)[None])
        Array([[2, 5, 7]], dtype=int32)
    """

    target_shape: tuple[int, ...] = field(static=True)
    operation: Callable[[Any], Any]

    def __init__(
        self,
        target_shape: int | Sequence[int],
        num_spatial_dims: int,
        operation: Callable[[Any], Any],
    ):
        layer = type(self).__name__
        n = check_size(layer, "num_spatial_dims", num_spatial_dims, minimum=0)
        self.target_shape = per_dim(layer, "target_shape", target_shape, n)
        self.operation = operation

    @jax.named_scope("vernal.nn.AdaptivePool")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Reduces the parts.

        Args:
            x: shape `(..., channels, *spatial)`, where `...` are batch axes: any number of them, or
                none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., channels, *target_shape)`.
        """
        layer = type(self).__name__
        check_shape(layer, x, image_shape("channels", len(self.target_shape)))
        x = jnp.asarray(x)
        leading = x.ndim - len(self.target_shape)
        spatial = x.shape[leading:]
        if any(n < t for n, t in zip(spatial, self.target_shape, strict=True)):
            raise value_error(
                f"`{layer}` cannot divide its input into more parts than it has entries",
                where="argument `x`",
                expected=f"spatial sizes of at least {self.target_shape}",
                got=str(spatial),
                instead="a smaller `target_shape`",
            )
        for axis, parts in enumerate(self.target_shape, start=leading):
            x = _reduce_parts(x, axis, parts, self.operation)
        return x


def _reduce_parts(
    x: jax.Array, axis: int, parts: int, operation: Callable[[Any], Any]
) -> jax.Array:
    for _ in range(x.ndim):
        operation = jax.vmap(operation)
    x = jnp.moveaxis(x, axis, -1)
    length, longer = divmod(x.shape[-1], parts)
    split = longer * (length + 1)
    pieces = [
        operation(jnp.reshape(piece, (*x.shape[:-1], count, size)))
        for piece, count, size in (
            (x[..., :split], longer, length + 1),
            (x[..., split:], parts - longer, length),
        )
        if count
    ]
    return jnp.moveaxis(jnp.concatenate(pieces, axis=-1), -1, axis)


# Subclasses of a class that is not abstract, for the reason given at `_AvgPool`.
class _AdaptiveAvgPool(AdaptivePool):
    _dims: ClassVar[int]

    def __init__(self, target_shape: int | Sequence[int]):
        super().__init__(target_shape, self._dims, jnp.mean)


class _AdaptiveMaxPool(AdaptivePool):
    _dims: ClassVar[int]

    def __init__(self, target_shape: int | Sequence[int]):
        super().__init__(target_shape, self._dims, jnp.max)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """The mean of each of a given number of parts, over one spatial dimension:
    `(..., channels, length)`.

    Args:
        target_shape: as for `AdaptivePool`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveAvgPool1d(3)(jnp.ones((2, 7))).shape
        (2, 3)
    """

    _dims = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """The mean of each of a given number of parts, over two spatial dimensions:
    `(..., channels, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveAvgPool2d(3)(jnp.ones((2, 7, 7))).shape
        (2, 3, 3)
    """

    _dims = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """The mean of each of a given number of parts, over three spatial dimensions:
    `(..., channels, depth, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveAvgPool3d(3)(jnp.ones((2, 7, 7, 7))).shape
        (2, 3, 3, 3)
    """

    _dims = 3


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """The maximum of each of a given number of parts, over one spatial dimension:
    `(..., channels, length)`.

    Args:
        target_shape: as for `AdaptivePool`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveMaxPool1d(3)(jnp.ones((2, 7))).shape
        (2, 3)
    """

    _dims = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """The maximum of each of a given number of parts, over two spatial dimensions:
    `(..., channels, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveMaxPool2d(3)(jnp.ones((2, 7, 7))).shape
        (2, 3, 3)
    """

    _dims = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """The maximum of each of a given number of parts, over three spatial dimensions:
    `(..., channels, depth, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveMaxPool3d(3)(jnp.ones((2, 7, 7, 7))).shape
        (2, 3, 3, 3)
    """

    _dims = 3
