"""Convolutions, and the base that they share with transposed convolutions."""

import abc
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, type_error, value_error
from ..trees import check_key
from ._batch import batched
from ._convolve import convolve
from ._init import limit, uniforms, weight_dtype
from ._layer_arguments import (
    as_array,
    as_flag,
    check_parameter,
    check_shape,
    check_size,
    check_weight,
    check_window_fits,
    image_shape,
    padding_pairs,
    per_dim,
)
from ._mesh import beside, whole

Sizes = int | Sequence[int]
Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]

_PAD_MODES = {"ZEROS": "constant", "REFLECT": "reflect", "REPLICATE": "edge", "CIRCULAR": "wrap"}


class AbstractConv(Module):
    """The base of convolutions and transposed convolutions: fields, checks, initial weights."""

    num_spatial_dims: int = field(static=True)
    weight: jax.Array
    bias: jax.Array | None
    in_channels: int = field(static=True)
    out_channels: int = field(static=True)
    kernel_size: tuple[int, ...] = field(static=True)
    stride: tuple[int, ...] = field(static=True)
    padding: str | tuple[tuple[int, int], ...] = field(static=True)
    dilation: tuple[int, ...] = field(static=True)
    groups: int = field(static=True)
    use_bias: bool = field(static=True)
    padding_mode: str = field(static=True)

    @abc.abstractmethod
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Applies the convolution to an input of shape `(..., in_channels, *spatial)`."""

    def _set(
        self,
        num_spatial_dims: int,
        channels: tuple[int, int],
        kernel_size: Sizes,
        stride: Sizes,
        padding: Padding,
        dilation: Sizes,
        groups: int,
        padding_mode: str,
    ) -> None:
        """Checks the settings and stores them in the form that calls use."""
        layer = type(self).__name__
        n = check_size(layer, "num_spatial_dims", num_spatial_dims, minimum=0)
        self.num_spatial_dims = n
        self.in_channels = check_size(layer, "in_channels", channels[0])
        self.out_channels = check_size(layer, "out_channels", channels[1])
        self.kernel_size = per_dim(layer, "kernel_size", kernel_size, n)
        self.stride = per_dim(layer, "stride", stride, n)
        self.dilation = per_dim(layer, "dilation", dilation, n)
        self.groups = check_size(layer, "groups", groups)
        self.padding = _parse_padding(layer, padding, n)
        self.padding_mode = _parse_mode(layer, padding_mode, self.padding)
        for name, count in zip(("in_channels", "out_channels"), channels, strict=True):
            if count % self.groups:
                raise value_error(
                    f"the channels of `{layer}` cannot be divided into its groups",
                    where=f"arguments `{name}` and `groups`",
                    expected=f"a multiple of groups={self.groups}",
                    got=f"{name}={count}",
                )

    def _draw(self, use_bias: bool, dtype: DTypeLike | None, key: Any) -> None:
        layer = type(self).__name__
        dtype = weight_dtype(layer, dtype)
        inputs = self.in_channels // self.groups
        lim = limit(inputs * math.prod(self.kernel_size))
        self.use_bias = as_flag(type(self).__name__, "use_bias", use_bias)
        weight = (self.out_channels, inputs, *self.kernel_size)
        bias = (self.out_channels,) + (1,) * self.num_spatial_dims if self.use_bias else None
        self.weight, self.bias = uniforms(check_key(layer, key), (weight, bias), lim, dtype)

    @property
    def _window(self) -> tuple[int, ...]:
        """The extent of the kernel in each dimension, dilation included. It is that of the weight: `vernal.tree_at` may
        have put in a kernel of another size than `kernel_size`."""
        kernel = self.weight.shape[2:]
        return tuple(d * (k - 1) + 1 for d, k in zip(self.dilation, kernel, strict=True))

    def _checked(self, x: Any) -> jax.Array:
        layer = type(self).__name__
        spatial = image_shape("out_channels", self.num_spatial_dims)[2:]
        kernel = (f"kernel_{axis}" for axis in spatial)
        check_weight(layer, self.weight, ("out_channels", "in_channels/groups", *kernel))
        # `vernal.tree_at` may have put in a weight for other channels than `in_channels`.
        channels = "in_channels", self.weight.shape[1] * self.groups
        check_shape(layer, x, image_shape(channels, self.num_spatial_dims))
        x = as_array(self, x)
        if 0 in self.weight.shape[2:]:
            raise value_error(
                f"the kernel of `{layer}` is empty",
                where=f"`weight` of {layer}",
                expected="at least one number along each spatial axis",
                got=str(self.weight.shape),
            )
        if self.weight.shape[0] % self.groups:
            raise value_error(
                f"the channels of `{layer}` cannot be divided into its groups",
                where=f"`weight` of {layer}",
                expected=f"a first axis (out_channels) whose length is a multiple of groups={self.groups}",
                got=str(self.weight.shape),
            )
        # For a NumPy array, this is the dtype that JAX will give it.
        dtype = jnp.result_type(self.weight)
        if x.dtype != dtype:
            raise type_error(
                f"`{layer}` was given an input whose dtype is not that of its weights",
                where="argument `x`",
                expected=str(dtype),
                got=str(x.dtype),
                instead=f"x.astype(jnp.{dtype})",
            )
        return x

    def _spatial(self, x: jax.Array) -> tuple[int, ...]:
        return x.shape[x.ndim - self.num_spatial_dims :]

    def _pad(self, x: jax.Array, pads: Sequence[tuple[int, int]], mode: str) -> jax.Array:
        return jnp.pad(x, ((0, 0),) * (x.ndim - len(pads)) + tuple(pads), mode=mode)

    def _convolve(self, x: jax.Array, pads: Sequence[tuple[int, int]], **strides: Any) -> jax.Array:
        weight = whole(jnp.asarray(self.weight))

        def with_one_batch_axis(x: jax.Array) -> jax.Array:
            options = {"padding": pads, "rhs_dilation": self.dilation, **strides}
            return convolve(x, weight, self.groups, **options)

        single = x.ndim == 1 + self.num_spatial_dims
        x = lax.expand_dims(x, (0,)) if single else x
        y = batched(with_one_batch_axis, x, 2 + self.num_spatial_dims)
        y = lax.squeeze(y, (0,)) if single else y
        if self.bias is None:
            return y
        out = y.shape[y.ndim - 1 - self.num_spatial_dims]
        check_parameter(type(self).__name__, "bias", self.bias, (out, *[1] * self.num_spatial_dims))
        return y + beside(self.bias, y)


def _parse_padding(layer: str, padding: Any, n: int) -> str | tuple[tuple[int, int], ...]:
    if isinstance(padding, str) and padding.upper() in ("SAME", "SAME_LOWER", "VALID"):
        return padding.upper()
    return padding_pairs(layer, padding, n, words=", or 'SAME', 'SAME_LOWER', 'VALID'")


def _parse_mode(layer: str, mode: str, padding: Any) -> str:
    if mode.upper() not in _PAD_MODES:
        raise value_error(
            f"`{layer}` was given an unknown padding mode",
            where="argument `padding_mode`",
            expected=", ".join(map(repr, _PAD_MODES)),
            got=short(mode),
        )
    if mode.upper() != "ZEROS" and not isinstance(padding, str) and min(sum(padding, (0,))) < 0:
        raise value_error(
            f"`{layer}` takes negative padding, which crops, only with padding_mode='ZEROS'",
            where=f"argument `padding`, with padding_mode={mode!r}",
            expected="integers of at least 0",
            got=short(padding),
        )
    return mode.upper()


class Conv(AbstractConv):
    """Convolution over any number of spatial dimensions, channels first.

    As usual in deep learning, it is a cross-correlation: the kernel is not flipped. Weight and bias
    are drawn uniformly between `-1/sqrt(n)` and `1/sqrt(n)`, where
    `n = in_channels/groups * prod(kernel_size)`.

    Args:
        num_spatial_dims: the number of spatial dimensions.
        in_channels: the number of channels of the input.
        out_channels: the number of channels of the output.
        kernel_size: one integer, or one for each dimension, as for `stride` and `dilation`.
        stride: how far the kernel moves between two outputs.
        padding: how much is added to the input: an integer for every side, one for each dimension,
            or a pair (before, after) for each; or `"VALID"` (none), `"SAME"` (the output has size
            `ceil(size / stride)`; an odd remainder goes after the input) or `"SAME_LOWER"` (an odd
            remainder goes before it).
        dilation: the distance between two entries of the kernel; 1 is an ordinary convolution.
        groups: the channels are divided into this many groups, and each group is convolved by
            itself.
        use_bias: whether to add a bias for each output channel.
        padding_mode: what is added: `"ZEROS"`, `"REFLECT"` (the input mirrored at its edge, once),
            `"REPLICATE"` (the edge repeated) or `"CIRCULAR"` (the input repeated).
        dtype: the dtype of the weights, floating-point or complex; `float32` by default (`float64`
            if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Attributes:
        weight: shape `(out_channels, in_channels/groups, *kernel_size)`.
        bias: shape `(out_channels, 1, ..., 1)`, or None.

    Raises:
        ValueError: for sizes that are not positive integers, sequences of the wrong length,
            channels that the groups do not divide, an unknown padding; when called, for an input of
            the wrong shape, or too small for the kernel or for mirrored padding.
        TypeError: when called, for an input of another dtype than the weights.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Conv(2, 3, 8, kernel_size=5, padding="SAME", key=jax.random.key(0))
        >>> layer(jnp.ones((3, 32, 32))).shape
        (8, 32, 32)
    """

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
    ):
        channels = (in_channels, out_channels)
        self._set(
            num_spatial_dims, channels, kernel_size, stride, padding, dilation, groups, padding_mode
        )
        self._draw(use_bias, dtype, key)

    @jax.named_scope("vernal.nn.Conv")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Applies the convolution.

        Args:
            x: shape `(..., in_channels, *spatial)`, where `...` are batch axes: any number of them,
                or none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., out_channels, *spatial)`, each size
            `floor((size + before + after - dilation * (kernel_size - 1) - 1) / stride) + 1`.
        """
        x = self._checked(x)
        pads = self.padding
        if isinstance(pads, str):
            pads = lax.padtype_to_pads(self._spatial(x), self._window, self.stride, pads)
        check_window_fits(type(self).__name__, self._spatial(x), pads, self._window)
        if self.padding_mode != "ZEROS":
            self._check_reach(x, pads)
            x = self._pad(x, pads, _PAD_MODES[self.padding_mode])
            pads = ((0, 0),) * self.num_spatial_dims
        return self._convolve(x, pads, window_strides=self.stride)

    def _check_reach(self, x: jax.Array, pads: Sequence[tuple[int, int]]) -> None:
        """Refuses padding that takes more values from an axis than there are."""
        reflects = self.padding_mode == "REFLECT"
        for n, pair in zip(self._spatial(x), pads, strict=True):
            # `REFLECT` does not repeat the edge itself. The other modes can repeat any values, but need at least one.
            if max(pair) > 0 and (n == 0 or reflects and max(pair) >= n):
                raise value_error(
                    f"`{type(self).__name__}` was given an input too small for its padding",
                    where=f"argument `x`, with padding_mode={self.padding_mode!r}",
                    expected="each spatial size larger than its padding on either side"
                    if reflects
                    else "spatial sizes of at least 1",
                    got=f"sizes {self._spatial(x)} and padding {tuple(pads)}",
                    instead="less padding, or padding_mode='REPLICATE'" if reflects else None,
                )


# Concrete classes are not subclassed in this library, with one exception: `Conv2d(...)` is a `Conv`
# whose first argument is fixed, and code that asks `isinstance(layer, Conv)` means all of them.
class _FixedConv(Conv):
    _dims: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        use_bias: bool = True,
        padding_mode: str = "ZEROS",
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
    ):
        super().__init__(
            self._dims,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            key=key,
        )


class Conv1d(_FixedConv):
    """`Conv` over one spatial dimension: `(..., in_channels, length)`.

    Args:
        in_channels: this and all other arguments are as for `Conv`, without `num_spatial_dims`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.Conv1d(1, 4, 3, stride=2, key=jax.random.key(0))(jnp.ones((1, 9))).shape
        (4, 4)
    """

    _dims = 1


class Conv2d(_FixedConv):
    """`Conv` over two spatial dimensions: `(..., in_channels, height, width)`.

    Args:
        in_channels: this and all other arguments are as for `Conv`, without `num_spatial_dims`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Conv2d(3, 8, kernel_size=3, padding=1, key=jax.random.key(0))
        >>> layer(jnp.ones((10, 3, 8, 8))).shape
        (10, 8, 8, 8)
    """

    _dims = 2


class Conv3d(_FixedConv):
    """`Conv` over three spatial dimensions: `(..., in_channels, depth, height, width)`.

    Args:
        in_channels: this and all other arguments are as for `Conv`, without `num_spatial_dims`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.Conv3d(1, 2, 3, key=jax.random.key(0))(jnp.ones((1, 5, 5, 5))).shape
        (2, 3, 3, 3)
    """

    _dims = 3
