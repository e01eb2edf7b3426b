"""The leaves of a tree as Equinox counts them: the fields of a module that are not static,
whatever they hold.

Equinox's format is a stream of leaves without names, and in Equinox a number in a field (the `p` of
a dropout layer) is a leaf, while here it is structure. To read and write the same stream we visit all
fields that are not declared static, in order. Functions and strings are visited too, but nothing is
written for them.
"""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from ..show import path_text, short, value_error
from ..trees import node_parts, replace_parts

_Path = tuple[Any, ...]
_Part = tuple[Any, Any]
# Called with the path, the leaf and its filter; returns the new leaf.
Visit = Callable[[_Path, Any, Any], Any]


def _with_parts(node: Any, parts: list[_Part], new: list[Any]) -> Any:
    changed = {key: b for (key, a), b in zip(parts, new, strict=True) if b is not a}
    return replace_parts(node, changed) if changed else node


def _filters(spec: Any, node: Any, parts: list[_Part], path: _Path) -> list[Any]:
    """The part of a prefix tree of filters for each part of a node."""
    if callable(spec) and not jtu.is_tree_node(type(spec)):
        return [spec] * len(parts)
    own = node_parts(spec) if type(spec) is type(node) else None
    if own is None or [key for key, _ in own] != [key for key, _ in parts]:
        raise value_error(
            "filter_spec is not a prefix of the tree",
            where=path_text(path, "tree"),
            expected=f"a function, or a {type(node).__name__} with as many parts",
            got=short(spec),
            instead="give one function for the whole tree, or build the specification by jax.tree.map",
        )
    return [part for _, part in own]


def walk(
    visit: Visit,
    node: Any,
    spec: Any,
    is_leaf: Callable[[Any], bool] | None,
    path: _Path = (),
) -> Any:
    """Visits every leaf in Equinox's order, with its path and its filter from `spec` (a filter or a prefix tree of
    them), and rebuilds the tree from the results of `visit`."""
    parts = None if is_leaf is not None and is_leaf(node) else node_parts(node)
    if parts is None:
        return visit(path, node, spec)
    filters = _filters(spec, node, parts, path)
    new = [
        walk(visit, part, own, is_leaf, (*path, key))
        for (key, part), own in zip(parts, filters, strict=True)
    ]
    return _with_parts(node, parts, new)
