"""Any value as structure."""

from typing import Any

import jax.tree_util as jtu

from .._ground import by_name, same
from ._module import Module


class _Held:
    """A value compared leaf by leaf, so that values whose own `==` is unhelpful still compare
    equal."""

    __slots__ = ("leaves", "treedef")

    def __init__(self, value: Any):
        self.leaves, self.treedef = jtu.tree_flatten(value)

    def __eq__(self, other: Any) -> bool:
        return (
            type(other) is _Held
            and self.treedef == other.treedef
            and len(self.leaves) == len(other.leaves)
            and all(map(same, self.leaves, other.leaves))
        )

    def __hash__(self) -> int:
        return hash(self.treedef)

    def __reduce__(self) -> Any:
        return _held, (self.treedef, list(map(by_name, self.leaves)))


def _held(treedef: Any, leaves: list[Any]) -> _Held:
    return _Held(treedef.unflatten(leaves))


class Static(Module):
    """Holds any value as structure: a module without leaves, so that the value passes through
    every transformation.

    Two of them are equal when their values have the same tree structure and the same leaves. NumPy
    arrays compare by content; JAX arrays and tracers have no place here, and compare by identity.

    Example:
        >>> import jax
        >>> import vernal
        >>> jax.tree.leaves(vernal.Static("anything"))
        []
        >>> vernal.Static([1, "a"]).value
        [1, 'a']
    """

    _held: Any

    def __init__(self, value: Any):
        """Wraps a value.

        Args:
            value: any Python object.
        """
        self._held = _Held(value)

    @property
    def value(self) -> Any:
        """What was wrapped."""
        return self._held.treedef.unflatten(self._held.leaves)
