"""The nodes of a tree that a path means, for `tree_at`: leaves, parts, and structure of modules."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu

from ._parts import node_parts
from ._path_syntax import keys_of, read
from ._paths import Paths

_Path = tuple[Any, ...]
_IsLeaf = Callable[[Any], bool] | None


def _values(node: Any, path: _Path, is_leaf: _IsLeaf) -> Iterator[tuple[_Path, Any]]:
    """Everything in a tree that has no parts."""
    parts = None if is_leaf is not None and is_leaf(node) else node_parts(node)
    if not parts:
        yield path, node
    for key, part in parts or ():
        yield from _values(part, (*path, key), is_leaf)


def _prefixes(path: _Path) -> list[_Path]:
    return [path[:end] for end in range(len(path) + 1)]


def meant_nodes(text: str, tree: Any, is_leaf: _IsLeaf, where: str) -> list[_Path]:
    """The key paths of the nodes that a path means, in the order of the tree. Raises `ValueError` if there are none.

    Without wildcards it means whatever is there. With wildcards it passes over None and empty containers; `*` at the
    end means leaves and parts with leaves in them, but no structure; `**` at the end means leaves.
    """
    values = dict(_values(tree, (), is_leaf))
    nodes = dict.fromkeys(node for path in values for node in _prefixes(path))
    paths = Paths(values)
    names = set(paths.nodes(text))
    found = [node for node in nodes if ".".join(keys_of(node)) in names]
    parts = [part for choice in read(text) for part in choice]
    if any(part.name is None for part in parts):
        leaves = {path for path, _ in jtu.tree_leaves_with_path(tree, is_leaf=is_leaf)}
        ends = [choice[-1] for choice in read(text) if choice]
        if any(end.test is None for end in ends):
            allowed = leaves
        elif any(end.pieces == (None,) for end in ends):
            allowed = {node for leaf in leaves for node in _prefixes(leaf)}
        else:
            allowed = nodes.keys() - {p for p, x in values.items() if _is_empty(x)} | leaves
        found = [node for node in found if node in allowed]
    if not found:
        raise paths.refusal(where, [text])
    return found


def _is_empty(node: Any) -> bool:
    return node is None or node_parts(node) == []
