"""The placement of an array: the mesh axes that it is split over, and those that it varies over.

Under explicit mesh axes, and inside `jax.shard_map`, this is part of an array's type, and JAX refuses
to combine arrays that differ in it. Code that combines arrays from several sources brings them to one
type first. Outside of meshes these functions do nothing.
"""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from .._ground import Zero, instantiate_zeros
from ..show import listed, value_error


def placed_like(x: Any, aval: Any) -> Any:
    """Brings an array to the placement of a type.

    Args:
        x: an array.
        aval: the type.

    Returns:
        `x`, resharded and made to vary over `shard_map` axes like `aval`.
    """
    target = aval.sharding
    if not target.mesh.empty:
        x = split_over(x, target.mesh, target.spec)
    return varying_over(x, aval.manual_axis_type.varying)


def zeros_like(x: Any, dtype: Any = None) -> Any:
    """Zeros with the type and the placement of an array.

    Args:
        x: the array.
        dtype: another dtype, or None for that of `x`.
    """
    # From JAX 0.12 on, `jnp.zeros_like` follows a mesh only if it is the current one.
    return placed_like(jnp.zeros_like(x, dtype=dtype), jax.typeof(x))


def zeros_of(aval: Any) -> Any:
    """Zeros of a type and its placement; for random keys, the key made of zeros.

    Args:
        aval: the type.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return placed_like(jax.lax.full(aval.shape, 0, aval.dtype), aval)
    return instantiate_zeros(Zero(aval))


def summed_like(ct: Any, aval: Any, *, by: str, cotangents: Sequence[Any]) -> Any:
    """The cotangent of an array, from what a rule returns for it. If that differs between devices of `shard_map` but
    the array does not, it is each device's part of a sum.

    The cotangent of a result that differs is a part, too, but that of a result that all devices share is the whole. A
    rule that is given both may add them, and the whole would be summed.

    Args:
        ct: what the rule returns.
        aval: the type of the cotangent.
        by: the name of the rule's function, for the message.
        cotangents: those of the results, with a `Zero` for each that is not used.

    Returns:
        The cotangent, of that type.

    Raises:
        ValueError: if it would be summed, and only some of the results differ.
    """
    parts = varying_axes(ct) - varying_axes(aval)
    axes = [varying_axes(x.aval if isinstance(x, Zero) else x) for x in cotangents]
    live = [a for a, x in zip(axes, cotangents, strict=True) if not isinstance(x, Zero)]
    if any(parts & a for a in axes) and any(parts - a for a in live):
        over = listed(sorted(map(repr, parts)))
        raise value_error(
            f"some results of `{by}` differ between the devices of `shard_map`, and others do not",
            where=f"the backward rule of `{by}`",
            expected="cotangents that are all parts of a sum over devices, or all whole",
            got=f"cotangents of both kinds, and a result of the rule to sum over {over}",
            instead="a function with its own rule for each kind of result",
        )
    return placed_like(jax.lax.psum(ct, tuple(sorted(parts))) if parts else ct, aval)


def split_over(x: Any, mesh: AbstractMesh, entries: PartitionSpec | Sequence[Any]) -> Any:
    """Reshards an array; returns it unchanged if it already has that sharding.

    Args:
        x: an array.
        mesh: a mesh with explicit axes.
        entries: for each axis of `x`, the axes of the mesh to split it over.
    """
    spec = PartitionSpec(*entries)
    if jax.typeof(x).sharding.spec == spec:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, spec))


def gathered(x: Any) -> Any:
    """The whole array on every device of its mesh.

    Args:
        x: an array.
    """
    mesh = explicit_mesh(x)
    return x if mesh is None else split_over(x, mesh, [None] * x.ndim)


def unmapped_gathered(axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """The arguments of a batching rule, with unmapped ones gathered over the mesh axes of the mapped axis: inside, an
    array cannot be split over those.

    Args:
        axis: the mapped axis.
        args: the arguments.
        dims: for every argument the position of the axis, or None.
    """
    names = axis_names(axis.explicit_mesh_axis)

    def free(x: Any) -> Any:
        mesh = explicit_mesh(x) if names else None
        if mesh is None:
            return x
        return split_over(x, mesh, entries_without(jax.typeof(x).sharding.spec, names))

    return [free(x) if dim is None else x for x, dim in zip(args, dims, strict=True)]


def axis_names(entry: Any) -> tuple[Any, ...]:
    """The axes of the mesh in an entry of a `PartitionSpec`.

    Args:
        entry: a name, a tuple of names, or None.
    """
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def entries_without(entries: PartitionSpec | Sequence[Any], names: Collection[Any]) -> list[Any]:
    """Entries of a `PartitionSpec`, without some axes of the mesh.

    Args:
        entries: the entries, or the whole `PartitionSpec`.
        names: the axes to leave out.
    """
    return [tuple(n for n in axis_names(entry) if n not in names) or None for entry in entries]


def explicit_mesh(*arrays: Any) -> AbstractMesh | None:
    """The first mesh with explicit axes that any of the arrays is on.

    Args:
        *arrays: the arrays.

    Returns:
        The mesh, or None.
    """
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh
        if AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def advise_to_place(error: Exception, arrays: Sequence[Any]) -> None:
    """Adds what to do to an error of JAX's about explicit axes of a mesh.

    Args:
        error: the error; any other is left as it is.
        arrays: the differentiated arrays.
    """
    if type(error).__name__ == "ShardingTypeError":
        if any(explicit_mesh(x) is None for x in arrays):
            error.add_note(
                "vernal: a differentiated array is not on the mesh that the data are on. Place the model first, for "
                "example by vernal.sharding.place(model, mesh, vernal.sharding.data_parallel())."
            )
    elif "Length of device assignment" in str(error):
        error.add_note(
            "vernal: outside of compiled functions JAX does not know the mesh of every array. Differentiate in "
            "vernal.filter_jit, with a model that is placed on the mesh, or under jax.set_mesh(mesh)."
        )


def varying_axes(*arrays: Any) -> frozenset[Any]:
    """The axes of `shard_map` that any of the arrays varies over.

    Args:
        *arrays: the arrays, or their types.
    """
    types = [x if isinstance(x, ShapedArray) else jax.typeof(x) for x in arrays]
    return frozenset().union(*(t.manual_axis_type.varying for t in types))


def varying_over(x: Any, axes: frozenset[Any]) -> Any:
    """Lets an array vary over further axes of `shard_map`; returns it unchanged if it varies over all of them.

    Args:
        x: an array.
        axes: the axes.
    """
    missing = axes - jax.typeof(x).manual_axis_type.varying
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def varying_alike(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, each varying over every `shard_map` axis that any of them varies over.

    The transpose is the sum over the axis, which is the cotangent of an array that is the same on every
    device.

    Args:
        arrays: the arrays.
    """
    union = varying_axes(*arrays)
    return [varying_over(x, union) for x in arrays]
