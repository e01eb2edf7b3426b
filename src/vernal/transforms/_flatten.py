"""Flattening the arguments of a compiled call, at every call, in as few steps as possible.

Each argument becomes its *leaves*, which hold its arrays in order and nothing else (an array, a
list of arrays, a list of leaves, or None), and a *key*: everything else about it. One compiled
program serves all calls with the same keys.

A module caches its flat form from the second call that it is an argument of (it may never be passed
again after the first). Results of a compiled function are already flat. The keys of trees are
compared by identity: equal structures have the same `Key`, as long as it is alive.
"""

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._ground import ArrayImpl, one_level, register_cache, static_key
from ..modules import Flat, module_classes, remember_flat
from ..trees import is_array

# The key of an array: JAX distinguishes shapes and dtypes.
ARRAY = "array"


class Key:
    """The identity of a tree's structure and of the static values in it."""

    __slots__ = ("__weakref__",)


_keys: weakref.WeakValueDictionary[Any, Key] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _key_of(treedef: Any, mask: tuple[bool, ...] | None = None, *fixed: Any) -> Key:
    """The key that equal structures share. A mask of None means that all leaves are arrays."""
    # The hash of a treedef leaves out the data of its nodes: the data of the root, at least, tells apart
    # the many modules of one class.
    kind, data = treedef.node_data() or (None, None)
    description = (treedef, hash(data) if kind in module_classes else 0, mask, *fixed)
    key = _keys.get(description)
    if key is None:
        with _lock:
            key = _keys.setdefault(description, Key())
    return key


def flatten(x: Any, is_dynamic: Callable[[Any], bool] = is_array) -> Flat:
    """The arrays of a tree and its key.

    Args:
        x: any tree.
        is_dynamic: whether a leaf is an array.

    Raises:
        TypeError: if a static value cannot be hashed.
    """
    leaves, treedef = jtu.tree_flatten(x)
    mask = tuple(map(is_dynamic, leaves))
    if all(mask):
        return Flat(leaves, _key_of(treedef))
    arrays = [leaf for leaf, m in zip(leaves, mask, strict=True) if m]
    fixed = [static_key(leaf) for leaf, m in zip(leaves, mask, strict=True) if not m]
    return Flat(arrays, _key_of(treedef, mask, *fixed))


_END = object()
_plain_tuples: dict[type, bool] = {tuple: True}


def is_plain_tuple(x: tuple[Any, ...]) -> bool:
    """Whether JAX treats a tuple (perhaps a named one) as a node with its items in order."""
    cls = type(x)
    known = _plain_tuples.get(cls)
    if known is None:
        children = one_level(x)[0] if jtu.is_tree_node(cls) else [_END]
        known = len(children) == len(x) and all(map(operator.is_, children, x))
        if x or getattr(cls, "_fields", None) == ():
            _plain_tuples[cls] = known
    return known


register_cache(_plain_tuples.clear)


class Flattener:
    """Flattens arguments, and caches the keys of their structures for one function.

    Args:
        is_dynamic: whether a leaf is an array; `is_array`, except for lowering.
    """

    def __init__(self, is_dynamic: Callable[[Any], bool] = is_array):
        self.is_dynamic = is_dynamic
        self.remembers = is_dynamic is is_array
        # From the structure and the types of the leaves to the key, and which leaves are arrays.
        self.known: dict[Any, tuple[Key, tuple[bool, ...]]] = {}

    def flatten(self, x: Any) -> tuple[Any, Any]:
        """Flattens an argument.

        Args:
            x: any object.

        Returns:
            `(key, leaves)`.

        Raises:
            TypeError: if a static value cannot be hashed.
        """
        cls = type(x)
        if cls is ArrayImpl:
            return ARRAY, x
        if cls in module_classes:
            if not self.remembers:
                flat = flatten(x, self.is_dynamic)
            else:
                flat = x._vernal_flat
                if type(flat) is not Flat or not flat.fits(x):
                    flat = flatten(x)
                    remember_flat(x, flat)
            return flat.key, flat.arrays
        if cls in _plain_tuples or isinstance(x, tuple):
            if is_plain_tuple(x):
                items = [(ARRAY, y) if type(y) is ArrayImpl else self.flatten(y) for y in x]
                return (cls, *[key for key, _ in items]), [leaves for _, leaves in items]
        return self._flatten_other(x)

    def flatten_keywords(self, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Flattens keyword arguments, in JAX's order.

        Args:
            kwargs: the keyword arguments without a position.

        Returns:
            `(key, leaves)` of all of them.
        """
        names = sorted(kwargs)
        items = [self.flatten(kwargs[name]) for name in names]
        return (*names, *(key for key, _ in items)), [leaves for _, leaves in items]

    def _flatten_other(self, x: Any) -> tuple[Any, Any]:
        leaves, treedef = jtu.tree_flatten(x)
        if treedef.num_nodes == treedef.num_leaves == 1:
            return (ARRAY, x) if self.is_dynamic(x) else (static_key(x), None)
        types = tuple(map(type, leaves))
        seen: Any = (treedef, types)
        if np.ndarray in types or not self.remembers:
            # Arrays of objects or strings are static values, but have the type of arrays.
            seen = (treedef, types, tuple(map(self.is_dynamic, leaves)))
        known = self.known.get(seen)
        if known is None:
            mask = tuple(map(self.is_dynamic, leaves))
            known = self.known[seen] = _key_of(treedef, mask), mask
        key, mask = known
        if all(mask):
            return key, leaves
        arrays = [leaf for leaf, m in zip(leaves, mask, strict=True) if m]
        fixed = [static_key(leaf) for leaf, m in zip(leaves, mask, strict=True) if not m]
        return (key, *fixed), arrays
