"""Random programs that make functions, change what they refer to, and call old and fresh ones.

The oracle: an answer is right if it is what the function returns now, or what this same function
has answered before at this shape and dtype, by any route; never what another function answers, and
never a state in which this one was not called. A partial is what it is made of.

CI makes about 10,000 steps. At the desk,

    VERNAL_SOUNDNESS_MINUTES=60 python -m pytest tests/soundness/test_random_programs.py -m slow

makes new programs for an hour, and stops at the first wrong answer with the shortest program found.
"""

import contextvars
import functools
import gc
import itertools
import os
import threading
import time
import types
from typing import Any, NamedTuple

import hypothesis
import hypothesis.stateful as stateful
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from tests.soundness import _answers
from tests.soundness._answers import ONE, Holder
from tests.soundness._array_kinds import ARRAY_KINDS
from tests.soundness._kinds import KINDS, Kind

MINUTES = float(os.environ.get("VERNAL_SOUNDNESS_MINUTES", "0"))
INPUTS = (jnp.ones(2), jnp.ones(3), jnp.ones(()), jnp.ones(2, jnp.float16))
# Most calls are alike, so that most programs are found again.
SOME_INPUT = st.sampled_from((*INPUTS[:1] * 4, *INPUTS[1:2] * 3, *INPUTS[2:]))
# Two threads cannot enter a generator at once, and here states may go before functions over them.
NAMES = tuple(sorted((KINDS | ARRAY_KINDS).keys() - {"generator", "weak reference"}))
NUMBERS = (1.0, 2.0, 3.0)
ARGUMENT_ROUTES = (
    *_answers.ARGUMENT_ROUTES,
    _answers.keyword,
    _answers.in_filter_vmap,
    _answers.in_filter_checkpoint,
)
FIELD_ROUTES = (
    _answers.field,
    _answers.field_of_jax_jit,
    _answers.static_field,
    _answers.list_in_field,
    _answers.module_given,
    _answers.method_given,
    _answers.in_vernal_partial,
    _answers.tree_map,
    _answers.result,
)
# filter_vmap maps over an axis, which a scalar has not.
NEED_AN_AXIS = (_answers.in_filter_vmap,)


class State(NamedTuple):
    """Something that functions refer to."""

    serial: int
    name: str
    kind: Kind
    value: Any


class Function(NamedTuple):
    """A function of the program.

    `key` is who it is: functions that are the same by the rule have the same key. `mayhold` says
    that there is an array inside. `depth` limits how they are nested.
    """

    key: Any
    f: Any
    mayhold: bool = False
    depth: int = 0


class Model(NamedTuple):
    """A model that holds functions in a list, a dict and a tuple."""

    module: Any
    # The very list in the module, if it is still the one that was put in.
    items: list[Any]


def _call_model(module: Any, x: Any) -> Any:
    for f in module.f["list"]:
        x = f(x)
    return module.f["tuple"][0](x) * module.w.astype(x.dtype)


class Programs(stateful.RuleBasedStateMachine):
    """One random program. Everything is picked by number from lists: Hypothesis's own bundles would
    keep alive what the program drops."""

    def __init__(self):
        super().__init__()
        self.serials = itertools.count()
        self.states: list[State] = []
        self.functions: list[Function] = []
        self.models: list[Model] = []
        self.keys: dict[int, Any] = {}
        self.given: dict[Any, list[Any]] = {}
        self.names: tuple[str, ...] = ()
        self.routes: list[tuple[Any, Any]] = []
        self.model_routes = [
            vernal.filter_jit(_call_model),
            jax.jit(_call_model),
            lambda module, x: _call_model(jax.tree.map(lambda leaf: leaf, module), x),
        ]
        self.passers = [
            lambda m: jax.tree.map(lambda leaf: leaf, m),
            vernal.filter_jit(lambda m: m),
            jax.jit(lambda m: m),
            lambda m: vernal.tree_at(lambda m: m.w, m, jnp.ones(())),
        ]

    # What there is.

    def add(self, f: Any, key: Any = None, *, mayhold: bool = False, depth: int = 0) -> None:
        key = next(self.serials) if key is None else key
        if len(self.functions) > 7:
            del self.functions[0]
        self.functions.append(Function(key, f, mayhold, depth))

    @stateful.initialize(
        names=st.tuples(*[st.sampled_from(NAMES)] * 2),
        routes=st.tuples(st.sampled_from(ARGUMENT_ROUTES), *[st.sampled_from(FIELD_ROUTES)] * 2),
    )
    def start(self, names, routes):
        # Few kinds and few routes in one program: what is alike is what can be mixed up.
        self.names, self.routes = names, [(route, route()) for route in routes]
        for n in (0, 0, 0, 1):
            self.make_state(n)

    @stateful.rule(n=st.integers(0, 1))
    def make_state(self, n):
        name = self.names[n]
        kind = (KINDS | ARRAY_KINDS)[name]
        if len(self.states) > 4:
            del self.states[0]
        self.states.append(State(next(self.serials), name, kind, kind.new()))
        self.make_function(len(self.states) - 1)

    @stateful.rule(n=st.integers(0, 99))
    def make_function(self, n):
        """A fresh function over a state that may have changed since the last one was made."""
        state = self.states[n % len(self.states)]
        self.add(state.kind.make(state.value), None, mayhold=state.name in ARRAY_KINDS)

    @stateful.rule(n=st.integers(0, 99), k=st.sampled_from(NUMBERS))
    def change(self, n, k):
        state = self.states[n % len(self.states)]
        state.kind.change(state.value, k)

    @stateful.rule(n=st.integers(0, 99), m=st.integers(0, 99), how=st.integers(0, 6))
    def nest(self, n, m, how):
        """A function over functions."""
        one, two = (self.functions[i % len(self.functions)] for i in (n, m))
        if max(one.depth, two.depth) >= 2:
            return
        f, g, key = one.f, two.f, None
        if how == 0:
            made: Any = lambda x: g(f(x))  # noqa: E731 (one of seven)
        elif how == 1:
            # A partial of a partial is the inner one, and the route `in_partial` makes another.
            made, key = functools.partial(f), one.key
        elif how == 2:
            made = functools.wraps(jax.nn.relu)(lambda x: f(x))
        elif how == 3:
            made = types.MethodType(lambda self, x: self[0](self[1](x)), (f, g))
        elif how == 4:
            made = _Chain([f, g])
        elif how == 5:
            made, key = functools.partial(_apply, f), ("apply", one.key)
        else:
            made = lambda x, f=f, *, g=g: f(g(x))  # noqa: E731 (one of seven)
        mayhold = one.mayhold or (two.mayhold and how in (0, 3, 4, 6))
        self.add(made, key, mayhold=mayhold, depth=max(one.depth, two.depth) + 1)

    @stateful.rule(n=st.integers(0, 99), m=st.integers(0, 99))
    def change_a_chain(self, n, m):
        """Another function in a list that a callable object holds."""
        chain, other = (
            self.functions[n % len(self.functions)],
            self.functions[m % len(self.functions)],
        )
        if (
            isinstance(chain.f, _Chain)
            and other.depth < chain.depth
            and other.mayhold <= chain.mayhold
        ):
            chain.f.functions[0] = other.f

    @stateful.rule(n=st.integers(0, 99))
    def forget(self, n):
        """Drops the last function and a model; others may come to their addresses."""
        if len(self.functions) > 4:
            del self.functions[-1]
        if self.models:
            del self.models[n % len(self.models)]
        if n % 8 == 0:
            gc.collect(1)

    # What is asked.

    def check(self, key: Any, x: Any, right: Any, got: Any, how: str) -> None:
        right, got = np.asarray(right), np.asarray(got)
        earlier = self.given.setdefault((key, x.shape, x.dtype), [])
        assert got.shape == right.shape and got.dtype == right.dtype, (
            f"{how}: {got!r} for {right!r}"
        )
        if not any(np.array_equal(got, value) for value in (right, *earlier)):
            raise AssertionError(
                f"{how}: the library says {got!r}. This function returns {right!r} now, and has "
                f"answered {earlier!r} before: this answer belongs to another function or state."
            )
        earlier.append(got)

    def ask(self, function: Function, way: int, x: Any) -> tuple[Any, str]:
        """What the library says, and by which route. The first route takes every function."""
        only_argument = function.mayhold or x.dtype != jnp.float32
        route, call = self.routes[0 if only_argument else way]
        if route in NEED_AN_AXIS and x.ndim == 0:
            x = x[None]
            return call(function.f, x)[0], route.__name__
        return call(function.f, x), route.__name__

    @stateful.rule(n=st.integers(0, 99), way=st.integers(0, 2), x=SOME_INPUT)
    def call(self, n, way, x):
        function = self.functions[n % len(self.functions)]
        right = function.f(x)
        got, how = self.ask(function, way, x)
        self.check(function.key, x, right, got, how)

    @stateful.rule(x=SOME_INPUT, way=st.integers(0, 2))
    def call_all(self, x, way):
        for n in range(len(self.functions)):
            self.call(n, way, x)

    @stateful.rule(n=st.integers(0, 99), way=st.integers(0, 2), x=SOME_INPUT)
    def call_a_fresh_one(self, n, way, x):
        self.make_function(n)
        self.call(len(self.functions) - 1, way, x)

    @stateful.rule(
        n=st.integers(0, 99),
        k=st.sampled_from(NUMBERS),
        way=st.integers(0, 2),
        x=SOME_INPUT,
    )
    def change_and_call(self, n, k, way, x):
        self.change(n, k)
        self.call(n, way, x)

    @stateful.rule(
        pairs=st.tuples(*[st.tuples(st.integers(0, 99), SOME_INPUT)] * 2),
        way=st.integers(0, 2),
    )
    def call_from_two_threads(self, pairs, way):
        asked = [(self.functions[n % len(self.functions)], x) for n, x in pairs]
        right = [function.f(x) for function, x in asked]
        got: list[Any] = [None, None]

        def work(i):
            try:
                got[i] = self.ask(asked[i][0], way, asked[i][1])
            except Exception as error:
                got[i] = error

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(work, i)) for i in (0, 1)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for (function, x), expected, answer in zip(asked, right, got, strict=True):
            if isinstance(answer, Exception):
                raise answer
            self.check(function.key, x, expected, answer[0], f"{answer[1]}, in a thread")

    # Models.

    def _keys_of(self, model: Model) -> Any:
        listed = (*model.items, model.module.f["tuple"][0])
        return ("model", *(self.keys[id(f)] for f in listed))

    def _name(self, function: Function) -> Any:
        # Alive as long as this program: what a model holds is known by its address.
        self.keys[id(function.f)] = function.key
        self.given.setdefault("alive", []).append(function.f)
        return function.f

    def _plain_function(self, n: int) -> Function | None:
        function = self.functions[n % len(self.functions)]
        return None if function.mayhold else function

    @stateful.rule(n=st.integers(0, 99), m=st.integers(0, 99))
    def make_a_model(self, n, m):
        one, two = self._plain_function(n), self._plain_function(m)
        if one and two:
            items = [self._name(one), self._name(two)]
            held = {"list": items, "tuple": (self._name(one), "text"), "number": 1}
            self.models.append(Model(Holder(ONE, held), items))

    @stateful.rule(n=st.integers(0, 99), m=st.integers(0, 99))
    def change_a_list_in_a_model(self, n, m):
        function = self._plain_function(m)
        if self.models and function:
            self.models[n % len(self.models)].items[m % 2] = self._name(function)

    @stateful.rule(n=st.integers(0, 99), how=st.integers(0, 3))
    def pass_a_model_on(self, n, how):
        if not self.models:
            return
        model = self.models[n % len(self.models)]
        made = self.passers[how](model.module)
        got = (*made.f["list"], made.f["tuple"][0])
        for before, after in zip((*model.items, model.module.f["tuple"][0]), got, strict=True):
            if isinstance(before, functools.partial):
                self.keys.setdefault(id(after), self.keys[id(before)])
                self.given.setdefault("alive", []).append(after)
            else:
                assert after is before, f"a model was given {before}, and its copy has {after}"
        self.models.append(Model(made, made.f["list"]))

    @stateful.rule(n=st.integers(0, 99), how=st.integers(0, 2), x=SOME_INPUT)
    def call_a_model(self, n, how, x):
        if self.models:
            model = self.models[n % len(self.models)]
            right = _call_model(model.module, x)
            got = self.model_routes[how](model.module, x)
            self.check(self._keys_of(model), x, right, got, f"model, way {how}")


class _Chain:
    """Calls the functions in its list, one after the other."""

    def __init__(self, functions: list[Any]):
        self.functions = functions

    def __call__(self, x):
        for f in self.functions:
            x = f(x)
        return x


def _apply(f, x):
    return f(x)


def _run(**more: Any) -> None:
    settings = hypothesis.settings(
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        report_multiple_bugs=False,
        **more,
    )
    stateful.run_state_machine_as_test(Programs, settings=settings)


@pytest.mark.slow
@pytest.mark.timeout(900 + 120 * MINUTES)
def test_random_programs():
    if not MINUTES:
        # Making a program shorter takes many times as long as finding it: that is for the desk.
        _run(phases=(hypothesis.Phase.generate,))
        return
    until = time.monotonic() + 60 * MINUTES
    while time.monotonic() < until:
        _run(derandomize=False, database=None)
        jax.clear_caches()
        vernal.clear_caches()
        gc.collect()
