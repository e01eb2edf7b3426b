"""The mark of frozen arrays: a hidden static entry of the innermost module around them, with their
names within that module.

Marks come from the functions in `_frozen.py`, and from fields declared with
`field(trainable=False)`: this file freezes whatever is put into such a field, at construction or by
surgery.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.tree_util as jtu

from ..show import FROZEN, field_key, value_error
from ..trees import is_sealed, path_name
from ._attributes import Attributes, attributes_of
from ._sorting import Kind, Mixed
from ._structure import KEY, assemble

_SHOWN = 10
# In a mark, the prefix of a buffer's name that `freeze` was asked for. Its class freezes it anyway; now its value
# stays as well.
HELD = "="


def is_module(x: Any) -> bool:
    """Whether a value is a module."""
    return issubclass(type(x), Attributes)


def is_marked(x: Any) -> bool:
    """Whether a value is a module that has frozen arrays of its own."""
    # Not by `is_module`: this runs for every node of a model at every derivative.
    return issubclass(type(x), Attributes) and FROZEN in attributes_of(x)


def own(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The arrays and modules that a node holds directly, with their paths."""
    return jtu.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node and (is_module(x) or is_sealed(x))
    )


def freeze_fields(
    cls: type, kinds: dict[str, Kind], values: dict[str, Any], fields: Iterable[str]
) -> dict[str, Kind]:
    """Freezes the contents of these fields in a module that is about to be assembled: puts the mark into `values`, and
    frozen modules in place of those in the fields. Returns the kinds with the mark, or `kinds` itself if there is
    nothing to freeze."""
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
            elif KEY in attributes_of(x):  # a module that is still being built cannot be copied
                x = remark(x, itertools.repeat(True), set.union)
            parts.append(x)
        if any(part is not x for part, (_, x) in zip(parts, held, strict=True)):
            values[field] = treedef.unflatten(parts)
    if not names:
        return kinds
    values[FROZEN] = tuple(sorted(names))
    return {**kinds, FROZEN: False}


def buffer_leaves(pytree: Any) -> list[bool]:
    """Which leaves of a tree are buffers: in a field declared `trainable=False`, or in a module in such a
    field.

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
    """The module with exactly these of its own arrays frozen."""
    current = attributes_of(module)
    kinds = dict(current[KEY][0].layout.kinds)
    kinds.pop(FROZEN, None)
    values = {name: current[name] for name in kinds}
    if names:
        kinds[FROZEN], values[FROZEN] = False, tuple(sorted(names))
    return assemble(type(module), kinds, values)


def remark(node: Any, chosen: Iterator[bool], change: Callable[[set[str], set[str]], Any]) -> Any:
    """A module or tree with its marks changed where `chosen`, one bool for each leaf, is true. `change` computes the
    names of a module's frozen arrays from the old names and the names of its chosen arrays. Raises `ValueError` if a
    chosen array is not in a module."""
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
        "only arrays in a module can be frozen: the module stores which of its arrays are",
        where=", ".join(sorted(names)[:_SHOWN]) or "the array itself",
        expected="arrays in a vernal.Module",
        got="arrays outside of any module",
        instead="vernal.trainable(tree, where) makes a tree of bools for wrt= and for Optax's masks",
    )
