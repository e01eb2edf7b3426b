"""`InstanceNorm`: normalises each channel of each example separately."""

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
    check_shape,
    check_size,
    image_shape,
    wrong_shape,
)
from ._normalisation import _unit_size, scale_and_shift, two_readings
from ._precision import narrow, widen


class InstanceNorm(Module):
    """Normalises each channel of an example to mean 0 and variance 1 over all its positions.

        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    Mean and (biased) variance are over the spatial axes, with one weight and one bias for each channel. There are no
    running statistics: training and inference are the same, as with PyTorch's `track_running_stats=False`.

    Ulyanov, Vedaldi, Lempitsky, "Instance Normalization: The Missing Ingredient for Fast Stylization", 2016,
    arXiv:1607.08022.

    Args:
        channels: the number of channels.
        eps: added to the variance, so that a constant channel gives zeros.
        channelwise_affine: whether to scale and shift each channel by a learnt `weight` (ones at first) and `bias`
            (zeros). The default is True, as for all norms here; that of PyTorch's `affine` is False.
        dtype: of `weight` and `bias`; JAX's default float if None.
        num_spatial_dims: the number of axes of an example after its channels. Without it the input is one example with
            any number of them, at least one; for a batch use `jax.vmap(layer)`. It is required where another axis has
            the length of the channels, because the input may then be a batch.

    Raises:
        ValueError: for fewer than one channel or spatial axis, or a `dtype` of integers; when called, for an input of
            the wrong shape, or with a single position.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> norm = vernal.nn.InstanceNorm(channels=2)
        >>> norm(jnp.array([[1.0, 3.0], [10.0, 50.0]])).round(3)
        Array([[-1.,  1.],
               [-1.,  1.]], dtype=float32)
        >>> images = jnp.ones((10, 2, 8, 8))
        >>> vernal.nn.InstanceNorm(2, num_spatial_dims=2)(images).shape
        (10, 2, 8, 8)
    """

    channels: int = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    num_spatial_dims: int | None = field(static=True)
    weight: Array | None
    bias: Array | None

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        dtype: DTypeLike | None = None,
        *,
        num_spatial_dims: int | None = None,
    ):
        dtype = weight_dtype("InstanceNorm", dtype)
        if num_spatial_dims is not None:
            num_spatial_dims = check_size("InstanceNorm", "num_spatial_dims", num_spatial_dims)
        self.channels = check_size("InstanceNorm", "channels", channels)
        self.eps = check_eps("InstanceNorm", eps)
        self.channelwise_affine = as_flag(
            type(self).__name__, "channelwise_affine", channelwise_affine
        )
        self.num_spatial_dims = num_spatial_dims
        self.weight = jnp.ones(self.channels, dtype) if channelwise_affine else None
        self.bias = jnp.zeros(self.channels, dtype) if channelwise_affine else None

    @jax.named_scope("vernal.nn.InstanceNorm")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Normalises one input.

        Args:
            x: an array of shape `(channels, *spatial)` with at least one spatial axis, and no batch axes. With
                `num_spatial_dims` its shape is `(..., channels, *spatial)`, where `...` are batch axes: any number of
                them, or none.
            key: not used; every layer takes one.

        Returns:
            An array of the shape and dtype of `x`, computed in at least float32. (An integer input gives floats.)

        Raises:
            ValueError: if the channel axis of `x` does not have size `channels`; if `x` has no spatial axis, or a
                single position, which would always give zero; if, without `num_spatial_dims`, `x` may be a batch.
        """
        x = as_array(self, x)
        n = self._spatial_dims(x)
        spatial = x.shape[x.ndim - n :]
        if all(isinstance(size, int) and size == 1 for size in spatial):
            raise value_error(
                "the variance of a single position is zero, whatever the input",
                where="argument `x` of InstanceNorm",
                expected="more than one position for each channel",
                got=f"shape {x.shape}",
                instead="LayerNorm(shape), which normalises over the channels",
            )
        y = _unit_size(widen(x), tuple(range(x.ndim - n, x.ndim)), self.eps, centre=True)
        return narrow(scale_and_shift(self, y, (self.channels,), n), x)

    def _spatial_dims(self, x: Array) -> int:
        """The number of spatial axes of an input, after checking its axes."""
        channels, n = ("channels", self.channels), self.num_spatial_dims
        if n is not None:
            check_shape("InstanceNorm", x, image_shape(channels, n))
            return n
        if x.ndim > 1 and x.shape[0] == self.channels:
            # Not the last axis: channels without positions are not an input.
            if self.channels in x.shape[1:-1]:
                raise two_readings("InstanceNorm", x, x.shape.index(self.channels, 1))
            return x.ndim - 1
        instead = None
        if x.ndim > 2 and x.shape[1] == self.channels:
            instead = (
                f"InstanceNorm(..., num_spatial_dims={x.ndim - 2}) for batches, "
                "or jax.vmap(layer)(x)"
            )
        further = ["any"] * max(1, x.ndim - (1 if instead is None else 2))
        raise wrong_shape("InstanceNorm", x.shape, (channels, *further), instead=instead)
