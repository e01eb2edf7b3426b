"""Names for the leaves of a tree: the key path, its parts joined by dots.

`layers.0.weight`: fields, indices and dictionary keys look the same. Parts that could be misread are
quoted, so that a name can be read back, and different paths have different names:

* a string key that is empty, looks like an index, begins or ends with a space, or contains one of
  ``. * ? [ ] { } , " ` \\`` or a character that does not print, is written in double quotes as in
  JSON: `heads."a.b".bias`;
* a key that is neither a string nor an int is written as its `repr` in backquotes:
  ``table.`(0, 1)`.weight``.

(`vernal.show.path_text` is the other spelling: the Python expression `.layers[0].weight`. A `Pattern`
may be written in either.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu

from ..show import key_names, path_text, value_error

_Path = tuple[Any, ...]
_IsLeaf = Callable[[Any], bool]


def path_name(path: Sequence[Any]) -> str:
    """The dotted name of a key path.

    Args:
        path: key entries, as in `jax.tree_util.tree_flatten_with_path`.

    Returns:
        For example `layers.0.weight`. Parts that could be misread are quoted: a string key with a
        dot, `heads."a.b".bias`, or one that looks like an index, `heads."3".bias`; other keys are
        written in backquotes, ``table.`(0, 1)` ``. The name of the empty path is empty.

    Example:
        >>> import jax
        >>> from vernal.trees import path_name
        >>> tree = {"heads": [{"bias": 1.0, "a.b": 2.0}]}
        >>> [path_name(path) for path, _ in jax.tree.leaves_with_path(tree)]
        ['heads.0."a.b"', 'heads.0.bias']
    """
    return ".".join(key_names(path))


def tree_paths(pytree: Any, is_leaf: _IsLeaf | None = None) -> Any:
    """A tree of the same structure whose leaves are their own names.

    Args:
        pytree: any pytree.
        is_leaf: as in `jax.tree.map`.

    Returns:
        The tree with each leaf replaced by its `path_name`.

    Example:
        >>> from vernal.trees import tree_paths
        >>> tree_paths({"a": [1.0, 2.0], "b": None})
        {'a': ['a.0', 'a.1'], 'b': None}
    """
    return jtu.tree_map_with_path(lambda path, _: path_name(path), pytree, is_leaf=is_leaf)


def named_leaves(pytree: Any, is_leaf: _IsLeaf | None = None) -> dict[str, Any]:
    """The leaves of a tree by name.

    Args:
        pytree: any pytree.
        is_leaf: as in `jax.tree.map`.

    Returns:
        A dictionary in the order of the leaves.

    Raises:
        ValueError: if two leaves have the same name, which only different keys that print alike can cause.

    Example:
        >>> from vernal.trees import named_leaves
        >>> named_leaves({"layers": [{"weight": 1.0}, {"weight": 2.0}]})
        {'layers.0.weight': 1.0, 'layers.1.weight': 2.0}
    """
    found: dict[str, Any] = {}
    paths: dict[str, _Path] = {}
    for path, leaf in jtu.tree_flatten_with_path(pytree, is_leaf=is_leaf)[0]:
        name = path_name(path)
        if name in found:
            raise value_error(
                f"two leaves have the name {name!r}",
                where=f"{path_text(paths[name], 'tree')} and {path_text(path, 'tree')}",
                expected="a different name for every leaf",
                instead="rename one of the keys, so that they print differently",
            )
        found[name] = leaf
        paths[name] = path
    return found
