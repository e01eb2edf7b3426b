"""What a function may return besides arrays: from a transformation, only objects that hide no traced value; from a
cached program, only values that all calls may share."""

import itertools
from typing import Any, TypeVar

import jax.tree_util as jtu

from .._ground import is_of_current_trace, static_key
from ..show import is_traced, path_text, short, value_error
from ..trees import everything_in, is_array

T = TypeVar("T")

# How many objects inside a result are searched: one that reaches more leads to the rest of the program.
_MOST = 10_000


def check_hides_nothing(out: T, name: str) -> T:
    """Refuses a result with a traced value inside an object that JAX does not open.

    Args:
        out: what the function has returned, during the trace.
        name: the name of the function.

    Returns:
        `out`.

    Raises:
        ValueError: for such an object.
    """
    for path, leaf in _odd_leaves(out):
        reached = itertools.islice(everything_in(leaf, objects=True), _MOST)
        if any(is_traced(x) and is_of_current_trace(x) for x in reached):
            raise value_error(
                f"`{name}` returns an object that hides a traced array, which has no value outside of the function",
                where=path_text(path, "result"),
                expected="arrays where JAX sees them: in lists, tuples, dicts and modules",
                got=short(leaf),
                instead="return a module; in place of functools.partial and closures, vernal.Partial or "
                "vernal.closure_to_pytree(function)",
            )
    return out


def check_returned(out: T, name: str) -> T:
    """Refuses a result that later calls, which trace nothing, cannot return.

    Everything in it that is not an array is one object for all calls, so it must not change in place. (Values in it
    that are traced outside of the program belong to the function or its arguments, which the program is looked up by.)

    Args:
        out: what the function has returned.
        name: the name of the function.

    Returns:
        `out`.

    Raises:
        ValueError: for such a value.
    """
    for path, leaf in _odd_leaves(out):
        if _changes(leaf):
            raise value_error(
                f"`{name}` returns a value that can change in place, and all calls would share it",
                where=path_text(path, "result"),
                expected="arrays, and immutable, hashable values; in lists, tuples, dicts and modules",
                got=short(leaf),
                instead="return a list, a tuple, a dict, a frozenset, a frozen dataclass or a module",
            )
    return out


def _odd_leaves(out: Any) -> list[tuple[Any, Any]]:
    """The leaves that are neither arrays nor plain values, with their paths."""
    if all(map(_is_plain, jtu.tree_leaves(out))):
        return []
    return [(path, x) for path, x in jtu.tree_leaves_with_path(out) if not _is_plain(x)]


def _is_plain(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (str, int, float, complex, bytes))


def _changes(leaf: Any) -> bool:
    try:
        static_key(leaf)
    except (TypeError, ValueError):  # ValueError: a memory that can be written to
        return True
    return hasattr(type(leaf), "__next__")
