"""Whether a pytree is a tree: no node is inside itself or in two places."""

from collections.abc import Sequence
from typing import Any

from .._ground import one_level, one_level_with_keys
from ..show import path_text, value_error

_Path = tuple[Any, ...]


def _cycle(outer: _Path, inner: _Path, node: Any) -> ValueError:
    return value_error(
        f"a node of type {type(node).__name__} contains itself",
        where=f"{path_text(inner, 'tree')} is {path_text(outer, 'tree')} again",
        expected="a tree, in which no node is inside itself",
        instead="remove the inner reference; JAX would flatten the cycle for ever",
    )


def tree_flatten_one_level(pytree: Any) -> tuple[list[Any], Any]:
    """The immediate children of a node, leaves or not.

    Args:
        pytree: any pytree.

    Returns:
        The children in JAX's order, and a treedef in which each of them is a leaf:
        `treedef.unflatten(children)` is a copy of the node. A leaf is its own only child. None and
        empty containers have no children.

    Raises:
        ValueError: if the node is one of its own children.

    Example:
        >>> from vernal.trees import tree_flatten_one_level
        >>> tree_flatten_one_level({"a": [1, 2], "b": None})
        ([[1, 2], None], PyTreeDef({'a': *, 'b': *}))
    """
    for key, child in one_level_with_keys(pytree)[0]:
        if child is pytree:
            raise _cycle((), (key,), pytree)
    return one_level(pytree)


def tree_check(pytree: Any) -> None:
    """Checks that a pytree is a tree: that no node is inside itself, or in two places.

    When JAX next unflattens the tree, a node in two places becomes two independent nodes: two layers
    that shared their weights silently stop sharing. Leaves, None and empty containers may repeat.

    Args:
        pytree: any pytree.

    Raises:
        ValueError: if a node contains itself, or if a node that is neither a leaf nor empty is in two
            places.

    Example:
        >>> from vernal.trees import tree_check
        >>> layer = [1.0, 2.0]
        >>> tree_check({"encoder": layer, "decoder": [1.0, 2.0]})
        >>> tree_check({"encoder": layer, "decoder": layer})
        Traceback (most recent call last):
            ...
        ValueError: one node of type list appears twice in the tree
          where: tree['decoder'] and tree['encoder']
          expected: each node once; JAX would make two independent copies of it
          instead: build two nodes; or, to share weights, store one and use it twice
    """
    _check(pytree, (), {}, [])


def _check(
    node: Any, path: _Path, seen: dict[int, tuple[_Path, Any]], above: Sequence[int]
) -> None:
    children, _ = one_level_with_keys(node)
    if not children:
        return
    if id(node) in above:
        raise _cycle(seen[id(node)][0], path, node)
    if id(node) in seen:
        raise value_error(
            f"one node of type {type(node).__name__} appears twice in the tree",
            where=f"{path_text(seen[id(node)][0], 'tree')} and {path_text(path, 'tree')}",
            expected="each node once; JAX would make two independent copies of it",
            instead="build two nodes; or, to share weights, store one and use it twice",
        )
    # The node is kept along with its path: a node class may create its children during flattening,
    # and the address of a freed child would be reused by the next.
    seen[id(node)] = path, node
    for key, child in children:
        _check(child, (*path, key), seen, [*above, id(node)])
