"""Calls and trees without the traced values that functions in them close over.

A transformation of JAX may call a function later, or somewhere else, than where it was written: what
it closes over must then be an argument. `Hollow` is a tree without its arrays and without the tracers
hidden in its functions; `HoistedCall` is a whole call like that.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..show import is_traced
from ._boundary import Rest, split
from ._captured import captured
from ._transformed import call_inside


class _Slot:
    """Where an array was."""

    def __repr__(self) -> str:
        return "<array>"


_SLOT = _Slot()


def _is_slot(x: Any) -> bool:
    return x is _SLOT


class Hollow:
    """What is left of a tree without its arrays and without the tracers that its functions hide.

    Holds neither, so that it may live as long as a traced program.

    Args:
        make: makes the tree, with slots in place of the arrays, from the hidden tracers.
    """

    def __init__(self, make: Callable[[Sequence[Any]], Any]):
        self.make = make

    def rest(self, hidden: Sequence[Any]) -> Rest:
        """The structure of the tree around its arrays, from other hidden values."""
        return split(self.make(hidden), _is_slot)[1]


def hollow(tree: Any) -> tuple[list[Any], list[Any], Hollow]:
    """Takes a tree apart.

    Args:
        tree: a tree of any Python objects.

    Returns:
        `(arrays, hidden, left)`: its arrays, the tracers that functions in it close over, and what
        is left. `left.rest(hidden).fill(arrays)` is the tree.
    """
    arrays, rest = split(tree)
    hidden, make = captured(rest.fill([_SLOT] * len(arrays)), is_traced)
    return arrays, hidden, Hollow(make)


class HoistedCall:
    """A call of a function without anything traced in it.

    Args:
        fn: makes the function from what it closes over.
        arguments: what is left of `(None, args, kwargs)`.
        count: how many values the function closes over.
    """

    def __init__(self, fn: Callable[[Sequence[Any]], Any], arguments: Hollow, count: int):
        self.fn = fn
        self.arguments = arguments
        self.count = count

    def function(self, outside: Sequence[Any]) -> Any:
        """The function itself."""
        return self.fn(outside[: self.count])

    def rest(self, outside: Sequence[Any]) -> Rest:
        """The structure of `(None, args, kwargs)`."""
        return self.arguments.rest(outside[self.count :])

    def __call__(self, outside: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Calls the function.

        Args:
            outside: what the function, and functions among its arguments, close over.
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
    arrays, hidden, arguments = hollow((None, args, kwargs))
    return HoistedCall(make, arguments, len(of_fn)), [*of_fn, *hidden], arrays
