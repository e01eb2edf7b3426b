"""Pooling to a given size, for inputs of any size."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import value_error
from ._layer_arguments import as_array, as_flag, check_shape, check_size, image_shape, per_dim
from ._taps import picked


class AdaptivePool(Module):
    """Divides each spatial dimension into a given number of parts, and reduces each part to one
    number.

    In a dimension of size `n` with `t` parts, part `i` goes from `floor(i * n / t)` up to, but
    excluding, `ceil((i + 1) * n / t)`, as in PyTorch: parts overlap where `t` does not divide `n`,
    and there may be more parts than entries. Dimensions are reduced one after the other.

    Args:
        target_shape: the number of parts: one integer, or one for each dimension.
        num_spatial_dims: the number of spatial dimensions.
        operation: a function from an array of shape `(length,)` to a number, such as
            `jax.numpy.mean`.
        disjoint: True for parts that do not overlap, as in Equinox: the first `n % t` are one entry
            longer than the others.

    Raises:
        ValueError: for sizes that are not positive integers, or a sequence of the wrong length;
            when called, for an input of the wrong shape or without entries or, with disjoint parts,
            one smaller than the target.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.AdaptivePool(3, num_spatial_dims=1, operation=jnp.max)
        >>> layer(jnp.arange(8)[None])
        Array([[2, 5, 7]], dtype=int32)
        >>> nn.AdaptiveAvgPool1d(3)(jnp.arange(8.0)[None])
        Array([[1. , 3.5, 6. ]], dtype=float32)
        >>> nn.AdaptiveAvgPool1d(3, disjoint=True)(jnp.arange(8.0)[None])
        Array([[1. , 4. , 6.5]], dtype=float32)
    """

    target_shape: tuple[int, ...] = field(static=True)
    disjoint: bool = field(static=True)
    operation: Callable[[Any], Any]

    def __init__(
        self,
        target_shape: int | Sequence[int],
        num_spatial_dims: int,
        operation: Callable[[Any], Any],
        *,
        disjoint: bool = False,
    ):
        layer = type(self).__name__
        n = check_size(layer, "num_spatial_dims", num_spatial_dims, minimum=0)
        self.target_shape = per_dim(layer, "target_shape", target_shape, n)
        self.operation = operation
        self.disjoint = as_flag(type(self).__name__, "disjoint", disjoint)

    @jax.named_scope("vernal.nn.AdaptivePool")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Reduces each part to one number.

        Args:
            x: shape `(..., channels, *spatial)`, where `...` are batch axes: any number of them, or
                none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., channels, *target_shape)`.
        """
        layer = type(self).__name__
        check_shape(layer, x, image_shape("channels", len(self.target_shape)))
        x = as_array(self, x)
        leading = x.ndim - len(self.target_shape)
        spatial = x.shape[leading:]
        least = self.target_shape if self.disjoint else (1,) * len(spatial)
        if any(n < t for n, t in zip(spatial, least, strict=True)):
            raise value_error(
                f"`{layer}` was given an input that is too small",
                where="argument `x`",
                expected=f"spatial sizes of at least {least}",
                got=str(spatial),
                instead="a smaller `target_shape`" if self.disjoint else "a larger input",
            )
        for axis, parts in enumerate(self.target_shape, start=leading):
            x = _reduce_parts(x, axis, parts, self.operation, self.disjoint)
        return x


def _bounds(size: int, parts: int, disjoint: bool) -> tuple[np.ndarray, np.ndarray]:
    """Where the parts of an axis begin and end."""
    i = np.arange(parts + 1)
    if disjoint:
        length, longer = divmod(size, parts)
        ends = i * length + np.minimum(i, longer)
        return ends[:-1], ends[1:]
    return i[:-1] * size // parts, -(-i[1:] * size // parts)


def _reduce_parts(
    x: jax.Array, axis: int, parts: int, operation: Callable[[Any], Any], disjoint: bool
) -> jax.Array:
    for _ in range(x.ndim):
        operation = jax.vmap(operation)
    x = jnp.moveaxis(x, axis, -1)
    size = x.shape[-1]
    if size % parts == 0:
        y = operation(jnp.reshape(x, (*x.shape[:-1], parts, size // parts)))
        return jnp.moveaxis(y, -1, axis)
    starts, ends = _bounds(size, parts, disjoint)
    # The operation is given all parts of one length at once.
    groups = [np.flatnonzero(ends - starts == n) for n in np.unique(ends - starts)]
    pieces = [
        operation(picked(x, x.ndim - 1, _ranges(starts[group], ends[group]))) for group in groups
    ]
    order = np.argsort(np.concatenate(groups))
    y = picked(jnp.concatenate(pieces, axis=-1), x.ndim - 1, order)
    return jnp.moveaxis(y, -1, axis)


def _ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The indices from each start to its end, one row for each; all have the same length."""
    return starts[:, None] + np.arange(ends[0] - starts[0])


# Subclasses of a class that is not abstract, for the reason given at `_AvgPool`.
class _AdaptiveAvgPool(AdaptivePool):
    _dims: ClassVar[int]

    def __init__(self, target_shape: int | Sequence[int], *, disjoint: bool = False):
        super().__init__(target_shape, self._dims, jnp.mean, disjoint=disjoint)


class _AdaptiveMaxPool(AdaptivePool):
    _dims: ClassVar[int]

    def __init__(self, target_shape: int | Sequence[int], *, disjoint: bool = False):
        super().__init__(target_shape, self._dims, jnp.max, disjoint=disjoint)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """Average pooling to a given size over one spatial dimension: `(..., channels, length)`.

    Args:
        target_shape: as for `AdaptivePool`; so is `disjoint`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveAvgPool1d(3)(jnp.ones((2, 7))).shape
        (2, 3)
    """

    _dims = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """Average pooling to a given size over two spatial dimensions:
    `(..., channels, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`; so is `disjoint`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveAvgPool2d(3)(jnp.ones((2, 7, 7))).shape
        (2, 3, 3)
    """

    _dims = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """Average pooling to a given size over three spatial dimensions:
    `(..., channels, depth, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`; so is `disjoint`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveAvgPool3d(3)(jnp.ones((2, 7, 7, 7))).shape
        (2, 3, 3, 3)
    """

    _dims = 3


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """Max pooling to a given size over one spatial dimension: `(..., channels, length)`.

    Args:
        target_shape: as for `AdaptivePool`; so is `disjoint`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveMaxPool1d(3)(jnp.ones((2, 7))).shape
        (2, 3)
    """

    _dims = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """Max pooling to a given size over two spatial dimensions: `(..., channels, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`; so is `disjoint`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveMaxPool2d(3)(jnp.ones((2, 7, 7))).shape
        (2, 3, 3)
    """

    _dims = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """Max pooling to a given size over three spatial dimensions:
    `(..., channels, depth, height, width)`.

    Args:
        target_shape: as for `AdaptivePool`; so is `disjoint`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AdaptiveMaxPool3d(3)(jnp.ones((2, 7, 7, 7))).shape
        (2, 3, 3, 3)
    """

    _dims = 3
