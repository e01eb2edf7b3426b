"""Donation: which arguments' memory the results of a compiled function may take over."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import jax.tree_util as jtu

from ..show import short, value_error

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
_CHOICES = ("all", "all-except-first", "warn", "warn-except-first", "none")


def check_donate(transform: str, donate: Any) -> None:
    """Refuses an unknown choice."""
    if donate not in _CHOICES:
        raise value_error(
            "unknown value of `donate`",
            where=f"{transform}(fn, donate={donate!r})",
            expected=", ".join(map(repr, _CHOICES)),
            got=short(donate),
            instead=f"{transform}(fn, donate='all')",
        )


def donated_leaves(treedef: Any, dynamic: list[int], donate: str) -> list[int]:
    """Which of the leaves of `(fn, args, kwargs)` at the positions `dynamic` are donated. The function never is: the
    next call needs it."""
    if donate == "none":
        return []
    fn, args, _ = treedef.unflatten(range(treedef.num_leaves))
    first = args[0] if args and donate.endswith("except-first") else None
    spared = set(jtu.tree_leaves((fn, first)))
    return [i for i in dynamic if i not in spared]


def donated_arguments(donate: str, count: int, first: int) -> tuple[int, ...]:
    """Which of `count` arguments of a call are donated. `first` is the position of the user's first one, after the
    function if that is an argument."""
    if donate == "none":
        return ()
    return tuple(range(first + donate.endswith("except-first"), count))


@contextlib.contextmanager
def without_donation_warnings() -> Iterator[None]:
    """Silences JAX's warning about donated buffers that it could not use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield


def quietly(donate: str) -> contextlib.AbstractContextManager[None]:
    """`without_donation_warnings` unless the user chose to be warned."""
    return (
        without_donation_warnings()
        if donate in ("all", "all-except-first")
        else contextlib.nullcontext()
    )
