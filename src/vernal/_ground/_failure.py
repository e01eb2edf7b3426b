"""Failures of compiled programs: the exception that users see, and the mailbox through which it
reaches them.

A check inside a compiled program fails on a thread of XLA, in a callback. An exception raised there
arrives as the text of a `jax.errors.JaxRuntimeError`, between the compiler's own lines. So the
callback puts the exception into the mailbox, under a number that it writes into that text, and the
caller of the program finds the number in the text and takes the exception out. Numbers are never
reused, so this is right for any number of threads and any nesting of programs.
"""

import itertools
import re
import threading

from ._jax_private import runtime_tokens

# Exceptions that are never collected (the failures of further devices, or of programs under plain
# `jax.jit`) are dropped when there are more than this.
_MOST = 256


class RuntimeCheckError(RuntimeError):
    """A check inside a program, such as `vernal.runtime.error_if`, has failed while the program ran.

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

    # Users import it from the package that raises it.
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
        error: the exception that the caller of the program is to see.

    Returns:
        The mark that the text of the exception that ends the program must contain.
    """
    with _lock:
        number = next(_numbers)
        _letters[number] = error
        while len(_letters) > _MOST:
            del _letters[next(iter(_letters))]
    return f"[vernal check {number}]"


def failure_of(error: Exception) -> RuntimeCheckError | None:
    """The exception to raise in place of an error of JAX.

    Args:
        error: the exception that JAX raised when a program was run or waited for.

    Returns:
        The error of the check that ended the program, the first if there are several; None if no
        check ended it.
    """
    # JAX raises one of these; no other error needs to be turned into text.
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
    """Makes JAX forget the programs that checks have ended. It would raise their errors again when
    Python exits, in `jax.effects_barrier`, and from the next program with ordered effects."""
    for tokens in (runtime_tokens.output_runtime_tokens, runtime_tokens.current_tokens):
        for key, token in list(tokens.items()):
            try:
                token.block_until_ready()
            except RuntimeError as error:
                if _NUMBER.search(str(error)):
                    tokens.pop(key, None)
