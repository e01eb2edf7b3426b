"""The checks of options that all loops share."""

from collections.abc import Sequence
from typing import Any

from .._ground import callable_name
from ..show import short, type_error, value_error


def check_kind(
    loop: str, kind: Any, kinds: Sequence[str], *, checkpoints: Any = None, base: Any = None
) -> None:
    """Refuses an unknown kind of loop, and options that are wrong or that it does not use."""
    if kind not in kinds:
        raise value_error(
            f"{loop} was given an unknown kind",
            where=f"{loop}(..., kind=...)",
            expected=" or ".join(map(repr, kinds)),
            got=short(kind),
            instead='kind="checkpointed" for gradients of a loop with any number of steps',
        )
    if checkpoints is not None:
        check_unused(loop, kind, "checkpoints", kind != "checkpointed", 'kind="checkpointed"')
        check_count(loop, "checkpoints", checkpoints, 1)
    if base is not None:
        check_unused(loop, kind, "base", kind != "bounded", 'kind="bounded"')
        check_count(loop, "base", base, 2)


def check_unused(loop: str, kind: str, option: str, given: bool, used_by: str) -> None:
    """Refuses an option that was given and that this kind of loop would ignore; `used_by` says what uses it."""
    if given:
        raise value_error(
            f"{loop} with kind={kind!r} does not use `{option}`",
            where=f"{loop}(..., kind={kind!r}, {option}=...)",
            expected=f"`{option}` only with {used_by}",
            instead=f"leave `{option}` out",
        )


def check_count(loop: str, option: str, value: Any, least: int, also: str = "") -> None:
    """Refuses anything but a Python int of at least `least`; `also` says what else is allowed."""
    if type(value) is not int:
        raise type_error(
            f"`{option}` of {loop} must be known while tracing",
            where=f"{loop}(..., {option}=...)",
            expected=f"a Python int{also}",
            got=short(value),
            instead="int(n) for a NumPy integer; a Python int or a size from `x.shape` for a traced value",
        )
    if value < least:
        raise value_error(
            f"`{option}` of {loop} is too small",
            where=f"{loop}(..., {option}=...)",
            expected=f"{least} or more{also}",
            got=str(value),
        )


def check_function(loop: str, name: str, fn: Any) -> None:
    """Refuses what cannot be called."""
    if not callable(fn):
        raise type_error(
            f"{loop} needs a function",
            where=f"argument `{name}` of {loop}",
            expected="a callable",
            got=short(fn),
            instead=f"{name}=lambda carry: ...",
        )


def returned_by(fn: Any) -> str:
    """What a function returns, for messages."""
    return f"what `{callable_name(fn)}` returns"
