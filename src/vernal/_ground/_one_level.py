"""One level of a pytree: the immediate children of a node, leaves or not."""

import itertools
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu


def _below_the_first() -> Callable[[Any], bool]:
    """An `is_leaf` that opens only the root.

    JAX asks about the root first. Comparing with `is` instead would never end in a list that contains
    itself.
    """
    questions = itertools.count()
    return lambda _: next(questions) > 0


def one_level(node: Any) -> tuple[list[Any], Any]:
    """The immediate children of a node.

    Args:
        node: any pytree. A leaf is its own only child.

    Returns:
        The children, and the treedef that rebuilds the node from them.
    """
    return jtu.tree_flatten(node, is_leaf=_below_the_first())


def one_level_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The immediate children of a node with their keys.

    Args:
        node: any pytree. A leaf has no children here.

    Returns:
        Pairs of key and child, and the treedef that rebuilds the node from the children.
    """
    found, treedef = jtu.tree_flatten_with_path(node, is_leaf=_below_the_first())
    return [(path[0], child) for path, child in found if path], treedef
