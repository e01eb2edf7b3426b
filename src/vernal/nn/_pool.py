"""Pooling: reduces each window that slides over the input to one number."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import value_error
from ._layer_arguments import (
    as_array,
    as_flag,
    as_number,
    check_shape,
    check_size,
    check_window_fits,
    image_shape,
    padding_pairs,
    per_dim,
)
from ._mesh import beside
from ._precision import narrow, widen

Sizes = int | Sequence[int]
Padding = int | Sequence[int] | Sequence[tuple[int, int]]


class Pool(Module):
    """Reduces each window of the input to one number, separately for each channel.

    Args:
        init: the initial value, a number: the identity of `operation`, such as `0` for a sum or `-inf` for a
            maximum. Padding is filled with this value too.
        operation: an associative function of two arrays, such as `jax.lax.add` or `jax.lax.max`.
        num_spatial_dims: the number of spatial dimensions.
        kernel_size: the size of the window: one integer, or one for each dimension.
        stride: how far the window moves between two outputs: one integer, or one for each dimension.
        padding: how much to pad the input: an integer for every side, one for each dimension,
            or a pair (before, after) for each. At least 0, and less than the window.
        use_ceil: what to do if the last window does not end with the input. False leaves the rest
            of the input out; True adds one more window, which reaches beyond the input, unless it
            would begin after the input.

    Raises:
        ValueError: for an `init` that is not a number, sizes that are not positive integers, sequences of the wrong
            length, or a padding that is negative or as large as the window; when called, for an input of the wrong
            shape or too small.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Pool(0.0, jax.lax.add, num_spatial_dims=1, kernel_size=2, stride=2)
        >>> layer(jnp.array([[1.0, 2.0, 3.0, 4.0]]))
        Array([[3., 7.]], dtype=float32)
    """

    init: ArrayLike = field(trainable=False)
    operation: Callable[[Any, Any], Any]
    num_spatial_dims: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: tuple[tuple[int, int], ...] = field(static=True)
    use_ceil: bool = field(static=True)

    def __init__(
        self,
        init: ArrayLike,
        operation: Callable[[Any, Any], Any],
        num_spatial_dims: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        use_ceil: bool = False,
    ):
        layer = type(self).__name__
        self.init = as_number(layer, "init", init, "one number")
        self.operation = operation
        self.num_spatial_dims = n = check_size(layer, "num_spatial_dims", num_spatial_dims, 0)
        self.kernel_size = per_dim(layer, "kernel_size", kernel_size, n)
        self.stride = per_dim(layer, "stride", stride, n)
        self.padding = padding_pairs(layer, padding, n)
        self.use_ceil = as_flag(type(self).__name__, "use_ceil", use_ceil)
        # A negative padding, which would crop, can take the whole process down inside XLA.
        if any(
            not 0 <= p < k
            for pair, k in zip(self.padding, self.kernel_size, strict=True)
            for p in pair
        ):
            raise value_error(
                f"`{layer}` was given a negative padding, or one as large as its kernel",
                where="argument `padding`",
                expected=f"at least 0 and less than kernel_size={self.kernel_size}",
                got=str(self.padding),
            )

    @jax.named_scope("vernal.nn.Pool")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Reduces the windows.

        Args:
            x: shape `(..., channels, *spatial)`, where `...` are batch axes: any number of them, or
                none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., channels, *spatial)`, each size `(size + before + after - kernel_size) / stride
            + 1`, rounded down, or up if `use_ceil`. The dtype is that of `x`, except that means of
            integers are floating-point numbers.
        """
        layer = type(self).__name__
        check_shape(layer, x, image_shape("channels", self.num_spatial_dims))
        x = as_array(self, x)
        leading = x.ndim - self.num_spatial_dims
        pads = self._reach(x.shape[leading:]) if self.use_ceil else self.padding
        check_window_fits(layer, x.shape[leading:], pads, self.kernel_size)
        return lax.reduce_window(
            x,
            _initial(self.init, x.dtype),
            self.operation,
            (1,) * leading + self.kernel_size,
            (1,) * leading + self.stride,
            ((0, 0),) * leading + pads,
        )

    def _reach(self, spatial: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The padding up to the end of the last window, with the number of windows rounded up."""
        pads: list[tuple[int, int]] = []
        for size, k, stride, (before, after) in zip(
            spatial, self.kernel_size, self.stride, self.padding, strict=True
        ):
            last = -(-(size + before + after - k) // stride) * stride
            if last >= size + before:
                # The last window would begin after the input.
                last -= stride
            # Never negative: input beyond the last window need not be cropped.
            pads.append((before, max(0, last + k - size - before)))
        return tuple(pads)


def _initial(init: Any, dtype: Any) -> Any:
    """The initial value in the dtype of the input; an infinite one becomes the dtype's least or greatest number."""
    if not isinstance(init, bool | int | float | complex):
        return lax.convert_element_type(init, dtype)
    if isinstance(init, float) and math.isinf(init):
        if jnp.issubdtype(dtype, jnp.bool_):
            init = init > 0
        elif jnp.issubdtype(dtype, jnp.integer):
            init = jnp.iinfo(dtype).max if init > 0 else jnp.iinfo(dtype).min
    # Not a JAX array: `reduce_window` must read the value to recognise the operation and its derivative.
    return np.asarray(init, dtype)


# The one exception to the rule that concrete classes are not subclassed: `MaxPool2d(...)` is a `Pool`
# with its first arguments fixed, and `isinstance(layer, Pool)` is meant to match all of them.
class _AvgPool(Pool):
    _dims: ClassVar[int]

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        use_ceil: bool = False,
    ):
        super().__init__(0, lax.add, self._dims, kernel_size, stride, padding, use_ceil)

    @jax.named_scope("vernal.nn.AvgPool")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """The mean of each window; arguments and result are those of `Pool`."""
        x = as_array(self, x)
        # The sum of a window of bytes does not fit into a byte, nor the sum of 1024 ones into bfloat16.
        sums = super().__call__(widen(x))
        counts = self._counts(x.shape[x.ndim - self.num_spatial_dims :])
        return narrow(sums / beside(jnp.asarray(counts, sums.dtype), sums), x)

    def _counts(self, spatial: tuple[int, ...]) -> Any:
        """The number of values that each window averages. (In `vernal.compat`: always the size of the window.)"""
        if not self.use_ceil:
            return math.prod(self.kernel_size)
        counts = np.ones((), int)
        for size, k, stride, given, pads in zip(
            spatial, self.kernel_size, self.stride, self.padding, self._reach(spatial), strict=True
        ):
            starts = np.arange(0, size + sum(pads) - k + 1, stride)
            # Entries beyond the given padding do not count.
            counts = counts[..., None] * np.minimum(k, size + sum(given) - starts)
        return counts


class _MaxPool(Pool):
    _dims: ClassVar[int]

    def __init__(
        self,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        use_ceil: bool = False,
    ):
        super().__init__(-math.inf, lax.max, self._dims, kernel_size, stride, padding, use_ceil)


class AvgPool1d(_AvgPool):
    """The mean of each window over one spatial dimension: `(..., channels, length)`.

    Padding counts as zeros. If `use_ceil` makes a window reach beyond the padding, only its part inside the input and
    the padding counts.

    Args:
        kernel_size: as for `Pool`, like all other arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AvgPool1d(2, stride=2)(jnp.ones((2, 6))).shape
        (2, 3)
    """

    _dims = 1


class AvgPool2d(_AvgPool):
    """The mean of each window over two spatial dimensions: `(..., channels, height, width)`.

    Padding counts as zeros. If `use_ceil` makes a window reach beyond the padding, only its part inside the input and
    the padding counts.

    Args:
        kernel_size: as for `Pool`, like all other arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AvgPool2d(2, stride=2)(jnp.ones((2, 6, 6))).shape
        (2, 3, 3)
    """

    _dims = 2


class AvgPool3d(_AvgPool):
    """The mean of each window over three spatial dimensions:
    `(..., channels, depth, height, width)`.

    Padding counts as zeros. If `use_ceil` makes a window reach beyond the padding, only its part inside the input and
    the padding counts.

    Args:
        kernel_size: as for `Pool`, like all other arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.AvgPool3d(2, stride=2)(jnp.ones((2, 6, 6, 6))).shape
        (2, 3, 3, 3)
    """

    _dims = 3


class MaxPool1d(_MaxPool):
    """The maximum of each window over one spatial dimension: `(..., channels, length)`.

    Padding is never the maximum.

    Args:
        kernel_size: as for `Pool`, like all other arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.MaxPool1d(2, stride=2)(jnp.ones((2, 6))).shape
        (2, 3)
    """

    _dims = 1


class MaxPool2d(_MaxPool):
    """The maximum of each window over two spatial dimensions: `(..., channels, height, width)`.

    Padding is never the maximum.

    Args:
        kernel_size: as for `Pool`, like all other arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.MaxPool2d(2, stride=2)(jnp.ones((2, 6, 6))).shape
        (2, 3, 3)
    """

    _dims = 2


class MaxPool3d(_MaxPool):
    """The maximum of each window over three spatial dimensions:
    `(..., channels, depth, height, width)`.

    Padding is never the maximum.

    Args:
        kernel_size: as for `Pool`, like all other arguments.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.MaxPool3d(2, stride=2)(jnp.ones((2, 6, 6, 6))).shape
        (2, 3, 3, 3)
    """

    _dims = 3
