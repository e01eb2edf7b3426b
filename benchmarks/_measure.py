"""How every benchmark measures: one process, warm, variants interleaved, medians, ratios.

Absolute times depend on the machine and its other tenants; the ratio of two medians taken in turns hardly does.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

REPEATS = 31
RUNS = 3


class Row(NamedTuple):
    """One line of a table: how much of the peer's time we need, and how much we allow ourselves."""

    name: str
    ours_us: float
    theirs_us: float
    ratio: float
    bar: float

    @property
    def met(self) -> bool:
        return self.ratio <= self.bar


def _seconds(fn: Callable[[], Any], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        fn()
    return (time.perf_counter() - start) / number


def _number(fn: Callable[[], Any]) -> int:
    """How many calls make one repeat of about two milliseconds."""
    number = 1
    while _seconds(fn, number) * number < 2e-3:
        number *= 2
    return number


def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], bar: float) -> Row:
    """Times two callables in turns. The ratio is the median of three runs of 31 repeats each."""
    ours(), theirs()
    number, runs = max(_number(ours), 1), []
    their_number = max(_number(theirs), 1)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(RUNS):
            pairs = [
                (_seconds(ours, number), _seconds(theirs, their_number)) for _ in range(REPEATS)
            ]
            mine, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
            runs.append((mine / peer, mine, peer))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    ratio, mine, peer = sorted(runs)[RUNS // 2]
    return Row(name, mine * 1e6, peer * 1e6, ratio, bar)


def show(title: str, rows: Sequence[Row]) -> bool:
    """Prints the rows as a Markdown table and returns whether every bar is met."""
    print(f"\n{title} (JAX {jax.__version__}, CPU; time relative to Equinox, medians)\n")
    print("| | Vernal / Equinox | bar | met |")
    print("|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.ratio:.3f} | {row.bar} | {'yes' if row.met else 'NO'} |")
    return all(row.met for row in rows)
