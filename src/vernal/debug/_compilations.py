"""`record_compilations`: every compilation of a program, with its place, its times and its reason.

JAX notifies its listeners, in the working thread, when it has traced, lowered or compiled a function,
with the function's name, but without the place or the reason. The place is read from the stack at that
moment; the reasons come from JAX's log (`_cache_misses`) and, for functions under `filter_jit`, from
Vernal (`watch_traces`).
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from ..transforms import Trace, watch_traces
from ._cache_misses import FIRST_CALL, REMADE, CacheMiss, cache_misses_reported_to, jax_explains
from ._compilation import Compilation, Recording, Span
from ._compilation_page import compilation_page
from ._compilation_table import compilation_table
from ._user_place import VERNAL, is_users, place_of_call

_PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_FOUND_ON_DISK = "/jax/compilation_cache/cache_hits"

_OUTSIDE_OF_JIT = "JAX's own function, outside of `jit`"
_NOT_TRACED = "not traced again: another device, sharding, layout, or transformation of it"
_MADE_ANEW = "new to JAX: another function object, a transformation of it, or cleared caches"


class _Thread(threading.local):
    """The state of one thread."""

    def __init__(self) -> None:
        # Functions that JAX is about to trace, and unfinished compilations. Some never finish (a trace
        # that fails, `eval_shape`): old ones are dropped.
        self.misses: collections.deque[CacheMiss] = collections.deque(maxlen=64)
        self.unfinished: collections.deque[Compilation] = collections.deque(maxlen=64)
        # Start and length of phases that are not inside a later one.
        self.outermost: list[tuple[float, float]] = []
        self.found_on_disk = False


class CompilationLog:
    """The recording of `record_compilations`. Read it at any time, from any thread.

    Example:
        >>> import vernal
        >>> with vernal.debug.record_compilations() as log:
        ...     pass
        >>> log.compilations
        ()
        >>> log.table().partition(",")[0]
        'nothing was compiled'
    """

    def __init__(self) -> None:
        # Now, because the user may change to another folder, or remove this one.
        self._folder = os.path.join(os.getcwd(), "")
        self._began = time.time()
        self._ended: float | None = None
        self._started: list[Compilation] = []
        # The places of each function that JAX has explained.
        self._places: dict[str, set[str]] = {}
        # The place of the first call of each function under `filter_jit`.
        self._first_calls: dict[Any, str] = {}
        # The first function under `filter_jit` of each code that was called at each place.
        self._made: dict[tuple[Any, str], Any] = {}
        self._thread = _Thread()
        self._lock = threading.Lock()

    @property
    def compilations(self) -> tuple[Compilation, ...]:
        """Every compilation, in the order in which they began."""
        return self._recording().compilations

    def table(self, width: int = 120) -> str:
        """A table of the compilations: a row for each function, the slowest first, with the count, the
        seconds in each phase, and the reasons.

        Args:
            width: the maximum width in characters.

        Returns:
            The lines of the table.
        """
        return compilation_table(self._recording(), width)

    def __str__(self) -> str:
        return self.table()

    def page(self, title: str = "Compilations") -> str:
        """A page for the browser: the same table, sortable and filterable, and a timeline.

        Args:
            title: the heading of the page.

        Returns:
            Self-contained HTML: it needs no other file and no network.
        """
        return compilation_page(self._recording(), title)

    def _recording(self) -> Recording:
        with self._lock:
            parts: dict[bool, list[Compilation]] = {True: [], False: []}
            for x in self._started:
                parts[x.has("lower") or x.has("compile")].append(x)
        ended = time.time() if self._ended is None else self._ended
        return Recording(tuple(parts[True]), tuple(parts[False]), self._began, ended - self._began)

    def _on_trace(self, trace: Trace) -> None:
        """Adds what Vernal knows of a trace or compilation in this thread, after its end."""
        misses = self._thread.misses
        for i in reversed(range(len(misses))):
            if misses[i].function == trace.name:
                # It was traced inside another function, so not compiled.
                del misses[i]
                return
        thread = threading.current_thread().name
        with self._lock:
            for compilation in reversed(self._started):
                if (compilation.function, compilation.thread) == (trace.name, thread):
                    compilation.reason = trace.reason or self._first(trace, compilation.place)
                    # One place for all calls, so that they are one function.
                    place = self._first_calls.setdefault(trace.source, compilation.place)
                    compilation.place = place
                    return

    def _first(self, trace: Trace, place: str) -> str:
        """The reason of the first trace of a function: one with the same code may have been called here before."""
        made = self._made.setdefault((trace.code, place), trace.source)
        return FIRST_CALL if trace.code is None or made is trace.source else REMADE

    def _on_miss(self, miss: CacheMiss) -> None:
        self._thread.misses.append(miss)

    def _on_event(self, event: str, **_: Any) -> None:
        if event == _FOUND_ON_DISK:
            self._thread.found_on_disk = True

    def _on_span(self, event: str, start_time: float, end_time: float, **details: Any) -> None:
        phase = _PHASES.get(event)
        if phase is None:
            return
        name = str(details.get("fun_name", "?"))
        if name.startswith("jit(") and name.endswith(")"):
            name = name[len("jit(") : -1]
        own = self._own_seconds(start_time, end_time)
        span = Span(phase, start_time - self._began, end_time - self._began, own)
        compilation = None if phase == "trace" else self._unfinished(name, phase)
        if compilation is None:
            compilation = self._begin(name)
        with self._lock:
            compilation.spans.append(span)
        if phase == "compile":
            compilation.from_disk, self._thread.found_on_disk = self._thread.found_on_disk, False

    def _own_seconds(self, start: float, stop: float) -> float:
        inside, outermost = 0.0, self._thread.outermost
        while outermost and outermost[-1][0] >= start:
            inside += outermost.pop()[1]
        outermost.append((start, stop - start))
        return max(stop - start - inside, 0.0)

    def _unfinished(self, name: str, phase: str) -> Compilation | None:
        """The compilation of a function that has not gone through a phase yet."""
        unfinished = self._thread.unfinished
        for compilation in reversed(unfinished):
            if compilation.function == name and not compilation.has(phase):
                if phase == "compile":
                    unfinished.remove(compilation)
                return compilation
        return None

    def _begin(self, name: str) -> Compilation:
        place, reason = self._place_and_reason(name)
        compilation = Compilation(name, place, reason, threading.current_thread().name)
        self._thread.unfinished.append(compilation)
        with self._lock:
            self._started.append(compilation)
        return compilation

    def _place_and_reason(self, name: str) -> tuple[str, str]:
        miss = self._explanation(name)
        if miss is None:
            known = self._places.get(name, set())
            if len(known) == 1:
                return next(iter(known)), _NOT_TRACED
            reason = "" if known or not jax_explains() else _OUTSIDE_OF_JIT
            return self._place_text(place_of_call()), reason
        defined = (miss.file, miss.line) if is_users(miss.file) else None
        place = self._place_text(defined or place_of_call())
        places = self._places.setdefault(name, set())
        reason = miss.reason
        if miss.file.startswith(VERNAL):
            # JAX explains our wrapper of the user's function: Vernal's own reason is better.
            reason = ""
        elif reason == FIRST_CALL and place in places:
            reason = _MADE_ANEW
        places.add(place)
        return place, reason

    def _place_text(self, place: tuple[str, int] | None) -> str:
        return "" if place is None else f"{place[0].removeprefix(self._folder)}:{place[1]}"

    def _explanation(self, name: str) -> CacheMiss | None:
        """JAX's explanation for the function that it has just traced."""
        misses = self._thread.misses
        for i in reversed(range(len(misses))):
            # Functions inside it are explained too, but not compiled on their own.
            if misses[i].function in (name, "<unknown>"):
                miss = misses[i]
                while len(misses) > i:
                    misses.pop()
                return miss
        return None


@contextlib.contextmanager
def record_compilations() -> Iterator[CompilationLog]:
    """Records every JAX compilation inside a `with` block, in every thread and by any library.

    It costs time only when a function is compiled, not when one is called. `python -m vernal compiles
    SCRIPT` does the same for a whole script.

    Returns:
        A context manager that gives the recording. Inside, JAX's own explanations
        (`jax_explain_cache_misses`) are switched on, and read instead of printed.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> double = jax.jit(lambda x: 2 * x)
        >>> short, long = jnp.ones(2), jnp.ones(3)
        >>> with vernal.debug.record_compilations() as log:
        ...     _ = double(short), double(long), double(short)
        >>> [(x.function, x.reason) for x in log.compilations]
        [('<lambda>', 'first call'), ('<lambda>', 'x: f32[2] -> f32[3]')]
    """
    log = CompilationLog()
    # Kept, because each access makes a new bound method, and JAX unregisters by identity.
    on_span, on_event = log._on_span, log._on_event
    monitoring = jax.monitoring
    with cache_misses_reported_to(log._on_miss), watch_traces(log._on_trace):
        monitoring.register_event_time_span_listener(on_span)
        monitoring.register_event_listener(on_event)
        try:
            yield log
        finally:
            log._ended = time.time()
            monitoring.unregister_event_time_span_listener(on_span)
            monitoring.unregister_event_listener(on_event)
