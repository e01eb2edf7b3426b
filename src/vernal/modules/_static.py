"""Any value as structure."""

from typing import Any, Generic, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np

from .._ground import static_key
from ..trees import Rest
from . import _refusals as refuse
from ._module import Module

Value = TypeVar("Value")


def _settled(path: tuple[Any, ...], leaf: Any) -> Any:
    """A leaf that stays what it is."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        leaf = leaf.copy()
        leaf.flags.writeable = False
    elif not isinstance(leaf, jax.Array):
        try:
            static_key(leaf)
        except TypeError:
            raise refuse.unhashable(Static, "value", path, leaf) from None
    return leaf


class Static(Module, Generic[Value]):
    """Holds any value as structure: a module without leaves, so that the value passes through
    every transformation.

    Two of them are equal when their values have the same tree structure and the same leaves. NumPy
    arrays are copied, and compare by content. A JAX array compares by identity, and is a constant
    here: never trained, updated, saved or moved.

    Raises:
        ValueError: for a leaf that can change in place, such as a set.

    Example:
        >>> import jax
        >>> import vernal
        >>> jax.tree.leaves(vernal.Static("anything"))
        []
        >>> vernal.Static([1, "a"]).value
        [1, 'a']
    """

    _rest: Rest

    def __init__(self, value: Value):
        """Wraps a value.

        Args:
            value: any Python object.
        """
        keyed, treedef = jtu.tree_flatten_with_path(value)
        leaves = tuple(_settled(path, leaf) for path, leaf in keyed)
        self._rest = Rest(treedef, (False,) * len(leaves), leaves)

    @property
    def value(self) -> Value:
        """What was wrapped."""
        return self._rest.fill(())
