"""`Static`: any value as structure."""

from typing import Any, Generic, TypeVar

import jax
import jax.tree_util as jtu
import numpy as np

from .._ground import Itself, static_key
from ..show import is_traced, path_text, short, value_error
from ..trees import Rest
from . import _refusals as refuse
from ._fields import field
from ._module import Module

Value = TypeVar("Value")


def _settled(path: tuple[Any, ...], leaf: Any) -> Any:
    """The leaf, if it cannot change in place."""
    if is_traced(leaf):
        raise value_error(
            "a traced value cannot be structure: it differs in every trace",
            where=f"Static(...): {path_text(path, 'value')}",
            expected="values that are known while tracing",
            got=short(leaf),
            instead="the array itself, which is a leaf",
        )
    if isinstance(leaf, jax.Array):
        return Itself(leaf)
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        leaf = leaf.copy()
        leaf.flags.writeable = False
    else:
        try:
            static_key(leaf)
        except TypeError:
            raise refuse.unhashable(Static, "value", path, leaf) from None
    return leaf


class Static(Module, Generic[Value]):
    """Holds any value as structure: a module without leaves, whose value passes through every
    transformation.

    Two are equal if their values have the same tree structure and the same leaves. NumPy arrays are
    copied, and compare by content. A JAX array compares by identity, and is a constant here: never
    trained, updated, saved or moved.

    Raises:
        ValueError: for a leaf that can change in place, such as a set, and for a traced value.

    Example:
        >>> import jax
        >>> import vernal
        >>> jax.tree.leaves(vernal.Static("anything"))
        []
        >>> vernal.Static([1, "a"]).value
        [1, 'a']
    """

    _rest: Rest = field(static=True)

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
        """The wrapped value."""
        leaves = [leaf.value if type(leaf) is Itself else leaf for leaf in self._rest.fixed]
        return self._rest.treedef.unflatten(leaves)
