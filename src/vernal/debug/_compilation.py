"""Compilations as data: a single one, those of a function, those of a recording."""

import collections
from collections.abc import Iterable
from typing import NamedTuple

from ._cache_misses import FIRST_CALL

PHASES = ("trace", "lower", "compile")


class Span(NamedTuple):
    """A phase of a compilation.

    Args:
        phase: one of `PHASES`.
        start: seconds from the beginning of the recording.
        stop: likewise.
        own: seconds, without those of other compilations inside.
    """

    phase: str
    start: float
    stop: float
    own: float


class Compilation:
    """One compilation of one function, in a recording of `record_compilations`.

    Args:
        function: its name.
        place: `file:line` of its definition if that is known and in the user's code, otherwise of the
            call that caused the compilation (for a function under `filter_jit`: the first one); "" if
            there is neither.
        reason: why it was compiled; "" if unknown.
        thread: the name of the thread.

    Attributes:
        spans: its phases ("trace", "lower", "compile") in order, each with its seconds. A phase that JAX
            had cached is missing.
        from_disk: whether the compiled program came from JAX's persistent cache.

    Example:
        >>> from vernal.debug import Compilation
        >>> Compilation("step", "train.py:12", "first call", "MainThread").seconds()
        0.0
    """

    __slots__ = ("from_disk", "function", "place", "reason", "spans", "thread")

    def __init__(self, function: str, place: str, reason: str, thread: str):
        self.function = function
        self.place = place
        self.reason = reason
        self.thread = thread
        self.spans: list[Span] = []
        self.from_disk = False

    def seconds(self, phase: str | None = None) -> float:
        """The time that it took.

        Args:
            phase: "trace", "lower" or "compile". None: all of them.

        Returns:
            Seconds, without those of other compilations inside.
        """
        return sum((span.own for span in self.spans if phase in (None, span.phase)), 0.0)

    def has(self, phase: str) -> bool:
        """Whether it went through a phase.

        Args:
            phase: "trace", "lower" or "compile".

        Returns:
            True or False.
        """
        return any(span.phase == phase for span in self.spans)


class Recording(NamedTuple):
    """The state of a recording at one moment.

    Args:
        compilations: the compilations, in the order in which they began.
        only_traced: functions that were traced, but not compiled.
        began: when the recording began, as `time.time()`.
        seconds: how long it has lasted.
    """

    compilations: tuple[Compilation, ...]
    only_traced: tuple[Compilation, ...]
    began: float
    seconds: float

    def summary(self) -> str:
        """One sentence about the whole recording."""
        if not self.compilations:
            return f"nothing was compiled, in a run of {seconds_text(self.seconds)} s"
        functions = len(rows_of(self.compilations))
        took = seconds_in(self.compilations)
        text = (
            f"{_counted(len(self.compilations), 'compilation')} of {_counted(functions, 'function')}: "
            f"{seconds_text(took)} s, in a run of {seconds_text(self.seconds)} s"
        )
        if self.only_traced:
            took = seconds_in(self.only_traced)
            text += f"; {len(self.only_traced)} more traced only: {seconds_text(took)} s"
        return text


class Row(NamedTuple):
    """The compilations of one function.

    Args:
        function: its name.
        place: `file:line`.
        compilations: the compilations, in the order in which they began.
    """

    function: str
    place: str
    compilations: list[Compilation]

    def seconds(self, phase: str | None = None) -> float:
        """The total seconds of one phase, or of all."""
        return seconds_in(self.compilations, phase)

    def reasons(self) -> list[str]:
        """Why it was compiled, the most frequent reason first, each with its count."""
        of = len(self.compilations)
        counts = collections.Counter(x.reason for x in self.compilations if x.reason)
        if len(counts) > 1:
            # For a function that was compiled again, only the other reasons are of interest.
            del counts[FIRST_CALL]
        if from_disk := sum(x.from_disk for x in self.compilations):
            counts["found in JAX's cache on disk"] = from_disk
        return [
            reason if count in (1, of) else f"{reason} ({count} times)"
            for reason, count in counts.most_common()
        ]


def rows_of(compilations: Iterable[Compilation]) -> list[Row]:
    """One row for each function and place, the slowest first."""
    rows: dict[tuple[str, str], Row] = {}
    for compilation in compilations:
        key = compilation.function, compilation.place
        rows.setdefault(key, Row(*key, [])).compilations.append(compilation)
    return sorted(rows.values(), key=lambda row: -row.seconds())


def seconds_in(of: Iterable[Compilation | Row], phase: str | None = None) -> float:
    """The total seconds of several, in one phase or in all."""
    return sum((x.seconds(phase) for x in of), 0.0)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def seconds_text(x: float) -> str:
    """Seconds as text, to the millisecond, or to a tenth if there are many."""
    return f"{x:.3f}" if x < 10 else f"{x:.1f}"
