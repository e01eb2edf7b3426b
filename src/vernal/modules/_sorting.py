"""How fields are sorted: arrays are leaves, everything else is structure.

Every value that a field may hold has a *kind*:

* `True`: a child, exactly as JAX expects it (an array, a module, another registered pytree, None);
* `False`: structure, part of the treedef (a function, a string, a number, a tuple of those);
* a tuple of kinds, one for each immediate child of a container that mixes both. Flattening such a
  container shows its arrays and modules under their ordinary key paths and keeps the rest in the
  treedef.

Kinds are decided once, when construction ends, and remembered by the treedef: a tree made by
`jax.tree.map` keeps the sorting of the original whatever its leaves have become.
"""

import itertools
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._ground import one_level, one_level_with_keys, static_key
from ..trees import Rest, everything_in, is_array

Kind = bool | tuple[Any, ...]

# Kinds that the type alone decides. For other types, each value is looked at.
_BY_TYPE: dict[type, bool] = {
    type(None): True,
    jax.ShapeDtypeStruct: True,
    str: False,
    bytes: False,
    bool: False,
    int: False,
    float: False,
    complex: False,
    type(Ellipsis): False,
}
kind_by_type = _BY_TYPE.get
# Types of which no value is an array or holds one.
_never_data: set[type] = {kind for kind, is_child in _BY_TYPE.items() if not is_child}

CONTAINERS = (list, tuple, dict)
# The most objects to look at when ordinary objects are opened.
_MOST = 1_000
# Structure that needs no second look.
_PLAIN = frozenset({str, bytes, bool, int, float, complex, types.FunctionType})


def is_node(value: Any) -> bool:
    """Whether JAX knows `value` as an inner node of a pytree (None included)."""
    return jtu.is_tree_node(type(value))


def is_data(value: Any) -> bool:
    """Whether a leaf is an array, stands for one, or turns into one."""
    return (
        is_array(value)
        or isinstance(value, jax.ShapeDtypeStruct)
        or hasattr(type(value), "__jax_array__")
    )


def sort_value(value: Any) -> Kind:
    """The kind of a field's value."""
    cls = type(value)
    known = _BY_TYPE.get(cls)
    if known is not None:
        return known
    if isinstance(value, CONTAINERS) and is_node(value):
        return _sort_container(value)
    if is_node(value):
        if not hasattr(cls, "_vernal_class") and not hasattr(value, "__self__"):
            # A registration is permanent. (A module or a method may lead back to the module being
            # built, so each is looked at.)
            _BY_TYPE[cls] = True
        return True
    if isinstance(value, jax.Array):
        _BY_TYPE[cls] = True
        return True
    if is_data(value):
        return True
    if not isinstance(value, np.ndarray):
        _never_data.add(cls)
    return False


def _sort_container(value: Any) -> Kind:
    children = one_level(value)[0]
    return _joined(value, tuple(map(sort_value, children)))


def _joined(value: Any, kinds: tuple[Kind, ...]) -> Kind:
    """The kind of a container whose children are of these kinds."""
    if all(kind is True for kind in kinds):
        return True
    if all(kind is False for kind in kinds) and isinstance(value, tuple):
        return False
    # A list or dict that holds only structure stays a node: flattening reads its contents, and so
    # sees a change in place. (A tuple cannot change.)
    return kinds


def sort_again(old: Any, kind: Kind, new: Any) -> Kind:
    """The kind of a value that replaces another: sorted afresh, unless the old value no longer fitted its
    kind.

    In a mask, an axes tree or a gradient, the leaves of children are bools, ints or other values that
    would be structure in a model. Replacing one by another such value must keep the shape of the tree.
    """
    if new is old:
        return kind
    if kind is True and not is_node(old) and not is_data(old):
        return True
    if isinstance(kind, tuple) and type(new) is type(old) and isinstance(new, CONTAINERS):
        before, old_def = one_level(old)
        after, new_def = one_level(new)
        if old_def == new_def and len(kind) == len(before):
            return _joined(new, tuple(map(sort_again, before, kind, after)))
    if kind is True and type(new) is type(old) and isinstance(new, CONTAINERS):
        before, old_def = one_level(old)
        after, new_def = one_level(new)
        if old_def == new_def and before:
            return _joined(new, tuple(map(sort_again, before, [True] * len(before), after)))
    return sort_value(new)


class Mixed:
    """Stands for a mixed container while it is flattened. Never seen by users."""

    __slots__ = ("kinds", "value")

    def __init__(self, value: Any, kinds: Kind):
        self.value = value
        self.kinds = kinds


def _kinds_now(mixed: Mixed, children: list[Any]) -> tuple[Kind, ...]:
    kinds = mixed.kinds
    if isinstance(kinds, tuple) and len(kinds) == len(children):
        if not any(map(_outgrown, children, kinds)):
            return kinds
    # The container was changed in place since it was sorted.
    return tuple(map(sort_value, children))


def _outgrown(child: Any, kind: Kind) -> bool:
    """Whether structure, or a mixed container, has been replaced by something else since it was sorted."""
    if kind is False:
        return type(child) not in _never_data and sort_value(child) is not False
    return kind is not True and not isinstance(child, CONTAINERS)


def _shown(children: list[Any], kinds: tuple[Kind, ...]) -> Iterator[Any]:
    for child, kind in zip(children, kinds, strict=True):
        if kind is True:
            yield child
        elif kind is not False:
            yield Mixed(child, kind)


def _rest(treedef: Any, children: list[Any], kinds: tuple[Kind, ...]) -> tuple[Rest]:
    mask = tuple(kind is not False for kind in kinds)
    fixed = tuple(c for c, shown in zip(children, mask, strict=True) if not shown)
    for value in fixed:
        # A list may have been changed since its module was built.
        if type(value) not in _PLAIN:
            static_key(value)
    # A one-element tuple: JAX then compares identical rests by identity, in C.
    return (Rest(treedef, mask, fixed),)


def _flatten_mixed(mixed: Mixed) -> tuple[tuple[Any, ...], Any]:
    children, treedef = one_level(mixed.value)
    kinds = _kinds_now(mixed, children)
    return tuple(_shown(children, kinds)), _rest(treedef, children, kinds)


def _flatten_mixed_with_keys(mixed: Mixed) -> tuple[tuple[Any, ...], Any]:
    keyed, treedef = one_level_with_keys(mixed.value)
    children = [child for _, child in keyed]
    kinds = _kinds_now(mixed, children)
    keys = [key for (key, _), kind in zip(keyed, kinds, strict=True) if kind is not False]
    shown = tuple(zip(keys, _shown(children, kinds), strict=True))
    return shown, _rest(treedef, children, kinds)


def _unflatten_mixed(aux: tuple[Rest], shown: Any) -> Any:
    return aux[0].fill(shown)


jtu.register_pytree_with_keys(Mixed, _flatten_mixed_with_keys, _unflatten_mixed, _flatten_mixed)


def hides_arrays(value: Any) -> bool:
    """Whether structure holds arrays where no transformation can see them: in the closure, defaults or
    attributes of a callable, or inside a container or dataclass.

    To JAX, `jax.vmap(layer)`, `functools.partial(f, weights)` and their like are plain functions:
    arrays inside would become constants that are never trained.
    """
    if type(value) is types.FunctionType and not (
        value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__
    ):
        return False
    if any(map(is_array, everything_in(value, closed=is_array))):
        return True
    # In ordinary objects, NumPy arrays (tables) are fine. An object that leads to more than `_MOST` others (a logger)
    # leads to the rest of the program.
    reached = itertools.islice(everything_in(value, closed=is_array, objects=True), _MOST)
    return any(isinstance(x, jax.Array) for x in reached)
