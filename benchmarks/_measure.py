"""How every benchmark measures: one process, warm, variants interleaved, medians, ratios.

Absolute times depend on the machine and its other tenants; the ratio of two medians taken in turns hardly does.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

Clock = Callable[[], float]

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


class Column(NamedTuple):
    """One column of a grid: the time of each way to do a thing over that of the first way."""

    name: str
    ratios: dict[str, float]
    bar: float


def _seconds(fn: Callable[[], Any], number: int, clock: Clock = time.perf_counter) -> float:
    out = None
    start = clock()
    for _ in range(number):
        out = fn()
    taken = clock() - start
    # Not timed, for a call may return before it is done; but the next variant must not pay for it.
    jax.block_until_ready(out)
    return taken / number


def _number(fn: Callable[[], Any]) -> int:
    """How many calls make one repeat of about two milliseconds of the processor.

    (Of the clock, one interruption would make a single call of them, which meets cold caches every time.)
    """
    number = 1
    while _seconds(fn, number, time.process_time) * number < 2e-3:
        number *= 2
    return number


def _in_turns(fns: Sequence[Callable[[], Any]], clock: Clock) -> list[list[list[float]]]:
    """Three runs of 31 rounds: the seconds of one call of each, taken in turns.

    Every round begins with another one: the neighbour of a slow call often finds its time slice used up.
    """
    for fn in fns:
        fn()
    runs = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        # Already without the collector: one collection would look like two milliseconds of calls.
        numbers = [_number(fn) for fn in fns]
        for _ in range(RUNS):
            rounds = [[0.0] * len(fns) for _ in range(REPEATS)]
            for i, times in enumerate(rounds):
                for k in range(i, i + len(fns)):
                    k %= len(fns)
                    times[k] = _seconds(fns[k], numbers[k], clock)
            runs.append(rounds)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return runs


def compare(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], bar: float) -> Row:
    """Times two callables in turns. The ratio is the median of three runs of 31 repeats each."""
    runs = []
    for rounds in _in_turns([ours, theirs], time.perf_counter):
        mine, peer = (statistics.median(column) for column in zip(*rounds, strict=True))
        runs.append((mine / peer, mine, peer))
    ratio, mine, peer = sorted(runs)[RUNS // 2]
    return Row(name, mine * 1e6, peer * 1e6, ratio, bar)


def relative(
    name: str, ways: dict[str, Callable[[], Any]], bar: float, clock: Clock = time.process_time
) -> Column:
    """Times all ways in turns, over the first one. Each ratio is the median of three runs.

    It is the time of the processor, all threads together, that counts here, unless another clock is given. These
    calls are so short that the other tenants of a machine take the processor away in the middle of some of them.
    """
    runs = []
    for rounds in _in_turns(list(ways.values()), clock):
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        runs.append([median / medians[0] for median in medians])
    ratios = map(statistics.median, zip(*runs, strict=True))
    return Column(name, dict(zip(ways, ratios, strict=True)), bar)


class Work(NamedTuple):
    """What is started, again and again, and how to wait until the last result is there."""

    start: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready

    def seconds(self, count: int) -> float:
        """Of one of so many, by the clock."""
        result = None
        start = time.perf_counter()
        for _ in range(count):
            result = self.start()
        self.wait(result)
        return (time.perf_counter() - start) / count


def by_the_clock(works: dict[str, Work], budget: float, length: float = 0.05) -> dict[str, float]:
    """The median seconds of each, in turns, in rounds of some length, for about as many seconds as the budget says.

    For what an accelerator does while the processor waits, or what takes long. All must have run once.
    """
    counts = {
        name: max(1, round(length / min(work.seconds(1) for _ in range(3))))
        for name, work in works.items()
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    end = time.perf_counter() + budget
    while any(len(found) < 3 for found in times.values()) or time.perf_counter() < end:
        for name, work in works.items():
            times[name].append(work.seconds(counts[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def show(title: str, rows: Sequence[Row]) -> bool:
    """Prints the rows as a Markdown table and returns whether every bar is met."""
    print(f"\n{title} (JAX {jax.__version__}, CPU; time relative to Equinox, medians)\n")
    print("| | Vernal / Equinox | bar | met |")
    print("|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.ratio:.3f} | {row.bar} | {'yes' if row.met else 'NO'} |")
    return all(row.met for row in rows)


def show_grid(title: str, columns: Sequence[Column], ours: str) -> bool:
    """Prints the columns as a Markdown table and returns whether the row `ours` meets every bar."""
    print(f"\n{title} (JAX {jax.__version__}, CPU; medians)\n")
    print(f"| | {' | '.join(column.name for column in columns)} |")
    print("|---" * (len(columns) + 1) + "|")
    for way in columns[0].ratios:
        print(f"| {way} | {' | '.join(f'{column.ratios[way]:.2f}' for column in columns)} |")
    print(f"| our bar | {' | '.join(str(column.bar) for column in columns)} |", flush=True)
    missed = [column for column in columns if column.ratios[ours] > column.bar]
    print()
    for column in missed:
        print(f"MISSED: {ours}, {column.name}: {column.ratios[ours]:.3f} > {column.bar}")
    return not missed
