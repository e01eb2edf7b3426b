"""Prefix trees: one value (an axis, a sharding) for a whole subtree, broadcast to its leaves."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from ..show import short, value_error


def broadcast_prefix(
    prefix: Any,
    tree: Any,
    *,
    what: str,
    root: str,
    is_leaf: Callable[[Any], bool] | None = None,
) -> list[Any]:
    """The prefix's value for every leaf of a tree, in order. None in a prefix is a value.

    Args:
        prefix: a tree whose structure is a prefix of `tree`'s, else `ValueError`.
        tree: the tree.
        what: the name of the prefix, for the message.
        root: the name of the argument, for the message.
        is_leaf: what else, besides None, is a leaf of the prefix.
    """

    def stop(x: Any) -> bool:
        return x is None or (is_leaf is not None and is_leaf(x))

    values, treedef = jtu.tree_flatten(prefix, is_leaf=stop)
    try:
        subtrees = treedef.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError):
        raise value_error(
            f"{what} is not a prefix of the tree that it applies to",
            where=root,
            expected="the same structure, with one value in place of any subtree",
            got=_reason(treedef, tree),
            instead="give one value for everything, or a tuple with one entry for each positional argument",
        ) from None
    return [v for v, sub in zip(values, subtrees, strict=True) for _ in jtu.tree_leaves(sub)]


def _reason(treedef: Any, tree: Any) -> str:
    """Why a prefix does not fit, in JAX's words, without the elements of arrays."""
    try:
        treedef.flatten_up_to(jtu.tree_map(short, tree))
    except (ValueError, TypeError, KeyError) as error:
        return str(error)
    return "a different structure"
