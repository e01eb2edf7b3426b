"""Functions equal by value, seen from `filter_jit`: one program for functions that do the same, and
never the program of a function that does something else."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from vernal import Module, filter_jit

X = jnp.arange(3.0)


def scaled(by: Any):
    return lambda x: x * by


@dataclasses.dataclass(frozen=True)
class Power:
    """A callable dataclass, with a function among its fields."""

    inner: Callable[..., Any]
    times: int

    def __call__(self, x):
        for _ in range(self.times):
            x = self.inner(x)
        return x


class Named:
    """A callable that compares by its name."""

    def __init__(self, name: str):
        self.name = name

    def __eq__(self, other: Any) -> bool:
        return type(other) is Named and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __call__(self, x):
        return getattr(jnp, self.name)(x)


class Layer(Module):
    w: jax.Array
    act: Callable[..., Any]

    def __call__(self, x):
        return self.act(self.w * x)


def custom():
    f = jax.custom_jvp(lambda x: x * 2.0)
    f.defjvp(lambda p, t: (p[0] * 2.0, t[0] * 2.0))
    return f


FUNCTIONS = {
    "lambda": lambda: lambda x: x + 1.0,
    "closure": lambda: scaled(2.0),
    "nested": lambda: nested(scaled(2.0)),
    "partial": lambda: functools.partial(lambda by, x: x * by[0], [2.0]),
    "method": lambda: Power(scaled(2.0), 2).__call__,
    "dataclass": lambda: Power(scaled(2.0), 2),
    "own_rule": lambda: Named("sin"),
    "captured_own_rule": lambda: scaled_by_call(Named("sin")),
    "custom_jvp": custom,
    "jit": lambda: jax.jit(scaled(2.0)),
    "vmap": lambda: jax.vmap(scaled(2.0)),
    "grad": lambda: jax.vmap(jax.grad(scaled(2.0))),
    "checkpoint": lambda: jax.checkpoint(scaled(2.0)),
}


def nested(f: Any):
    def inner(x):
        return f(x)

    return lambda x: inner(x)


def scaled_by_call(f: Any):
    return lambda x: f(x) * 2.0


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_made_anew_share_a_program(make):
    step = filter_jit(lambda f, x: f(x))
    results = [step(make(), X) for _ in range(4)]
    assert step.trace_count == 1
    assert all((r == make()(X)).all() for r in results)


@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_made_anew_in_a_field_shares_the_program(make):
    step = filter_jit(lambda layer, x: layer(x))
    for _ in range(4):
        step(Layer(jnp.float32(2.0), make()), X)
    assert step.trace_count == 1


def schedules():
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, 1e-3, 5),
            optax.cosine_decay_schedule(1e-3, 10),
            optax.exponential_decay(1e-3, 10, 0.5),
        ],
        [5, 15],
    )


def labels():
    return {"a": "slow", "b": "fast"}


OPTIMISERS = {
    "adam": lambda: optax.adam(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
    "masked": lambda: optax.masked(optax.adamw(1e-3), {"a": True, "b": False}),
    "masked_by_function": lambda: optax.masked(
        optax.sgd(0.1), lambda p: jax.tree.map(lambda x: True, p)
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"slow": optax.adam(1e-3), "fast": optax.sgd(0.1)}, labels()
    ),
    "schedules": lambda: optax.adam(schedules()),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
}


@pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)
def test_optimisers_made_anew_share_a_program(make):
    @filter_jit
    def step(optimiser, params, state):
        updates, state = optimiser.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = {"a": X, "b": X}
    with jax.numpy_dtype_promotion("standard"):
        state = make().init(params)
        results = [step(make(), params, state)[0] for _ in range(4)]
    assert step.trace_count == 1
    assert all((a["a"] == results[0]["a"]).all() for a in results)


def test_optimisers_with_other_settings_are_compiled_again():
    @filter_jit
    def step(optimiser, params, state):
        return optimiser.update(params, state)[0]

    with jax.numpy_dtype_promotion("standard"):
        makers = [lambda: optax.sgd(0.1), lambda: optax.sgd(0.2), lambda: optax.sgd(schedules())]
        for make in makers * 2:
            want = make().update(X, make().init(X))[0]
            assert jnp.allclose(step(make(), X, make().init(X)), want)
    assert step.trace_count == 3


# --- never a wrong hit ---

SCALE = 1.0


def by_global(x):
    return x * SCALE


@pytest.mark.parametrize("held", [lambda f: f, lambda f: Layer(jnp.float32(1.0), f)], ids="fm")
def test_every_function_gets_its_own_result(held, monkeypatch):
    step = filter_jit(lambda f, x: f(x))
    numbers = [1, 1.0, True, 2.0, -0.0, 0.0, float("nan")]
    for by in [*numbers, *numbers]:
        for f in (scaled(by), functools.partial(lambda x, by: x * by, by=by), defaulted(by)):
            with jax.numpy_dtype_promotion("standard"):
                want, got = f(X), step(held(f), X)
            assert want.dtype == got.dtype
            assert jnp.array_equal(jnp.signbit(want), jnp.signbit(got))
            assert jnp.array_equal(want, got, equal_nan=True)
    assert step.trace_count == 3 * len(numbers)
    for value in (1.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "SCALE", value)
        assert (step(held(lambda x: by_global(x)), X) == X * value).all()


def defaulted(by: Any):
    return lambda x, y=by: x * y


def test_a_list_that_is_changed_in_place_changes_the_result():
    step = filter_jit(lambda f, x: f(x))
    by = [1.0]
    f = scaled_by_first(by)
    assert (step(f, X) == X).all()
    by[0] = 2.0
    assert (step(f, X) == 2 * X).all()
    assert (step(scaled_by_first(by), X) == 2 * X).all()
    assert (step(scaled_by_first([1.0]), X) == X).all()
    assert step.trace_count == 2


def scaled_by_first(by: list[float]):
    return lambda x: x * by[0]


@pytest.mark.parametrize(
    "hold",
    [lambda f: f, lambda f: Layer(1.0, f), lambda f: Layer(jnp.ones(()), f), jax.vmap],
    ids=["function", "static", "module", "vmap"],
)
def test_a_variable_that_a_loop_assigns_is_read_as_it_is_at_the_call(hold):
    step = filter_jit(lambda f, x: f(x))

    def run(x):
        for by in (1.0, 2.0, 1.0):
            f = hold(lambda x: x * by)  # noqa: B023 (the variable is to be shared)
            assert (step(f, x) == x * by).all()

    # Another shape is traced anew, by when the loop has assigned its variable again.
    for x in (X, X, jnp.ones(5)):
        run(x)


def test_a_variable_that_another_function_assigns_changes_the_result():
    step = filter_jit(lambda f, x: f(x))
    f, assign = assignable(1.0)
    step(Layer(jnp.float32(1.0), f), X)
    assert (step(f, X) == X).all()
    assign(2.0)
    assert (step(f, X) == 2 * X).all()
    for by in (1.0, 2.0):
        for x in (X, jnp.ones(5)):
            assert (step(assignable(by)[0], x) == by * x).all()
            assert (step(Layer(jnp.float32(1.0), assignable(by)[0]), x) == by * x).all()


def assignable(by: float):
    def f(x):
        return x * by

    def assign(new):
        nonlocal by
        by = new

    return f, assign


def test_an_optimiser_that_is_used_again_is_not_traced_again():
    step = filter_jit(lambda optimiser, g, state: optimiser.update(g, state))
    with jax.numpy_dtype_promotion("standard"):
        optimiser = optax.adam(schedules())
        state = optimiser.init(X)
        for _ in range(3):
            _, state = step(optimiser, X, state)
    assert step.trace_count == 1


def test_a_closure_over_a_tracer_can_be_an_argument_of_a_compiled_function():
    step = filter_jit(lambda f, x: f(x))
    run = jax.jit(lambda a, x: step(scaled(a), x))
    for a, x in [(2.0, X), (3.0, X), (2.0, jnp.ones(5))]:
        assert (run(a, x) == a * x).all()
    assert (jax.grad(lambda a: run(a, X).sum())(2.0) == X.sum()).all()


def test_a_trace_for_another_shape_sees_the_function_of_that_call():
    def first(factors):
        return lambda x: x * factors[0]

    step = filter_jit(lambda fn, x: fn(x))
    factors = [1.0]
    fn = first(factors)
    assert float(step(fn, jnp.ones(2))[0]) == 1.0
    factors[0] = 2.0
    assert float(step(first([1.0]), jnp.ones(3))[0]) == 1.0
    assert float(step(fn, jnp.ones(3))[0]) == 2.0


def test_a_module_keeps_its_own_function_when_the_one_it_equalled_has_changed():
    class Scale(Module):
        x: jax.Array
        fn: object

    def first(factors):
        return lambda x: x * factors[0]

    factors = [1.0]
    old = Scale(jnp.ones(2), first(factors))
    factors[0] = 2.0
    new = Scale(jnp.ones(2), first([1.0]))
    out = jax.tree.map(lambda x: x, new)
    assert float(out.fn(out.x)[0]) == 1.0
    assert float(jax.tree.map(lambda x: x, old).fn(jnp.ones(2))[0]) == 2.0
