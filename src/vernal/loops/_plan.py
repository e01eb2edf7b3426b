"""Which states a checkpointed loop keeps, as far as that is decided before it runs: see `_schedule.py`."""

import functools
import math
from typing import Any, NamedTuple

# The largest number of steps: counters are 32 bits wide.
MOST_STEPS = 2**31 - 1
# How many states are kept by default when the number of steps has no bound: from FEWEST for large states to MOST for
# small ones.
FEWEST, MOST = 82, 256
# All states are kept by default if together they take at most this many bytes.
SMALL = 2**13


class Plan(NamedTuple):
    """How a loop is checkpointed.

    `positions`: after how many steps the forward pass keeps a state, if that is fixed beforehand.
    `online`: how many slots it may fill, if it is not (else 0).
    `flat`: whether every segment between two positions fits into the slots that are free when the
    backward pass gets there, so that none has to be divided.
    `capacities`: `capacity(slots, sweeps)` for all arguments that may occur; empty if there are too many.
    `every`: whether every state is kept.
    """

    checkpoints: int
    positions: tuple[int, ...]
    online: int
    flat: bool
    capacities: tuple[tuple[int, ...], ...]
    every: bool

    @property
    def slots(self) -> int:
        """The number of states that fit: the checkpoints and the state being worked on."""
        return self.checkpoints + 1


def capacity(slots: int, sweeps: int) -> int:
    """How many steps can be reversed with `slots` kept states (the initial one among them) if no step
    is computed forward more than `sweeps` times: `binomial(slots + sweeps, sweeps)`."""
    out = 1
    for k in range(1, sweeps + 1):
        out = out * (slots + k) // k
    return out


def default_checkpoints(max_steps: int | None, state_bytes: int | None = None) -> int:
    """The fewest states with which no step is computed more than twice, about `sqrt(2 max_steps)`; all
    of them if they are small. Without a bound, a fixed number, greater for small states."""
    if max_steps is None:
        fitting = FEWEST if state_bytes is None else SMALL // max(1, state_bytes)
        return min(max(FEWEST, fitting), MOST)
    if state_bytes is not None and max_steps * state_bytes <= SMALL:
        return max_steps
    # The least for which `capacity(slots, 2)` is enough.
    root = math.isqrt(8 * max_steps)
    return max(
        1, next(slots for slots in range(root // 2 - 2, root) if capacity(slots, 2) >= max_steps)
    )


def make_plan(
    max_steps: int | None, checkpoints: int | None, state_bytes: int | None = None
) -> Plan:
    """The plan for a loop of at most `max_steps` steps that keeps `checkpoints` states."""
    if checkpoints is None:
        checkpoints = default_checkpoints(max_steps, state_bytes)
    if max_steps is not None:
        checkpoints = max(1, min(checkpoints, max_steps))
        positions = _positions(max_steps, checkpoints)
        ends = enumerate((*positions[1:], max_steps))
        flat = all(end - positions[k] - 1 <= checkpoints - k for k, end in ends)
        capacities = _capacities(checkpoints, checkpoints, max_steps)
        return Plan(checkpoints, positions, 0, flat, capacities, checkpoints == max_steps)
    # Three quarters for the forward pass: the last segment is reversed in the rest.
    online = 3 * checkpoints // 4
    online -= 1 - online % 2
    # With fewer than three slots the gap cannot double: only the initial state is kept.
    online = online if online >= 3 else 0
    free = checkpoints - online + 1 if online else checkpoints
    return Plan(checkpoints, (0,), online, False, _capacities(checkpoints, free, MOST_STEPS), False)


# How many numbers of sweeps the table covers; beyond that `split_at` counts them up one by one.
_MOST_SWEEPS = 32


def _capacities(checkpoints: int, free: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """The table for segments of `longest` steps that are divided among `free` slots or more."""
    sweeps = 1
    while capacity(free, sweeps) < longest:
        sweeps += 1
        if sweeps == _MOST_SWEEPS:
            return ()
    return tuple(
        tuple(min(capacity(slots, k), MOST_STEPS) for k in range(sweeps))
        for slots in range(checkpoints + 1)
    )


def _positions(max_steps: int, checkpoints: int) -> tuple[int, ...]:
    found, start = [0], 0
    for slots in range(checkpoints, 0, -1):
        if max_steps - start < 2:
            break
        start += split_at(_Python(), max_steps - start, slots)
        found.append(start)
    return tuple(found)


def split_at(m: Any, length: Any, slots: Any, capacities: Any = ()) -> Any:
    """After how many of `length` steps to keep a state, with `slots` slots, the one at the start included.

    Finds the least number of sweeps that suffices. The first part then has as many steps as can be
    reversed with one sweep less, but the second part keeps at least as many as can be reversed so.
    """

    def more(state: Any) -> Any:
        sweeps, _, before, now = state
        fits = now <= m.div(MOST_STEPS, slots + sweeps + 1)
        grown = m.div(m.where(fits, now, 0) * (slots + sweeps + 1), sweeps + 1)
        return sweeps + 1, before, now, m.where(fits, grown, MOST_STEPS)

    # With one slot only the start is kept, and `rest` is right at once; counting would take as long as the steps.
    several = slots > 1
    if capacities:
        two_less, one_less = m.last_below(capacities, slots, length)
    else:
        # One and zero as integers of the machine's own kind.
        one, zero = slots - slots + 1, slots - slots
        _, two_less, one_less, _ = m.while_loop(
            lambda state: (state[3] < length) & several, more, (one, zero, one, slots + 1)
        )
    rest = length - (one_less - two_less)
    return m.where(several & (one_less < rest), one_less, rest)


def recomputed(plan: Plan, steps: int) -> int:
    """How many steps the backward pass of a loop of `steps` steps computes again."""
    if steps == 0:
        return 0
    m, starts = _Python(), list(plan.positions)
    if plan.online:
        gap = 1
        while gap * (plan.online - 1) < steps:
            gap *= 2
        starts = list(range(0, steps, gap))
    starts = [start for start in starts if start < steps]
    ends = [*starts[1:], steps]

    @functools.cache
    def reverse(length: int, slots: int) -> int:
        count = 0
        while length - 1 > slots:
            until = split_at(m, length, slots)
            count += until + reverse(length - until, slots - 1)
            length = until
        return count + length - 1

    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return sum(reverse(length, plan.checkpoints - k) for k, length in enumerate(lengths))


class _Python:
    """Python's integers and loop."""

    div = staticmethod(int.__floordiv__)
    rem = staticmethod(int.__mod__)

    @staticmethod
    def while_loop(cond: Any, body: Any, state: Any) -> Any:
        while cond(state):
            state = body(state)
        return state

    @staticmethod
    def where(pred: bool, yes: int, no: int) -> int:
        return yes if pred else no

    @staticmethod
    def table(values: tuple[int, ...]) -> list[int]:
        return list(values)

    @staticmethod
    def table_of(entry: Any, length: int) -> list[int]:
        return [entry(k) for k in range(length)]

    @staticmethod
    def load(table: list[int], index: int) -> int:
        return table[index]

    @staticmethod
    def last_below(rows: Any, row: int, bound: int) -> tuple[int, int]:
        below = [0, *[entry for entry in rows[row] if entry < bound]]
        return below[-2], below[-1]

    @staticmethod
    def store(table: list[int], index: int, value: int) -> list[int]:
        table[index] = value
        return table
