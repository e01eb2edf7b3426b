"""Many small arrays as a few long ones, for programs whose time goes into passing arrays to them."""

import dataclasses
import functools
import math
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..show import is_traced, short, spec_text, type_error, value_error


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an array is: from `start` on in this buffer."""

    buffer: int
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape)


class Layout:
    """Where each leaf of a tree is in the buffers of a `Packed`."""

    def __init__(self, structure: Any, places: tuple[_Place | None, ...], max_size: int):
        self.structure = structure
        self.places = places
        self.max_size = max_size
        self.facts = structure, places
        self._hash = hash(self.facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.facts == other.facts)

    def __repr__(self) -> str:
        packed = sum(place is not None for place in self.places)
        return f"Layout({packed} of {len(self.places)} leaves)"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of each buffer."""
        ends: dict[int, int] = {}
        for place in self.places:
            if place is not None:
                ends[place.buffer] = place.end
        return tuple(ends.values())


# A call compares the layout of its argument with the one it was compiled for: at once, if equal ones are one object.
_layouts: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("buffers", "others"),
    meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree whose small arrays are in a few long ones, made by `pack`.

    It is a tree itself, whose leaves are the long arrays and what was not packed; so it can be an argument and a result
    of any transformation.

    Attributes:
        buffers: for each dtype an array of one axis, with the elements of all packed arrays of that dtype.
        others: the leaves that were not packed.
        layout: where each leaf is. Hashable; equal for trees of the same structure, shapes and dtypes.
    """

    buffers: tuple[Any, ...]
    others: tuple[Any, ...]
    layout: Layout

    def unpack(self) -> Any:
        """The tree.

        Returns:
            The tree that was packed, equal to the bit; or, if the buffers have changed since, one like it.

        Raises:
            ValueError: if the buffers have other shapes than those that `pack` made.

        Example:
            >>> import jax.numpy as jnp
            >>> import vernal
            >>> vernal.pack({"a": jnp.arange(3.0), "b": jnp.ones(())}).unpack()["a"].tolist()
            [0.0, 1.0, 2.0]
        """
        for buffer, length in zip(self.buffers, self.layout.lengths, strict=True):
            if jnp.shape(buffer) != (length,):
                raise value_error(
                    "the buffers of a packed tree have changed their shape",
                    where="Packed.unpack()",
                    expected=f"an array of shape ({length},), as `pack` made it",
                    got=short(buffer),
                    instead="unpack inside the function that vmap maps, which sees one tree at a time",
                )
        if any(map(is_traced, self.buffers)):
            sources: Sequence[Any] = self.buffers
        else:
            # On the host: on the device, each array would be a program to compile.
            sources = [np.array(buffer) for buffer in self.buffers]
        others = iter(self.others)
        leaves = [
            next(others) if place is None else _cut(sources, self.buffers, place)
            for place in self.layout.places
        ]
        return jax.tree.unflatten(self.layout.structure, leaves)

    def __reduce__(self) -> Any:
        # JAX cannot pickle the structure of a tree.
        return functools.partial(pack, max_size=self.layout.max_size), (self.unpack(),)


def pack(tree: Any, *, max_size: int = 4096) -> Packed:
    """Packs the small arrays of a tree into one long array for each dtype.

    A call passes each array to the device by itself. Where a step is short and a model has many small arrays, this
    takes most of the time; packed, they are passed as one:

        packed = vernal.pack((model, state))

        @vernal.filter_jit
        def step(packed, x, y):
            model, state = packed.unpack()
            ...
            return vernal.pack((model, state))

    Compiling takes longer: XLA compiles each array's way out of the buffer by itself (see the page of benchmarks).

    What is not packed stays a leaf of its own: larger arrays, NumPy arrays and Python numbers, random keys, arrays that
    are weakly typed.

    Args:
        tree: any pytree.
        max_size: the largest number of elements of an array that is packed.

    Returns:
        The packed tree; `packed.unpack()` gives the tree back.

    Raises:
        TypeError: if `max_size` is not an integer.
        ValueError: if a small array is on more than one device, or small arrays are on different ones.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> mlp = vernal.nn.MLP(2, 2, 8, depth=3, key=jax.random.key(0))
        >>> packed = vernal.pack(mlp)
        >>> len(jax.tree.leaves(mlp)), [leaf.shape for leaf in jax.tree.leaves(packed)]
        (8, [(186,)])
        >>> bool(vernal.tree_equal(packed.unpack(), mlp))
        True
    """
    try:
        max_size = operator.index(max_size)
    except TypeError:
        raise type_error(
            "the size of an array is an integer",
            where="pack(tree, max_size=...)",
            expected="the largest number of elements of an array that is packed",
            got=short(max_size),
        ) from None
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[Any]] = {}
    sizes: dict[Any, int] = {}
    places: list[_Place | None] = []
    for leaf in leaves:
        if not _is_small(leaf, max_size):
            places.append(None)
            continue
        _check_device(leaf)
        group = groups.setdefault(leaf.dtype, [])
        group.append(leaf)
        start = sizes.get(leaf.dtype, 0)
        sizes[leaf.dtype] = start + leaf.size
        places.append(_Place(list(groups).index(leaf.dtype), start, leaf.shape))
    others = tuple(leaf for leaf, place in zip(leaves, places, strict=True) if place is None)
    layout = Layout(structure, tuple(places), max_size)
    layout = _layouts.setdefault(layout.facts, layout)
    return Packed(tuple(map(_joined, groups.values())), others, layout)


def _is_small(leaf: Any, max_size: int) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf.size <= max_size
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        and not leaf.weak_type
    )


def _check_device(leaf: Any) -> None:
    spread = (
        any(jax.typeof(leaf).sharding.spec)
        if is_traced(leaf)
        else len(leaf.sharding.device_set) > 1
    )
    if spread:
        raise value_error(
            "an array on more than one device cannot be packed",
            where="pack(tree)",
            expected="small arrays on one device",
            got=f"{spec_text(leaf)} on {jax.typeof(leaf).sharding if is_traced(leaf) else leaf.sharding}",
            instead="pack what is on one device, and pass the rest as it is",
        )


def _joined(arrays: list[Any]) -> Any:
    if any(map(is_traced, arrays)):
        return jnp.concatenate([array.reshape(-1) for array in arrays])
    committed = [array for array in arrays if array.committed]
    devices = {device for array in committed for device in array.sharding.device_set}
    if len(devices) > 1:
        raise value_error(
            "arrays on different devices cannot be packed",
            where="pack(tree)",
            expected="small arrays on one device",
            got=", ".join(sorted(map(str, devices))),
            instead="jax.device_put(tree, device), or pack what is on each device by itself",
        )
    # On the host, as in `unpack`.
    joined = np.concatenate([np.asarray(array).reshape(-1) for array in arrays])
    return _like(joined, committed[0] if committed else arrays[0])


def _cut(sources: Sequence[Any], buffers: Sequence[Any], place: _Place) -> Any:
    source, buffer = sources[place.buffer], buffers[place.buffer]
    if source is buffer:
        return lax.slice(source, (place.start,), (place.end,)).reshape(place.shape)
    return _like(source[place.start : place.end].reshape(place.shape), buffer)


def _like(array: np.ndarray, like: Any) -> jax.Array:
    """On the device of another array, and bound to it if that one is."""
    return jax.device_put(array, like.sharding) if like.committed else jnp.asarray(array)
