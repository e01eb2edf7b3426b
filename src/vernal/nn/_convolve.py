"""Convolution with a derivative that is right on every mesh.

XLA computes the derivative of a grouped convolution with respect to its kernel wrongly if the batch is split over some
axes of a mesh and replicated over others: it also adds up the replicas, so the gradient is too large by a factor of
their number. (JAX 0.10.2 to 0.12, explicit and automatic axes; the operation is a convolution with
`batch_group_count`.) So this module computes that derivative for each group separately, as that of a convolution
without groups. Convolutions without groups need it too: `vmap` over kernels makes groups of them. On a CPU it takes
longer (1.8 times for a depthwise convolution), so it is used only with several devices.
"""

import functools
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from ..primitives import local_linear_call
from ..transforms import explicit_mesh


def convolve(x: Array, weight: Array, groups: int, **options: Any) -> Array:
    """`lax.conv_general_dilated` of `x`, of shape `(batch, in_channels, *spatial)`, with a weight of shape
    `(out_channels, in_channels/groups, *kernel_size)` that is not split over a mesh. `options` are strides, padding
    and dilation."""
    if jax.device_count() == 1:
        return _grouped(x, weight, groups, **options)
    forward = functools.partial(_grouped, groups=groups, **options)
    transposed = functools.partial(_by_group, groups=groups, shape=weight.shape, **options)
    return local_linear_call(forward, transposed, x, weight)


def _grouped(x: Array, weight: Array, groups: int, **options: Any) -> Array:
    return lax.conv_general_dilated(x, weight, feature_group_count=groups, **options)


def _by_group(x: Array, cotangent: Array, groups: int, shape: Any, **options: Any) -> Array:
    """The cotangent of the weight."""

    def one(x: Array, cotangent: Array) -> Array:
        weight = jax.ShapeDtypeStruct((shape[0] // groups, *shape[1:]), cotangent.dtype)
        convolution = functools.partial(lax.conv_general_dilated, x, **options)
        return jax.linear_transpose(convolution, weight)(cotangent)[0]

    def all_groups(x: Array, cotangent: Array) -> Array:
        if groups == 1:
            return one(x, cotangent)
        each = (a.reshape(a.shape[0], groups, -1, *a.shape[2:]) for a in (x, cotangent))
        return jax.vmap(one, (1, 1))(*each).reshape(shape)

    mesh = explicit_mesh(x, cotangent)
    if mesh is None:
        return all_groups(x, cotangent)
    # The sum over a batch that is split is left to automatic axes.
    out = NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    run: Any = jax.sharding.auto_axes(all_groups, out_sharding=out)
    return run(x, cotangent)
