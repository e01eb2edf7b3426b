"""Many small arrays as a few long ones, for programs whose time goes into passing arrays to them."""

import dataclasses
import functools
import math
import operator
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..show import is_traced, short, spec_text, type_error, value_error
from ..trees import is_array
from ._fields import field
from ._frozen import frozen_leaves
from ._module import Module


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a leaf is: in this array of the trained or of the frozen ones, from `start` on; the leaf itself if that is
    None."""

    frozen: bool
    index: int
    start: int | None
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return (self.start or 0) + math.prod(self.shape)


class Layout:
    """Where each leaf of a tree is in a `Packed`."""

    def __init__(self, structure: Any, places: tuple[_Place, ...], max_size: int):
        self.structure = structure
        self.places = places
        self.max_size = max_size
        self.facts = structure, places
        # Of each array that `pack` makes, by its place.
        self.lengths = {(p.frozen, p.index): p.end for p in places if p.start is not None}
        self._hash = hash(self.facts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.facts == other.facts)

    def __repr__(self) -> str:
        packed = sum(place.start is not None for place in self.places)
        return f"Layout({packed} of {len(self.places)} leaves)"


# A call compares the layout of its argument with the one it was compiled for: at once, if equal ones are one object.
_layouts: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()


class Packed(Module, layout="fields"):
    """A tree whose small arrays are in a few long ones, made by `pack`.

    It is a module of the long arrays and of the leaves that were not packed, so it can be an argument and a result of
    any transformation. What is frozen in the tree is frozen in it, and its gradient unpacks as one of the tree.

    Attributes:
        trained: for each dtype an array of one axis, with the elements of all packed arrays of that dtype that are not
            frozen; and the leaves that were not packed.
        frozen: likewise, of the arrays that are frozen.
        layout: where each leaf is. Hashable; equal for trees of the same structure, shapes and dtypes.
    """

    trained: tuple[Any, ...]
    frozen: tuple[Any, ...] = field(trainable=False)
    layout: Layout = field(static=True)

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
        arrays = {False: self.trained, True: self.frozen}
        # Each long array, and what its parts are cut out of: on the device, each would be a program to compile.
        sources: dict[Any, tuple[Any, Any]] = {}
        for (frozen, index), length in self.layout.lengths.items():
            array = arrays[frozen][index]
            if is_array(array) and array.shape != (length,):
                raise value_error(
                    "the arrays of a packed tree have changed their shape",
                    where="Packed.unpack()",
                    expected=f"an array of shape ({length},), as `pack` made it",
                    got=short(array),
                    instead="unpack inside the function that vmap maps, which sees one tree at a time",
                )
            on_host = is_array(array) and not is_traced(array)
            sources[frozen, index] = array, np.array(array) if on_host else array
        leaves = [
            arrays[place.frozen][place.index]
            if place.start is None
            else _cut(*sources[place.frozen, place.index], place)
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
    parts: tuple[_Part, _Part] = _Part(), _Part()
    places = [
        parts[frozen].put(leaf, frozen, _is_small(leaf, max_size))
        for leaf, frozen in zip(leaves, frozen_leaves(tree), strict=True)
    ]
    layout = Layout(structure, tuple(places), max_size)
    layout = _layouts.setdefault(layout.facts, layout)
    return Packed(parts[0].joined(), parts[1].joined(), layout)


class _Part:
    """What becomes the trained arrays of a `Packed`, or the frozen ones."""

    def __init__(self):
        self.arrays: list[Any] = []
        """For each array that it will have a list of what is joined, or the leaf that stays as it is."""
        self.of_dtype: dict[Any, int] = {}
        self.sizes: dict[Any, int] = {}

    def put(self, leaf: Any, frozen: bool, small: bool) -> _Place:
        if not small:
            self.arrays.append(leaf)
            return _Place(frozen, len(self.arrays) - 1, None, ())
        _check_device(leaf)
        if leaf.dtype not in self.of_dtype:
            self.of_dtype[leaf.dtype] = len(self.arrays)
            self.arrays.append(_Joined())
        index, start = self.of_dtype[leaf.dtype], self.sizes.get(leaf.dtype, 0)
        self.arrays[index].append(leaf)
        self.sizes[leaf.dtype] = start + leaf.size
        return _Place(frozen, index, start, leaf.shape)

    def joined(self) -> tuple[Any, ...]:
        return tuple(_joined(x) if isinstance(x, _Joined) else x for x in self.arrays)


class _Joined(list[Any]):
    """Arrays that become one."""


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


def _cut(array: Any, source: Any, place: _Place) -> Any:
    if not is_array(array):
        # A tree of gradients has something else in the place of what is frozen.
        return array
    part = source[place.start : place.end].reshape(place.shape)
    return part if is_traced(array) else _like(part, array)


def _like(array: np.ndarray, like: Any) -> jax.Array:
    """On the device of another array, and bound to it if that one is."""
    return jax.device_put(array, like.sharding) if like.committed else jnp.asarray(array)
