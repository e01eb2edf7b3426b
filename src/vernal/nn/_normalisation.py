"""Layers that normalise an array: over all of it (`LayerNorm`, `RMSNorm`), or over groups of channels.

They share one computation: subtract the mean (`RMSNorm` does not), divide by the root of the mean
square, then scale and shift. Statistics are computed in at least float32, because in half precision a
mean square overflows at values of a few hundred. For complex inputs the mean square is that of the
absolute value, hence real.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import value_error
from ._init import weight_dtype
from ._layer_arguments import (
    as_array,
    as_flag,
    check_eps,
    check_parameter,
    check_real,
    check_shape,
    check_size,
    image_shape,
    wrong_shape,
)
from ._mesh import beside
from ._precision import narrow, widen


def _unit_size(x: Array, axes: tuple[int, ...], eps: float, centre: bool) -> Array:
    if centre:
        x = x - jnp.mean(x, axes, keepdims=True)
    mean_square = jnp.mean(jnp.real(x * jnp.conj(x)), axes, keepdims=True)
    return x * inverse_root(mean_square, eps).astype(x.dtype)


def inverse_root(mean_square: Array, eps: Any) -> Array:
    """`1 / sqrt(mean_square + eps)`; NaN where the mean square has overflowed, because zeros would look valid."""
    # Not `rsqrt`: its derivative, `rsqrt(x) / x`, underflows in float32 for layer inputs from 1e13 on.
    return jnp.where(jnp.isinf(mean_square), jnp.nan, 1 / jnp.sqrt(mean_square + eps))


def scale_and_shift(layer: Any, x: Array, shape: tuple[int, ...], spatial: int = 0) -> Array:
    """`x` times the layer's `weight` plus its `bias`, where it has them.

    Args:
        layer: the layer.
        x: the normalised input.
        shape: the shape of both parameters: that of the axes of `x` just before the spatial ones.
        spatial: the number of spatial axes at the end of `x`.
    """

    def along(name: str, parameter: Array) -> Array:
        check_parameter(type(layer).__name__, name, parameter, shape)
        check_real(type(layer).__name__, name, parameter, x)
        return beside(parameter.astype(x.dtype).reshape(shape + (1,) * spatial), x)

    if layer.weight is not None:
        x = x * along("weight", layer.weight)
    if layer.bias is not None:
        x = x + along("bias", layer.bias)
    return x


class _ShapeNorm(Module):
    """The base of `LayerNorm` and `RMSNorm`, which differ only in whether the mean is subtracted."""

    shape: tuple[int, ...] = field(static=True)
    eps: float = field(static=True)
    use_weight: bool = field(static=True)
    use_bias: bool = field(static=True)
    weight: Array | None
    bias: Array | None

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
    ):
        name = type(self).__name__
        dtype = weight_dtype(name, dtype)
        sizes = shape if isinstance(shape, Sequence) else (shape,)
        self.shape = tuple(check_size(name, "shape", n, minimum=0) for n in sizes)
        self.eps = check_eps(name, eps)
        self.use_weight = as_flag(type(self).__name__, "use_weight", use_weight)
        self.use_bias = as_flag(type(self).__name__, "use_bias", use_bias)
        self.weight = jnp.ones(self.shape, dtype) if use_weight else None
        self.bias = jnp.zeros(self.shape, dtype) if use_bias else None

    def _normalise(self, x: Any, centre: bool) -> Array:
        x = as_array(self, x)
        batch = check_shape(type(self).__name__, x, (..., *self.shape))
        y = _unit_size(widen(x), tuple(range(len(batch), x.ndim)), self.eps, centre)
        return narrow(scale_and_shift(self, y, self.shape), x)


class LayerNorm(_ShapeNorm):
    """Subtracts the mean of the whole input and divides by its standard deviation.

        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    The mean and the (biased) variance are over all elements; every element has its own weight and bias.
    Ba, Kiros, Hinton, "Layer Normalization", 2016, arXiv:1607.06450.

    Args:
        shape: the shape of the inputs; an int is the length of a vector.
        eps: added to the variance, so that a constant input gives zeros.
        use_weight: whether to scale by a learnt `weight`, initially ones.
        use_bias: whether to shift by a learnt `bias`, initially zeros.
        dtype: of `weight` and `bias`; JAX's default float if None.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> norm = vernal.nn.LayerNorm(4)
        >>> norm(jnp.array([1.0, 1.0, 3.0, 3.0])).round(3)
        Array([-1., -1.,  1.,  1.], dtype=float32)
    """

    @jax.named_scope("vernal.nn.LayerNorm")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Normalises one input, or each of a batch.

        Args:
            x: an array of shape `(..., *shape)`, where `...` are batch axes: any number of them, or none.
            key: not used; every layer takes one.

        Returns:
            An array of the shape and dtype of `x`, computed in at least float32. (An integer input
            gives floats.)

        Raises:
            ValueError: if the shape of `x` does not end with `shape`.
        """
        return self._normalise(x, centre=True)


class RMSNorm(_ShapeNorm):
    """Divides by the root of the mean square of the whole input.

        y = x / sqrt(mean(|x|^2) + eps) * weight + bias

    Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467. (The paper has no bias:
    `use_bias=False`.)

    Args:
        shape: the shape of the inputs; an int is the length of a vector.
        eps: added to the mean square, so that zeros give zeros.
        use_weight: whether to scale by a learnt `weight`, initially ones.
        use_bias: whether to shift by a learnt `bias`, initially zeros.
        dtype: of `weight` and `bias`; JAX's default float if None.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> norm = vernal.nn.RMSNorm(2)
        >>> norm(jnp.array([3.0, 3.0])).round(3)
        Array([1., 1.], dtype=float32)
    """

    @jax.named_scope("vernal.nn.RMSNorm")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Normalises one input, or each of a batch.

        Args:
            x: an array of shape `(..., *shape)`, where `...` are batch axes: any number of them, or none.
            key: not used; every layer takes one.

        Returns:
            An array of the shape and dtype of `x`, computed in at least float32. (An integer input
            gives floats.)

        Raises:
            ValueError: if the shape of `x` does not end with `shape`.
        """
        return self._normalise(x, centre=False)


class GroupNorm(Module):
    """`LayerNorm` over each of several groups of channels, with one weight and one bias per channel.

    The channels are the first axis of an example. Group `i` holds channels `i*c/g` to `(i+1)*c/g - 1` at all positions.
    One group is a layer norm over everything; one group per channel is instance normalisation.
    Wu, He, "Group Normalization", 2018, arXiv:1803.08494.

    Args:
        groups: the number of groups that the channels are divided into.
        channels: the number of channels. May be left out if `channelwise_affine` is False.
        eps: added to the variance of each group.
        channelwise_affine: whether to scale and shift each channel by a learnt `weight` (initially ones) and
            `bias` (initially zeros).
        dtype: of `weight` and `bias`; JAX's default float if None.
        num_spatial_dims: the number of axes that an example has after its channels. If None, the input is one example
            with any number of them; use `jax.vmap(layer)` for a batch. It is required if another axis is as long as the
            channels, because the input could then be a batch.

    Raises:
        ValueError: if `groups` does not divide `channels`, or `channels` is needed and not given.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> norm = vernal.nn.GroupNorm(groups=2, channels=4)
        >>> norm(jnp.array([1.0, 3.0, 10.0, 50.0])).round(3)
        Array([-1.,  1., -1.,  1.], dtype=float32)
        >>> images = jnp.ones((10, 4, 8, 8))
        >>> vernal.nn.GroupNorm(2, 4, num_spatial_dims=2)(images).shape
        (10, 4, 8, 8)
    """

    groups: int = field(static=True)
    channels: int | None = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    num_spatial_dims: int | None = field(static=True)
    weight: Array | None
    bias: Array | None

    def __init__(
        self,
        groups: int,
        channels: int | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        dtype: DTypeLike | None = None,
        *,
        num_spatial_dims: int | None = None,
    ):
        dtype = weight_dtype("GroupNorm", dtype)
        if num_spatial_dims is not None:
            num_spatial_dims = check_size("GroupNorm", "num_spatial_dims", num_spatial_dims, 0)
        groups = check_size("GroupNorm", "groups", groups)
        if channels is None and channelwise_affine:
            raise value_error(
                "GroupNorm needs `channels`, the number of its weights",
                where="GroupNorm(channels=...)",
                expected="an int, because channelwise_affine=True",
                got="None",
                instead="GroupNorm(groups, channels), or channelwise_affine=False",
            )
        if channels is not None and channels % groups:
            raise value_error(
                "the channels cannot be divided into equal groups",
                where="GroupNorm(groups, channels)",
                expected=f"a number of channels that {groups} divides",
                got=f"channels={channels}",
            )
        self.groups = groups
        self.channels = channels
        self.eps = check_eps("GroupNorm", eps)
        self.channelwise_affine = as_flag(
            type(self).__name__, "channelwise_affine", channelwise_affine
        )
        self.num_spatial_dims = num_spatial_dims
        self.weight = jnp.ones(channels, dtype) if channelwise_affine and channels else None
        self.bias = jnp.zeros(channels, dtype) if channelwise_affine and channels else None

    @jax.named_scope("vernal.nn.GroupNorm")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Normalises one input.

        Args:
            x: an array of shape `(channels, ...)`: any number of further axes, or none, but no batch
                axes. With `num_spatial_dims` its shape is `(..., channels, *spatial)`, where `...`
                are batch axes: any number of them, or none.
            key: not used; every layer takes one.

        Returns:
            An array of the shape and dtype of `x`, computed in at least float32. (An integer input
            gives floats.)

        Raises:
            ValueError: if `x` does not have `channels` channels, or `groups` does not divide their
                number; without `num_spatial_dims`, if `x` could also be a batch.
        """
        x = as_array(self, x)
        channels, spatial = self._divided(x)
        if self.num_spatial_dims is None:
            self._refuse_two_readings(x, list(map(self._fits, spatial)))
        batch = x.shape[: x.ndim - 1 - len(spatial)]
        groups = widen(x).reshape(*batch, self.groups, channels // self.groups, *spatial)
        inside = tuple(range(len(batch) + 1, groups.ndim))
        y = _unit_size(groups, inside, self.eps, centre=True).reshape(x.shape)
        return narrow(scale_and_shift(self, y, (channels,), len(spatial)), x)

    def _divided(self, x: Array) -> tuple[int, tuple[int, ...]]:
        """The number of channels and the spatial sizes of an input; an error if they do not fit."""
        n = self.num_spatial_dims
        axis = 0 if n is None else x.ndim - 1 - n
        if 0 <= axis < x.ndim and self._fits(x.shape[axis]):
            return x.shape[axis], x.shape[axis + 1 :]
        channels = (
            f"a multiple of {self.groups}" if self.channels is None else ("channels", self.channels)
        )
        if n is not None:
            raise wrong_shape("GroupNorm", x.shape, image_shape(channels, n))
        further = x.ndim - 1
        instead = None
        if x.ndim > 1 and self._fits(x.shape[1]):
            further -= 1
            instead = (
                f"GroupNorm(..., num_spatial_dims={further}) for batches, or jax.vmap(layer)(x)"
            )
        expected = (channels, *["any"] * further)
        raise wrong_shape("GroupNorm", x.shape, expected, instead=instead)

    def _fits(self, channels: int) -> bool:
        return channels % self.groups == 0 if self.channels is None else channels == self.channels

    def _refuse_two_readings(self, x: Array, fitting: list[bool]) -> None:
        if any(fitting):
            raise two_readings("GroupNorm", x, fitting.index(True) + 1)


def two_readings(layer: str, x: Array, axis: int) -> ValueError:
    """The error for an input that may be one example, or a batch with its channels in another axis."""
    return value_error(
        "the channel axis is ambiguous: the first axis or another one",
        where=f"argument `x` of {layer}",
        expected="num_spatial_dims=..., because several axes have a length that fits the channels",
        got=f"shape {x.shape}",
        instead=f"{layer}(..., num_spatial_dims={x.ndim - 1}) if this is one example, "
        f"num_spatial_dims={x.ndim - 1 - axis} if it is a batch",
    )
