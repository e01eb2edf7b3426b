"""One function is never substituted for another, whatever they have in common."""

import contextvars
import dataclasses
import functools
from typing import Any, NamedTuple

import pytest

import vernal
from tests.soundness._answers import ARGUMENT_ROUTES, Answers, X, Y, Z
from tests.soundness._array_kinds import ARRAY_KINDS
from tests.soundness._kinds import KINDS, Kind


def exchange(kind: Kind, answers: Answers) -> None:
    """Two states that are equal at first, and functions over each."""

    a, b = kind.new(), kind.new()
    f, g = kind.make(a), kind.make(b)
    answers.check(f, X)
    answers.check(g, X)
    kind.change(a, 5.0)
    answers.check(g, X)
    answers.check(g, Y)
    answers.check(kind.make(a), X)
    answers.check(kind.make(b), X)
    answers.check(f, Y)
    c = kind.new()
    answers.check(kind.make(c), Y)


def set_and_reset(kind: Kind, answers: Answers) -> None:
    """Traces at other shapes happen in other states."""

    a = kind.new()
    f = kind.make(a)
    answers.check(f, X)
    kind.change(a, 2.0)
    answers.check(f, Y)
    b = kind.new()
    answers.check(kind.make(b), Y)
    answers.check(kind.make(a), X)
    kind.change(a, 1.0)
    answers.check(kind.make(a), X)
    answers.check(kind.make(a), Y)
    answers.check(f, Z)
    kind.change(b, 3.0)
    answers.check(kind.make(b), Z)
    answers.check(kind.make(a), Z)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sample(16)
def test_equal_states_that_part_do_not_answer_for_each_other(kind, answers):
    exchange(kind, answers)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sample(16)
def test_a_state_that_is_set_and_reset_poisons_no_program(kind, answers):
    set_and_reset(kind, answers)


@pytest.mark.parametrize("route", ARGUMENT_ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("kind", ARRAY_KINDS.values(), ids=ARRAY_KINDS)
@pytest.mark.parametrize("scenario", [exchange, set_and_reset])
@pytest.mark.sample(8)
def test_buffers_that_are_refilled_in_place(kind, scenario, route):
    scenario(kind, Answers(route))


class Held(vernal.Module):
    k: list


class Pair(NamedTuple):
    held: Any


@dataclasses.dataclass(frozen=True)
class Around:
    held: Any


class ByIdentity:
    """Says itself that it is compared by identity."""

    def __init__(self):
        self.k = 1.0

    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


def _object(wrap=lambda s: s, read=lambda held: held.k, new=ByIdentity):
    """A partial over an object that stands inside of something."""

    def times(held, x):
        return x * read(held)

    return Kind(new, lambda s: functools.partial(times, wrap(s)), lambda s, k: setattr(s, "k", k))


def _module(wrap=lambda s: s, read=lambda held: held.k[0]):
    def times(held, x):
        return x * read(held)

    return Kind(
        lambda: Held([1.0]),
        lambda s: functools.partial(times, wrap(s)),
        lambda s, k: s.k.__setitem__(0, k),
    )


PARTIALS = {
    "object compared by identity": _object(),
    "object in a tuple": _object(lambda s: (s,), lambda held: held[0].k),
    "object in a named tuple": _object(Pair, lambda held: held.held.k),
    "object in a frozen dataclass": _object(Around, lambda held: held.held.k),
    "object in a frozenset": _object(lambda s: frozenset([s]), lambda held: next(iter(held)).k),
    "object in a slice": _object(slice, lambda held: held.stop.k),
    "context variable": Kind(
        lambda: contextvars.ContextVar("k", default=1.0),
        lambda s: functools.partial(lambda s, x: x * s.get(), s),
        lambda s, k: s.set(k),
    ),
    "module": _module(),
    "module in a frozen dataclass": _module(Around, lambda held: held.held.k[0]),
    "module in a module": _module(lambda s: Held([s]), lambda held: held.k[0].k[0]),
    "module in a partial": _module(
        lambda s: functools.partial(max, s), lambda held: held.args[0].k[0]
    ),
    "keyword": Kind(
        lambda: Held([1.0]),
        lambda s: functools.partial(lambda x, held: x * held.k[0], held=s),
        lambda s, k: s.k.__setitem__(0, k),
    ),
}


@pytest.mark.parametrize("route", ARGUMENT_ROUTES, ids=lambda route: route.__name__)
@pytest.mark.parametrize("kind", PARTIALS.values(), ids=PARTIALS)
@pytest.mark.parametrize("scenario", [exchange, set_and_reset])
@pytest.mark.sample(16)
def test_partials_made_afresh_over_what_has_changed(kind, scenario, route):
    scenario(kind, Answers(route))
