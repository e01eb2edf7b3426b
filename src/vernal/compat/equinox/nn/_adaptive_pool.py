"""Adaptive pools with Equinox's parts, which do not overlap, where Vernal's are those of PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

from .... import nn


class AdaptivePool(nn.AdaptivePool):
    """`vernal.nn.AdaptivePool` with `disjoint=True`."""

    def __init__(
        self,
        target_shape: int | Sequence[int],
        num_spatial_dims: int,
        operation: Callable[[Any], Any],
    ):
        super().__init__(target_shape, num_spatial_dims, operation, disjoint=True)


class AdaptiveAvgPool1d(AdaptivePool, nn.AdaptiveAvgPool1d):
    """`vernal.nn.AdaptiveAvgPool1d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptiveAvgPool1d.__init__(self, target_shape, disjoint=True)


class AdaptiveAvgPool2d(AdaptivePool, nn.AdaptiveAvgPool2d):
    """`vernal.nn.AdaptiveAvgPool2d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptiveAvgPool2d.__init__(self, target_shape, disjoint=True)


class AdaptiveAvgPool3d(AdaptivePool, nn.AdaptiveAvgPool3d):
    """`vernal.nn.AdaptiveAvgPool3d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptiveAvgPool3d.__init__(self, target_shape, disjoint=True)


class AdaptiveMaxPool1d(AdaptivePool, nn.AdaptiveMaxPool1d):
    """`vernal.nn.AdaptiveMaxPool1d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptiveMaxPool1d.__init__(self, target_shape, disjoint=True)


class AdaptiveMaxPool2d(AdaptivePool, nn.AdaptiveMaxPool2d):
    """`vernal.nn.AdaptiveMaxPool2d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptiveMaxPool2d.__init__(self, target_shape, disjoint=True)


class AdaptiveMaxPool3d(AdaptivePool, nn.AdaptiveMaxPool3d):
    """`vernal.nn.AdaptiveMaxPool3d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptiveMaxPool3d.__init__(self, target_shape, disjoint=True)
