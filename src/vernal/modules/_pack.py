"""Many small arrays as a few long ones, for programs whose time goes into passing arrays to them."""

import dataclasses
import functools
import math
import threading
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


class _Token:
    """What equal layouts have in common, as long as one of them is alive."""


_tokens: weakref.WeakValueDictionary[Any, _Token] = weakref.WeakValueDictionary()
# Comparing structures may call the user's `==`, which may pack a tree.
_lock = threading.RLock()


class Layout:
    """Where each leaf of a tree is in a `Packed`.

    Two are equal if one compiled program serves both. Each keeps its own structure: JAX takes some for equal that are
    not the same, such as `{1: x}` and `{True: x}`.
    """

    def __init__(self, structure: Any, places: tuple[_Place | None, ...], dtypes: tuple[Any, ...]):
        self.structure = structure
        # None for a leaf that is not packed.
        self.places = places
        self.dtypes = dtypes
        ends = {place.buffer: place.end for place in places if place is not None}
        self.lengths = tuple(ends.values())

    @functools.cached_property
    def _token(self) -> _Token:
        # A call compares the layout of its argument with the one that it was compiled for: by identity.
        with _lock:
            return _tokens.setdefault((self.structure, self.places, self.dtypes), _Token())

    def __hash__(self) -> int:
        return hash(self._token)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._token is other._token)

    def __repr__(self) -> str:
        leaves = [
            None if place is None else jax.ShapeDtypeStruct(place.shape, self.dtypes[place.buffer])
            for place in self.places
        ]
        return f"Layout({tree_pformat(jax.tree.unflatten(self.structure, leaves))})"


# Not frozen: each call runs the constructor, and that of a frozen dataclass takes twice as long.
@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("buffers", "others"),
    meta_fields=("layout",),
)
@dataclasses.dataclass(eq=False, repr=False)
class Packed:
    """A tree whose small arrays are in a few long ones, made by `pack`.

    It can be an argument and a result of compiled functions, the carry of a loop, and mapped. To `jax.grad` and Optax
    it is a tree of its buffers. Vernal's gradients, optimisers, `freeze` and saved files need the tree itself, and
    refuse it.

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
            The tree that was packed, equal to the bit (but a signalling NaN may become a quiet one); or, if the buffers
            have changed since, one like it.

        Raises:
            ValueError: if the buffers have other shapes than those that `pack` made, or 64 bits where JAX has none.

        Example:
            >>> import jax.numpy as jnp
            >>> import vernal
            >>> vernal.pack({"a": jnp.arange(3.0), "b": jnp.ones(())}).unpack()["a"].tolist()
            [0.0, 1.0, 2.0]
        """
        expected = [(length,) for length in self.layout.lengths]
        got = [x.shape if has_shape(x) else x for x in self.buffers]
        if got != expected or len(self.others) != self.layout.places.count(None):
            raise value_error(
                "the buffers of a packed tree have changed",
                where="Packed.unpack()",
                expected=f"arrays of shapes {expected} and {self.layout.places.count(None)} other leaves, as `pack` "
                "made them",
                got=f"{short(got)} and {len(self.others)}",
                instead="unpack what `pack` returned; under vmap, pack and unpack inside the mapped function, "
                "which sees one tree at a time",
            )
        # On the host: on the device, each array would be a program to compile.
        sources = [_on_host(x) if is_array(x) else x for x in self.buffers]
        others = iter(self.others)
        leaves = [
            next(others)
            if place is None
            else _cut(self.buffers[place.buffer], sources[place.buffer], place)
            for place in self.layout.places
        ]
        return jax.tree.unflatten(self.layout.structure, leaves)

    def __repr__(self) -> str:
        return tree_pformat(self)

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

        @jax.jit
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
    leaves = [jnp.array(x) if _is_numpy(x) else x for x in leaves]
    return _packed(leaves, structure, [not _is_small(leaf, max_size) for leaf in leaves])


def _is_numpy(leaf: Any) -> bool:
    """Whether a leaf is an array of NumPy's that JAX takes; not so a masked one, or one of long doubles."""
    return (
        (type(leaf) is np.ndarray or isinstance(leaf, np.generic))
        and is_array(leaf)
        and leaf.dtype.isnative
        and leaf.dtype.char not in "gG"
    )


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
    _check_one_device([array for group in groups.values() for array in group])
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
    if is_traced(leaf):
        sharding = jax.typeof(leaf).sharding
        spread = any(sharding.spec) and sharding.mesh.size > 1
    else:
        spread = len(leaf.sharding.device_set) > 1
    if spread:
        raise value_error(
            "an array on more than one device cannot be packed",
            where="pack(tree)",
            expected="small arrays on one device",
            got=f"{spec_text(leaf)} on {jax.typeof(leaf).sharding if is_traced(leaf) else leaf.sharding}",
            instead="pack what is on one device, and pass the rest as it is",
        )


def _check_one_device(arrays: list[Any]) -> None:
    arrays = [array for array in arrays if not is_traced(array)]
    committed = [array for array in arrays if array.committed]
    devices = {str(device) for array in committed for device in array.sharding.device_set}
    kinds = {str(array.sharding.memory_kind) for array in arrays}
    if len(devices) > 1 or len(kinds) > 1:
        raise value_error(
            "arrays on different devices cannot be packed",
            where="pack(tree)",
            expected="small arrays on one device, in one memory",
            got=", ".join(sorted(devices) + sorted(kinds)),
            instead="jax.device_put(tree, device), or pack what is on each device by itself",
        )


def _joined(arrays: list[Any]) -> Any:
    if any(map(is_traced, arrays)):
        return jnp.concatenate([array.reshape(-1) for array in arrays])
    committed = [array for array in arrays if array.committed]
    # On the host, as in `unpack`.
    joined = np.concatenate([np.asarray(array).reshape(-1) for array in arrays])
    return _like(joined, committed[0] if committed else arrays[0])


def _on_host(array: Any) -> Any:
    if is_traced(array):
        return array
    if isinstance(array, jax.Array) and jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
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
    return _like(part, buffer) if isinstance(buffer, jax.Array) and not is_traced(buffer) else part


def _like(array: np.ndarray, like: Any) -> jax.Array:
    """On the device of another array, and bound to it if that one is."""
    return jax.device_put(array, like.sharding) if like.committed else jnp.asarray(array)
