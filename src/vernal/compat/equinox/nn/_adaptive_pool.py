"""Adaptive pools with Equinox's windows, which do not overlap; Vernal's are those of PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from .... import nn
from ....modules import field
from ._layer import LayerMeta


class AdaptivePool(nn.AdaptivePool, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AdaptivePool` with `disjoint=True`."""

    # Not a field in Equinox.
    disjoint: bool = field(static=True, init=False, default=True)

    def __init__(
        self,
        target_shape: int | Sequence[int],
        num_spatial_dims: int,
        operation: Callable[[Any], Any],
    ):
        super().__init__(target_shape, num_spatial_dims, operation, disjoint=True)


class AdaptiveAvgPool1d(AdaptivePool, nn.AdaptiveAvgPool1d, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AdaptiveAvgPool1d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptivePool.__init__(self, target_shape, 1, jnp.mean, disjoint=True)


class AdaptiveAvgPool2d(AdaptivePool, nn.AdaptiveAvgPool2d, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AdaptiveAvgPool2d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptivePool.__init__(self, target_shape, 2, jnp.mean, disjoint=True)


class AdaptiveAvgPool3d(AdaptivePool, nn.AdaptiveAvgPool3d, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AdaptiveAvgPool3d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptivePool.__init__(self, target_shape, 3, jnp.mean, disjoint=True)


class AdaptiveMaxPool1d(AdaptivePool, nn.AdaptiveMaxPool1d, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AdaptiveMaxPool1d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptivePool.__init__(self, target_shape, 1, jnp.max, disjoint=True)


class AdaptiveMaxPool2d(AdaptivePool, nn.AdaptiveMaxPool2d, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AdaptiveMaxPool2d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptivePool.__init__(self, target_shape, 2, jnp.max, disjoint=True)


class AdaptiveMaxPool3d(AdaptivePool, nn.AdaptiveMaxPool3d, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.AdaptiveMaxPool3d` with `disjoint=True`."""

    def __init__(self, target_shape: int | Sequence[int]):
        nn.AdaptivePool.__init__(self, target_shape, 3, jnp.max, disjoint=True)
