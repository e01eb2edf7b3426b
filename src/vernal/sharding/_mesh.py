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

    Axes are explicit: how an array is spread over them is part of its type, `float32[8@data,4]`, follows from the types
    of the arguments of every operation, and is never guessed. Where an operation does not say how its result is spread,
    JAX asks. Over automatic axes the compiler decides, and shardings are what it is asked for.

    Args:
        automatic: True for automatic axes, or the names of those that are.
        devices: the `jax.Device` objects to arrange; by default all devices, of all processes.
        **sizes: how many devices there are along each axis, in order: `data=4, model=2`. One of them may be -1: as many
            as are left.

    Returns:
        A `jax.sharding.Mesh`, for `jax.set_mesh`, for the functions of this room and for those of JAX. Neighbours along
        the last axis are the closest; that is where most should be sent.

    Raises:
        TypeError: for a size that is not an integer.
        ValueError: for sizes that do not make the number of devices, or a name in `automatic` that is not one of the
            axes.

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
    """The sizes, with the number that is left in the place of -1."""
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
