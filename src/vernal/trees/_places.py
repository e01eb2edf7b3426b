"""The nodes of a tree that a path matches, for `tree_at`: leaves, parts, and structure of modules."""

from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu

from ..show import UnnamedKey
from ._parts import node_parts
from ._path_syntax import keys_of, read
from ._paths import Paths
from ._static_fields import refuse_static_path

_Path = tuple[Any, ...]
_IsLeaf = Callable[[Any], bool] | None


def _walk(node: Any, path: _Path, is_leaf: _IsLeaf) -> Iterator[tuple[_Path, Any, bool]]:
    """Every node of a tree, from the root down, and whether it has no parts."""
    parts = None if is_leaf is not None and is_leaf(node) else node_parts(node)
    yield path, node, not parts
    for key, part in parts or ():
        yield from _walk(part, (*path, key), is_leaf)


def meant_nodes(text: str, tree: Any, is_leaf: _IsLeaf, where: str) -> dict[_Path, Any]:
    """The nodes that a path matches, by key path, in the order of the tree. Raises `ValueError` if there are none.

    Without wildcards it matches any node. With wildcards it skips None and empty containers; a final `*` matches
    leaves and parts with leaves in them, but not structure; a final `**` matches leaves.
    """
    every = list(_walk(tree, (), is_leaf))
    paths = Paths(path for path, _, ends in every if ends)
    names = set(paths.nodes(text))
    found = {path: node for path, node, _ in every if ".".join(keys_of(path)) in names}
    parts = [part for choice in read(text) for part in choice]
    if any(part.name is None for part in parts):
        leaves = {path for path, _ in jtu.tree_leaves_with_path(tree, is_leaf=is_leaf)}
        ends = [choice[-1] for choice in read(text) if choice]
        if any(end.test is None for end in ends):
            allowed = leaves
        elif any(end.pieces == (None,) for end in ends):
            allowed = {leaf[:end] for leaf in leaves for end in range(len(leaf) + 1)}
        else:
            allowed = leaves | {path for path, node, _ in every if not _is_empty(node)}
        found = {path: node for path, node in found.items() if path in allowed}
    if not found:
        refuse_static_path(text, tree, where)
        raise paths.refusal(where, [text])
    # The contents of an unnamed field have the name of the module around it: then the module itself does not match.
    around = {path[:-1] for path in found if path and isinstance(path[-1], UnnamedKey)}
    return {path: node for path, node in found.items() if path not in around}


def _is_empty(node: Any) -> bool:
    return node is None or node_parts(node) == []
