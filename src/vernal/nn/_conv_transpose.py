"""Transposed convolutions.

A convolution without bias is a linear map of its input. Its transpose is the operation that carries
gradients back through it (exactly so if the kernel is flipped in space and its channel axes are
swapped). It is computed as an ordinary convolution over the input with `stride - 1` zeros between
its entries.
"""

from collections.abc import Mapping
from typing import ClassVar

import jax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import field
from ..show import message, value_error
from ._conv import AbstractConv, Padding, Sizes
from ._layer_arguments import check_window_fits, per_dim


class ConvTranspose(AbstractConv):
    """Transposed convolution over any number of spatial dimensions, channels first.

    Where `Conv` with the same settings maps size `large` to size `small`, this layer maps size
    `small` to size `large`. The initial weights are drawn as for `Conv`.

    Args:
        num_spatial_dims: the number of spatial dimensions.
        in_channels: the number of channels of the input.
        out_channels: the number of channels of the output.
        kernel_size: one integer, or one for each dimension, as for `stride`, `output_padding` and
            `dilation`.
        stride: the distance in the output between the contributions of two neighbouring inputs.
        padding: the padding of the `Conv`, which this layer therefore cuts off; given as for
            `Conv`.
        output_padding: with a stride, several sizes `large` give the same size `small`; this
            chooses among them, and must be less than the stride. The output is that much larger at
            its end or, with `padding="SAME"` or `"SAME_LOWER"`, that much smaller than
            `size * stride`.
        dilation: the distance between two entries of the kernel.
        groups: the channels are divided into this many groups, and each group is convolved by
            itself.
        use_bias: whether to add a bias for each output channel.
        padding_mode: `"ZEROS"`, or `"CIRCULAR"` together with `padding="SAME"` or `"SAME_LOWER"`
            and no `output_padding`.
        dtype: the dtype of the weights, floating-point or complex; `float32` by default (`float64`
            if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Attributes:
        weight: shape `(out_channels, in_channels/groups, *kernel_size)`.
        bias: shape `(out_channels, 1, ..., 1)`, or None.

    Raises:
        ValueError: for sizes that are not positive integers, sequences of the wrong length,
            channels that the groups do not divide, an unknown padding, an `output_padding` that is
            not less than the stride; when called, for an input of the wrong shape, or if all of the
            output would be cut off.
        NotImplementedError: for a `padding_mode` that this layer does not support.
        TypeError: when called, for an input of another dtype than the weights.

    References:
        Dumoulin and Visin, "A guide to convolution arithmetic for deep learning", arXiv:1603.07285.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> key = jax.random.key(0)
        >>> small = nn.Conv(1, 2, 4, kernel_size=3, stride=2, padding=1, key=key)(jnp.ones((2, 8)))
        >>> nn.ConvTranspose(1, 4, 2, 3, stride=2, padding=1, output_padding=1, key=key)(small).shape
        (2, 8)
    """

    # PyTorch keeps the kernel of the convolution: see `vernal.saving.from_torch`.
    _vernal_other_in_torch: ClassVar[Mapping[str, str]] = {"weight": "conv_transpose_rules"}

    output_padding: tuple[int, ...] = field(static=True)

    def __init__(
        self,
        num_spatial_dims: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Padding = 0,
        output_padding: Sizes = 0,
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
        layer = type(self).__name__
        self.output_padding = per_dim(
            layer, "output_padding", output_padding, self.num_spatial_dims, minimum=0
        )
        if any(o >= s for o, s in zip(self.output_padding, self.stride, strict=True)):
            raise value_error(
                f"the output padding of `{layer}` must be smaller than its stride",
                where="argument `output_padding`",
                expected=f"less than stride={self.stride} in every dimension",
                got=str(self.output_padding),
            )
        self._check_mode(layer)
        self._draw(use_bias, dtype, key)

    def _check_mode(self, layer: str) -> None:
        same = self.padding in ("SAME", "SAME_LOWER")
        circular = self.padding_mode == "CIRCULAR" and same and not any(self.output_padding)
        if self.padding_mode != "ZEROS" and not circular:
            raise NotImplementedError(
                message(
                    f"`{layer}` does not support this padding",
                    where="argument `padding_mode`",
                    expected="'ZEROS', or 'CIRCULAR' with padding='SAME' or 'SAME_LOWER' and output_padding=0",
                    got=f"padding_mode={self.padding_mode!r}, padding={self.padding!r}, "
                    f"output_padding={self.output_padding}",
                )
            )

    def _zeros_around(self) -> list[tuple[int, int]]:
        """The number of zeros before and after the input (spread out by the stride); negative
        numbers crop."""
        around: list[tuple[int, int]] = []
        for i, (window, stride, extra) in enumerate(
            zip(self._window, self.stride, self.output_padding, strict=True)
        ):
            if self.padding in ("SAME", "SAME_LOWER"):
                # The padding of `Conv` for an input of size `size * stride - extra`; if its kernel
                # leaves gaps, the last gap is made up for at the end.
                total = window - stride + extra
                less = max(total, 0) // 2
                before = less if self.padding == "SAME" else max(total, 0) - less
                cut = (before, total - before)
            elif isinstance(self.padding, str):
                cut = (0, -extra)
            else:
                cut = (self.padding[i][0], self.padding[i][1] - extra)
            around.append((window - 1 - cut[0], window - 1 - cut[1]))
        return around

    @jax.named_scope("vernal.nn.ConvTranspose")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Applies the transposed convolution.

        Args:
            x: shape `(..., in_channels, *spatial)`, where `...` are batch axes: any number of them,
                or none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., out_channels, *spatial)`, each size `(size - 1) * stride + dilation *
            (kernel_size - 1) + 1 - before - after + output_padding`; with `"SAME"` and
            `"SAME_LOWER"`, `size * stride - output_padding`.
        """
        x = self._checked(x)
        around = self._zeros_around()
        spread = [(n - 1) * s + 1 for n, s in zip(self._spatial(x), self.stride, strict=True)]
        check_window_fits(type(self).__name__, spread, around, self._window)
        if self.padding_mode == "CIRCULAR":
            x, around = self._wrap(x, around)
        return self._convolve(
            x, around, window_strides=(1,) * self.num_spatial_dims, lhs_dilation=self.stride
        )

    def _wrap(
        self, x: jax.Array, around: list[tuple[int, int]]
    ) -> tuple[jax.Array, list[tuple[int, int]]]:
        """Repeats the input around itself as far as the kernel reaches; the remaining padding crops
        the excess.

        Spread out by the stride, the input is one period of `size * stride` without its last
        `stride - 1` zeros: a copy after it begins `stride` after its last entry, as its own next
        entry would.
        """
        copies: list[tuple[int, int]] = []
        rest: list[tuple[int, int]] = []
        for stride, (before, after) in zip(self.stride, around, strict=True):
            copied = max(0, -(-before // stride)), max(0, after // stride)
            copies.append(copied)
            rest.append((before - copied[0] * stride, after - copied[1] * stride))
        return self._pad(x, copies, "wrap"), rest


# Subclasses for the reason given at `_FixedConv`.
class _FixedConvTranspose(ConvTranspose):
    _dims: ClassVar[int]

    # `output_padding` comes before `padding` here: an old slip of Equinox that positional calls
    # rely on.
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        output_padding: Sizes = 0,
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
            output_padding,
            dilation,
            groups,
            use_bias,
            padding_mode,
            dtype,
            key=key,
        )


class ConvTranspose1d(_FixedConvTranspose):
    """`ConvTranspose` over one spatial dimension: `(..., in_channels, length)`.

    Args:
        in_channels: this and all other arguments are as for `ConvTranspose`, without
            `num_spatial_dims`; by position, `output_padding` comes before `padding`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.ConvTranspose1d(4, 1, 3, stride=2, key=jax.random.key(0))(jnp.ones((4, 4))).shape
        (1, 9)
    """

    _dims = 1


class ConvTranspose2d(_FixedConvTranspose):
    """`ConvTranspose` over two spatial dimensions: `(..., in_channels, height, width)`.

    Args:
        in_channels: this and all other arguments are as for `ConvTranspose`, without
            `num_spatial_dims`; by position, `output_padding` comes before `padding`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.ConvTranspose2d(8, 3, 4, stride=2, padding="SAME", key=jax.random.key(0))
        >>> layer(jnp.ones((8, 7, 7))).shape
        (3, 14, 14)
    """

    _dims = 2


class ConvTranspose3d(_FixedConvTranspose):
    """`ConvTranspose` over three spatial dimensions: `(..., in_channels, depth, height, width)`.

    Args:
        in_channels: this and all other arguments are as for `ConvTranspose`, without
            `num_spatial_dims`; by position, `output_padding` comes before `padding`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> nn.ConvTranspose3d(2, 1, 3, key=jax.random.key(0))(jnp.ones((2, 3, 3, 3))).shape
        (1, 5, 5, 5)
    """

    _dims = 3
