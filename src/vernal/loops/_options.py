"""What the options of a loop may be: the refusals that all loops share."""

from collections.abc import Sequence
from typing import Any

from .._ground import callable_name
from ..show import message, short


def check_kind(loop: str, kind: Any, kinds: Sequence[str]) -> None:
    """Refuses a kind of loop that there is not.

    Args:
        loop: the name of the loop, for the message.
        kind: what the user asks for.
        kinds: what there is.

    Raises:
        ValueError: if it is none of them.
    """
    if kind not in kinds:
        raise ValueError(
            message(
                f"{loop} has no such kind",
                where=f"{loop}(..., kind=...)",
                expected=" or ".join(map(repr, kinds)),
                got=short(kind),
                instead='kind="checkpointed" for gradients of a loop with any number of steps',
            )
        )


def check_unused(loop: str, kind: str, option: str, given: bool, used_by: str) -> None:
    """Refuses an option that would be ignored.

    Args:
        loop: the name of the loop, for the message.
        kind: what kind of loop it is.
        option: the name of the option.
        given: whether it was given, though this kind has no use for it.
        used_by: what has a use for it.

    Raises:
        ValueError: if it was given.
    """
    if given:
        raise ValueError(
            message(
                f"{loop} of kind {kind!r} does not use `{option}`",
                where=f"{loop}(..., kind={kind!r}, {option}=...)",
                expected=f"`{option}` only with {used_by}",
                instead=f"leave `{option}` out",
            )
        )


def check_count(loop: str, option: str, value: Any, least: int, also: str = "") -> None:
    """Refuses what is not a Python int, or too small a one.

    Args:
        loop: the name of the loop, for the message.
        option: the name of the option.
        value: what was given.
        least: the smallest that may be.
        also: what else may be, for the message.

    Raises:
        TypeError: if it is not a Python int.
        ValueError: if it is too small.
    """
    if type(value) is not int:
        raise TypeError(
            message(
                f"`{option}` of {loop} must be known while tracing",
                where=f"{loop}(..., {option}=...)",
                expected=f"a Python int{also}",
                got=short(value),
                instead="int(...) of a number, or the size of a shape",
            )
        )
    if value < least:
        raise ValueError(
            message(
                f"`{option}` of {loop} is too small",
                where=f"{loop}(..., {option}=...)",
                expected=f"{least} or more{also}",
                got=str(value),
            )
        )


def check_function(loop: str, name: str, fn: Any) -> None:
    """Refuses what cannot be called.

    Args:
        loop: the name of the loop, for the message.
        name: the name of the argument.
        fn: what was given.

    Raises:
        TypeError: if it cannot be called.
    """
    if not callable(fn):
        raise TypeError(
            message(
                f"{loop} needs a function",
                where=f"argument `{name}` of {loop}",
                expected="a callable",
                got=short(fn),
                instead=f"{name}=lambda carry: ...",
            )
        )


def returned_by(fn: Any) -> str:
    """What a function returns, for messages."""
    return f"what `{callable_name(fn)}` returns"
