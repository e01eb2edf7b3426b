"""Which nodes of a tree a function picks, for `tree_at` and all functions that take such a function.

The difficulty: `where(tree)` returns values, and a value does not say where in the tree it was
(two layers may share a dropout rate of 0.5, and every small int is one object). The solution: call
`where` with a *ghost*, a copy of the tree in which every leaf is a unique marker. It then returns
markers or inner nodes of the ghost, and both are found by identity. If it returns anything else, that
was a value that is not a leaf (structure of a module, None, an empty container), and `where` runs once
more on a deeper ghost, in which those are markers too.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.tree_util as jtu

from ..show import short, value_error
from ._parts import node_parts, replace_parts
from ._places import meant_nodes
from ._static_fields import mark_static_fields, refuse_static

Path = tuple[Any, ...]
_MISSING = object()


class _Marker:
    """Stands for one leaf of the ghost. Reading anything from it means that `where` reads values."""

    __slots__ = ("place",)

    def __init__(self, place: Any):
        self.place = place


def _deep_ghost(node: Any, path: Path) -> Any:
    parts = node_parts(node)
    if not parts:
        return _Marker(path)
    return replace_parts(node, {key: _deep_ghost(part, (*path, key)) for key, part in parts}, False)


def _inner_nodes(node: Any, path: Path) -> Iterator[tuple[int, Path]]:
    if isinstance(node, _Marker):
        return
    parts = node_parts(node)
    if not parts:
        return
    yield id(node), path
    for key, part in parts:
        yield from _inner_nodes(part, (*path, key))


def _by_id(ghost: Any) -> dict[int, Any]:
    """The place of each inner node; `_MISSING` for an object in two places, such as a shared tuple of numbers."""
    found: dict[int, Any] = {}
    for identity, path in _inner_nodes(ghost, ()):
        found[identity] = _MISSING if identity in found else path
    return found


def _bad_where(name: str, got: str, error: Exception | None = None) -> ValueError:
    return value_error(
        f"`{name}` must use only the structure of the tree, not the values in it",
        where=f"the function `{name}`",
        expected="a function that returns nodes of the tree it is given, e.g. `lambda m: m.layers[0].weight`",
        got=got if error is None else f"{type(error).__name__}: {error}",
        instead="pick by name, index or type; if the choice depends on values, make it before the call",
    )


def _run(where: Callable[[Any], Any], ghost: Any, name: str) -> Any:
    try:
        return where(ghost)
    except (TypeError, AttributeError) as error:
        if "_Marker" in str(error):
            raise _bad_where(name, "", error) from error
        raise


def located(
    where: Callable[[Any], Any],
    tree: Any,
    is_leaf: Callable[[Any], bool] | None,
    name: str = "where",
) -> tuple[list[Any], Any]:
    """The places of the picked nodes (an index among the leaves, or a path), and their arrangement."""
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=is_leaf)
    ghost = treedef.unflatten([_Marker(i) for i in range(len(leaves))])
    picked = _run(where, ghost, name)
    if type(picked) is _Marker:
        return [picked.place], None
    if _is_new_and_empty(picked, ghost):
        return [], jtu.tree_structure(picked)
    places, arrangement = _places(picked, ghost)
    if _MISSING in places:
        ghost = _deep_ghost(tree, ())
        picked = _run(where, ghost, name)
        places, arrangement = _places(picked, ghost)
    if _MISSING in places:
        _refuse_static(where, ghost, name)
        raise _bad_where(name, _name_stray(picked, ghost))
    return places, arrangement


def _is_new_and_empty(picked: Any, ghost: Any) -> bool:
    """Whether `where` made an empty list or dict, which picks nothing. (One that is in the tree is a node.)"""
    if type(picked) not in (list, dict) or picked:
        return False
    nodes = jtu.tree_leaves(ghost, is_leaf=lambda x: x is picked)
    return not any(x is picked for x in nodes)


def _places(picked: Any, ghost: Any) -> tuple[list[Any], Any]:
    if type(picked) is _Marker:
        return [picked.place], None
    inner = _by_id(ghost)
    if id(picked) in inner:
        return [inner[id(picked)]], None
    found, arrangement = jtu.tree_flatten(
        picked, is_leaf=lambda x: type(x) is _Marker or x is None or id(x) in inner
    )
    places = [
        x.place if type(x) is _Marker else inner.get(id(x), _MISSING) if x is not None else _MISSING
        for x in found
    ]
    if not found:
        return [_MISSING], None
    return places, arrangement


def _refuse_static(where: Callable[[Any], Any], ghost: Any, name: str) -> None:
    """Refuses a function that returns static fields: those of another ghost, in which they are markers too."""
    try:
        picked = jtu.tree_leaves(where(mark_static_fields(ghost, _Marker)))
    except Exception:
        return
    paths = [x.place for x in picked if type(x) is _Marker]
    refuse_static(paths, ghost, f"the function `{name}`")


def _name_stray(picked: Any, ghost: Any) -> str:
    inner = dict(_inner_nodes(ghost, ()))
    for leaf in jtu.tree_leaves(picked, is_leaf=lambda x: id(x) in inner):
        if type(leaf) is not _Marker and id(leaf) not in inner:
            return f"{short(leaf)}, which is not in the tree"
    return "nothing"


def as_path(place: Any, paths: list[Path]) -> Path:
    return paths[place] if isinstance(place, int) else place


def node_at(tree: Any, path: Path) -> Any:
    for key in path:
        tree = next(part for k, part in node_parts(tree) or [] if k == key)
    return tree


def picked_nodes(
    where: str | Sequence[str] | Callable[[Any], Any], pytree: Any, name: str = "where"
) -> list[tuple[Path, Any]]:
    """The nodes of a tree that a function picks or a path matches, with their key paths.

    Args:
        where: as for `tree_at`.
        pytree: the tree.
        name: the name of `where` in messages.

    Returns:
        The key path and the value of every picked node.

    Raises:
        ValueError: if `where` reads values, or returns something that is not in the tree; if the path matches nothing.

    Example:
        >>> from vernal.show import path_text
        >>> from vernal.trees import picked_nodes
        >>> [(path, node)] = picked_nodes(lambda t: t["a"][1], {"a": [1.0, 2.0]})
        >>> path_text(path, "t"), node
        ("t['a'][1]", 2.0)
    """
    if not callable(where):
        texts = [where] if isinstance(where, str) else where
        found = (meant_nodes(text, pytree, None, f"{name}={text!r}") for text in texts)
        return [item for nodes in found for item in nodes.items()]
    places, _ = located(where, pytree, None, name)
    paths_of_leaves = [path for path, _ in jtu.tree_flatten_with_path(pytree)[0]]
    paths = [as_path(place, paths_of_leaves) for place in places]
    return [(path, node_at(pytree, path)) for path in paths]
