"""`make_mesh`: the devices of the program, arranged along named axes."""

import math
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
from jax.sharding import AxisType, Mesh

from ..show import short, type_error, value_error

_WHERE = "make_mesh(...)"


def make_mesh(
    *,
    automatic: bool | Sequence[str] = False,
    devices: Sequence[Any] | None = None,
    **sizes: SupportsIndex,
) -> Mesh:
    """Arranges devices along named axes.

    Axes are explicit by default: the sharding of an array over them is part of its type, `float32[8@data,4]`, follows
    from the types of the arguments of every operation, and is never guessed. If an operation leaves the sharding of its
    result open, JAX raises an error that asks for it. Over automatic axes the compiler decides, and shardings are
    requests to it.

    Args:
        automatic: True to make all axes automatic, or the names of the automatic ones.
        devices: the `jax.Device` objects to arrange. Default: all devices, of all processes.
        **sizes: the number of devices along each axis, in order: `data=4, model=2`. One of them may be -1: all that are
            left.

    Returns:
        A `jax.sharding.Mesh`, for `jax.set_mesh`, the functions of this package and those of JAX. Neighbours along the
        last axis are closest: use that axis for the heaviest communication.

    Raises:
        TypeError: for a size that is not an integer.
        ValueError: for sizes whose product is not the number of devices, or a name in `automatic` that is not an axis.

    Example:
        >>> import jax
        >>> from vernal.sharding import make_mesh
        >>> mesh = make_mesh(data=-1, model=1)
        >>> mesh.axis_names, mesh.shape["data"] == jax.device_count()
        (('data', 'model'), True)
    """
    found = list(jax.devices() if devices is None else devices)
    shape = _shape({name: _integer(name, size) for name, size in sizes.items()}, len(found))
    if isinstance(automatic, bool):
        automatic = list(sizes) if automatic else []
    unknown = [name for name in automatic if name not in sizes]
    if unknown or isinstance(automatic, str):
        raise value_error(
            "`automatic` names an axis that the mesh does not have",
            where=_WHERE,
            expected=f"True, False, or a list with some of {', '.join(map(repr, sizes))}",
            got=short(automatic),
        )
    types = [AxisType.Auto if name in automatic else AxisType.Explicit for name in sizes]
    return jax.make_mesh(shape, tuple(sizes), axis_types=tuple(types), devices=found)


def _integer(name: str, size: Any) -> int:
    try:
        return operator.index(size)
    except TypeError:
        raise type_error(
            "the size of an axis must be an integer",
            where=f"make_mesh({name}=...)",
            expected="how many devices there are along the axis, or -1",
            got=short(size),
        ) from None


def _shape(sizes: dict[str, int], count: int) -> tuple[int, ...]:
    """The sizes, with -1 replaced by the remaining number of devices."""
    given = math.prod(size for size in sizes.values() if size != -1)
    open_axes = sum(size == -1 for size in sizes.values())
    fits = given > 0 and (count % given == 0 if open_axes else count == given)
    if not sizes or open_axes > 1 or min(sizes.values()) < -1 or not fits:
        asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise value_error(
            f"these axes cannot be made of {count} devices",
            where=_WHERE,
            expected=f"at least one axis, positive sizes whose product is {count}, and at most one -1, "
            "for as many as are left",
            got=asked or "no axis",
            instead="give `devices=jax.devices()[:n]` to use only some of them; for development, "
            'jax.config.update("jax_num_cpu_devices", n) makes n of one CPU',
        )
    return tuple(count // given if size == -1 else size for size in sizes.values())
