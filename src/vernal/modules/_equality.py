"""How modules compare: by value, also during tracing, when JAX compares them to search its caches."""

from typing import Any

import jax
import jax.tree_util as jtu

from ..show import is_traced
from ..trees import tree_equal


def hashed(leaf: Any) -> Any:
    """The part of a leaf that goes into the hash of a module."""
    if is_traced(leaf):
        # It is unknown whether two traced values are equal, and JAX compares this hash first.
        return id(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)
    return leaf


def equal_arrays(a: Any, b: Any) -> Any:
    """Whether two modules of one structure have equal arrays."""
    leaves, others = jtu.tree_leaves(a), jtu.tree_leaves(b)
    if any(map(is_traced, [*leaves, *others])):
        # JAX compares callables for its caches, which need a Python bool, even if the hashes differ:
        # they are equal only if all traced values are identical.
        return False if callable(a) else tree_equal(a, b)
    # A program may compute something else with a weakly typed array.
    if any(
        getattr(x, "weak_type", False) != getattr(y, "weak_type", False)
        for x, y in zip(leaves, others, strict=True)
    ):
        return False
    # JAX compares during tracing, when the answer would be traced too.
    with jax.ensure_compile_time_eval():
        try:
            return tree_equal(a, b)
        except ValueError:  # on different devices
            return tree_equal(*jax.device_get((a, b)))
