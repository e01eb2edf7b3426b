"""A tree in two parts: its arrays, and the rest.

JAX's transformations take and return arrays. `split` takes the arrays out of a tree of arbitrary
Python objects. The remainder is a `Rest`, a pytree without leaves, which goes through any
transformation as structure and puts the tree together again.
"""

from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._ground import frozen, same, static_key
from ._by_name import by_name
from ._kinds import is_array

Path = tuple[Any, ...]


class Rest:
    """A tree without its arrays. It compares by the library's rule for static values.

    Args:
        treedef: the structure of the whole tree.
        mask: for every leaf, whether it was taken out.
        fixed: the leaves that were not taken out, in order.
    """

    # Immutable, so it may be structure inside of other structure.
    _vernal_unchanging = True
    __slots__ = ("_hash", "fixed", "mask", "treedef")

    def __init__(self, treedef: Any, mask: tuple[bool, ...], fixed: tuple[Any, ...]):
        self.treedef = treedef
        self.mask = mask
        self.fixed = frozen(fixed)
        self._hash: int | None = None

    def fill(self, arrays: Any) -> Any:
        """The tree with these arrays in it.

        Args:
            arrays: as many as `split` took out, in the same order.

        Returns:
            The tree.
        """
        if not self.fixed:
            return self.treedef.unflatten(arrays)
        arrays, fixed = iter(arrays), iter(self.fixed)
        return self.treedef.unflatten([next(arrays if m else fixed) for m in self.mask])

    def paths(self) -> list[Path]:
        """The key path of every array, in order."""
        indices = self.treedef.unflatten(range(self.treedef.num_leaves))
        found = jtu.tree_flatten_with_path(indices)[0]
        return [path for path, i in found if self.mask[i]]

    def __eq__(self, other: Any) -> bool:
        return (
            type(other) is Rest
            and self.treedef == other.treedef
            and self.mask == other.mask
            and same(self.fixed, other.fixed)
        )

    def __hash__(self) -> int:
        if self._hash is None:
            try:
                key = static_key(self.fixed)
            except (
                TypeError,
                ValueError,
            ):  # NumPy arrays, and values that can change: compared, not hashed.
                key = None
            self._hash = hash((self.treedef, self.mask, key))
        return self._hash

    def __repr__(self) -> str:
        return f"Rest({self.treedef}, {self.fixed!r})"

    def __reduce__(self) -> Any:
        return Rest, (self.treedef, self.mask, by_name(self.fixed))


# A one-element tuple as aux data: JAX then compares identical rests by identity, in C.
jtu.register_pytree_node(Rest, lambda rest: ((), (rest,)), lambda aux, _: aux[0])


def split(tree: Any, is_dynamic: Callable[[Any], bool] = is_array) -> tuple[list[Any], Rest]:
    """Takes the arrays out of a tree of arbitrary Python objects.

    Args:
        tree: any tree.
        is_dynamic: which leaves to take out.

    Returns:
        `(arrays, rest)`; `rest.fill(arrays)` is the tree again.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.trees import split
        >>> arrays, rest = split({"x": jnp.arange(2), "f": "text"})
        >>> arrays
        [Array([0, 1], dtype=int32)]
        >>> rest.fill(["anything"])
        {'f': 'text', 'x': 'anything'}
    """
    leaves, treedef = jtu.tree_flatten(tree)
    mask = tuple(map(is_dynamic, leaves))
    if all(mask):
        return leaves, Rest(treedef, mask, ())
    arrays = [x for x, m in zip(leaves, mask, strict=True) if m]
    return arrays, Rest(treedef, mask, tuple(x for x, m in zip(leaves, mask, strict=True) if not m))
