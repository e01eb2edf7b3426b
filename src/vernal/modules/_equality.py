"""How modules compare: by value, also while JAX traces, which asks when it looks for what it has traced."""

from typing import Any

import jax
import jax.tree_util as jtu

from ..show import is_traced
from ..trees import tree_equal


def hashed(leaf: Any) -> Any:
    """What the hash of a module takes of a leaf."""
    if is_traced(leaf):
        # Whether two traced values are equal is not known, and JAX asks this hash first.
        return id(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    return leaf


def equal_arrays(a: Any, b: Any) -> Any:
    """Whether two modules of one structure have equal arrays."""
    leaves, others = jtu.tree_leaves(a), jtu.tree_leaves(b)
    if any(map(is_traced, [*leaves, *others])):
        # A function is asked by JAX, whose caches need an answer of Python, also where the hashes
        # differ: the same only if all that is traced is the very same.
        return False if callable(a) else tree_equal(a, b)
    # A program does something else with an array of a weak type.
    if any(
        getattr(x, "weak_type", False) != getattr(y, "weak_type", False)
        for x, y in zip(leaves, others, strict=True)
    ):
        return False
    # JAX asks while it traces, when the answer would be traced too.
    with jax.ensure_compile_time_eval():
        try:
            return tree_equal(a, b)
        except ValueError:  # on different devices
            return tree_equal(*jax.device_get((a, b)))
