"""Key paths as Python expressions that reach the same place."""

from collections.abc import Sequence
from typing import Any

from ._spelling import key_text


def _key_text(key: Any) -> str:
    try:
        return key_text(key)
    except Exception:
        # A dictionary key, or another library's key class, whose printing fails must not hide the real
        # error.
        return f"[<{type(key).__name__}>]"


def shown_name(name: str) -> str:
    """The name of a leaf in a message.

    Args:
        name: the name from `vernal.trees.named_leaves`; empty for a tree that is one leaf.
    """
    return name or "(the tree itself)"


def path_text(path: Sequence[Any], root: str = "") -> str:
    """A JAX key path as a Python expression.

    Args:
        path: key entries, as in `jax.tree_util.tree_flatten_with_path`.
        root: the name of the tree itself.

    Returns:
        For example `model.layers[0].weight`, or `['k']` without a root. The empty path is `root`, or
        `(the tree itself)` if that is empty too. Keys that cannot be written as an expression are
        quoted as in `vernal.trees.path_name`, so that a path without a root is a
        `vernal.trees.Pattern` for the same place.

    Example:
        >>> import jax
        >>> from vernal.show import path_text
        >>> [(path, leaf)] = jax.tree_util.tree_leaves_with_path({"k": [1.0]})
        >>> path_text(path, root="params")
        "params['k'][0]"
    """
    return shown_name(root + "".join(map(_key_text, path)))
