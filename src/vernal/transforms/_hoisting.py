"""Calls and trees without the traced values that functions in them close over.

A JAX transformation may call a function later, or elsewhere, than where it was written: what it closes
over must then be an argument. `HoistedCall` is a call without its arrays and without the tracers that
are hidden in its functions.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..show import is_traced
from ..trees import Rest, split
from ._captured import captured
from ._transformed import call_inside


class _Slot:
    """A placeholder for an array."""

    def __repr__(self) -> str:
        return "<array>"


_SLOT = _Slot()


def _is_slot(x: Any) -> bool:
    return x is _SLOT


# Makes the structure of a tree around its arrays from the traced values that functions in it close over.
# Holds neither, so that it may live as long as a traced program.
RestOf = Callable[[Sequence[Any]], Rest]


def flatten_hoisted(tree: Any) -> tuple[list[Any], list[Any], RestOf]:
    """Takes the arrays and the hidden tracers out of a tree.

    Args:
        tree: a tree of any Python objects.

    Returns:
        `(arrays, hidden, rest_of)`: its arrays, the tracers that functions in it close over, and the
        rest. `rest_of(hidden).fill(arrays)` is the tree.
    """
    arrays, rest = split(tree)
    hidden, make = captured(rest.fill([_SLOT] * len(arrays)), is_traced)
    return arrays, hidden, lambda hidden: split(make(hidden), _is_slot)[1]


class HoistedCall:
    """A call of a function without anything traced in it.

    Args:
        fn: makes the function from what it closes over.
        arguments: the rest of `(None, args, kwargs)`.
        count: the number of values that the function closes over.
    """

    def __init__(self, fn: Callable[[Sequence[Any]], Any], arguments: RestOf, count: int):
        self.fn = fn
        self.arguments = arguments
        self.count = count

    def function(self, outside: Sequence[Any]) -> Any:
        """The function itself."""
        return self.fn(outside[: self.count])

    def rest(self, outside: Sequence[Any]) -> Rest:
        """The structure of `(None, args, kwargs)`."""
        return self.arguments(outside[self.count :])

    def __call__(self, outside: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Calls the function.

        Args:
            outside: the values that the function, and functions among its arguments, close over.
            arrays: the arrays of the arguments.

        Returns:
            What the function returns.
        """
        return call_inside(self.function(outside), self.rest(outside), list(arrays))


def hoist(
    fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[HoistedCall, list[Any], list[Any]]:
    """Takes a call apart.

    Args:
        fn: the function.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        `(call, outside, arrays)`: `call(outside, arrays)` is `fn(*args, **kwargs)`.
    """
    of_fn, make = captured(fn, is_traced)
    arrays, hidden, arguments = flatten_hoisted((None, args, kwargs))
    return HoistedCall(make, arguments, len(of_fn)), [*of_fn, *hidden], arrays
