"""Why a function compiled again: records every trace of a function under `filter_jit`, with what has
changed since the most similar earlier trace.

The body of a compiled function runs only when it is traced. There `Tracing` is entered, with the call
as the body sees it. The devices of its arrays are known when the call is over. A program may also be
compiled again without a trace, for other devices; JAX notifies its listeners, and they leave a note
with the program. So nothing in this file runs in a call that compiles nothing.
"""

import collections
import contextlib
import contextvars
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._ground import callable_name, trace_state_clean
from ..show import listed
from ._compilation_notes import listen
from ._place import here
from ._signatures import Difference, Signature, has_identity, signature_of_call

# How many traces of a function are kept, to compare with and to report.
_KEPT = 32
# How many differences of one trace are reported.
_TOLD = 6
_NOT_SEEN = (
    "nothing in the arguments or in JAX's settings; JAX's caches were cleared, or the function is called "
    "inside another transformation, or captures a new object"
)
_FAILED = "nothing; the earlier call that traced it failed"
_NAN = Difference("jax_debug_nans", "no NaN", "a NaN, so it runs operation by operation")


class Call:
    """A call of a function under `filter_jit`.

    Args:
        fn: the function.
        options: the options of `filter_jit`, by name.
        arguments: `(args, kwargs)`.
    """

    __slots__ = ("code", "name", "signature", "traces")

    def __init__(self, fn: Any, options: dict[str, Any], arguments: tuple[Any, Any]):
        # The name and not the function, which may hold tracers: a call is kept until it is over.
        self.name = callable_name(fn)
        self.code = getattr(fn, "__code__", None)
        self.traces = traces_of(fn)
        self.signature = signature_of_call(fn, *arguments, options)


class Trace:
    """One trace of a function under `filter_jit`, or one compilation of what was traced before.

    Attributes:
        name: the name of the function.
        code: its code, the same for all functions that a loop makes; None if it has none.
        kind: `"traced"` (and compiled, unless inside another function), `"compiled"` without being
            traced, or `"run"` operation by operation, which is how JAX looks for a NaN.
        number: how often the function was traced, including this time.
        again: whether it was traced before.
        differences: what has changed since the most similar earlier trace.
        reason: the differences in one line; empty for the first trace.
        place: where it was called: `train.py:57`.
        seconds: how long it took to trace, lower and compile; None until that is done.
        source: the same object for all traces of one function.
    """

    __slots__ = (
        "again",
        "code",
        "compiled",
        "differences",
        "failed",
        "kind",
        "name",
        "number",
        "place",
        "reason",
        "seconds",
        "signature",
        "source",
    )

    def __init__(self, call: Call, kind: str, traces: "Traces"):
        self.name = call.name
        self.code = call.code
        self.kind = kind
        self.number = traces.count + (kind == "traced")
        self.again = traces.count > 0
        self.compiled = kind == "compiled"
        self.failed = False
        self.signature = call.signature
        self.differences: list[Difference] = []
        self.reason = ""
        self.place = _place()
        self.seconds: float | None = None
        self.source = traces.source

    def explain_with(self, differences: list[Difference], otherwise: str) -> None:
        """Sets the differences as the reason."""
        self.differences = differences
        self.reason = listed(differences, "; ", _TOLD) or otherwise

    def event(self) -> str:
        """What happened, and what to write instead, on one line: `traced again (2nd, 0.8 s): n: 2 -> 3 (instead:
        jnp.asarray(n))`."""
        times = [ordinal(self.number)] if self.kind == "traced" else []
        if self.seconds is not None:
            times.append(f"{self.seconds:.2g} s" if self.seconds < 10 else f"{self.seconds:.0f} s")
        text = f"{self.kind}{' again' if self.again else ''} ({', '.join(times)})"
        cures = dict.fromkeys(d.instead for d in self.differences[:_TOLD] if d.instead)
        told = f"{text}: {self.reason}" if self.reason else text
        return f"{told} (instead: {listed(cures, '; ', 2)})" if cures else told

    def __str__(self) -> str:
        return f"{self.name} {self.event()}"


def _place() -> str:
    """The place in the user's code of the call in progress."""
    entries = here().entries
    return f"{os.path.basename(entries[-1][0])}:{entries[-1][1]}" if entries else "unknown"


def ordinal(n: int) -> str:
    """`1st`, `2nd`, `3rd`, `4th`, ..., `11th`, ..."""
    ending = "th" if 10 < n % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


def _nearest(
    earlier: Iterable[Trace], signature: Signature, placed: bool
) -> tuple[list[Difference], Trace | None]:
    """The first of the traces with the fewest differing parts, and its differences."""
    compared = [(trace.signature.compared(signature, placed), trace) for trace in earlier]
    found, nearest = min(
        compared, key=lambda one: sum(size for _, size in one[0]), default=([], None)
    )
    return [difference for difference, _ in found], nearest


class Traces:
    """The traces of one function, under any options."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.count = 0
        self.recent: collections.deque[Trace] = collections.deque(maxlen=_KEPT)
        self.source = object()

    def traced(self, call: Call) -> Trace:
        """Records a new trace, unless a guard refuses it."""
        with self.lock:
            trace = Trace(call, "traced", self)
            if trace.again:
                found, nearest = _nearest(reversed(self.recent), trace.signature, placed=False)
                failed = nearest is not None and nearest.failed
                trace.explain_with(found, _FAILED if failed else _NOT_SEEN)
            _ask_guards(trace)
            self.count += 1
            self.recent.append(trace)
            return trace

    def called(self, trace: Trace, signature: Signature) -> None:
        """Records where the arrays of a trace are, which is known when its call is over."""
        with self.lock:
            trace.signature = signature
            if trace.differences and trace.kind == "traced":
                earlier = itertools.takewhile(lambda t: t is not trace, self.recent)
                found = _nearest(reversed([*earlier]), signature, placed=False)[0]
                trace.explain_with(found, trace.reason)

    def ran(self, call: Call) -> Trace:
        """Records that JAX runs the body without tracing it, to find the source of a NaN."""
        with self.lock:
            trace = Trace(call, "run", self)
            trace.explain_with([_NAN], "")
            self.recent.append(trace)
            return trace

    def compiled(self, call: Call, seconds: float) -> None:
        """Records a compilation without a trace."""
        with self.lock:
            trace = Trace(call, "compiled", self)
            for earlier in self.recent:
                if not (earlier.compiled or earlier.signature.differences(trace.signature)):
                    # It was only traced, by `lower` or inside another function: this is its first compilation.
                    earlier.compiled, earlier.signature = True, trace.signature
                    return
            found = _nearest(reversed(self.recent), trace.signature, placed=True)[0]
            if not found:
                # JAX compiled a transformation of the function.
                return
            trace.explain_with(found, "")
            _ask_guards(trace)
            self.recent.append(trace)
        trace.seconds = seconds
        _tell_watchers(trace)

    def explain(self, name: str) -> str:
        """What `.explain()` of a function returns.

        Args:
            name: the name of the function.
        """
        with self.lock:
            recent, count = list(self.recent), self.count
        if not count:
            return f"{name}: not traced yet"
        lines = [f"{name}: traced {'once' if count == 1 else f'{count} times'}"]
        missing = count - sum(trace.kind == "traced" for trace in recent)
        if missing:
            lines.append(f"  ... ({missing} earlier traces)")
        lines += [f"  {trace.place}: {trace.event()}" for trace in recent]
        return "\n".join(lines)


# Traces are kept as long as the function they belong to, or by class where the function is passed
# with its arguments.
_of_function: weakref.WeakKeyDictionary[Any, Traces] = weakref.WeakKeyDictionary()
_of_class: dict[type, Traces] = {}


def traces_of(fn: Any) -> Traces:
    """The traces of a function.

    Args:
        fn: the function that `filter_jit` was given.

    Returns:
        Its traces; later ones are added to the same object.

    Example:
        >>> import vernal
        >>> from vernal.transforms import traces_of
        >>> double = vernal.filter_jit(lambda x, n: n * x)
        >>> _ = double(1.0, 2), double(1.0, 3)
        >>> [trace.reason for trace in traces_of(double.fn).recent]
        ['', 'n: 2 -> 3']
    """
    if has_identity(fn):
        return _of_function.setdefault(fn, Traces())
    return _of_class.setdefault(type(fn), Traces())


class Tracing:
    """A context entered in the body of a compiled function, and left when its call is over.

    Args:
        call: the call that is traced.

    Raises:
        RetraceError: when entered, if `debug.no_retrace` refuses the trace.
    """

    __slots__ = ("call", "outer_error", "start", "trace")

    def __init__(self, call: Call):
        self.call = call

    def __enter__(self) -> "Tracing":
        listen()
        self.start, self.outer_error = time.perf_counter(), sys.exception()
        traces = self.call.traces
        run_only = trace_state_clean()
        self.trace = traces.ran(self.call) if run_only else traces.traced(self.call)
        return self

    def __exit__(self, *error: Any) -> None:
        # An error of the call may be in flight when it is left.
        failed = sys.exception() is not self.outer_error
        self.trace.failed = failed and self.trace.kind == "traced"
        self.trace.seconds = time.perf_counter() - self.start
        _tell_watchers(self.trace)


def log_call(call: Call, tracings: list[Tracing], seconds: list[float]) -> None:
    """Logs what happened in a call that is over.

    Args:
        call: the call, whose arrays are now on their devices.
        tracings: its traces.
        seconds: how long each compilation in it took.
    """
    for tracing in tracings:
        call.traces.called(tracing.trace, call.signature)
        tracing.trace.compiled |= bool(seconds)
    if not tracings:
        call.traces.compiled(call, sum(seconds))


_watchers: list["Watch"] = []
_guards: contextvars.ContextVar[tuple[Callable[[Trace], None], ...]] = contextvars.ContextVar(
    "vernal_trace_guards", default=()
)


def _tell_watchers(trace: Trace) -> None:
    for watch in list(_watchers):
        watch.tell(trace)


def _ask_guards(trace: Trace) -> None:
    for guard in _guards.get():
        guard(trace)


class Watch:
    """Reports every trace until it is stopped, or until the end of its `with` block.

    Args:
        tell: called with each trace.
    """

    def __init__(self, tell: Callable[[Trace], None]):
        self.tell = tell
        _watchers.append(self)

    def stop(self) -> None:
        """Stops the reports. Calling it again does nothing."""
        if self in _watchers:
            _watchers.remove(self)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()


def watch_traces(tell: Callable[[Trace], None]) -> Watch:
    """Reports every trace of a function under `filter_jit`, in any thread, when its call is over; and
    every compilation without a trace.

    Args:
        tell: called with each `Trace`.

    Returns:
        The watch, already running. End it with `.stop()`, or use it in a `with` statement.

    Example:
        >>> import vernal
        >>> from vernal.transforms import watch_traces
        >>> double = vernal.filter_jit(lambda x, n: n * x)
        >>> with watch_traces(lambda trace: print(trace.number, trace.reason)):
        ...     _ = double(1.0, 2), double(1.0, 3)
        1
        2 n: 2 -> 3
    """
    return Watch(tell)


@contextlib.contextmanager
def guard_traces(ask: Callable[[Trace], None]) -> Iterator[None]:
    """Calls a guard before every trace in this thread; the guard may raise to prevent the trace.

    Args:
        ask: called with each `Trace` before the function is. If it raises, nothing is traced, and
            no compiled program is lost.

    Example:
        >>> import vernal
        >>> from vernal.transforms import guard_traces
        >>> double = vernal.filter_jit(lambda x: 2 * x)
        >>> with guard_traces(lambda trace: print("first trace:", not trace.again)):
        ...     _ = double(1.0)
        first trace: True
    """
    token = _guards.set((*_guards.get(), ask))
    try:
        yield
    finally:
        _guards.reset(token)
