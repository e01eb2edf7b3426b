"""Optimisers around a user's functions: a schedule or a mask is never taken from another one."""

import functools
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import vernal
from tests.soundness._answers import ONE, Holder, StaticHolder
from tests.soundness._kinds import KINDS, Kind

MODEL = {"w": jnp.ones(2)}
GRADS = {"w": jnp.ones(2)}
OTHER_MODEL, OTHER_GRADS = {"w": jnp.ones(3)}, {"w": jnp.ones(3)}


def _stepped(opt: Any, model: Any, grads: Any) -> Any:
    return opt.update(model, grads, opt.init(model))[0]


def _updated(opt: Any, model: Any, grads: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = opt.update(grads, opt.init(model), model)
        return optax.apply_updates(model, updates)


def _optimizer() -> Callable[..., Any]:
    return lambda f, *given: _stepped(vernal.Optimizer(optax.sgd, f), *given)


def _optimizer_copy() -> Callable[..., Any]:
    kept = []

    def call(f, *given):
        kept.append(vernal.Optimizer(optax.sgd, f))
        kept.append(jax.tree.map(lambda leaf: leaf, kept[-1]))
        return _stepped(kept[-1], *given)

    return call


def _optimizer_in(wrap: Any) -> Callable[[], Callable[..., Any]]:
    def make():
        step = wrap(_stepped)
        return lambda f, *given: step(vernal.Optimizer(optax.sgd, f), *given)

    return make


def _nested_optimizer() -> Callable[..., Any]:
    step = vernal.filter_jit(_stepped)
    return lambda f, *given: step(
        vernal.Optimizer(
            optax.chain, vernal.Optimizer(optax.clip, 10.0), vernal.Optimizer(optax.sgd, f)
        ),
        *given,
    )


def _optax_argument() -> Callable[..., Any]:
    step = vernal.filter_jit(_updated)
    return lambda f, *given: step(optax.sgd(f), *given)


def _optax_chain_argument() -> Callable[..., Any]:
    step = vernal.filter_jit(_updated)
    return lambda f, *given: step(optax.chain(optax.clip(10.0), optax.sgd(f)), *given)


def _optax_field(cls: Any) -> Callable[[], Callable[..., Any]]:
    def make():
        step = jax.jit(lambda holder, *given: _updated(holder.f, *given))
        return lambda f, *given: step(cls(ONE, optax.sgd(f)), *given)

    return make


ROUTES = {
    "Optimizer": _optimizer,
    "copy of an Optimizer": _optimizer_copy,
    "Optimizer in filter_jit": _optimizer_in(vernal.filter_jit),
    "Optimizer in jax.jit": _optimizer_in(jax.jit),
    "nested Optimizer": _nested_optimizer,
    "optax": _optax_argument,
    "optax.chain": _optax_chain_argument,
    "optax in a field": _optax_field(Holder),
    "optax in a static field": _optax_field(StaticHolder),
}
# A schedule of each kind: what the kind does with x = 1.
CHOSEN = ("dataclass", "namespace", "nonlocal", "list", "bound method", "partial of a bound method",
          "default argument", "callable object", "wraps of a library function", "namespace called optax")  # fmt: skip


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.sample(12)
def test_a_schedule_belongs_to_its_optimiser(name, route):
    kind: Kind = KINDS[name]
    call = route()

    def schedule(state):
        f = kind.make(state)
        if name in ("bound method", "partial of a bound method", "callable object"):
            return f if name == "callable object" else functools.partial(_at_one, f)
        return lambda count: f(1.0)

    def rate_of(state):
        return float(kind.make(state)(1.0))

    def check(f, right, model=MODEL, grads=GRADS):
        got = 1.0 - float(call(f, model, grads)["w"][0])
        assert abs(got - right) < 1e-6, f"the schedule says {right}, and the step was {got}"

    if name == "callable object":
        schedule = lambda state: _ConstantOf(kind.make(state))  # noqa: E731 (the other of two)
    a, b = kind.new(), kind.new()
    f, g = schedule(a), schedule(b)
    check(f, 1.0)
    check(g, 1.0)
    kind.change(a, 5.0)
    check(g, 1.0)
    check(schedule(a), rate_of(a))
    check(g, 1.0, OTHER_MODEL, OTHER_GRADS)
    check(f, rate_of(a), OTHER_MODEL, OTHER_GRADS)
    check(schedule(kind.new()), 1.0, OTHER_MODEL, OTHER_GRADS)
    kind.change(a, 1.0)
    check(schedule(a), 1.0)


def _at_one(f, count):
    return f(1.0)


class _ConstantOf:
    def __init__(self, f):
        self.f = f

    def __call__(self, count):
        return self.f(1.0)


def test_a_mask_belongs_to_its_optimiser():
    step = vernal.filter_jit(_updated)
    field = jax.jit(lambda holder, *given: _updated(holder.f, *given))
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}

    def of(held):
        def mask(params):
            return {name: name == held.name for name in params}

        return optax.masked(optax.scale(3.0), mask)

    one, two = types.SimpleNamespace(name="a"), types.SimpleNamespace(name="a")
    first, second = of(one), of(two)
    for call in (step, lambda opt, *given: field(Holder(ONE, opt), *given)):
        one.name = two.name = "a"
        assert _sizes(call(first, model, model)) == (4.0, 2.0)
        assert _sizes(call(second, model, model)) == (4.0, 2.0)
        one.name = "b"
        assert _sizes(call(second, model, model)) == (4.0, 2.0), (
            "the mask of another optimiser was used"
        )
        assert _sizes(call(of(one), model, model)) == (2.0, 4.0), (
            "a fresh mask got the program of an old one"
        )
        assert _sizes(call(of(two), model, model)) == (4.0, 2.0)


def _sizes(model: Any) -> tuple[float, float]:
    return float(model["a"][0]), float(model["b"][0])


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_a_schedule_that_counts_its_calls_counts_its_own(route):
    call = route()

    def make():
        calls = 0

        def schedule(count):
            nonlocal calls
            calls += 1
            return 1.0

        return schedule, lambda: calls

    (f, of_f), (g, of_g) = make(), make()
    call(f, MODEL, GRADS)
    before = of_f()
    assert before > 0 and of_g() == 0, "a call was charged to another schedule"
    call(g, MODEL, GRADS)
    assert of_g() > 0, "the second schedule has never been called: another one answered for it"
    assert of_f() == before, "a call of the second schedule was charged to the first"


def test_the_optimisers_of_the_review():
    """`Optimizer(optax.sgd, lambda count: c.scale)` stepped by -100 instead of -1."""

    class Config:
        scale = 1.0

    def make(c):
        return vernal.Optimizer(optax.sgd, lambda count: c.scale)

    c1, c2 = Config(), Config()
    first, second = make(c1), make(c2)
    second = jax.tree.map(lambda leaf: leaf, second)
    c1.scale = 100.0
    moved = _stepped(second, MODEL, GRADS)["w"][0] - 1.0
    assert moved == -1.0, f"the second optimiser moved by {moved}: by the schedule of the first"
    assert _stepped(first, MODEL, GRADS)["w"][0] == -99.0
