"""What a program that is kept may return: arrays, and what every call may share."""

from typing import Any, TypeVar

import jax.tree_util as jtu

from .._ground import static_key
from ..show import is_traced, path_text, short, value_error
from ..trees import everything_in, is_array

T = TypeVar("T")


def check_returned(out: T, name: str) -> T:
    """Refuses a result that later calls, which trace nothing, could not be given.

    Whatever is no array in it is one object for all calls. So it must not change in place, and must hold nothing
    that is traced.

    Args:
        out: what the function has returned.
        name: what the function is called.

    Returns:
        `out`.

    Raises:
        ValueError: for such a value.
    """
    for path, leaf in jtu.tree_leaves_with_path(out):
        if is_array(leaf):
            continue
        if _changes(leaf):
            raise value_error(
                f"`{name}` returns a value that can change in place, and all calls would share it",
                where=path_text(path, "result"),
                expected="arrays, and values with a hash that stays; in lists, tuples, dicts and modules",
                got=short(leaf),
                instead="return a list, a tuple, a dict, a frozenset, a frozen dataclass or a module",
            )
        if any(is_traced(x) for x in everything_in(leaf, closed=is_array)):
            raise value_error(
                f"`{name}` returns an object that hides an array, which all calls would share",
                where=path_text(path, "result"),
                expected="arrays where JAX sees them: in lists, tuples, dicts and modules",
                got=short(leaf),
                instead="return a module; in place of functools.partial and closures, vernal.Partial or "
                "vernal.closure_to_pytree(function)",
            )
    return out


def _changes(leaf: Any) -> bool:
    try:
        static_key(leaf)
    except (TypeError, ValueError):  # ValueError: a memory that can be written to
        return True
    return hasattr(type(leaf), "__next__")
