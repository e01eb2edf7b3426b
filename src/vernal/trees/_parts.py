"""The parts of a node: its children and, of a module, the structure that surgery may reach.

A class supports this through two hooks: `__tree_fields__()` returns its parts by name, and
`__tree_replace__(changes, sort)` a copy with some of them replaced and, if `sort`, sorted afresh.
"""

from collections.abc import Mapping
from typing import Any

import jax.tree_util as jtu

from .._ground import one_level, one_level_with_keys
from ..show import field_key, short, type_error


def is_sealed(node: Any) -> bool:
    """Whether a node may only be passed on: its class says so by `__tree_sealed__`.

    Args:
        node: any Python object.

    Returns:
        True for a `vernal.Packed`.

    Example:
        >>> import vernal
        >>> from vernal.trees import is_sealed
        >>> is_sealed(vernal.pack([1.0])), is_sealed([1.0])
        (True, False)
    """
    return getattr(type(node), "__tree_sealed__", False)


def refuse_sealed(node: Any, where: str = "a tool that looks into a tree") -> None:
    """Refuses a node that may only be passed on, where the tree that it stands for is needed.

    Args:
        node: any Python object.
        where: what needs the tree, for the error.

    Raises:
        TypeError: for a `vernal.Packed`.

    Example:
        >>> from vernal.trees import refuse_sealed
        >>> refuse_sealed([1.0])
    """
    if is_sealed(node):
        raise type_error(
            "a packed tree has no layers, names or gradients",
            where=where,
            expected="the tree itself",
            got=short(node),
            instead="packed.unpack(), and vernal.pack(tree) of the result",
        )


def node_parts(node: Any) -> list[tuple[Any, Any]] | None:
    """The immediate parts of a node.

    Args:
        node: any Python object.

    Returns:
        Pairs of key and part: for a module all fields that are not declared static, for another
        pytree node its children. None for a leaf, and for None.

    Raises:
        TypeError: for a `vernal.Packed`.

    Example:
        >>> import vernal
        >>> from vernal.trees import node_parts
        >>> [str(key) for key, part in node_parts(vernal.nn.Lambda(abs))]
        ['.fn']
    """
    refuse_sealed(node)
    fields = getattr(type(node), "__tree_fields__", None)
    if fields is not None:
        return [(field_key(type(node), name), value) for name, value in fields(node).items()]
    if node is None or not jtu.is_tree_node(type(node)):
        return None
    return one_level_with_keys(node)[0]


def replace_parts(node: Any, changes: Mapping[Any, Any], sort: bool = True) -> Any:
    """A copy of a node in which some parts are replaced.

    Args:
        node: a node; see `node_parts`.
        changes: the new parts by key.
        sort: whether a module decides anew which of the new parts are structure.

    Returns:
        The copy. No `__init__` runs.

    Example:
        >>> import vernal
        >>> from vernal.trees import node_parts, replace_parts
        >>> layer = vernal.nn.Lambda(abs)
        >>> [(key, _)] = node_parts(layer)
        >>> replace_parts(layer, {key: len}).fn
        <built-in function len>
    """
    if hasattr(type(node), "__tree_replace__"):
        return node.__tree_replace__({key.name: part for key, part in changes.items()}, sort)
    keyed = node_parts(node) or []
    return one_level(node)[1].unflatten([changes.get(key, part) for key, part in keyed])
