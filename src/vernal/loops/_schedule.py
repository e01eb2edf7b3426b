"""Which states a checkpointed loop keeps, which it computes again, and when: integers only, no JAX.

**The difficulty.** Reverse mode needs the states of a loop last to first, but a loop makes them first to last.
Keeping all of them takes too much memory, and their number is known only when the loop has ended.

**The plan.** The forward pass (`fill`) keeps some states. The backward pass (`sweep`) repeatedly takes the last
state that is kept, runs the loop on from there, keeping some of the states in between in the slots that are now free,
and takes the derivative of the steps after the last one. The binomial rule says where to keep a state: if `slots`
states can be kept and no step may be computed more than `sweeps` times, then at most `binomial(slots + sweeps,
sweeps)` steps can be reversed, so the next state to keep is the one after which the rest just fits (`split_at`).

- If at most N steps are made, `fill` keeps the states that this rule chooses for N steps. A loop that makes exactly
  N then computes nothing more often than the optimum of Griewank and Walther; one that stops early has slots left
  over.
- If there is a slot for every state, both passes are one plain loop.
- If no bound is known, `fill` keeps every `gap`-th state in `online` slots; when these are full, it drops every other
  one and doubles `gap`. No state is ever moved: with an odd number M of slots, the state after `k * gap` steps is in
  slot `k * gap mod M`, and because the gap is a power of two, the remaining states are already where they belong.

**What holds.** States are kept on a stack, `k = 0, 1, ...` from the bottom. Each is an earlier state of the loop
than the one above it; the lowest is the initial state. `sweep` reverses the steps between the uppermost state and
`end`, and then drops that state: `end` falls until it is zero. The stack has at most `checkpoints` states, and one
more slot holds the state that is being worked on.

**The bound.** With N known, no step is computed again more than `r - 1` times, where `r` is the least number with
`binomial(checkpoints + r, r) >= N`, wherever the loop stops. Without a bound, after n steps, it is `r` times at
most, for the least `r` with `binomial(free + r, r) >= gap`. Here `free = checkpoints - online + 1` are the slots
that the last segment has, and the gap is at most the least power of two with `(online - 1) * gap >= n`.

**What it costs.** Forward evaluations of each step, the first included: with a bound that is just reached (the
binomial optimum) / without a bound (`python benchmarks/loops.py --schedule`):

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

**How it is written.** `fill` and `sweep` decide what to compute, and do not depend on what a state is: the machine
that they are given has the states, the slots, and the loop construct. The tests run them with a machine of Python
integers over every number of steps; `_machines.py` has those that JAX compiles. A machine has

- `while_loop`, `where(pred, yes, no)`, and for integers that are not negative `div`, `rem`;
- tables of integers: `table(values)`, `table_of(entry, length)`, `load(table, index)`, `store(table, index, value)`;
- `last_below(rows, row, bound)`, the last two entries below a bound in an ascending row, with a 0 before the first;
- `put(slots, place, state)` and `take(slots, place)`;
- forward: `going(index, state)`, whether the loop takes step `index`, and `step(index, state)`, which takes it;
- backward: `step` as well, and `back(index, state, cotangents)`, the cotangents before step `index`.

Glossary: `slots` where states are kept; `depth` the position of a state on the stack, `places[depth]` its position
in `slots`, `steps[depth]` the number of steps after which it was reached; `gap` the number of steps between kept
states; `count` the number of steps made.

Source: A. Griewank and A. Walther, Algorithm 799: revolve, 2000, doi:10.1145/347837.347846. Keeping states
when the number of steps is unknown: P. Stumm and A. Walther, New algorithms for optimal online checkpointing, 2010,
doi:10.1137/080742439 (which keeps other states than here).
"""

from typing import Any, NamedTuple

from ._plan import MOST_STEPS, Plan, split_at


class Filled(NamedTuple):
    """What the forward pass leaves behind: how many steps it made, and the stack.

    `places` is None if the stack is in order; so is `steps` if every state is kept.
    """

    count: Any
    depth: Any
    steps: Any
    places: Any
    slots: Any


def fill(m: Any, plan: Plan, state: Any, slots: Any, zero: Any) -> Any:
    """The forward pass: takes the steps from `state`, and puts states into `slots`. Returns the final state, and
    what the backward pass needs."""
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
        # Above the states of the forward pass, any permutation of the free slots will do.
        return m.where(depth < online, m.rem(depth * turn, online), depth)

    steps = m.table_of(lambda depth: depth * gap, plan.slots)
    depth = m.div(count - 1, gap) + 1
    return state, Filled(count, depth, steps, m.table_of(place, plan.slots), slots)


def _run_until(m: Any, count: Any, state: Any, until: Any) -> Any:
    """Takes steps until the loop ends or `until` is reached."""
    return m.while_loop(
        lambda run: (run[0] < until) & m.going(*run),
        lambda run: (run[0] + 1, m.step(*run)),
        (count, state),
    )


def sweep(m: Any, plan: Plan, filled: Filled, cotangents: Any) -> Any:
    """The backward pass: takes the cotangents of the final state, returns those of the initial state."""
    count, depth, steps, places, slots = filled
    if plan.every:
        return _back(m, count, 0, lambda index: m.take(slots, index), cotangents)

    def place(depth: Any) -> Any:
        return depth if places is None else m.load(places, depth)

    def record(top: Any, start: Any, state: Any, end: Any, steps: Any, slots: Any) -> Any:
        """Keeps every state up to the last one: each has a slot."""

        def keep(run: Any) -> Any:
            index, state, slots = run
            state = m.step(index, state)
            return index + 1, state, m.put(slots, place(top + index + 1 - start), state)

        *_, slots = m.while_loop(lambda run: run[0] < end - 1, keep, (start, state, slots))
        return top, start, steps, slots

    def descend(top: Any, start: Any, state: Any, end: Any, steps: Any, slots: Any) -> Any:
        """Keeps states up to the last one: some on the way, then, once each has a slot, all. Also
        returns from which state on there is no gap."""

        def keep(descent: Any) -> Any:
            top, start, state, steps, slots, from_top, from_start = descent
            until = start + split_at(m, end - start, plan.checkpoints - top, plan.capacities)
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
    """The cotangents at step `start` from those at `end`; `kept(index)` is the state at a step in between."""

    def back(run: Any) -> Any:
        index, cotangents = run[0] - 1, run[1]
        return index, m.back(index, kept(index), cotangents)

    return m.while_loop(lambda run: run[0] > start, back, (end, cotangents))[-1]


def _run(m: Any, index: Any, state: Any, until: Any) -> Any:
    """The state at step `until`, from the one at step `index`."""
    return m.while_loop(
        lambda run: run[0] < until, lambda run: (run[0] + 1, m.step(*run)), (index, state)
    )
