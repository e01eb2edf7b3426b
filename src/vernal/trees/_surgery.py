"""`tree_at`: replacing nodes of an immutable tree, named by paths (`_places.py`) or by a function (`_picking.py`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu

from ..show import listed, path_text, short, type_error, value_error
from ._kinds import is_array
from ._parts import node_parts, replace_parts
from ._picking import Path, as_path, located, node_at
from ._places import meant_nodes

_MISSING = object()


def _refuse_overlap(paths: list[Path]) -> None:
    places = set(paths)
    for path in paths:
        above = next((path[:end] for end in range(len(path)) if path[:end] in places), None)
        if above is None and len(places) < len(paths) and paths.count(path) > 1:
            above = path
        if above is not None:
            what = (
                "the same node is picked twice"
                if above == path
                else "one picked node is inside another"
            )
            raise value_error(
                f"`where` is ambiguous: {what}",
                where=f"{path_text(above, 'tree')} and {path_text(path, 'tree')}",
                expected="different nodes, none inside another",
                instead="return each node once, or call tree_at twice",
            )


def _rebuild(node: Any, changes: list[tuple[Path, Any]]) -> Any:
    if not changes[0][0]:
        return changes[0][1]
    below: dict[Any, list[tuple[Path, Any]]] = {}
    for path, new in changes:
        below.setdefault(path[0], []).append((path[1:], new))
    parts = dict(node_parts(node) or [])
    return replace_parts(
        node, {key: _rebuild(parts[key], some) for key, some in below.items()}, True
    )


def _replacements(replace: Any, count: int, arrangement: Any) -> list[Any]:
    if arrangement is None:
        return [replace]
    if isinstance(replace, (list, tuple)) and len(replace) == count and _is_sequence(arrangement):
        return list(replace)
    try:
        found = arrangement.flatten_up_to(replace)
    except (ValueError, TypeError, KeyError) as error:
        raise value_error(
            "the replacements do not match the nodes that `where` picks",
            where="tree_at(where, tree, replace)",
            expected=f"{count} replacements, arranged as `where` returns the nodes",
            got=f"{short(replace)} ({error})",
            instead="return a tuple from `where` and give a tuple of the same length",
        ) from None
    return found


def _is_sequence(arrangement: Any) -> bool:
    """Whether the nodes are in one list or tuple, for which any other may be given."""
    kind = arrangement.node_data()
    return (
        kind is not None
        and issubclass(kind[0], (list, tuple))
        and arrangement.num_nodes == arrangement.num_leaves + 1
    )


def _each(where: str, replace: Any, paths: list[Path]) -> list[Any]:
    """The new values of the nodes that a path matches."""
    if len(paths) == 1:
        return [replace]
    if not isinstance(replace, (list, tuple)) or len(replace) != len(paths):
        raise value_error(
            "the path matches several nodes, and `replace` is not a list with one value for each",
            where=f"tree_at({where!r}, tree, replace)",
            expected=f"a list of {len(paths)} values, for {listed(path_text(path) for path in paths)}",
            got=short(replace),
            instead="replace_fn=lambda old: ... to compute each value from the old one",
        )
    return list(replace)


def _no_where(got: Any) -> TypeError:
    return type_error(
        "tree_at takes paths, or a function that picks nodes",
        where="tree_at(where, tree, ...)",
        expected="a path, a list of paths, or a function",
        got=short(got),
        instead='"layers.0.weight", ["**.weight", "**.bias"] or lambda tree: tree.layers[0].weight',
    )


def _at_paths(
    where: Any,
    pytree: Any,
    replace: Any,
    replace_fn: Callable[[Any], Any] | None,
    is_leaf: Callable[[Any], bool] | None,
) -> Any:
    """`tree_at` with one path, or with several and a replacement for each."""
    texts = [where] if isinstance(where, str) else list(where)
    if not all(isinstance(text, str) for text in texts):
        raise _no_where(where)
    given = [replace] if isinstance(where, str) else replace
    if replace_fn is None and (not isinstance(given, (list, tuple)) or len(given) != len(texts)):
        raise value_error(
            "`replace` must be a list with one value for each path",
            where=f"tree_at({short(where)}, tree, replace)",
            expected=f"a list of length {len(texts)}",
            got=short(replace),
            instead="replace_fn=lambda old: ... to compute each value from the old one",
        )
    paths: list[Path] = []
    new: list[Any] = []
    for i, text in enumerate(texts):
        meant = meant_nodes(text, pytree, is_leaf, f"tree_at({text!r}, tree, ...)")
        paths += meant
        if replace_fn is not None:
            new += map(replace_fn, meant.values())
        else:
            new += _each(text, given[i], list(meant))
    _refuse_overlap(paths)
    return _rebuild(pytree, list(zip(paths, new, strict=True))) if paths else pytree


def tree_at(
    where: str | Sequence[str] | Callable[[Any], Any],
    pytree: Any,
    replace: Any = _MISSING,
    replace_fn: Callable[[Any], Any] | None = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Returns a copy of a tree in which some nodes are replaced.

    Nodes are leaves, whole subtrees, None, or structure of a module that is not declared
    `static=True` (a dropout rate, an activation function). A new value is sorted afresh: an array
    becomes a leaf, a function becomes structure. Shapes and types may change. No `__init__`,
    converter or check runs.

    Args:
        where: the path of a node, or of several (see `vernal.trees.Pattern`). Without wildcards it may
            name anything in the tree. With wildcards it skips None; a final `*` does not match
            structure, and a final `**` matches only leaves. Or a list of paths. Or a function that picks
            one node, or any pytree of nodes (usually a tuple), from a tree like `pytree`: it receives
            placeholders, so it cannot read values. It may run twice. A new empty list picks nothing.
        pytree: the tree. It is not changed.
        replace: the new node, or as many as `where` returns, in the same arrangement. (For a list or tuple of nodes,
            any list or tuple.) If a path matches several nodes, a list of new nodes in the order of the tree. For a
            list of paths, a list with the replacement for each of them.
        replace_fn: computes each new node from the old one instead.
        is_leaf: as in `jax.tree.map`: what to treat as a leaf.

    Returns:
        The changed copy.

    Raises:
        ValueError: unless exactly one of `replace` and `replace_fn` is given; if `where` reads values,
            or returns something that is not in the tree, the same node twice or nodes inside one
            another; if the number of replacements is wrong; if a path matches nothing in the tree (the
            error suggests paths that do).
        TypeError: if `where` is neither paths nor a function.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> linear = vernal.nn.Linear(2, 3, key=jax.random.key(0))
        >>> vernal.tree_at(lambda l: l.bias, linear, jnp.ones(3)).bias
        Array([1., 1., 1.], dtype=float32)
        >>> vernal.tree_at(lambda d: d.p, vernal.nn.Dropout(0.5), 0.1).p
        0.1
        >>> doubled = vernal.tree_at("[*].bias", [linear, linear], replace_fn=lambda x: 2 * x)
        >>> bool((doubled[1].bias == 2 * linear.bias).all())
        True
    """
    if (replace is _MISSING) == (replace_fn is None):
        raise value_error(
            "tree_at needs exactly one of `replace` and `replace_fn`",
            where="tree_at(where, tree, ...)",
            got="neither" if replace_fn is None else "both",
            instead="tree_at(where, tree, new_value) or tree_at(where, tree, replace_fn=lambda old: ...)",
        )
    if isinstance(where, (str, list, tuple)):
        return _at_paths(where, pytree, replace, replace_fn, is_leaf)
    if not callable(where):
        raise _no_where(where)
    found, arrangement = located(where, pytree, is_leaf)
    new = None if replace_fn is not None else _replacements(replace, len(found), arrangement)
    if all(isinstance(place, int) for place in found) and len(set(found)) == len(found):
        leaves, treedef = jtu.tree_flatten(pytree, is_leaf=is_leaf)
        values = [replace_fn(leaves[p]) for p in found] if replace_fn is not None else new or []
        if all(is_array(leaves[p]) and is_array(v) for p, v in zip(found, values, strict=True)):
            # Arrays replace arrays: the sorting cannot change.
            for place, value in zip(found, values, strict=True):
                leaves[place] = value
            return treedef.unflatten(leaves)
    paths_of_leaves = [p for p, _ in jtu.tree_flatten_with_path(pytree, is_leaf=is_leaf)[0]]
    paths = [as_path(place, paths_of_leaves) for place in found]
    _refuse_overlap(paths)
    if replace_fn is not None:
        new = [replace_fn(node_at(pytree, path)) for path in paths]
    return _rebuild(pytree, list(zip(paths, new or [], strict=True)))


def values_with_paths(pytree: Any) -> list[tuple[Path, Any]]:
    """Every value in a tree with its key path: the leaves, and the structure of modules that
    `tree_at` can reach.

    Args:
        pytree: the tree.

    Returns:
        `(path, value)` pairs in the order of the tree. None and empty containers count as values.

    Example:
        >>> from vernal.show import path_text
        >>> from vernal.trees import values_with_paths
        >>> [(path_text(path), value) for path, value in values_with_paths({"a": [1.0, None]})]
        [("['a'][0]", 1.0), ("['a'][1]", None)]
    """
    parts = node_parts(pytree)
    if not parts:
        return [((), pytree)]
    return [((key, *path), value) for key, part in parts for path, value in values_with_paths(part)]


def set_attributes(pytree: Any, name: str, value: Any) -> Any:
    """Sets an attribute on every node of a tree that has one of this name.

    Args:
        pytree: the tree. It is not changed.
        name: the attribute. Dictionary entries and properties do not count.
        value: the new value of each, whatever the old one: a leaf, a subtree (which is not searched),
            or structure of a module. As in `tree_at`, it is sorted afresh.

    Returns:
        The changed copy; nodes without a change in them are shared with `pytree`.

    Raises:
        TypeError: if a module has a field of that name declared `static=True`.

    Example:
        >>> import vernal
        >>> from vernal.trees import set_attributes
        >>> set_attributes([vernal.nn.Dropout(0.5)], "p", 0.1)
        [Dropout(p=0.1, inference=False, together=0)]
    """
    parts = node_parts(pytree)
    _refuse_static(pytree, name)
    changes = {}
    for key, part in parts or []:
        found = isinstance(key, jtu.GetAttrKey) and key.name == name
        new = value if found else set_attributes(part, name, value)
        if new is not part:
            changes[key] = new
    return replace_parts(pytree, changes, True) if changes else pytree


def _refuse_static(node: Any, name: str) -> None:
    fields = getattr(type(node), "__tree_fields__", None)
    if fields is None or name in fields(node) or name not in vars(node):
        return
    raise type_error(
        "a static field can only be set when its module is created",
        where=f"{type(node).__name__}.{name}",
        expected="a field that is not declared static=True",
        got=f"{name}: ... = field(static=True)",
        instead=f"declare `{name}` without static=True: a value that is not an array is structure anyway",
    )
