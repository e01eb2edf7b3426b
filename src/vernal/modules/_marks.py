"""The mark of a frozen array: a hidden static entry of the module that owns it, the innermost one
around it, with the names within the module of its frozen arrays.

Marks are made in two ways: by the functions in `_frozen.py`, and for fields that a class declares
with `field(trainable=False)`, of which this file also keeps the promise: whatever comes into such
a field, at construction or by surgery, is frozen.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.tree_util as jtu

from ..show import FROZEN, field_key, value_error
from ..trees import path_name
from ._attributes import Attributes, attributes_of
from ._sorting import Kind, Mixed
from ._structure import KEY, assemble

_SHOWN = 10
# In the mark, before the name of a buffer that `freeze` was asked for. Its class freezes it anyway; now its value stays
# as well.
HELD = "="


def is_module(x: Any) -> bool:
    """Whether a value is a module."""
    return issubclass(type(x), Attributes)


def is_marked(x: Any) -> bool:
    """Whether a value is a module that has frozen arrays of its own."""
    # Not by `is_module`: this runs for every node of a model at every derivative.
    return issubclass(type(x), Attributes) and FROZEN in attributes_of(x)


def own(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """What a node itself holds: its arrays and the modules in it, with their paths."""
    return jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node and is_module(x))


def freeze_fields(
    cls: type, kinds: dict[str, Kind], values: dict[str, Any], fields: Iterable[str]
) -> dict[str, Kind]:
    """Freezes what these fields hold, of a module of this class that is about to be assembled: puts the mark into
    `values`, and frozen modules in place of those in the fields. Returns the kinds with the mark; they themselves if
    there is nothing to freeze."""
    names = set(values.get(FROZEN, ()))
    for field in fields:
        kind = kinds.get(field, False)
        if kind is False:
            continue
        value = values[field]
        shown = Mixed(value, kind) if isinstance(kind, tuple) else value
        held, treedef = jtu.tree_flatten_with_path(shown, is_leaf=is_module)
        parts: list[Any] = []
        for path, x in held:
            if not is_module(x):
                names.add(path_name((field_key(cls, field), *path)))
            elif KEY in attributes_of(x):  # otherwise it is still being built, and cannot be copied
                x = remark(x, itertools.repeat(True), set.union)
            parts.append(x)
        if any(part is not x for part, (_, x) in zip(parts, held, strict=True)):
            values[field] = treedef.unflatten(parts)
    if not names:
        return kinds
    values[FROZEN] = tuple(sorted(names))
    return {**kinds, FROZEN: False}


def buffer_leaves(pytree: Any) -> list[bool]:
    """Which leaves of a tree are in a field that is declared `trainable=False`, or in a module in
    such a field.

    Args:
        pytree: the tree.
    """
    found: list[bool] = []
    for node in jtu.tree_leaves(pytree, is_leaf=is_module):
        if not is_module(node):
            found.append(False)
            continue
        fields = type(node)._vernal_class.filled().buffers
        for path, x in own(node)[0]:
            buffer = path[0].name in fields
            inside = buffer_leaves(x) if is_module(x) else [False]
            found.extend(buffer or leaf for leaf in inside)
    return found


def _with_mark(module: Any, names: set[str]) -> Any:
    """The module with just these arrays of its own frozen."""
    current = attributes_of(module)
    kinds = dict(current[KEY][0].layout.kinds)
    kinds.pop(FROZEN, None)
    values = {name: current[name] for name in kinds}
    if names:
        kinds[FROZEN], values[FROZEN] = False, tuple(sorted(names))
    return assemble(type(module), kinds, values)


def remark(node: Any, chosen: Iterator[bool], change: Callable[[set[str], set[str]], Any]) -> Any:
    """A module or tree with its marks changed where `chosen`, one bool for each leaf, says so. `change` computes
    the names of the frozen arrays of a module from the old ones, and those of its arrays that are chosen. Raises
    `ValueError` if a chosen array is in no module."""
    held, treedef = own(node)
    here: set[str] = set()
    parts: list[Any] = []
    for path, x in held:
        if is_module(x):
            x = remark(x, chosen, change)
        elif next(chosen):
            here.add(path_name(path))
        parts.append(x)
    unchanged = all(part is x for part, (_, x) in zip(parts, held, strict=True))
    if not is_module(node):
        if change(set(), here):
            raise _unowned(here)
        return node if unchanged else treedef.unflatten(parts)
    old = set(attributes_of(node).get(FROZEN, ()))
    new = change(old, here)
    if new == old:
        return node if unchanged else treedef.unflatten(parts)
    return _with_mark(treedef.unflatten(parts), new)


def _unowned(names: set[str]) -> ValueError:
    return value_error(
        "only arrays in a module can be frozen: it is their module that remembers it",
        where=", ".join(sorted(names)[:_SHOWN]) or "the array itself",
        expected="arrays in a vernal.Module",
        got="arrays that are in no module",
        instead="vernal.trainable(tree, where) makes a tree of bools for wrt= and for Optax's masks",
    )
