"""Checks that arrays can be cut as specs say: over axes that the mesh has, into equal parts."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from ..show import path_text, short, value_error
from ._placement import axis_names


def check_cut(array: Any, spec: PartitionSpec, sizes: Any, where: str) -> None:
    """Refuses a spec that does not cut an array into equal parts.

    Args:
        array: the array.
        spec: over which axes of the mesh each of its axes is cut.
        sizes: the axes of the mesh, with the number of devices along each.
        where: the function and the argument.

    Raises:
        ValueError: if the array cannot be cut that way.
    """
    check_axes(spec, sizes, where)
    shape = jnp.shape(array)
    parts = [math.prod(sizes[name] for name in axis_names(entry)) for entry in spec]
    if len(spec) > len(shape) or any(n % k for n, k in zip(shape, parts, strict=False)):
        raise value_error(
            f"an array cannot be split into equal parts by {spec}",
            where=where,
            expected=f"at least {len(spec)} axes, whose sizes are multiples of {tuple(parts)}",
            got=short(array),
            instead="pad or truncate the array; None in the spec for an axis that is not split",
        )


def check_lies(array: Any, spec: PartitionSpec, where: str) -> None:
    """Refuses an array that does not lie on explicit axes of a mesh as a spec says.

    Args:
        array: the array.
        spec: the spec.
        where: the function and the argument.

    Raises:
        ValueError: if it lies otherwise.
    """
    own = jax.typeof(array).sharding.spec
    wanted, found = (
        [axis_names(entry) for entry in (*s, *(None,) * (jnp.ndim(array) - len(s)))]
        for s in (spec, own)
    )
    if wanted != found:
        raise value_error(
            "an array does not lie on the explicit axes of the mesh as `in_specs` says",
            where=where,
            expected=f"an array that is spread as {spec}",
            got=f"{short(array)}, spread as {own}",
            instead="place it first: vernal.sharding.shard_batch(batch, mesh, axis), or vernal.sharding.place(...)",
        )


def check_axes(spec: PartitionSpec, sizes: Any, where: str) -> None:
    """Refuses a spec with axes that the mesh does not have.

    Args:
        spec: the spec.
        sizes: the axes of the mesh.
        where: the function and the place of the spec.

    Raises:
        ValueError: if the spec has such an axis.
    """
    unknown = [name for entry in spec for name in axis_names(entry) if name not in sizes]
    if unknown:
        raise value_error(
            f"there is no mesh axis {unknown[0]!r} to split an array over",
            where=where,
            expected="mesh axes that are mapped: " + ", ".join(map(repr, sizes)),
            got=str(spec),
        )


def check_axes_of(specs: Any, sizes: Any, where: str, root: str) -> None:
    """`check_axes` for every spec in a tree.

    Args:
        specs: the tree.
        sizes: as for `check_axes`.
        where: the function.
        root: the name of the tree.
    """
    for path, spec in jtu.tree_leaves_with_path(
        specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    ):
        check_axes(spec, sizes, f"{where}, {path_text(path, root)}")
