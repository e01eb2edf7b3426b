"""Where an array lies: on which axes of a mesh it is sharded, over which it varies.

Under explicit mesh axes, and inside `jax.shard_map`, this is part of an array's type, and JAX
refuses to combine what differs. An operation of ours that takes several arrays brings them to one
type first. Nothing happens outside of meshes.
"""

from collections.abc import Sequence
from typing import Any

import jax


def placed_like(x: Any, aval: Any) -> Any:
    """`x`, resharded and made to vary over axes as its type would be `aval`."""
    target = aval.sharding
    if not target.mesh.empty and jax.typeof(x).sharding.spec != target.spec:
        x = jax.sharding.reshard(x, target)
    return _varying(x, aval.manual_axis_type.varying)


def _varying(x: Any, axes: frozenset[Any]) -> Any:
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each varying over every `shard_map` axis that any of them varies over.

    The transpose of this is the sum over the axis, which is what the cotangent of an array that is
    the same on every device has to be.
    """
    union = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    return [_varying(x, union) for x in arrays]
