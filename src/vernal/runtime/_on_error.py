"""What happens when a check fails: `on_error`, from the argument or from `VERNAL_ON_ERROR`."""

import os
from collections.abc import Sequence
from typing import Any, Literal

import jax

from .._ground import hide_frames
from ..show import short, value_error
from ..transforms import check, fail_if, poison

OnError = Literal["default", "raise", "breakpoint", "nan", "off"]

_VARIABLE = "VERNAL_ON_ERROR"
_CHOICES = ("raise", "breakpoint", "nan", "off")


def choose(on_error: Any) -> str:
    """What to do, with the environment variable applied: `"raise"`, `"breakpoint"`, `"nan"` or `"off"`. Raises
    `ValueError` for anything else in the argument or the variable."""
    where = "argument `on_error`"
    if on_error == "default":
        on_error, where = os.environ.get(_VARIABLE, "raise"), f"environment variable {_VARIABLE}"
    if on_error not in _CHOICES:
        raise value_error(
            "unknown value of `on_error`",
            where=where,
            expected="raise, breakpoint, nan or off",
            got=short(on_error),
            instead="raise, unless you are debugging",
        )
    return on_error


def guard(
    arrays: Sequence[Any], condition: Any, operands: Sequence[Any], explain: Any, action: str
) -> list[Any]:
    """The arrays (at least one), with a check threaded through them that fails where `condition` holds. `explain` is
    the message, or makes it from the condition and the operands; `action` is `"raise"`, `"breakpoint"` or `"nan"`."""
    if action == "raise":
        return fail_if(arrays, condition, *operands, explain=explain)
    if action == "nan":
        return [poison(x, condition) for x in arrays]
    failed = check(condition, *operands, explain=explain, kind="tell")
    _breakpoint_if(failed)
    return [poison(x, failed) for x in arrays]


def _breakpoint_if(failed: Any) -> None:
    hide_frames(__file__)
    hide_frames(os.path.join(os.path.dirname(__file__), "_error_if.py"))
    jax.lax.cond(failed, lambda: jax.debug.breakpoint(num_frames=1), lambda: None)
