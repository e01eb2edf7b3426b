"""Pools whose function is a leaf. With `use_ceil`, average pools count elements beyond the padding as zeros too."""

import math
from typing import Any

from .... import nn
from ._layer import LayerMeta


class Pool(nn.Pool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Pool`."""


class MaxPool1d(nn.MaxPool1d, Pool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.MaxPool1d`."""


class MaxPool2d(nn.MaxPool2d, Pool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.MaxPool2d`."""


class MaxPool3d(nn.MaxPool3d, Pool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.MaxPool3d`."""


class _Whole:
    kernel_size: tuple[int, ...]

    def _counts(self, spatial: tuple[int, ...]) -> Any:
        return math.prod(self.kernel_size)


class AvgPool1d(_Whole, nn.AvgPool1d, Pool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AvgPool1d`, whose windows all count as whole."""


class AvgPool2d(_Whole, nn.AvgPool2d, Pool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AvgPool2d`, whose windows all count as whole."""


class AvgPool3d(_Whole, nn.AvgPool3d, Pool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AvgPool3d`, whose windows all count as whole."""
