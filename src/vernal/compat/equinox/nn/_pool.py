"""Average pools as Equinox's: with `use_ceil`, what is beyond the padding counts as zeros too."""

import math
from typing import Any

from .... import nn


class _Whole:
    kernel_size: tuple[int, ...]

    def _counts(self, spatial: tuple[int, ...]) -> Any:
        return math.prod(self.kernel_size)


class AvgPool1d(_Whole, nn.AvgPool1d):
    """`vernal.nn.AvgPool1d`, whose windows all count as whole."""


class AvgPool2d(_Whole, nn.AvgPool2d):
    """`vernal.nn.AvgPool2d`, whose windows all count as whole."""


class AvgPool3d(_Whole, nn.AvgPool3d):
    """`vernal.nn.AvgPool3d`, whose windows all count as whole."""
