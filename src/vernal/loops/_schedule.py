"""Which states a checkpointed loop keeps, which it computes again, and when: integers only, no JAX.

**The difficulty.** Reverse mode needs the states of a loop last to first, and a loop makes them first to last.
Keeping all of them takes too much memory, and how many there are is known only when the loop has ended.

**The plan.** The forward pass (`fill`) keeps some states. The backward pass (`sweep`) always looks at the last
state that is kept, runs the loop on from there, keeping some of the states in between in the slots that are free by
now, and takes the derivative of the steps behind the last one. Where to keep a state is the binomial rule: if
`slots` states can be kept and no step may be computed more than `sweeps` times, then at most `binomial(slots +
sweeps, sweeps)` steps can be reversed, so the next state to keep is the one after which the rest just fits
(`_split`).

- If at most N steps are made, `fill` keeps the states that this rule chooses for N steps. A loop that makes exactly
  N then computes nothing more often than the optimum of Griewank and Walther; one that stops early has slots left
  over.
- If there is a slot for every state, both passes are one plain loop.
- If no bound is known, `fill` keeps every `gap`-th state in `online` slots, and when these are full every other one
  is given up and `gap` doubles. No state is ever moved: with an odd number M of slots, the state after `k * gap`
  steps has its place at `k * gap mod M`, and because the gap is a power of two, the survivors already lie where
  they belong.

**What holds.** States are kept on a stack, `k = 0, 1, ...` from the bottom. Each is an earlier state of the loop
than the one above it; the lowest is the initial state. `sweep` reverses the steps between the uppermost state and
`end`, and then forgets that state: `end` falls until it is zero. At most `checkpoints` states lie on the stack, and
one more slot holds the state that is being worked on.

**The bound.** With N known, no step is computed again more than `r - 1` times, where `r` is the least number with
`binomial(checkpoints + r, r) >= N`, wherever the loop stops. Without a bound, after n steps, it is `r` times at
most, for the least `r` with `binomial(free + r, r) >= gap`. Here `free = checkpoints - online + 1` are the slots
that the last segment has, and the gap is at most the least power of two with `(online - 1) * gap >= n`.

**What it costs.** Forward evaluations of each step, the first included: with a bound that is just reached, which is the
binomial optimum, / without a bound (`python benchmarks/loops.py --schedule`):

| checkpoints | 100 steps | 1,000 | 10,000 | 100,000 | 1,000,000 |
|---|---|---|---|---|---|
| 4 | 3.75 / 4.10 | 8.00 / 8.84 | 15.75 / 15.93 | 29.51 / 33.04 | 54.01 / 74.84 |
| 8 | 2.46 / 2.72 | 4.29 / 4.56 | 6.86 / 7.10 | 10.32 / 10.90 | 14.96 / 17.38 |
| 16 | 1.83 / 2.03 | 2.86 / 3.11 | 4.40 / 4.57 | 5.99 / 6.16 | 7.92 / 8.37 |
| 32 | 1.67 / 1.87 | 2.41 / 2.58 | 3.29 / 3.35 | 4.34 / 4.45 | 5.50 / 5.59 |
| 64 | 1.35 / 1.75 | 1.94 / 1.97 | 2.78 / 2.81 | 3.50 / 3.62 | 4.14 / 4.27 |
| 128 | 1.00 / 1.50 | 1.87 / 1.94 | 2.15 / 2.28 | 2.91 / 2.95 | 3.63 / 3.68 |
| 256 | 1.00 / 1.00 | 1.74 / 1.88 | 1.97 / 1.98 | 2.67 / 2.79 | 2.97 / 2.98 |
| default number | 13 / 82 | 44 / 82 | 140 / 82 | 446 / 82 | 1413 / 82 |

**How it is written.** `fill` and `sweep` are the walk itself, and know nothing of what a state is: the machine that
they are given has the states, the slots, and the loop construct. The tests run them with a machine of Python
integers over every number of steps; `_machines.py` has those that JAX compiles. A machine has

- `while_loop`, `where(pred, yes, no)`, and for integers that are not negative `div`, `rem`;
- tables of integers: `table(values)`, `table_of(entry, length)`, `load(table, index)`, `store(table, index, value)`;
- `last_below(rows, row, bound)`, the last two entries below a bound in an ascending row, with a 0 before the first;
- `put(slots, place, state)` and `take(slots, place)`;
- forward: `going(index, state)`, whether the loop makes step `index`, and `step(index, state)`, which makes it;
- backward: `step` as well, and `back(index, state, cotangents)`, the cotangents before step `index`.

Glossary: `slots` where states are kept; `depth` where on the stack a state is, `places[depth]` where in `slots`,
`steps[depth]` after how many steps it was reached; `gap` the number of steps between kept states; `count` how many
steps were made.

Source: A. Griewank and A. Walther, Algorithm 799: revolve, 2000, doi:10.1145/347837.347846. Keeping states
when the number of steps is not known: P. Stumm and A. Walther, New algorithms for optimal online checkpointing, 2010,
doi:10.1137/080742439 (with other places than here).
"""

import functools
from typing import Any, NamedTuple

# The largest number of steps: counters are 32 bits wide.
MOST_STEPS = 2**31 - 1
# How many states are kept by default when the number of steps is not bounded.
DEFAULT_CHECKPOINTS = 82
# All of them are kept by default if they take no more than this together.
SMALL = 2**13


class Plan(NamedTuple):
    """How a loop is checkpointed.

    `positions`: after how many steps the forward pass keeps a state, if that is fixed beforehand.
    `online`: how many slots it may fill, if it is not (else 0).
    `flat`: whether every segment between two positions fits into the slots that are free when its
    turn comes, so that none has to be divided.
    `capacities`: `capacity(slots, sweeps)` for all that may be asked for; none if that is too much.
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
        """How many states there is room for: the checkpoints and the state being worked on."""
        return self.checkpoints + 1


class Filled(NamedTuple):
    """What the forward pass leaves behind: how many steps it made, and the stack.

    `places` is None if the stack is in order, `steps` too if every state is kept.
    """

    count: Any
    depth: Any
    steps: Any
    places: Any
    slots: Any


def capacity(slots: int, sweeps: int) -> int:
    """How many steps can be reversed with `slots` kept states (the initial one among them) if no step
    is computed forward more than `sweeps` times: `binomial(slots + sweeps, sweeps)`."""
    out = 1
    for k in range(1, sweeps + 1):
        out = out * (slots + k) // k
    return out


def default_checkpoints(max_steps: int | None, state_bytes: int | None) -> int:
    """The fewest states with which no step is computed more than twice, about `sqrt(2 max_steps)`; or
    all, if they are small."""
    if max_steps is None:
        return DEFAULT_CHECKPOINTS
    if state_bytes is not None and max_steps * state_bytes <= SMALL:
        return max_steps
    slots = 1
    while capacity(slots, 2) < max_steps:
        slots += 1
    return slots


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
    # Three quarters for the forward pass: the last segment is reversed in what is left.
    online = 3 * checkpoints // 4
    online -= 1 - online % 2
    # One slot cannot double its gap: only the initial state is kept.
    online = online if online >= 3 else 0
    free = checkpoints - online + 1 if online else checkpoints
    return Plan(checkpoints, (0,), online, False, _capacities(checkpoints, free, MOST_STEPS), False)


# How many numbers of sweeps are kept in a table; beyond that they are counted up one by one.
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
        start += _split(_Python(), max_steps - start, slots)
        found.append(start)
    return tuple(found)


def _split(m: Any, length: Any, slots: Any, capacities: Any = ()) -> Any:
    """After how many of `length` steps to keep a state, when `slots` are free or at the start.

    The least number of sweeps that suffices is counted up. Then as much as can be reversed in one
    sweep less comes first, but what comes after it is left no less than what that number can do.
    """

    def more(state: Any) -> Any:
        sweeps, _, before, now = state
        fits = now <= m.div(MOST_STEPS, slots + sweeps + 1)
        grown = m.div(m.where(fits, now, 0) * (slots + sweeps + 1), sweeps + 1)
        return sweeps + 1, before, now, m.where(fits, grown, MOST_STEPS)

    # One slot holds nothing but the start, and `rest` is right at once; the count would take as long as the steps.
    several = slots > 1
    if capacities:
        two_less, one_less = m.last_below(capacities, slots, length)
    else:
        # Integers of the machine's own kind.
        one, zero = slots - slots + 1, slots - slots
        _, two_less, one_less, _ = m.while_loop(
            lambda state: (state[3] < length) & several, more, (one, zero, one, slots + 1)
        )
    rest = length - (one_less - two_less)
    return m.where(several & (one_less < rest), one_less, rest)


def fill(m: Any, plan: Plan, state: Any, slots: Any, zero: Any) -> Any:
    """The forward pass: makes the steps, keeps states.

    Args:
        m: the machine.
        plan: the plan.
        state: the initial state.
        slots: what the states are put into.
        zero: the integer 0.

    Returns:
        The final state, and what the backward pass needs: a `Filled`.
    """
    if plan.every:
        return _fill_every(m, state, slots, zero)
    return (_fill_doubling if plan.online else _fill_positions)(m, plan, state, slots, zero)


def _fill_every(m: Any, state: Any, slots: Any, zero: Any) -> Any:
    def keep(run: Any) -> Any:
        index, state, slots = run
        return index + 1, m.step(index, state), m.put(slots, index, state)

    count, state, slots = m.while_loop(lambda run: m.going(*run[:2]), keep, (zero, state, slots))
    return state, Filled(count, count, None, None, slots)


def _fill_positions(m: Any, plan: Plan, state: Any, slots: Any, zero: Any) -> Any:
    ends = m.table((*plan.positions[1:], MOST_STEPS))

    def segment(carried: Any) -> Any:
        count, depth, state, slots = carried
        slots = m.put(slots, depth, state)
        count, state = _run_until(m, count, state, m.load(ends, depth))
        return count, depth + 1, state, slots

    carried = m.while_loop(
        lambda carried: m.going(carried[0], carried[2]), segment, (zero, zero, state, slots)
    )
    count, depth, state, slots = carried
    unused = plan.slots - len(plan.positions)
    return state, Filled(count, depth, m.table((*plan.positions, *[0] * unused)), None, slots)


def _fill_doubling(m: Any, plan: Plan, state: Any, slots: Any, zero: Any) -> Any:
    online = plan.online

    def segment(carried: Any) -> Any:
        count, gap, state, slots = carried
        slots = m.put(slots, m.rem(count, online), state)
        gap = m.where(count == gap * (online - 1), gap + gap, gap)
        until = m.where(count < MOST_STEPS - gap, count + gap, MOST_STEPS)
        count, state = _run_until(m, count, state, until)
        return count, gap, state, slots

    carried = m.while_loop(
        lambda carried: m.going(carried[0], carried[2]), segment, (zero, zero + 1, state, slots)
    )
    count, gap, state, slots = carried
    turn = m.rem(gap, online)

    def place(depth: Any) -> Any:
        # Above the states of the forward pass, any permutation of what is free would do.
        return m.where(depth < online, m.rem(depth * turn, online), depth)

    steps = m.table_of(lambda depth: depth * gap, plan.slots)
    depth = m.div(count - 1, gap) + 1
    return state, Filled(count, depth, steps, m.table_of(place, plan.slots), slots)


def _run_until(m: Any, count: Any, state: Any, until: Any) -> Any:
    """Makes steps until the loop ends or `until` is reached."""
    return m.while_loop(
        lambda run: (run[0] < until) & m.going(*run),
        lambda run: (run[0] + 1, m.step(*run)),
        (count, state),
    )


def sweep(m: Any, plan: Plan, filled: Filled, cotangents: Any) -> Any:
    """The backward pass: cotangents of the final state in, of the initial state out."""
    count, depth, steps, places, slots = filled
    if plan.every:
        return _back(m, count, 0, lambda index: m.take(slots, index), cotangents)

    def place(depth: Any) -> Any:
        return depth if places is None else m.load(places, depth)

    def record(top: Any, start: Any, state: Any, end: Any, steps: Any, slots: Any) -> Any:
        """Keeps every state up to the last one: there is a slot for each."""

        def keep(run: Any) -> Any:
            index, state, slots = run
            state = m.step(index, state)
            return index + 1, state, m.put(slots, place(top + index + 1 - start), state)

        *_, slots = m.while_loop(lambda run: run[0] < end - 1, keep, (start, state, slots))
        return top, start, steps, slots

    def descend(top: Any, start: Any, state: Any, end: Any, steps: Any, slots: Any) -> Any:
        """Keeps states up to the last one: some on the way, then, when each has a slot, all. Which
        these are, from which on there is no gap, is what is returned."""

        def keep(descent: Any) -> Any:
            top, start, state, steps, slots, from_top, from_start = descent
            until = start + _split(m, end - start, plan.checkpoints - top, plan.capacities)
            no_gap = until == start + 1
            start, state = _run(m, start, state, until)
            top, slots = top + 1, m.put(slots, place(top + 1), state)
            from_top, from_start = (
                m.where(no_gap, from_top, top),
                m.where(no_gap, from_start, start),
            )
            return top, start, state, m.store(steps, top, start), slots, from_top, from_start

        descent = top, start, state, steps, slots, top, start
        *_, steps, slots, top, start = m.while_loop(
            lambda descent: descent[1] < end - 1, keep, descent
        )
        return top, start, steps, slots

    def segment(carried: Any) -> Any:
        depth, end, steps, slots, cotangents = carried
        top = depth - 1
        start, state = m.load(steps, top), m.take(slots, place(top))
        fetch = record if plan.flat else descend
        top, start, steps, slots = fetch(top, start, state, end, steps, slots)

        def kept(index: Any) -> Any:
            return m.take(slots, place(top + index - start))

        return top, start, steps, slots, _back(m, end, start, kept, cotangents)

    carried = depth, count, steps, slots, cotangents
    return m.while_loop(lambda carried: carried[1] > 0, segment, carried)[-1]


def _back(m: Any, end: Any, start: Any, kept: Any, cotangents: Any) -> Any:
    """The cotangents at step `start` from those at `end`, where `kept(index)` is a state."""

    def back(run: Any) -> Any:
        index, cotangents = run[0] - 1, run[1]
        return index, m.back(index, kept(index), cotangents)

    return m.while_loop(lambda run: run[0] > start, back, (end, cotangents))[-1]


def _run(m: Any, index: Any, state: Any, until: Any) -> Any:
    """The state at step `until`, from the one at step `index`."""
    return m.while_loop(
        lambda run: run[0] < until, lambda run: (run[0] + 1, m.step(*run)), (index, state)
    )


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
            until = _split(m, length, slots)
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
