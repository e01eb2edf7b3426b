"""Programs and their owners: counters, loops, dead functions, and functions that are changed
themselves."""

import copy
import functools
import gc
import pickle
import types
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import vernal
from tests.soundness._answers import (
    ARGUMENT_ROUTES,
    MAIN_ROUTES,
    ONE,
    Answers,
    Holder,
    X,
    Y,
    Z,
    number_of,
)


def test_lambdas_of_one_loop_share_a_variable(answers):
    made = []
    for k in (1.0, 2.0, 3.0):
        made.append(lambda x: x * k)  # noqa: B023 (the attack)
        answers.check(made[-1], X)
    for f in made:
        answers.check(f, Y)
    k = 7.0
    for f in made:
        answers.check(f, Z)
    answers.check(lambda x: x * k, X)


def test_every_fresh_closure_has_its_own_constant(answers):
    def make(k):
        return lambda x: x * number_of(k)

    made = [make(k) for k in (0.0, 1.0, 2.0, 3.0, 1, True, -0.0, 0, False)]
    for f in made + made[::-1]:
        answers.check(f, X)


@pytest.mark.parametrize("route", MAIN_ROUTES, ids=lambda route: route.__name__)
@pytest.mark.sample(3)
def test_a_function_at_the_address_of_a_dead_one_has_its_own_program(route):
    call = route()

    def make(k):
        return lambda x: x * k

    addresses, wrong = set(), []
    for k in range(25):
        f = make(float(k))
        addresses.add(id(f))
        if call(f, X)[0] != k:
            wrong.append((k, float(call(f, X)[0])))
        del f
        if k % 5 == 0:
            gc.collect()
    assert not wrong, f"(captured number, answer) of functions at addresses used before: {wrong}"


@pytest.mark.parametrize("route", MAIN_ROUTES, ids=lambda route: route.__name__)
@pytest.mark.sample(3)
def test_a_callable_object_at_the_address_of_a_dead_one_has_its_own_program(route):
    class Times:
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x * self.k

    call = route()
    answers = [float(call(Times(k), X)[0]) for k in range(25)]
    assert answers == list(range(25)), "an object got the program of one that is gone"


def _counter() -> tuple[Any, list[int]]:
    """A function that counts its calls, and the count to be read from outside."""
    count = [0]

    def f(x):
        count[0] += 1
        return x * count[0]

    return f, count


def _nonlocal_counter() -> tuple[Any, Any]:
    count = 0

    def f(x):
        nonlocal count
        count += 1
        return x * count

    class Read:
        def __getitem__(self, _):
            return count

    return f, Read()


@pytest.mark.parametrize("make", [_counter, _nonlocal_counter])
@pytest.mark.parametrize("route", MAIN_ROUTES, ids=lambda route: route.__name__)
def test_a_counter_counts_its_own_calls(route, make):
    call = route()
    (f, of_f), (g, of_g) = make(), make()
    first = float(call(f, X)[0]), float(call(g, X)[0])
    assert first == (1.0, 1.0), f"{first}: each counter has been called once"
    assert (of_f[0], of_g[0]) == (1, 1), "a call of one counter was charged to the other"
    third = float(call(make()[0], X)[0])
    assert third == 1.0, f"a third counter starts at one, not at {third}"
    assert (of_f[0], of_g[0]) == (1, 1), "a call of the third counter was charged to another"
    assert float(call(f, Y)[0]) == 2.0, "the second trace of a counter is its second call"
    assert (of_f[0], of_g[0]) == (2, 1)


def test_swapped_code_is_seen_at_the_next_shape(answers):
    def make():
        def f(x):
            return x * 2

        return f

    f, g = make(), make()
    answers.check(f, X)
    answers.check(g, X)
    f.__code__ = (lambda x: x * 3).__code__
    answers.check(f, Y)
    answers.check(g, Y)
    answers.check(make(), X)
    answers.check(g, X)


def test_changed_defaults_are_seen_at_the_next_shape(answers):
    def make():
        def f(x, k=2.0, *, more=1.0):
            return x * k * more

        return f

    f, g = make(), make()
    answers.check(f, X)
    answers.check(g, X)
    f.__defaults__ = (3.0,)
    answers.check(f, Y)
    answers.check(g, Y)
    f.__kwdefaults__["more"] = 5.0
    answers.check(f, Z)
    answers.check(g, Z)
    answers.check(make(), X)


def test_functions_with_the_code_of_another_and_other_parts(answers):
    def f(x, k=2.0):
        return x * k * G

    def at(k, g):
        return types.FunctionType(f.__code__, {"G": g}, "f", (k,))

    made = [at(k, g) for k in (1.0, 2.0) for g in (1.0, 3.0)]
    for f_ in made + made[::-1]:
        answers.check(f_, X)
    made[0].__globals__["G"] = 9.0
    for f_ in made:
        answers.check(f_, Y)
    answers.check(at(1.0, 1.0), Y)


def test_copies_of_closures(answers):
    cell = [1.0]
    f = lambda x: x * cell[0]  # noqa: E731 (it is copied)
    remade = cloudpickle.loads(cloudpickle.dumps(f))
    answers.check(f, X)
    answers.check(remade, X)
    cell[0] = 4.0
    answers.check(remade, Y)
    answers.check(f, Y)
    answers.check(cloudpickle.loads(cloudpickle.dumps(f)), X)
    answers.check(copy.deepcopy(f), X)
    answers.check(remade, Z)


def test_copies_of_callable_objects(answers):
    first = HasNumber(1.0)
    second = copy.copy(first)
    third = pickle.loads(pickle.dumps(first))
    fourth = copy.deepcopy(functools.partial(first))
    for f in (first, second, third, fourth):
        answers.check(f, X)
    first.k = 2.0
    for f in (second, third, fourth, first):
        answers.check(f, Y)
    third.k = 3.0
    for f in (fourth, third, second, first, copy.copy(third)):
        answers.check(f, Z)
    answers.check(copy.copy(third), X)


class HasNumber:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return x * self.k


def test_partials_with_other_parts(answers):
    def f(k, x, *, by=1.0):
        return x * number_of(k) * number_of(by)

    parts = (1.0, 1, True, 2.0, -0.0, 0.0)
    partials = [functools.partial(f, k) for k in parts]
    partials += [functools.partial(f, 1.0, by=by) for by in (1.0, 2.0, 3)]
    partials += [functools.partial(functools.partial(f, by=2.0), 5.0, by=by) for by in (1.0, 2.0)]
    for p in partials + partials[::-1]:
        answers.check(p, X)


def _set_arguments(p: Any, k: float) -> None:
    p.__setstate__((p.func, (), {"k": k}, None))


def _set_keyword(p: Any, k: float) -> None:
    p.keywords["k"] = k


@pytest.mark.parametrize("change", [_set_arguments, _set_keyword])
def test_a_partial_changed_in_place(change, answers):
    def f(x, k):
        return x * k

    p = functools.partial(f, k=1.0)
    answers.check(p, X)
    answers.check(functools.partial(f, k=1.0), X)
    change(p, 3.0)
    answers.check(p, X)
    answers.check(functools.partial(f, k=1.0), X)
    answers.check(functools.partial(f, k=3.0), X)
    answers.check(p, Y)
    answers.check(functools.partial(f, k=1.0), Y)
    change(p, 1.0)
    answers.check(functools.partial(f, k=3.0), Y)
    answers.check(functools.partial(f, k=3.0), Z)
    answers.check(p, Z)


@pytest.mark.parametrize("route", ARGUMENT_ROUTES, ids=lambda route: route.__name__)
def test_a_method_of_a_module_over_fresh_closures(route):
    answers = Answers(route)

    def make(k):
        return lambda self, x: x * k * self.w

    module = Holder(ONE, None)
    for k in (1.0, 2.0, 3.0):
        answers.check(types.MethodType(make(k), module), X)


@pytest.mark.parametrize("wrap", [vernal.filter_jit, jax.jit])
def test_methods_of_modules_that_differ_in_structure(wrap):
    step = wrap(lambda model, x: model(x))
    for k in (1.0, 2.0, 3.0, 1.0):
        f = functools.partial(lambda k, x: x * k, k)
        assert step(Holder(ONE, f), X)[0] == k
        assert vernal.filter_jit(Holder(ONE, f).__call__)(X)[0] == k
        assert vernal.filter_jit(lambda f, x: f(x))(Holder(ONE, f).__call__, X)[0] == k


def test_a_result_is_the_function_of_this_call():
    def make(k):
        return lambda: k

    for swap in (
        vernal.filter_jit(lambda f, x: (x, {"f": f})),
        vernal.filter_jit(lambda f, x: (x, Holder(x, f))),
    ):
        for k in (1.0, 2.0):
            f = make(k)
            for x in (X, X, Y):
                out = swap(f, x)[1]
                got = out["f"] if isinstance(out, dict) else out.f
                assert got is f, f"the result holds a function that returns {got()}, not {k}"


def test_what_a_program_makes_while_it_is_traced_is_its_own():
    step = vernal.filter_jit(lambda k, x: (lambda y: y * k.value, x))

    class Value:
        def __init__(self, value):
            self.value = value

    first, second = Value(1.0), Value(2.0)
    (f, _), (g, _) = step(first, X), step(second, X)
    assert (f(1.0), g(1.0)) == (1.0, 2.0)
    second.value = 5.0
    assert (f(1.0), g(1.0)) == (1.0, 5.0), (
        "a function made in one program reads the state of another"
    )
    assert jnp.allclose(step(first, Y)[0](1.0), 1.0)
