"""Compiled programs whose failures can be read: the message and the place of the check that failed,
in place of the compiler's report.

A program without checks is left alone: nothing waits for its results. One with a check is waited
for, so that its error is raised by the call that it belongs to. Which is which is looked up in the
program itself, after each call in which it was traced; only there can one see the checks of inner
functions that JAX had traced before.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import Report, awaited, concrete_value, failure_of, reports_in


class Program:
    """A compiled function of arrays.

    Args:
        run: the `jax.jit` of it, as `run(donated, kept)`. What it traces calls the user's
            function with `traced`, and holds nothing of this object but `attention`: a cycle would
            keep alive the tracers that the function may close over.

    Attributes:
        attention: empty if the program is known to hold no check. Otherwise its checks, and the
            threads that have traced it and not looked yet.
    """

    __slots__ = ("attention", "run")

    def __init__(self) -> None:
        self.run: Any = None
        self.attention: set[int | Report] = set()

    def look(self, donated: Any, kept: Any) -> tuple[Report, ...]:
        """The checks of the program for these arguments (which JAX does not trace again)."""
        found = reports_in(self.run.trace(donated, kept).jaxpr)
        # In this order: another thread must not find the set empty in between.
        self.attention.update(found)
        self.attention.discard(threading.get_ident())
        return found

    def settle(self, donated: Any, kept: Any, out: Any) -> None:
        """Raises the error of a check.

        Args:
            donated: the arguments of the call.
            kept: likewise.
            out: what it returned.

        Raises:
            RuntimeCheckError: if a check has failed on a device that could not raise it.
        """
        # Copied, because other threads may add to it.
        if any(isinstance(item, int) for item in tuple(self.attention)):
            self.look(donated, kept)
        wait(out, [item for item in tuple(self.attention) if isinstance(item, Report)])

    def failed(self, error: Exception, donated: Any, kept: Any) -> None:
        """Called when a call has raised an error, inside the handler.

        Args:
            error: what it raised.
            donated: the arguments of the call.
            kept: likewise.

        Raises:
            RuntimeCheckError: in place of it, if a check was the reason.
        """
        failure = failure_of(error)
        if failure is None:
            self.attention.discard(threading.get_ident())
            return
        # It may have been the first call.
        self.look(donated, kept)
        raise failure from None


def traced(attention: set[int | Report], fn: Callable[..., Any], *args: Any) -> Any:
    """Calls the user's function while a program with this `attention` is traced."""
    attention.add(threading.get_ident())
    return awaited(fn, *args)


def wait(out: Any, reports: Sequence[Report]) -> None:
    """Waits for a program with checks; does nothing if there are none.

    Args:
        out: its results.
        reports: its checks.

    Raises:
        RuntimeCheckError: if one of them has failed on a device that could not raise it.
    """
    if not reports:
        return
    jax.block_until_ready([concrete_value(x) for x in jtu.tree_leaves(out)])
    for report in reports:
        error = report.take()
        if error is not None:
            raise error


def reraise(error: Exception) -> None:
    """Raises the error of a check in place of JAX's. Called inside the handler.

    Args:
        error: what JAX raised when a program was run or waited for.

    Raises:
        RuntimeCheckError: if a check was the reason.
    """
    failure = failure_of(error)
    if failure is not None:
        raise failure from None
