"""The line of the user's code that is running, past JAX, Vernal and other libraries."""

import os
import sys
import sysconfig
from types import FrameType

import jax

VERNAL = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BELOW = (
    VERNAL,
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")),
)
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
# Code made by Python itself and by beartype has no file.
_NO_FILE = ("<frozen ", "<@beartype")


def is_users(file: str) -> bool:
    """Whether a file is the user's own code: not that of JAX, Vernal, the standard library or an installed package,
    and not generated."""
    installed = any(part in file for part in _INSTALLED)
    return bool(file) and not installed and not file.startswith(("<", *_BELOW))


def place_of_call() -> tuple[str, int] | None:
    """File and line of the innermost running call in the user's code; otherwise of one in an installed package or in
    generated code; otherwise None."""
    frame: FrameType | None = sys._getframe(1)
    second_best = None
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return file, frame.f_lineno
        if second_best is None and not file.startswith((*_NO_FILE, *_BELOW)):
            second_best = file, frame.f_lineno
        frame = frame.f_back
    return second_best
