"""The schedule of checkpointed loops, run on integers: state k is the number k.

The files under test import nothing else of ours, and are loaded without the checks of types of the other tests: there
are some twenty thousand loops.
"""

import functools
import importlib
import sys
import types
from typing import Any

import pytest

import vernal.loops

# A package of the same files by another name.
_UNCHECKED = types.ModuleType("loops_unchecked")
_UNCHECKED.__path__ = list(vernal.loops.__path__)
sys.modules["loops_unchecked"] = _UNCHECKED
plans: Any = importlib.import_module("loops_unchecked._plan")
schedule: Any = importlib.import_module("loops_unchecked._schedule")

MOST_STEPS, MOST_CHECKPOINTS = 300, 20


class Machine(plans._Python):
    """Checks that every state and every derivative is what it has to be, and counts."""

    def __init__(self, steps: int):
        self.steps = steps
        self.evaluated = [0] * steps

    def going(self, index, state):
        assert state == index
        return index < self.steps

    def step(self, index, state):
        assert state == index
        self.evaluated[index] += 1
        return index + 1

    def back(self, index, state, cotangents):
        # Cotangents are represented by the step that they are cotangents after.
        assert state == index and cotangents == index + 1
        return index

    def put(self, slots, place, state):
        assert 0 <= place < len(slots)
        slots[place] = state
        return slots

    def take(self, slots, place):
        assert 0 <= place < len(slots)
        return slots[place]


def run(steps, max_steps, checkpoints):
    """How often each step is computed again."""
    plan = plans.make_plan(max_steps, checkpoints)
    m = Machine(steps)
    assert plan.checkpoints <= checkpoints
    # There is no more memory than this: what is not in a slot is gone.
    slots = [None] * (plan.checkpoints + 1)
    state, filled = schedule.fill(m, plan, 0, slots, 0)
    assert state == filled.count == steps and m.evaluated == [1] * steps
    m.evaluated = [0] * steps
    assert schedule.sweep(m, plan, filled, steps) == 0
    assert sum(m.evaluated) == plans.recomputed(plan, steps)
    return m.evaluated


@functools.cache
def optimum(steps, slots):
    """The fewest steps to compute again, by dynamic programming over where to keep the next state."""
    if steps <= 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(
        first + optimum(steps - first, slots - 1) + optimum(first, slots)
        for first in range(1, steps)
    )


def optimum_after_forward(steps, checkpoints):
    """The same when the forward pass, which makes every step once, may keep states too."""
    return optimum(steps, min(checkpoints, steps)) - steps + 1 if steps else 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", range(1, MOST_CHECKPOINTS + 1))
def test_every_step_is_differentiated_once_in_reverse_order_within_the_bounds(checkpoints):
    unbounded = plans.make_plan(None, checkpoints)
    for steps in range(MOST_STEPS + 1):
        sweeps = sweeps_for(steps, checkpoints)
        # A bound that is just reached, one that is not, and one that is far away.
        exact = run(steps, steps, checkpoints)
        assert max(exact, default=0) <= max(sweeps - 1, 0)
        assert sum(exact) == optimum_after_forward(steps, checkpoints)
        early = run(steps, steps + 1 + steps // 2, checkpoints)
        most = sweeps_for(steps + 1 + steps // 2, checkpoints)
        assert max(early, default=0) <= max(most - 1, 0)
        online = run(steps, None, checkpoints)
        if unbounded.online:
            gap = 1
            while (unbounded.online - 1) * gap < steps:
                gap *= 2
            free = checkpoints - unbounded.online + 1
            assert max(online, default=0) <= sweeps_for(gap, free)
        else:
            assert max(online, default=0) <= sweeps


def sweeps_for(steps, slots):
    """The least number of sweeps with which so many steps can be reversed."""
    sweeps = 0
    while plans.capacity(slots, sweeps) < steps:
        sweeps += 1
    return sweeps


def test_a_few_loops_are_reversed_within_the_bounds():
    for steps, checkpoints in [(0, 1), (1, 1), (2, 1), (9, 1), (17, 2), (40, 3), (64, 5), (90, 20)]:
        exact = run(steps, steps, checkpoints)
        assert sum(exact) == optimum_after_forward(steps, checkpoints)
        for max_steps in (None, 100):
            run(steps, max_steps, checkpoints)


@pytest.mark.parametrize("max_steps", [1, 2, 3, 10, 1000, 10_000, 100_000])
def test_the_default_grows_as_the_root_of_the_bound_and_computes_nothing_more_than_twice(max_steps):
    plan = plans.make_plan(max_steps, None)
    assert plan.checkpoints <= max(1, (2 * max_steps) ** 0.5)
    assert plan.flat
    for steps in {0, 1, max_steps // 2, max_steps}:
        assert plans.recomputed(plan, steps) <= max(steps - 1, 0)


def test_without_a_bound_the_number_of_states_is_fixed_and_the_work_grows_slowly():
    plan = plans.make_plan(None, None)
    assert plan.checkpoints == 82
    for steps, most in [(100, 1), (1000, 1), (10_000, 2), (100_000, 3), (1_000_000, 4)]:
        assert plans.recomputed(plan, steps) <= most * steps


def test_more_checkpoints_than_steps_keep_every_state():
    assert plans.make_plan(5, 100).checkpoints == 5
    assert run(5, 5, 100) == [0] * 5
    for steps in range(6):
        assert run(steps, 5, 5) == [0] * steps


def test_by_default_small_states_are_all_kept():
    assert plans.make_plan(32, None, state_bytes=256).every
    assert plans.make_plan(32, None, state_bytes=257) == plans.make_plan(32, None)
    assert not plans.make_plan(32, 31, state_bytes=1).every


@pytest.mark.parametrize(
    ("state_bytes", "kept"), [(0, 256), (8, 256), (64, 128), (100, 82), (10**9, 82)]
)
def test_without_a_bound_more_states_are_kept_if_they_are_small(state_bytes, kept):
    assert plans.make_plan(None, None, state_bytes=state_bytes).checkpoints == kept


def test_capacity_is_the_binomial_coefficient():
    assert [plans.capacity(3, sweeps) for sweeps in range(5)] == [1, 4, 10, 20, 35]


def test_the_split_stays_right_where_binomials_exceed_the_counters():
    m = plans._Python()
    for length in (10**6, 2**31 - 1):
        for slots in (2, 3, 50, 1000):
            until = plans.split_at(m, length, slots)
            assert 1 <= until < length
