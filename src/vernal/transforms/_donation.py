"""Donation: which arguments' memory the results of a compiled function may take over."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import jax.tree_util as jtu

from ..show import message, short

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
_CHOICES = ("all", "all-except-first", "warn", "warn-except-first", "none")


def check_donate(transform: str, donate: Any) -> None:
    """Refuses an unknown choice.

    Args:
        transform: the name of the transformation, for the message.
        donate: what the user wrote.

    Raises:
        ValueError: if it is not one of the choices.
    """
    if donate not in _CHOICES:
        raise ValueError(
            message(
                "unknown value of `donate`",
                where=f"{transform}(fn, donate={donate!r})",
                expected=", ".join(map(repr, _CHOICES)),
                got=short(donate),
                instead=f"{transform}(fn, donate='all')",
            )
        )


def donated_leaves(treedef: Any, dynamic: list[int], donate: str) -> list[int]:
    """Which leaves of a call are donated.

    Args:
        treedef: the structure of `(fn, args, kwargs)`.
        dynamic: the positions of the arrays among its leaves.
        donate: the choice.

    Returns:
        Positions, in order.
    """
    if donate == "none":
        return []
    if donate in ("all", "warn"):
        return dynamic
    _, args, _ = treedef.unflatten(range(treedef.num_leaves))
    first = set(jtu.tree_leaves(args[0])) if args else set()
    return [i for i in dynamic if i not in first]


def donated_arguments(donate: str, count: int, first: int) -> tuple[int, ...]:
    """Which arguments of a call are donated.

    Args:
        donate: the choice.
        count: how many arguments there are.
        first: the position of the user's first one; before it is the function, if it is an argument.

    Returns:
        Positions, in order.
    """
    if donate == "none":
        return ()
    spared = () if donate in ("all", "warn") else (first,)
    return tuple(i for i in range(count) if i not in spared)


@contextlib.contextmanager
def without_donation_warnings() -> Iterator[None]:
    """Silences JAX's warning about donated buffers that it could not use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def quietly(donate: str) -> contextlib.AbstractContextManager[None]:
    """The same for the choices that ask for it, and nothing for the others."""
    return (
        without_donation_warnings()
        if donate in ("all", "all-except-first")
        else contextlib.nullcontext()
    )
