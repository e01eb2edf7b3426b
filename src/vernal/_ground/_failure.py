"""Failures of compiled programs: the exception that users see, and the mailbox through which it
reaches them.

A check inside a compiled program fails on a thread of XLA, in a callback. What Python raises there
comes back as the text of a `jax.errors.JaxRuntimeError`, between the compiler's own lines. So the
callback puts the exception into the mailbox, under a number that it writes into that text; and
whoever called the program finds the number in the text and takes the exception out. Numbers are
never used twice, so this is right under any number of threads and however programs are nested.
"""

import itertools
import re
import threading

from ._jax_private import runtime_tokens

# Letters that nobody will collect (the failures of further devices, or of programs under plain
# `jax.jit`) are thrown away when there are more than this.
_MOST = 256


class RuntimeCheckError(RuntimeError):
    """A check inside a program has failed while the program ran: `vernal.runtime.error_if`.

    Args:
        message: the message of the check.
        place: where in the user's code the check stands, as lines of a traceback.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> from vernal.runtime import RuntimeCheckError, error_if
        >>> @vernal.filter_jit
        ... def root(x):
        ...     return jnp.sqrt(error_if(x, x < 0, "x is negative"))
        >>> try:
        ...     root(jnp.array(-1.0))
        ... except RuntimeCheckError as error:
        ...     print(error.message)
        x is negative
    """

    # Users know it from the room that raises it.
    __module__ = "vernal.runtime"

    def __init__(self, message: str, place: str = ""):
        super().__init__(message, place)
        self.message = message
        self.place = place

    def __str__(self) -> str:
        if not self.place:
            return self.message
        return f"{self.message}\n\nThe check was traced here (most recent call last):\n{self.place}"


_lock = threading.Lock()
_numbers = itertools.count(1)
_letters: dict[int, RuntimeCheckError] = {}
_NUMBER = re.compile(r"\[vernal check (\d+)\]")


def post(error: RuntimeCheckError) -> str:
    """Puts an error into the mailbox.

    Args:
        error: what the caller of the program shall see.

    Returns:
        The mark that the text of whatever ends the program must contain.
    """
    with _lock:
        number = next(_numbers)
        _letters[number] = error
        while len(_letters) > _MOST:
            del _letters[next(iter(_letters))]
    return f"[vernal check {number}]"


def failure_of(error: Exception) -> RuntimeCheckError | None:
    """What to tell the user instead of an error of JAX.

    Args:
        error: what JAX raised when a program was run or waited for.

    Returns:
        The error of the check that ended the program, the first if there are several; None if that
        is not why it ended.
    """
    # What JAX raises is one of these; nobody else's error need be turned into text.
    if not isinstance(error, (RuntimeError, ValueError)):
        return None
    numbers = _NUMBER.findall(str(error))
    if not numbers:
        return None
    _forget_failed_programs()
    with _lock:
        found = [_letters.pop(int(number), None) for number in numbers]
    return next((error for error in found if error is not None), None)


def _forget_failed_programs() -> None:
    """Makes JAX forget the programs that checks have ended, whose errors it would raise again when
    Python exits, in `jax.effects_barrier`, and from the next program with ordered effects."""
    for tokens in (runtime_tokens.output_runtime_tokens, runtime_tokens.current_tokens):
        for key, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except RuntimeError as error:
                if _NUMBER.search(str(error)):
                    tokens.pop(key, None)
