"""Compiled programs with readable failures: the message and the place of the failed check, in place of
the compiler's report.

A program without checks runs as usual: calls do not wait for its results. Calls of a program with a
check wait, so that each raises its own error. The checks are looked up in the program itself, after
each call in which it was traced; only there are the checks of inner functions visible that JAX had
traced before.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import concrete_value, failure_of
from ._compilation_notes import Compilations
from ._explain import Call, Tracing, log_call
from ._runtime_check import Report, awaited, reports_in


class Opened:
    """Contexts that are entered while a program is traced and left when the call that traced it is over.
    They cost nothing when nothing is traced."""

    def __init__(self) -> None:
        self._of_thread: dict[int, tuple[contextlib.ExitStack, list[Tracing]]] = {}

    def enter(self, tracing: Tracing, *others: contextlib.AbstractContextManager[Any]) -> None:
        """Enters contexts until `close` is called by the same thread.

        Args:
            tracing: the log of this trace.
            *others: further contexts.
        """
        new = contextlib.ExitStack(), []
        stack, tracings = self._of_thread.setdefault(threading.get_ident(), new)
        for context in (tracing, *others):
            stack.enter_context(context)
        tracings.append(tracing)

    def tracings(self) -> list[Tracing]:
        """The traces of this thread."""
        return self._of_thread.get(threading.get_ident(), (None, []))[1]

    def close(self) -> None:
        """Leaves the contexts that this thread has entered."""
        opened = self._of_thread.pop(threading.get_ident(), None)
        if opened is not None:
            opened[0].close()


class _AtFirst:
    """A compiled function that waits while another thread compiles it."""

    _here = threading.local()

    def __init__(self, jit: Any):
        self.jit = jit
        self.lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        # A thread that is compiling something else does not wait: that could be a deadlock.
        busy = getattr(self._here, "busy", False)
        locked = self.lock.acquire(blocking=not busy)
        self._here.busy = True
        try:
            return self.jit(*args)
        finally:
            self._here.busy = busy
            if locked:
                self.lock.release()


class Program:
    """A compiled function of arrays. The function that it traces calls the user's function with `traced`,
    and holds only `attention` and `opened` of this object: a cycle would keep alive the tracers that the
    user's function may close over.

    Args:
        described: describes a call, given its leaves.

    Attributes:
        jit: the `jax.jit` of it, as `jit(*leaves)`.
        run: the same; until it has been compiled, one thread at a time.
        opened: contexts opened during its trace, for the rest of that call.
        attention: empty if the program is known to have no check, and nothing was traced or compiled.
            Otherwise its checks, the threads that have traced it and have not looked up its checks
            yet, and compilations.
    """

    __slots__ = ("__weakref__", "attention", "described", "jit", "opened", "run")

    def __init__(self, described: Callable[[Any], Call]) -> None:
        self.described = described
        self.opened = Opened()
        self.attention: set[int | Report | Compilations] = set()

    def use(self, jit: Any) -> None:
        """Sets the function: the `jax.jit` of a function that calls `traced`."""
        self.jit = jit
        self.run: Any = _AtFirst(jit)

    def look(self, leaves: Sequence[Any]) -> tuple[Report, ...]:
        """Looks up the checks of the program for these arguments (JAX does not trace it again)."""
        found = reports_in(self.jit.trace(*leaves).jaxpr)
        # In this order: another thread must not find the set empty in between.
        self.attention.update(found)
        self.attention.discard(threading.get_ident())
        return found

    def finish(self, leaves: Sequence[Any]) -> None:
        """Closes what was opened while this call traced, and logs what was traced and compiled.

        Args:
            leaves: the arguments of the call.
        """
        here = threading.get_ident()
        # Copied, because other threads may add to it.
        notes = [
            x for x in tuple(self.attention) if isinstance(x, Compilations) and x.thread == here
        ]
        self.attention.difference_update(notes)
        seconds = [x for note in notes for x in note.take()]
        tracings = self.opened.tracings()
        try:
            if seconds or tracings:
                log_call(self.described(leaves), tracings, seconds)
        finally:
            self.opened.close()

    def settle(self, leaves: Sequence[Any], out: Any) -> None:
        """Raises the error of a check.

        Args:
            leaves: the arguments of the call.
            out: what the call returned.

        Raises:
            RuntimeCheckError: if a check has failed on a device that could not raise it.
        """
        self.finish(leaves)
        self.run = self.jit
        if any(isinstance(item, int) for item in tuple(self.attention)):
            self.look(leaves)
        wait(out, [item for item in tuple(self.attention) if isinstance(item, Report)])

    def failed(self, error: Exception, leaves: Sequence[Any]) -> None:
        """Handles an error of a call. Called inside the handler.

        Args:
            error: the error.
            leaves: the arguments of the call.

        Raises:
            RuntimeCheckError: in place of the error, if a check was its cause.
        """
        self.finish(leaves)
        failure = failure_of(error)
        if failure is None:
            self.attention.discard(threading.get_ident())
            return
        # This may have been the first call.
        self.look(leaves)
        raise failure from None


def traced(attention: set[int | Report | Compilations], fn: Callable[..., Any], *args: Any) -> Any:
    """Calls the user's function while a program with this `attention` is traced."""
    attention.add(threading.get_ident())
    return awaited(fn, *args)


def wait(out: Any, reports: Sequence[Report]) -> None:
    """Waits for the results of a program with checks, and raises the error of a check that has failed on a device that
    could not raise it; does nothing without checks."""
    if not reports:
        return
    jax.block_until_ready([concrete_value(x) for x in jtu.tree_leaves(out)])
    for report in reports:
        error = report.take()
        if error is not None:
            raise error


def reraise(error: Exception) -> None:
    """Raises the error of a check in place of JAX's, if a check was its cause. Called inside the handler."""
    failure = failure_of(error)
    if failure is not None:
        raise failure from None
