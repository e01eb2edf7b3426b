"""Taking the arguments of a compiled call apart, at every call, in as few steps as possible.

Each argument becomes a *group*, which holds its arrays in order and nothing else (an array, a list
of arrays, a tuple of groups, or None), and a *key*: everything else about it. One compiled program
stands for all calls with the same keys.

A module is flattened once: its form is left in its `__dict__` at the second call that it is an
argument of (at the first one nobody knows that it will be back). What a compiled function returns
brings its form along. So the keys of large trees are objects that are compared by identity: the
same `Key` for equal structures, for as long as anybody has it.
"""

import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._ground import ArrayImpl, intern_key, one_level, register_cache
from ..modules import Form, module_classes, remember_form
from ..trees import is_array

# The key of an array: its shape and dtype are JAX's business.
ARRAY = "array"


class Key:
    """Stands for the structure of a tree and the static values in it."""

    __slots__ = ("__weakref__",)


_keys: weakref.WeakValueDictionary[Any, Key] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def _interned(description: Any) -> Key:
    key = _keys.get(description)
    if key is None:
        with _lock:
            key = _keys.setdefault(description, Key())
    return key


def take_apart(x: Any, is_dynamic: Callable[[Any], bool] = is_array) -> Form:
    """The arrays of a tree and its key.

    Args:
        x: any tree.
        is_dynamic: which leaves are arrays.

    Returns:
        Both, as a form.

    Raises:
        TypeError: if a static value cannot be hashed.
    """
    leaves, treedef = jtu.tree_flatten(x)
    mask = tuple(map(is_dynamic, leaves))
    # The hash of a treedef leaves out what its nodes hold besides children.
    root = hash(treedef.node_data())
    if all(mask):
        return Form(leaves, _interned((treedef, root)))
    arrays = [leaf for leaf, m in zip(leaves, mask, strict=True) if m]
    fixed = [intern_key(leaf) for leaf, m in zip(leaves, mask, strict=True) if not m]
    return Form(arrays, _interned((treedef, root, mask, *fixed)))


class _Layout:
    """Which leaves of a tree, of one structure and with leaves of these types, are arrays."""

    __slots__ = ("fixed", "key", "mask")

    def __init__(self, treedef: Any, mask: tuple[bool, ...]):
        self.key = _interned((treedef, mask))
        self.mask = mask
        self.fixed = not all(mask)


_END = object()
_plain_tuples: dict[type, bool] = {tuple: True}


def is_plain_tuple(x: tuple[Any, ...]) -> bool:
    """Whether JAX sees a tuple, which may be a named one, as a node with its items in their order."""
    cls = type(x)
    known = _plain_tuples.get(cls)
    if known is None:
        children = one_level(x)[0] if jtu.is_tree_node(cls) else [_END]
        known = len(children) == len(x) and all(map(operator.is_, children, x))
        if x or getattr(cls, "_fields", None) == ():
            _plain_tuples[cls] = known
    return known


register_cache(_plain_tuples.clear)


class Taker:
    """Takes arguments apart, and remembers for one function how trees like them are.

    Args:
        is_dynamic: which leaves are arrays; `is_array`, but for lowering.
    """

    def __init__(self, is_dynamic: Callable[[Any], bool] = is_array):
        self.is_dynamic = is_dynamic
        self.remembers = is_dynamic is is_array
        self.layouts: dict[Any, _Layout] = {}

    def take(self, x: Any) -> tuple[Any, Any]:
        """Takes an argument apart.

        Args:
            x: any object.

        Returns:
            `(key, group)`.

        Raises:
            TypeError: if a static value cannot be hashed.
        """
        cls = type(x)
        if cls is ArrayImpl:
            return ARRAY, x
        if cls in module_classes:
            if not self.remembers:
                form = take_apart(x, self.is_dynamic)
            else:
                form = x._vernal_form
                if type(form) is not Form or not (form.watched is None or form.watched.unchanged()):
                    form = take_apart(x)
                    remember_form(x, form)
            return form.key, form.arrays
        if cls in _plain_tuples or isinstance(x, tuple):
            if is_plain_tuple(x):
                taken = [(ARRAY, y) if type(y) is ArrayImpl else self.take(y) for y in x]
                return (cls, *[key for key, _ in taken]), [group for _, group in taken]
        return self._take_other(x)

    def take_keywords(self, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Takes keyword arguments apart, in the order that JAX gives them.

        Args:
            kwargs: those that have no position.

        Returns:
            `(key, group)` of all of them.
        """
        names = sorted(kwargs)
        taken = [self.take(kwargs[name]) for name in names]
        return (*names, *(key for key, _ in taken)), [group for _, group in taken]

    def _take_other(self, x: Any) -> tuple[Any, Any]:
        leaves, treedef = jtu.tree_flatten(x)
        if treedef.num_nodes == treedef.num_leaves == 1:
            return (ARRAY, x) if self.is_dynamic(x) else (intern_key(x), None)
        types = tuple(map(type, leaves))
        seen: Any = (treedef, types)
        if np.ndarray in types or not self.remembers:
            # Arrays of objects or strings are static values, which their type does not tell.
            seen = (treedef, types, tuple(map(self.is_dynamic, leaves)))
        layout = self.layouts.get(seen)
        if layout is None:
            layout = self.layouts[seen] = _Layout(treedef, tuple(map(self.is_dynamic, leaves)))
        if not layout.fixed:
            return layout.key, leaves
        arrays = [leaf for leaf, m in zip(leaves, layout.mask, strict=True) if m]
        fixed = [intern_key(leaf) for leaf, m in zip(leaves, layout.mask, strict=True) if not m]
        return (layout.key, *fixed), arrays
