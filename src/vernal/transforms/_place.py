"""Where in the user's code something was traced."""

import importlib.util
import os
import sys
import traceback
from types import FrameType
from typing import Any

import jax

# Packages whose frames are not the user's: JAX, jaxtyping's checks of annotations, Vernal itself, and
# the modules through which they call functions.
_NOT_USERS = frozenset({"jax", "jaxlib", "jaxtyping", "vernal", "contextlib", "functools"})
# For frames of which only the file name is known, which differs in a zip application or a frozen program.
# (Found without importing jaxtyping, which takes time and may never be needed.)
_JAXTYPING = importlib.util.find_spec("jaxtyping")
_INSIDE = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (jax.__file__, _JAXTYPING and _JAXTYPING.origin, os.path.dirname(__file__))
    if file
)
# Functions that beartype generates have no file.
_GENERATED = "<@beartype"
_MOST = 20


class Place:
    """The frames of the user's code around the caller. Holds names and line numbers, but no frame or
    value.

    Args:
        entries: for each frame, outermost first: file, line and function.
        more: the number of further outer frames.
    """

    __slots__ = ("entries", "more")

    def __init__(self, entries: tuple[tuple[str, int, str], ...], more: int):
        self.entries = entries
        self.more = more

    def __str__(self) -> str:
        frames = [traceback.FrameSummary(*entry) for entry in self.entries]
        skipped = f"  ... ({self.more} outer frames)\n" if self.more else ""
        return skipped + "".join(traceback.format_list(frames)).rstrip("\n")


def here(outermost: FrameType | None = None, innermost: FrameType | None = None) -> Place:
    """The place in the user's code that is running now.

    Args:
        outermost: the frame to stop at; None for the bottom of the stack.
        innermost: the frame to begin at; None for the caller.

    Returns:
        Its frames, without those of JAX and of Vernal.
    """
    entries, more = [], 0
    frame = sys._getframe(1) if innermost is None else innermost
    while frame is not None and frame is not outermost:
        if is_users_frame(frame):
            if len(entries) < _MOST:
                code = frame.f_code
                entries.append((code.co_filename, frame.f_lineno, code.co_name))
            else:
                more += 1
        frame = frame.f_back
    return Place(tuple(reversed(entries)), more)


def place_of_equation(eqn: Any) -> Place:
    """The line of the user's code at which an equation of a jaxpr was traced.

    Args:
        eqn: the equation.

    Returns:
        The innermost frame that is not JAX's or Vernal's. Empty if JAX does not know the line.
    """
    traceback = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else []
    users = (f for f in frames if _is_users_file(f.file_name))
    found = [(f.file_name, f.line_num, f.function_name) for f in users]
    return Place(tuple(found[:1]), 0)


def is_users_frame(frame: FrameType) -> bool:
    """Whether a frame runs the user's code, and not that of JAX, jaxtyping or Vernal.

    Args:
        frame: the frame.
    """
    # The package comes first: `python -m vernal` runs under the name `__main__`.
    module = frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or ""
    generated = frame.f_code.co_filename.startswith(_GENERATED)
    return not generated and module.partition(".")[0] not in _NOT_USERS


def _is_users_file(file: str) -> bool:
    return not (file.startswith(_GENERATED) or os.path.abspath(file).startswith(_INSIDE))
