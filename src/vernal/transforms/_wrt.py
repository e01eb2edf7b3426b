"""`wrt`: what a derivative is with respect to.

It names arguments (a number, a name, or a tuple of those), or selects parts of the first argument: a
function picks nodes, a tree of bools marks leaves.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.tree_util as jtu

from ..modules import Module
from ..show import short, type_error, value_error

_Mask = Module | Mapping[str, Any] | list[Any] | tuple[Any, ...]
Wrt = int | str | tuple[int | str, ...] | Callable[[Any], Any] | _Mask


def is_several(wrt: Any) -> bool:
    """Whether `wrt` is a tuple that names arguments, with one result for each."""
    return isinstance(wrt, tuple) and bool(wrt) and all(type(one) in (int, str) for one in wrt)


def is_mask(wrt: Any) -> bool:
    """Whether `wrt` is a tree of bools. (A tree that is a module may be callable too.)"""
    leaves = jtu.tree_leaves(wrt)
    return bool(leaves) and wrt is not leaves[0] and all(type(leaf) is bool for leaf in leaves)


def check_wrt(wrt: Any, transform: str) -> None:
    """Refuses a `wrt` that is wrong for every call."""
    if wrt is None or type(wrt) in (int, str) or callable(wrt) or is_several(wrt) or is_mask(wrt):
        return
    raise type_error(
        "`wrt` must name or pick what to differentiate",
        where=f"{transform}(fn, wrt=...)",
        expected="the number or the name of an argument, a tuple of those, or, for the first argument, a function "
        "that picks nodes or a tree of bools",
        got=short(wrt),
        instead="wrt=0, wrt=(0, 'scale'), wrt=lambda model: (model.weight, model.bias), or "
        "wrt=vernal.trainable(model, 'head')",
    )


def spread_mask(mask: Any, tree: Any, name: str, transform: str) -> list[bool]:
    """The bool for every leaf of an argument `tree`, in order, from a tree of bools that may be a prefix. Raises
    `ValueError` if the structures differ. `name` is the name of the argument."""
    try:
        return jtu.tree_leaves(jax.tree.broadcast(mask, tree))
    except ValueError as error:
        raise value_error(
            "the tree of bools in `wrt` does not match the argument",
            where=f"{transform}(fn, wrt=...), for argument `{name}`",
            expected="the structure of that argument, or the upper part of it",
            got=str(error),
            instead="make it from the argument itself, for example with vernal.trainable(model)",
        ) from None
