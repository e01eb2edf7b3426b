"""Splits a tree in two by a predicate, and joins the parts again."""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._ground import callable_name, flatten_none_is_leaf, is_none
from ..show import diff_text, path_text, short, type_error, value_error
from ._no_gradient import is_missing

FilterSpec = Any  # a prefix tree of bools and predicates
IsLeaf = Callable[[Any], bool]


def _spec_error(spec: Any, path: Any) -> ValueError:
    return value_error(
        "a filter specification must consist of bools and functions of a leaf",
        where=path_text(path, root="filter_spec"),
        expected="True, False, or a function such as `vernal.is_array`",
        got=short(spec),
        instead="convert NumPy and JAX booleans with `bool(...)`",
    )


def _decide(spec: Any, leaves: list[Any], path: Any = ()) -> list[bool]:
    if type(spec) is bool:
        return [spec] * len(leaves)
    if not callable(spec):
        raise _spec_error(spec, path)
    chosen: list[Any] = [spec(leaf) for leaf in leaves]
    if any(type(c) is not bool for c in chosen):
        bad = next(c for c in chosen if type(c) is not bool)
        raise value_error(
            "a filter predicate must return a Python bool",
            where=f"`{callable_name(spec)}` at {path_text(path, root='filter_spec')}",
            expected="True or False",
            got=short(bad),
            instead="wrap the result in `bool(...)`, and decide by type, shape or dtype rather than by value",
        )
    return chosen


def _is_spec(spec: Any) -> bool:
    return type(spec) is bool or (callable(spec) and not jtu.is_tree_node(type(spec)))


def _choices(tree: Any, spec: Any, is_leaf: IsLeaf | None) -> tuple[list[Any], Any, list[bool]]:
    """The leaves of `tree`, its structure, and for each leaf whether the specification keeps it."""
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=is_leaf)
    if _is_spec(spec):
        return leaves, treedef, _decide(spec, leaves)
    kept, kept_def = jtu.tree_flatten(spec)
    if kept_def == treedef and all(type(k) is bool for k in kept):
        return leaves, treedef, kept
    paths_and_specs, spec_def = jtu.tree_flatten_with_path(spec, is_leaf=is_none)
    try:
        subtrees = spec_def.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        raise value_error(
            "the filter specification is not a prefix of the tree",
            where="filter_spec",
            expected="the tree's own structure, with a bool or a predicate in place of a subtree",
            got=str(error),
            instead="make it with `jax.tree.map(lambda leaf: ..., tree)`, or pass one predicate for all leaves",
        ) from None
    keep: list[bool] = []
    for (path, one), subtree in zip(paths_and_specs, subtrees, strict=True):
        below = jtu.tree_leaves(subtree, is_leaf=is_leaf)
        if one is None and not below:
            continue
        keep.extend(_decide(one, below, path))
    return leaves, treedef, keep


def filter(
    pytree: Any,
    filter_spec: FilterSpec,
    inverse: bool = False,
    replace: Any = None,
    is_leaf: IsLeaf | None = None,
) -> Any:
    """Keeps the leaves that a specification chooses and puts `replace` in place of the others.

    Args:
        pytree: any tree.
        filter_spec: a predicate of a leaf, a bool, or a tree of those whose structure is a prefix
            of `pytree`'s.
        inverse: keep the leaves that are not chosen instead.
        replace: the value in place of a leaf that is not kept.
        is_leaf: as in `jax.tree.map`.

    Returns:
        A tree of the structure of `pytree`.

    Raises:
        ValueError: if `filter_spec` holds, or a predicate returns, something that is not a Python
            bool; if `filter_spec` is not a prefix of `pytree`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> vernal.filter({"a": jnp.arange(2), "b": "text"}, vernal.is_array, replace=0)
        {'a': Array([0, 1], dtype=int32), 'b': 0}
    """
    leaves, treedef, keep = _choices(pytree, filter_spec, is_leaf)
    wanted = not inverse
    return treedef.unflatten(
        [x if k is wanted else replace for x, k in zip(leaves, keep, strict=True)]
    )


def partition(
    pytree: Any, filter_spec: FilterSpec, replace: Any = None, is_leaf: IsLeaf | None = None
) -> tuple[Any, Any]:
    """Splits a tree into the leaves that a specification chooses and the rest; `combine` joins them again.

    Args:
        pytree: any tree.
        filter_spec: as in `vernal.filter`.
        replace: the value in either part for each leaf of the other.
        is_leaf: as in `jax.tree.map`.

    Returns:
        `(chosen, rest)`, two trees of the structure of `pytree`.

    Raises:
        ValueError: as `vernal.filter`.

    Example:
        >>> import vernal
        >>> vernal.partition([1, "text"], lambda x: isinstance(x, int))
        ([1, None], [None, 'text'])
    """
    leaves, treedef, keep = _choices(pytree, filter_spec, is_leaf)
    chosen = [x if k else replace for x, k in zip(leaves, keep, strict=True)]
    rest = [replace if k else x for x, k in zip(leaves, keep, strict=True)]
    return treedef.unflatten(chosen), treedef.unflatten(rest)


def _first_given(*values: Any) -> Any:
    for value in values:
        if not is_missing(value):
            return value
    return values[0]


def combine(*pytrees: Any, is_leaf: IsLeaf | None = None) -> Any:
    """Joins trees of one structure: at every leaf, the first value that is not None or `NoGradient`.

    Args:
        *pytrees: trees that differ only in where they hold None, as `partition` returns them, or
            `NoGradient`, as `params` does.
        is_leaf: as in `jax.tree.map`.

    Returns:
        The joined tree.

    Raises:
        TypeError: if no tree is given.
        ValueError: if the structures differ.

    Example:
        >>> import vernal
        >>> vernal.combine([1, None], [None, "text"])
        [1, 'text']
    """
    if not pytrees:
        raise type_error(
            "combine needs at least one tree",
            where="combine()",
            expected="one or more trees",
            got="no trees",
            instead="combine(chosen, rest)",
        )

    if is_leaf is not None:
        return _combine_prefixes(pytrees, is_leaf)
    flat = list(map(flatten_none_is_leaf, pytrees))
    joined, treedef = flat[0]
    if any([other != treedef for _, other in flat]):
        return _combine_prefixes(pytrees, is_leaf)
    if not any([leaf is None for leaf in joined]) and hasattr(type(pytrees[0]), "__tree_replace__"):
        # The first part is complete, and a module is immutable: it is its own copy.
        return pytrees[0]
    for leaves, _ in flat[1:]:
        joined = [b if a is None else a for a, b in zip(joined, leaves, strict=True)]
    return treedef.unflatten(joined)


def _combine_prefixes(pytrees: tuple[Any, ...], is_leaf: IsLeaf | None) -> Any:
    """Joins trees of which some hold `NoGradient`, or None where others hold a whole subtree."""
    try:
        return jtu.tree_map(
            _first_given,
            *pytrees,
            is_leaf=lambda x: is_missing(x) or (is_leaf is not None and is_leaf(x)),
        )
    except (ValueError, TypeError, KeyError):
        other = next(t for t in pytrees if jtu.tree_structure(t) != jtu.tree_structure(pytrees[0]))
        raise value_error(
            "the trees to combine must have the same structure",
            where="combine(...)",
            expected="trees that differ only in where they hold None",
            got=diff_text(pytrees[0], other, leaves="ignore"),
            instead="make them with `vernal.partition`, or from one tree with `jax.tree.map`",
        ) from None
