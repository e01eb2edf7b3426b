"""Finding the call of a compiled function that is going on, from inside of what JAX traces for it.

The body that JAX traces is handed arrays only. What else the call was given is in the frame of the
call, further up the stack. Only a trace looks there, so a call that traces nothing pays nothing.
"""

import os
from types import FrameType

_ROOM = os.path.dirname(__file__)
_JIT = os.path.join(_ROOM, "_jit.py")
_CALLS = {(_JIT, "__call__"), (_JIT, "lower")}
_USER = (os.path.join(_ROOM, "_transformed.py"), "call_inside")


def _place(frame: FrameType) -> tuple[str, str]:
    return frame.f_code.co_filename, frame.f_code.co_name


def frame_of_call(frame: FrameType | None) -> FrameType | None:
    """The frame of `_Jit.__call__` or `_Jit.lower` that traces or compiles now. Among its local
    variables are `self`, `given` and `kwargs`.

    Args:
        frame: where to begin.

    Returns:
        The frame; None if it is the user's function that traces or compiles something, while it is
        traced itself, or if nothing of ours is going on.
    """
    while frame is not None and (place := _place(frame)) not in _CALLS:
        if place == _USER:
            return None
        frame = frame.f_back
    return frame
