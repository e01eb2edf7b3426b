"""Which settings of a call are leaves, and which are structure.

Floats (of Python and NumPy) and arrays are leaves, at any depth of lists, tuples and dicts. Ints, bools, strings,
functions and everything else are structure, but arrays that a function closes over are leaves. For Optax's own
factories a table (`_optax_table.py`) lists the exceptions. The caller can override both: `Static(value)` is structure,
and an array is a leaf.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._ground import trace_state_clean
from ..modules import Module, Static
from ..show import is_traced
from ..trees import is_array
from ._optax_table import LEAF, ZERO, Row
from ._whole import Whole, hoisted, is_transformation


class _Leaf:
    """A number on its way to becoming an array."""

    __slots__ = ("number",)

    def __init__(self, number: Any):
        self.number = float(number)


def as_settings(row: Row, values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a call with its leaves as arrays.

    A number without axes becomes a weakly typed array, whatever its type: a float32 learning rate would promote the
    state of bfloat16 weights to float32, and a change of type would compile again. (A traced number, or one with axes,
    keeps its type.) Containers are copied, so later changes to the caller's have no effect.
    """
    flat = {name: jtu.tree_flatten(value, is_leaf=_is_whole) for name, value in values.items()}
    numbers: dict[tuple[str, int], float] = {}
    for name, (parts, _) in flat.items():
        for i, part in enumerate(parts):
            parts[i] = kept = _kept(part, row.get(name))
            if isinstance(kept, _Leaf):
                numbers[name, i] = kept.number
    for (name, i), array in zip(numbers, _weak_arrays(list(numbers.values())), strict=True):
        flat[name][0][i] = array
    return {name: treedef.unflatten(parts) for name, (parts, treedef) in flat.items()}


def _is_whole(x: Any) -> bool:
    """Whether an object is treated as one setting: all but plain containers are."""
    return not isinstance(x, (list, tuple, dict)) or is_transformation(x)


def _kept(x: Any, reason: str | None) -> Any:
    """A part of a setting as it is stored."""
    if isinstance(x, (bool, np.bool_)):
        return bool(x)
    if isinstance(x, (int, np.integer)):
        if reason not in (LEAF, ZERO):
            return int(x) if isinstance(x, np.integer) else x
        x = float(x)
    if isinstance(x, (float, np.floating)):
        return float(x) if _stays(x, reason) else _Leaf(x)
    if is_array(x):
        return _kept_array(x, reason)
    if isinstance(x, Static):
        return x
    if is_transformation(x) and not isinstance(x, Module):
        return Whole(x)
    if jtu.is_tree_node(type(x)):
        return _kept_node(x, reason)
    return hoisted(x) if callable(x) and not isinstance(x, type) else x


def _stays(number: Any, reason: str | None) -> bool:
    """Whether a float stays structure."""
    return bool(number == 0) if reason == ZERO else reason not in (None, LEAF)


def _kept_array(x: Any, reason: str | None) -> Any:
    if reason == LEAF and jnp.issubdtype(x.dtype, np.integer):
        x = jnp.asarray(x, float)
    if jnp.issubdtype(x.dtype, np.floating) and np.ndim(x) == 0 and not is_traced(x):
        return _Leaf(x)
    return jnp.asarray(x)


def _kept_node(x: Any, reason: str | None) -> Any:
    """A module, or another registered pytree, as it is stored. Its leaves become leaves of the call, so a tree whose
    leaves are not arrays, such as a mask of bools, is structure as a whole."""
    leaves, treedef = jtu.tree_flatten(x)
    if all(map(is_array, leaves)):
        return x
    made = [
        jnp.asarray(leaf) if isinstance(leaf, float) and not _stays(leaf, reason) else leaf
        for leaf in leaves
    ]
    return treedef.unflatten(made) if any(map(is_array, made)) else Static(x)


def weakly_typed(numbers: list[Any]) -> list[Any]:
    """The identity, named after what compiling it does."""
    return numbers


_compiled = jax.jit(weakly_typed)


def _weak_arrays(numbers: list[float]) -> list[Any]:
    # One call for all, which takes a third of the time of a `jnp.asarray` for each. (Under
    # `jax.disable_jit()` it returns plain numbers.)
    made = _compiled(numbers) if numbers and trace_state_clean() else numbers
    return list(map(jnp.asarray, made)) if made and not is_array(made[0]) else made


def is_structure(kept: Any) -> bool:
    """Whether a setting neither is an array nor may hold one: a plain value, a function, or a tuple of those."""
    if isinstance(kept, tuple) and not isinstance(kept, Module):
        return all(map(is_structure, kept))
    return kept is None or not (is_array(kept) or jtu.is_tree_node(type(kept)))


def on_the_same_side(old: Any, new: Any) -> Any:
    """The new value of a setting: a number that replaces a leaf as a leaf, and one that replaces a `Static` as a
    `Static`."""
    is_number = isinstance(new, (int, float, np.integer, np.floating)) and type(new) is not bool
    if isinstance(old, Static) and is_number:
        return Static(new)
    if is_array(old) and jnp.issubdtype(old.dtype, np.floating):
        if is_number:
            return _weak_arrays([float(new)])[0]
        if is_array(new) and jnp.issubdtype(new.dtype, np.integer):
            return jnp.asarray(new, float)
    return new
