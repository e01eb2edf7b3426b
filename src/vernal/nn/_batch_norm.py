"""`BatchNorm`.

This is the one layer whose result for an example depends, while training, on the other examples of the batch. So it
must know which axes are the batch, and see all of them: leading axes of its input, axes mapped by `jax.vmap`, or axes
of a mesh under `jax.shard_map`. The mean over several of these axes is taken one after the other, which is exact
because every element of an axis holds equally many values.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import field
from ..show import short, value_error
from ._inference import in_inference
from ._init import weight_dtype
from ._layer_arguments import (
    as_array,
    as_flag,
    as_number,
    check_eps,
    check_kind,
    check_parameter,
    check_size,
    known_value,
)
from ._mesh import beside
from ._normalisation import inverse_root, scale_and_shift
from ._precision import narrow, widen
from ._state import State, StatefulLayer, check_state
from ._variable import Variable

_MOMENTUM = (
    "the share of the old average that is kept, from 0 to 1 (PyTorch's momentum=0.1 is 0.9 here)"
)


class BatchNorm(StatefulLayer):
    """Subtracts from each channel its mean over the batch and divides by its standard deviation.

        y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

    Mean and variance are over the batch and all positions. While training they are those of the current batch (with the
    biased variance), and the layer keeps running averages of them; in inference it uses the running averages.

    S. Ioffe and C. Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
    Shift", ICML 2015, arXiv:1502.03167.

    **Which axes are the batch.** One example has the shape `(channels, *spatial)`, with `num_spatial_dims` spatial
    axes, and all axes in front of it are the batch: `(*batch, channels, *spatial)`. `BatchNorm(3)` takes `(batch, 3)`.
    Inputs with more axes need `num_spatial_dims`: `BatchNorm(3, num_spatial_dims=2)` takes `(batch, 3, height, width)`,
    and `num_spatial_dims=0` takes several batch axes, `(batch, time, 3)`. With `axis_name` the batch is (also) over
    those named axes: `jax.vmap(layer, axis_name="batch")`, or axes of the mesh in `jax.shard_map`, so that all devices
    normalise by the statistics of the whole batch. (Under plain `jax.jit` a batch that is sharded over devices is one
    array, and needs no name.) With `axis_name` alone an example may have any number of spatial axes, and no batch axes
    in front, as in Equinox.

    In inference the leading axes are mapped over, as in any other layer. While training they are not: `layer(xs)`
    normalises over them, and `jax.vmap(layer)(xs)` without a name would normalise each example by itself.

    **Running statistics** are buffers (see `vernal.field`): `running_mean`, `running_var` (of the unbiased variance),
    and `num_batches_tracked`, the number of batches in them. Mean and variance start as 0 and 1, so that inference
    before any training changes nothing. After `n` batches they are the weighted average of those of all batches: the
    last has weight 1, the one before `momentum`, then `momentum**2`, ...; the starting values do not count, so one
    batch is enough for sensible inference. (PyTorch's `momentum=0.1` is `momentum=0.9` here. In PyTorch the starting
    values count, with weight `momentum**n`; statistics loaded from PyTorch are used as they are. If they were saved
    without their count, set `num_batches_tracked` to `jnp.array(jnp.inf)`, and training continues by PyTorch's rule;
    with a count of 0 the first batch would replace them. PyTorch cannot store an infinite count: use
    `to_torch(..., ignore="**.num_batches_tracked")`.) The new statistics are returned by `vernal.nn.apply`, or through
    `state`. They do not change in inference, nor if any of them is frozen (`vernal.freeze(model, "norm")`): the layer
    then normalises by them.

    Args:
        input_size: the number of channels.
        axis_name: the name, or names, of axes of `jax.vmap` or `jax.shard_map` that belong to the batch.
        eps: added to the variance.
        channelwise_affine: whether to scale and shift each channel by a learnt `weight` (ones at first) and `bias`
            (zeros).
        momentum: the weight of a batch relative to the next one, from 0 to 1. With None all batches count equally. With
            0 the statistics are those of the last batch. With 1 they keep the starting or loaded values; in mode "ema"
            those of the first batch.
        inference: True to normalise by the running statistics and leave them unchanged.
        dtype: of `weight` and `bias`; JAX's default float if None. The statistics have at least float32.
        mode: what to normalise by while training. `"batch"`: the statistics of the batch. `"ema"`: the running
            statistics, this batch included, so that training and inference do the same (gradients pass through this
            batch's share); the first batch sets them, each further one has weight `1 - momentum`, and their variance is
            the biased one, as in Equinox.
        num_spatial_dims: the number of axes of an example after its channels. None for any number if `axis_name` is
            given; otherwise the input is `(batch, channels)`.

    Raises:
        ValueError: if a size is wrong, `momentum` is not between 0 and 1, the mode is unknown, or `dtype` is complex.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> norm = nn.BatchNorm(2)
        >>> xs = jnp.array([[0.0, 1.0], [2.0, 5.0]])
        >>> ys, norm = nn.apply(norm, xs)
        >>> print(ys.round(3))
        [[-1. -1.]
         [ 1.  1.]]
        >>> print(norm.running_mean.value, norm.running_var.value)
        [1. 3.] [2. 8.]
        >>> nn.apply(norm, xs, train=False)[0].shape
        (2, 2)
    """

    weight: Array | None
    bias: Array | None
    running_mean: Variable
    running_var: Variable
    # A float, because plain `jax.grad` refuses anything else.
    num_batches_tracked: Variable
    inference: bool
    momentum: float | None = field(trainable=False)
    input_size: int = field(static=True)
    axis_name: str | tuple[str, ...] | None = field(static=True)
    eps: float = field(static=True)
    channelwise_affine: bool = field(static=True)
    mode: Literal["batch", "ema"] = field(static=True)
    num_spatial_dims: int | None = field(static=True)

    def __init__(
        self,
        input_size: int,
        axis_name: str | Sequence[str] | None = None,
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float | None = 0.9,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        mode: Literal["batch", "ema"] = "batch",
        *,
        num_spatial_dims: int | None = None,
    ):
        real: Any = weight_dtype("BatchNorm", dtype)
        if mode not in ("batch", "ema"):
            raise _wrong("mode", 'one of "batch" and "ema"', mode)
        if momentum is not None:
            momentum = as_number("BatchNorm", "momentum", momentum, _MOMENTUM)
        _check_momentum(momentum)
        if jnp.issubdtype(real, jnp.complexfloating):
            raise _wrong("dtype", "real numbers", real)
        self.input_size = check_size("BatchNorm", "input_size", input_size)
        if not isinstance(axis_name, str | Sequence | None):
            raise _wrong("axis_name", "a name, several of them, or None", axis_name)
        self.axis_name = (
            axis_name if axis_name is None or isinstance(axis_name, str) else tuple(axis_name)
        )
        self.eps = check_eps("BatchNorm", eps)
        self.channelwise_affine = as_flag(
            type(self).__name__, "channelwise_affine", channelwise_affine
        )
        self.momentum = momentum
        self.inference = as_flag(type(self).__name__, "inference", inference)
        self.mode = mode
        if num_spatial_dims is not None:
            num_spatial_dims = check_size(
                "BatchNorm", "num_spatial_dims", num_spatial_dims, minimum=0
            )
        self.num_spatial_dims = num_spatial_dims
        self.weight = jnp.ones(input_size, real) if channelwise_affine else None
        self.bias = jnp.zeros(input_size, real) if channelwise_affine else None
        self.running_mean = Variable(widen(jnp.zeros(input_size, real)))
        self.running_var = Variable(widen(jnp.ones(input_size, real)))
        self.num_batches_tracked = Variable(widen(jnp.zeros((), real)))

    @jax.named_scope("vernal.nn.BatchNorm")
    def __call__(
        self,
        x: ArrayLike,
        state: State | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
    ) -> Any:
        """Normalises a batch.

        Args:
            x: an array of shape `(*batch, channels, *spatial)`; see the class for which axes these are.
            state: the state from `vernal.nn.make_with_state`, for callers that thread the state explicitly.
            key: not used; every layer takes one.
            inference: overrides the layer's own setting, for this call.

        Returns:
            An array of the shape and dtype of `x`, computed in at least float32. (An integer input gives floats.) With
            `state`: that array and the new state.

        Raises:
            ValueError: if the channel axis of `x` does not have size `input_size`; if `x` is complex; while training,
                if `axis_name` is not an axis around this call, or there are fewer than two values a channel (in mode
                "ema": one).
            RuntimeError: while training, if the new running statistics would be lost: outside `vernal.nn.apply` and
                without `state`.
        """
        x = as_array(self, x)
        channel = self._channel_axis(x)
        wide = widen(x)
        # Size 1 for every axis but that of channels, to broadcast against `x`.
        shape = tuple(n if axis == channel else 1 for axis, n in enumerate(x.shape))
        variables = [self.running_mean, self.running_var, self.num_batches_tracked]
        check_state(self, state)
        old = [v.value if state is None else state.get(v) for v in variables]
        self._check_statistics(*old)

        def per_channel(values: Array) -> Array:
            return beside(values.astype(wide.dtype).reshape(shape), wide)

        mean, var = map(per_channel, old[:2])
        new: list[Array] = []
        if not in_inference(self, variables, inference):
            batch_mean, batch_var, count = self._of_the_batch(wide, channel)
            unbiased = batch_var if self.mode == "ema" else batch_var * (count / (count - 1))
            # Loaded statistics may have PyTorch's integer count.
            tracked = widen(old[2]) + 1
            share = self._share(tracked).astype(wide.dtype)
            new_mean = mean + share * (batch_mean - mean)
            new_var = var + share * (unbiased - var)
            new = [new_mean, new_var, tracked]
            mean, var = (new_mean, new_var) if self.mode == "ema" else (batch_mean, batch_var)
        y = (wide - mean) * inverse_root(var, self.eps)
        y = scale_and_shift(self, y, (self.input_size,), x.ndim - 1 - channel)
        y = narrow(y, x)
        # In inference `new` is empty.
        for variable, before, value in zip(variables, old, new, strict=False):
            value = lax.stop_gradient(value).reshape(before.shape).astype(before.dtype)
            if state is None:
                y = variable.update(value, y)
            else:
                state = state.set(variable, value)
        return y if state is None else (y, state)

    def _check_statistics(self, mean: Array, var: Array, count: Array) -> None:
        """Refuses statistics of the wrong shape or dtype, such as integers, to which new ones would be rounded.
        `vernal.tree_at` may have put them in."""
        check_parameter("BatchNorm", "num_batches_tracked", count, ())
        if count.dtype == bool or jnp.iscomplexobj(count):
            raise _wrong("num_batches_tracked", "an integer or floating-point number", count)
        for name, values in ("running_mean", mean), ("running_var", var):
            check_parameter("BatchNorm", name, values, (self.input_size,))
            check_kind("BatchNorm", name, values, jnp.floating)

    def _share(self, tracked: Array) -> Array:
        """The weight of the last of `tracked` batches in the running statistics."""
        if self.momentum is None:
            return 1 / tracked
        _check_momentum(self.momentum)
        kept = jnp.asarray(self.momentum, tracked.dtype)
        if self.mode == "ema":
            return jnp.where(tracked > 1, 1 - kept, 1)
        # `(1 - momentum) / (1 - momentum**tracked)`, without cancellation between nearly equal numbers.
        one, whole = jnp.expm1(jnp.log(kept)), jnp.expm1(tracked * jnp.log(kept))
        return jnp.where(kept < 1, one / jnp.where(kept < 1, whole, 1), 0)

    def _channel_axis(self, x: Array) -> int:
        spatial = self.num_spatial_dims
        if spatial is None and self.axis_name is None and x.ndim > 2:
            raise value_error(
                "the channel axis of the input of `BatchNorm` is ambiguous",
                where="argument `x`",
                expected=f"(batch, channels={self.input_size}), or num_spatial_dims=...",
                got=f"{x.shape}",
                instead="BatchNorm(..., num_spatial_dims=2) for images, 1 for signals, "
                "0 for vectors with several batch axes",
            )
        if spatial is None:
            spatial = 0 if self.axis_name is None else x.ndim - 1
        channel = x.ndim - 1 - spatial
        if channel < 0 or x.shape[channel] != self.input_size:
            batch = () if self.num_spatial_dims is None and self.axis_name is not None else ("...",)
            expected = ", ".join([*batch, f"channels={self.input_size}", *["any"] * spatial])
            behind = [n for n, size in enumerate(reversed(x.shape)) if size == self.input_size]
            raise value_error(
                "`BatchNorm` was given an input of the wrong shape",
                where="argument `x`",
                expected=f"({expected})",
                got=f"{x.shape}",
                instead=f"BatchNorm(..., num_spatial_dims={behind[0]}), if the axes after the channels are positions"
                if behind
                else None,
            )
        if jnp.iscomplexobj(x):
            raise _wrong("x", "real numbers", x)
        return channel

    def _of_the_batch(self, x: Array, channel: int) -> tuple[Array, Array, int]:
        """The mean and the biased variance of each channel, and the number of values that they are over."""
        axes = tuple(axis for axis in range(x.ndim) if axis != channel)

        def average(values: Array) -> Array:
            local = jnp.mean(values, axes, keepdims=True)
            return local if self.axis_name is None else lax.pmean(local, self.axis_name)

        count = math.prod(x.shape[axis] for axis in axes) * self._named_size()
        needed = 1 if self.mode == "ema" else 2
        if count < needed:
            raise value_error(
                "the batch is too small for statistics",
                where="argument `x` of BatchNorm, while training",
                expected=f"at least {needed} values per channel",
                got=f"{count} in {x.shape}",
                instead="an input with batch axes in front; or jax.vmap(layer, axis_name=...), with the same axis_name "
                "in BatchNorm; or vernal.nn.inference_mode(model)",
            )
        mean = average(x)
        return mean, average((x - mean) ** 2), count

    def _named_size(self) -> int:
        if self.axis_name is None:
            return 1
        try:
            return lax.axis_size(self.axis_name)
        except NameError as error:
            raise value_error(
                "`BatchNorm(axis_name=...)` was called outside of that axis",
                where=f"BatchNorm(axis_name={self.axis_name!r}), while training",
                expected="a call inside jax.vmap or jax.shard_map with axes of these names",
                got=str(error),
                instead=f"jax.vmap(model, axis_name={self.axis_name!r})(xs)",
            ) from None


def _check_momentum(momentum: Any) -> None:
    """Refuses a momentum known to be outside 0 to 1, which `tree_at` may have put in the layer."""
    known = None if momentum is None else known_value(momentum)
    if known is not None and not ((known >= 0) & (known <= 1)).all():
        raise _wrong("momentum", _MOMENTUM, momentum)


def _wrong(argument: str, expected: str, got: Any) -> ValueError:
    return value_error(
        "`BatchNorm` was given an invalid argument",
        where=f"argument `{argument}`",
        expected=expected,
        got=short(got),
    )
