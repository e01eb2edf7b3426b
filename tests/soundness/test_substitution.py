"""One function is never substituted for another, whatever they have in common."""

import pytest

from tests.soundness._answers import ARGUMENT_ROUTES, Answers, X, Y, Z
from tests.soundness._array_kinds import ARRAY_KINDS
from tests.soundness._kinds import KINDS, Kind


def exchange(kind: Kind, answers: Answers) -> None:
    """Two states that are equal at first, and functions over each."""

    def check(f, state, x):
        answers.check(f, x, kind.parts(state))

    a, b = kind.new(), kind.new()
    f, g = kind.make(a), kind.make(b)
    check(f, a, X)
    check(g, b, X)
    kind.change(a, 5.0)
    check(g, b, X)
    check(g, b, Y)
    check(kind.make(a), a, X)
    check(kind.make(b), b, X)
    check(f, a, Y)
    c = kind.new()
    check(kind.make(c), c, Y)


def set_and_reset(kind: Kind, answers: Answers) -> None:
    """Traces at other shapes happen in other states."""

    def check(f, state, x):
        answers.check(f, x, kind.parts(state))

    a = kind.new()
    f = kind.make(a)
    check(f, a, X)
    kind.change(a, 2.0)
    check(f, a, Y)
    b = kind.new()
    check(kind.make(b), b, Y)
    check(kind.make(a), a, X)
    kind.change(a, 1.0)
    check(kind.make(a), a, X)
    check(kind.make(a), a, Y)
    check(f, a, Z)
    kind.change(b, 3.0)
    check(kind.make(b), b, Z)
    check(kind.make(a), a, Z)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_equal_states_that_part_do_not_answer_for_each_other(kind, answers):
    exchange(kind, answers)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_state_that_is_set_and_reset_poisons_no_program(kind, answers):
    set_and_reset(kind, answers)


@pytest.mark.parametrize("route", ARGUMENT_ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("kind", ARRAY_KINDS.values(), ids=ARRAY_KINDS)
@pytest.mark.parametrize("scenario", [exchange, set_and_reset])
def test_buffers_that_are_refilled_in_place(kind, scenario, route):
    scenario(kind, Answers(route))
