"""Splitting and surgery of trees, which in Equinox accept arguments that Vernal refuses."""

from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from ... import trees
from ..._ground import is_none

_MISSING = object()


def is_array(element: Any) -> bool:
    """`vernal.is_array`, also true of NumPy arrays of strings, objects and dates.

    Args:
        element: any Python object.

    Returns:
        Whether it is a JAX array, or a NumPy array or scalar.
    """
    return isinstance(element, (jax.Array, np.ndarray, np.generic))


def is_array_like(element: Any) -> bool:
    """`vernal.is_array_like`, also true of NumPy arrays of strings, objects and dates.

    Args:
        element: any Python object.

    Returns:
        Whether it is an array, a number, or has a method `__jax_array__`.
    """
    return is_array(element) or hasattr(element, "__jax_array__") or trees.is_array_like(element)


def _truthy(predicate: Callable[[Any], Any]) -> Callable[[Any], bool]:
    return lambda leaf: bool(predicate(leaf))


def _with_bools(spec: Any) -> Any:
    """A specification whose predicates return Python bools; in Equinox they may return anything with a truth value."""
    if spec in (is_array, trees.is_inexact_array):
        return spec
    return jtu.tree_map(lambda one: _truthy(one) if callable(one) else one, spec, is_leaf=is_none)


def filter(
    pytree: Any,
    filter_spec: Any,
    inverse: bool = False,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """`vernal.filter`, whose predicates may return anything with a truth value.

    Args:
        pytree: as in `vernal.filter`.
        filter_spec: as in `vernal.filter`.
        inverse: as in `vernal.filter`.
        replace: as in `vernal.filter`.
        is_leaf: as in `vernal.filter`.

    Returns:
        As in `vernal.filter`.
    """
    return trees.filter(pytree, _with_bools(filter_spec), inverse, replace, is_leaf)


def partition(
    pytree: Any,
    filter_spec: Any,
    replace: Any = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> tuple[Any, Any]:
    """`vernal.partition`, whose predicates may return anything with a truth value.

    Args:
        pytree: as in `vernal.partition`.
        filter_spec: as in `vernal.partition`.
        replace: as in `vernal.partition`.
        is_leaf: as in `vernal.partition`.

    Returns:
        As in `vernal.partition`.
    """
    return trees.partition(pytree, _with_bools(filter_spec), replace, is_leaf)


class _Marker:
    """Stands for a leaf, and is only itself."""


def _picked(where: Callable[[Any], Any], pytree: Any, is_leaf: Any) -> list[Any]:
    """What tells the nodes apart that a function picks in a list or tuple; else one node."""
    leaves, treedef = jtu.tree_flatten(pytree, is_leaf=is_leaf)
    picked = where(treedef.unflatten([_Marker() for _ in leaves]))
    if type(picked) not in (list, tuple):
        return [picked]
    marked = [any(isinstance(x, _Marker) for x in jtu.tree_leaves(node)) for node in picked]
    return [node if marked[i] else object() for i, node in enumerate(picked)]


def tree_at(
    where: Callable[[Any], Any],
    pytree: Any,
    replace: Any = _MISSING,
    replace_fn: Callable[[Any], Any] | None = None,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """`vernal.tree_at`, where the last of several values for one node counts, and `where` may pick no node.

    Args:
        where: as in `vernal.tree_at`.
        pytree: as in `vernal.tree_at`.
        replace: as in `vernal.tree_at`.
        replace_fn: as in `vernal.tree_at`.
        is_leaf: as in `vernal.tree_at`.

    Returns:
        As in `vernal.tree_at`.
    """
    options: dict[str, Any] = {"replace_fn": replace_fn, "is_leaf": is_leaf}
    if replace is not _MISSING:
        options["replace"] = replace
    try:
        return trees.tree_at(where, pytree, **options)
    except ValueError:
        # Asked only now, because nearly every call is one that Vernal takes.
        picked = _picked(where, pytree, is_leaf)
        last = sorted({id(node): i for i, node in enumerate(picked)}.values())
        one_way = (replace is _MISSING) != (replace_fn is None)
        values = replace if type(replace) in (list, tuple) else ()
        fits = replace is _MISSING or len(values) == len(picked)
        if not one_way or not fits or 0 < len(last) == len(picked):
            raise
    if not last:
        return pytree
    if replace is not _MISSING:
        options["replace"] = [values[i] for i in last]
    return trees.tree_at(lambda tree: [where(tree)[i] for i in last], pytree, **options)
