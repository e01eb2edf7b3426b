"""Compiled programs whose failures can be read: the message and the place of the check that failed,
in place of the compiler's report.

A program without checks is left alone: nothing waits for its results. One with a check is waited
for, so that its error is raised by the call that it belongs to. Which is which is looked up in the
program itself, after each call in which it was traced; only there can one see the checks of inner
functions that JAX had traced before.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import Report, awaited, concrete_value, failure_of, reports_in


class Opened:
    """Contexts that are entered while a program is traced and left when the call that traced it is
    over: what costs nothing when nothing is traced."""

    def __init__(self) -> None:
        self._of_thread: dict[int, contextlib.ExitStack] = {}

    def enter(self, context: contextlib.AbstractContextManager[Any]) -> None:
        """Enters a context until `close` is called by the same thread."""
        stack = self._of_thread.setdefault(threading.get_ident(), contextlib.ExitStack())
        stack.enter_context(context)

    def close(self) -> None:
        """Leaves what this thread has entered."""
        stack = self._of_thread.pop(threading.get_ident(), None)
        if stack is not None:
            stack.close()


class _AtFirst:
    """A compiled function that waits while another thread compiles it."""

    _here = threading.local()

    def __init__(self, jit: Any):
        self.jit = jit
        self.lock = threading.RLock()

    def __call__(self, *groups: Any) -> Any:
        # Whoever is compiling something else does not wait: it could be waited for in turn.
        busy = getattr(self._here, "busy", False)
        locked = self.lock.acquire(blocking=not busy)
        self._here.busy = True
        try:
            return self.jit(*groups)
        finally:
            self._here.busy = busy
            if locked:
                self.lock.release()


class Program:
    """A compiled function of arrays. What it traces calls the user's function with `traced`, and
    holds nothing of this object but `attention` and `opened`: a cycle would keep alive the tracers
    that the function may close over.

    Args:
        keeps: what lives as long as the program. (Functions are equal to others by what they
            capture only as long as that is alive.)

    Attributes:
        jit: the `jax.jit` of it, as `jit(*groups)`.
        run: the same; until it has been compiled, one thread at a time.
        opened: what was opened while it was traced, for the rest of that call.
        attention: empty if the program is known to hold no check. Otherwise its checks, and the
            threads that have traced it and not looked yet.
    """

    __slots__ = ("attention", "jit", "keeps", "opened", "run")

    def __init__(self, keeps: Any) -> None:
        self.keeps = keeps
        self.opened = Opened()
        self.attention: set[int | Report] = set()

    def use(self, jit: Any) -> None:
        """Sets the function.

        Args:
            jit: the `jax.jit` of what calls `traced`.
        """
        self.jit = jit
        self.run: Any = _AtFirst(jit)

    def look(self, groups: Sequence[Any]) -> tuple[Report, ...]:
        """The checks of the program for these arguments (which JAX does not trace again)."""
        found = reports_in(self.jit.trace(*groups).jaxpr)
        # In this order: another thread must not find the set empty in between.
        self.attention.update(found)
        self.attention.discard(threading.get_ident())
        return found

    def settle(self, groups: Sequence[Any], out: Any) -> None:
        """Raises the error of a check.

        Args:
            groups: the arguments of the call.
            out: what it returned.

        Raises:
            RuntimeCheckError: if a check has failed on a device that could not raise it.
        """
        self.opened.close()
        self.run = self.jit
        # Copied, because other threads may add to it.
        if any(isinstance(item, int) for item in tuple(self.attention)):
            self.look(groups)
        wait(out, [item for item in tuple(self.attention) if isinstance(item, Report)])

    def failed(self, error: Exception, groups: Sequence[Any]) -> None:
        """Called when a call has raised an error, inside the handler.

        Args:
            error: what it raised.
            groups: the arguments of the call.

        Raises:
            RuntimeCheckError: in place of it, if a check was the reason.
        """
        self.opened.close()
        failure = failure_of(error)
        if failure is None:
            self.attention.discard(threading.get_ident())
            return
        # It may have been the first call.
        self.look(groups)
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
