"""Static fields of the modules in a tree, which `tree_at` does not reach: the error names them."""

import dataclasses
from collections.abc import Callable, Container, Iterator
from typing import Any

from ..show import field_key, listed, path_text, short, value_error
from ._parts import node_parts, replace_parts
from ._path_syntax import keys_of
from ._paths import Paths

_Path = tuple[Any, ...]


def _static_fields(node: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any, Any]]:
    """Every static field in a tree: its path, its module, and its value."""
    parts = node_parts(node) or []
    fields = getattr(type(node), "__tree_fields__", None)
    if fields is not None:
        free = fields(node)
        for name in (f.name for f in dataclasses.fields(node) if f.name not in free):
            if hasattr(node, name):
                yield (*path, field_key(type(node), name)), node, getattr(node, name)
    for key, part in parts:
        yield from _static_fields(part, (*path, key))


def mark_static_fields(node: Any, mark: Callable[[_Path], Any], path: _Path = ()) -> Any:
    """A copy of a tree with a mark in each static field, in place of its value."""
    parts = node_parts(node) or []
    changes = {key: mark_static_fields(part, mark, (*path, key)) for key, part in parts}
    for static, module, _ in _static_fields(node, path):
        if module is node:
            changes[static[-1]] = mark(static)
    return replace_parts(node, changes, False) if changes else node


def refuse_static_path(text: str, tree: Any, where: str) -> None:
    """Refuses a path that matches static fields, and nothing that may be replaced."""
    every = list(_static_fields(tree))
    names = set(Paths(path for path, _, _ in every).nodes(text))
    _refuse([found for found in every if ".".join(keys_of(found[0])) in names], where)


def refuse_static(paths: Container[_Path], tree: Any, where: str) -> None:
    """Refuses the static fields among some paths."""
    _refuse([found for found in _static_fields(tree) if found[0] in paths], where)


def _refuse(found: list[tuple[_Path, Any, Any]], where: str) -> None:
    if not found:
        return
    path, module, value = found[0]
    places = listed((path_text(path, "tree") for path, _, _ in found), most=3)
    whole = f"{type(module).__name__}(...)" if len(found) == 1 else "a new module"
    field = f"`{path[-1].name}`" if len(found) == 1 else "the field"
    raise value_error(
        "a static field cannot be picked: it is set when its module is created",
        where=where,
        expected="an array, a part, or a field that is not declared static=True",
        got=f"{short(value)}, the value of {places}",
        instead=f"{whole} with the new value, in the place of the old module; or, in a class of yours, {field} without "
        "static=True: a value that is not an array is structure anyway",
    )
