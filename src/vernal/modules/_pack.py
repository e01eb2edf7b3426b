"""Many small arrays as a few long ones, for programs whose time goes into passing arrays to them."""

import dataclasses
import functools
import math
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..show import is_traced, short, spec_text, tree_pformat, value_error
from ..trees import has_shape, is_array


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
    """Where each leaf of a tree is in a `Packed`."""

    def __init__(self, structure: Any, places: tuple[_Place | None, ...], dtypes: tuple[Any, ...]):
        self.structure = structure
        # None for a leaf that is not packed.
        self.places = places
        self.dtypes = dtypes
        ends = {place.buffer: place.end for place in places if place is not None}
        self.lengths = tuple(ends.values())
        self.facts = structure, places, dtypes
        self._hash = hash(self.facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.facts == other.facts)

    def __repr__(self) -> str:
        leaves = [
            None if place is None else jax.ShapeDtypeStruct(place.shape, self.dtypes[place.buffer])
            for place in self.places
        ]
        return f"Layout({tree_pformat(jax.tree.unflatten(self.structure, leaves))})"


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

    It can be an argument and a result of compiled functions, the carry of a loop, and mapped. Whatever asks for layers,
    names, gradients or frozen parts needs the tree itself, and refuses it.

    Attributes:
        buffers: for each dtype an array of one axis, with the elements of all packed arrays of that dtype.
        others: the leaves that were not packed.
        layout: where each leaf is. Hashable; equal for trees of the same structure, shapes and dtypes.
    """

    __tree_sealed__ = True

    buffers: tuple[Any, ...]
    others: tuple[Any, ...]
    layout: Layout

    def unpack(self) -> Any:
        """The tree.

        Returns:
            The tree that was packed, equal to the bit; or, if the buffers have changed since, one like it.

        Raises:
            ValueError: if the buffers have other shapes than those that `pack` made, or 64 bits where JAX has none.

        Example:
            >>> import jax.numpy as jnp
            >>> import vernal
            >>> vernal.pack({"a": jnp.arange(3.0), "b": jnp.ones(())}).unpack()["a"].tolist()
            [0.0, 1.0, 2.0]
        """
        for buffer, length in zip(self.buffers, self.layout.lengths, strict=True):
            if not has_shape(buffer) or buffer.shape != (length,):
                raise value_error(
                    "the buffers of a packed tree have changed",
                    where="Packed.unpack()",
                    expected=f"an array of shape ({length},), as `pack` made it",
                    got=short(buffer),
                    instead="unpack what `pack` returned; under vmap, pack and unpack inside the mapped function, "
                    "which sees one tree at a time",
                )
        # On the host: on the device, each array would be a program to compile.
        sources = [_on_host(x) if isinstance(x, jax.Array) else x for x in self.buffers]
        others = iter(self.others)
        leaves = [
            next(others)
            if place is None
            else _cut(self.buffers[place.buffer], sources[place.buffer], place)
            for place in self.layout.places
        ]
        return jax.tree.unflatten(self.layout.structure, leaves)

    def __reduce__(self) -> Any:
        # JAX cannot pickle the structure of a tree.
        return _packed_again, (self.unpack(), [place is None for place in self.layout.places])


def _packed_again(tree: Any, stays: list[bool]) -> Packed:
    leaves, structure = jax.tree.flatten(tree)
    return _packed(leaves, structure, stays)


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

    What is not packed stays a leaf of its own: larger arrays, Python numbers, random keys, arrays that are weakly
    typed. NumPy arrays become arrays of JAX, as arguments of compiled functions do.

    Args:
        tree: any pytree.
        max_size: the largest number of elements of an array that is packed.

    Returns:
        The packed tree; `packed.unpack()` gives the tree back.

    Raises:
        ValueError: if `max_size` is not an integer of at least 0, a small array is on more than one device, or small
            arrays are on different ones.

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
    if isinstance(max_size, bool) or not isinstance(max_size, int | np.integer) or max_size < 0:
        raise value_error(
            "`max_size` is not a size",
            where="pack(tree, max_size=...)",
            expected="an integer of at least 0: the largest number of elements of an array that is packed",
            got=short(max_size),
        )
    leaves, structure = jax.tree.flatten(tree)
    # Copied: `asarray` may share the memory, and show what NumPy writes there later.
    leaves = [
        jnp.array(x) if isinstance(x, np.ndarray | np.generic) and is_array(x) else x
        for x in leaves
    ]
    return _packed(leaves, structure, [not _is_small(leaf, max_size) for leaf in leaves])


def _packed(leaves: list[Any], structure: Any, stays: list[bool]) -> Packed:
    groups: dict[Any, list[Any]] = {}
    sizes: dict[Any, int] = {}
    places: list[_Place | None] = []
    for leaf, stay in zip(leaves, stays, strict=True):
        if stay:
            places.append(None)
            continue
        _check_device(leaf)
        group = groups.setdefault(leaf.dtype, [])
        group.append(leaf)
        start = sizes.get(leaf.dtype, 0)
        sizes[leaf.dtype] = start + leaf.size
        places.append(_Place(list(groups).index(leaf.dtype), start, leaf.shape))
    others = tuple(leaf for leaf, stay in zip(leaves, stays, strict=True) if stay)
    layout = Layout(structure, tuple(places), tuple(groups))
    layout = _layouts.setdefault(layout.facts, layout)
    return Packed(tuple(map(_joined, groups.values())), others, layout)


def _is_small(leaf: Any, max_size: int) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf.size <= max_size
        and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        and not leaf.weak_type
        # Where 64-bit numbers are switched off, they could not be joined.
        and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
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


def _on_host(array: jax.Array) -> Any:
    if is_traced(array):
        return array
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise value_error(
            "a tree that was packed with 64-bit numbers cannot be unpacked without them",
            where="Packed.unpack()",
            expected="64-bit numbers switched on, as they were for `pack`",
            got=spec_text(array),
            instead="jax.config.update('jax_enable_x64', True), or jax.enable_x64(True)",
        )
    return np.array(array)


def _cut(buffer: Any, source: Any, place: _Place) -> Any:
    if isinstance(buffer, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(place.shape, buffer.dtype)
    part = source[place.start : place.end].reshape(place.shape)
    return part if source is buffer else _like(part, buffer)


def _like(array: np.ndarray, like: Any) -> jax.Array:
    """On the device of another array, and bound to it if that one is."""
    return jax.device_put(array, like.sharding) if like.committed else jnp.asarray(array)
