"""`BatchNorm` with Equinox's defaults."""

import warnings
from collections.abc import Sequence
from typing import Literal

from jax.typing import DTypeLike

from .... import nn


class BatchNorm(nn.BatchNorm):
    """`vernal.nn.BatchNorm` with the defaults of Equinox 0.13.8.

    Args:
        input_size: as for `vernal.nn.BatchNorm`; so are all others but for their defaults.
        axis_name: which is needed here.
        eps: likewise.
        channelwise_affine: likewise.
        momentum: likewise.
        inference: likewise.
        dtype: likewise.
        mode: `"ema"` or `"batch"`; `"legacy"` is `"ema"` with a warning.

    Example:
        >>> from vernal.compat import equinox as eqx
        >>> eqx.nn.BatchNorm(3, "batch", mode="ema").momentum
        0.99
    """

    def __init__(
        self,
        input_size: int,
        axis_name: str | Sequence[str],
        eps: float = 1e-5,
        channelwise_affine: bool = True,
        momentum: float = 0.99,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        mode: Literal["legacy", "ema", "batch"] = "legacy",
    ):
        if mode == "legacy":
            warnings.warn('BatchNorm: give the `mode`; none is mode="ema"', stacklevel=2)
            mode = "ema"
        super().__init__(
            input_size, axis_name, eps, channelwise_affine, momentum, inference, dtype, mode
        )
