"""`from_optax` takes Optax objects apart: equal results, and fresh objects do not compile again."""

import copy
import functools
import pickle

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from vernal import filter_jit
from vernal.optim import Optimizer, Schedule, from_optax

MODEL = {
    "w": jnp.linspace(-1.0, 1.0, 6).reshape(3, 2),
    "b": jnp.array([0.5, -0.5]),
}
LABELS = {"w": "a", "b": "b"}
MASK = {"w": True, "b": False}


def loss(model):
    return jnp.sum(jnp.cosh(model["w"] - 0.3)) + jnp.sum((model["b"] - 1.0) ** 2)


def own(rate):
    """A transformation of a user: plain closures, a list, a default."""
    rates = [rate, 0.5]

    def update(updates, state, params=None, offset=0.25):
        scaled = jax.tree.map(lambda u: -rates[0] * u * (1.0 + offset) / rates[1], updates)
        return scaled, state + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


# For each kind of transformation: how it is made of a learning rate, and its settings.
OBJECTS = {
    "adam": (optax.adam, "eps eps_root step_size"),
    "adamw": (
        lambda r: optax.adamw(r, weight_decay=0.1, b2=0.99999),
        "eps eps_root step_size weight_decay",
    ),
    "adamw of no decay": (lambda r: optax.adamw(r, weight_decay=0.0), "eps eps_root step_size"),
    "sgd": (lambda r: optax.sgd(r, momentum=0.3, nesterov=True), "step_size"),
    "chain": (
        lambda r: optax.chain(optax.clip_by_global_norm(0.7), optax.adam(r), optax.scale(0.5)),
        "eps eps_root max_norm step_size_1 step_size_2",
    ),
    "masked": (
        lambda r: optax.masked(optax.adamw(r, mask=MASK), MASK),
        "eps eps_root step_size weight_decay",
    ),
    "multi_transform": (
        lambda r: optax.multi_transform({"a": optax.adam(r), "b": optax.sgd(r)}, LABELS),
        "eps eps_root step_size_1 step_size_2",
    ),
    "labels by a function": (
        lambda r: optax.multi_transform({"a": optax.adam(r), "b": optax.sm3(r)}, lambda p: LABELS),
        "eps_1 eps_2 eps_root step_size_1 step_size_2",
    ),
    "MultiSteps": (lambda r: optax.MultiSteps(optax.adam(r), 2), "eps eps_root step_size"),
    "schedule": (
        lambda r: optax.adam(optax.warmup_cosine_decay_schedule(0.1, r, 10, 900, 1e-4)),
        "alpha end_value eps eps_root exponent init_value_1 init_value_2",
    ),
    "piecewise": (
        lambda r: optax.sgd(optax.piecewise_constant_schedule(r, {30: 0.5, 90: 0.3})),
        "boundaries_and_scales_30 boundaries_and_scales_90 init_value",
    ),
    "our schedule": (
        lambda r: optax.sgd(Schedule(optax.exponential_decay, r, 50, 0.7)),
        "decay_rate init_value",
    ),
    "lambda": (lambda r: optax.sgd(lambda count: r / (1.0 + count)), "r"),
    "partial": (
        lambda r: optax.sgd(functools.partial(lambda rate, n: rate / (1.0 + n), r)),
        "learning_rate_0",
    ),
    "inject_hyperparams": (
        lambda r: optax.inject_hyperparams(optax.adam)(r),
        "eps eps_root learning_rate",
    ),
    "sm3": (optax.sm3, "eps step_size"),
    "noisy_sgd": (lambda r: optax.noisy_sgd(r, key=jax.random.key(3)), "eta gamma key step_size"),
    "apply_if_finite": (lambda r: optax.apply_if_finite(optax.sgd(r), 3), "step_size"),
    "schedule_free": (
        lambda r: optax.contrib.schedule_free_sgd(r, b1=0.9),
        "learning_rate step_size weight_lr_power",
    ),
    "own": (own, "offset rates_0 rates_1"),
}


def thousand(update, init, model, steps=1000):
    """The model after many steps, in one program."""

    def step(carry, _):
        model, state = carry
        return update(model, jax.grad(loss)(model), state), None

    return jax.jit(lambda model: jax.lax.scan(step, (model, init(model)), None, steps)[0][0])(model)


def close(a, b, tol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_thousand_steps_equal_those_of_optax(name):
    raw = OBJECTS[name][0](0.05)
    opt = from_optax(raw)

    def update(model, grads, state):
        updates, state = raw.update(grads, state, model)
        return optax.apply_updates(model, updates), state

    with jax.numpy_dtype_promotion("standard"):
        expected = thousand(update, raw.init, MODEL)
    close(thousand(opt.update, opt.init, MODEL), expected)


@pytest.mark.parametrize("name", OBJECTS)
def test_fresh_objects_and_other_numbers_run_the_same_program(name):
    make, settings = OBJECTS[name]

    @filter_jit
    def step(opt, model, state):
        return opt.update(model, jax.grad(loss)(model), state)

    opt = from_optax(make(0.05))
    assert " ".join(sorted(opt.settings)) == settings
    state = opt.init(MODEL)
    for rate in (0.05, 0.05, 0.05, 0.05, 0.02, 0.7, 1.0, jnp.asarray(0.04)):
        step(from_optax(make(rate)), MODEL, state)
    assert step.trace_count == 1
    assert copy.deepcopy(opt) == opt and jax.tree.structure(
        copy.deepcopy(opt)
    ) == jax.tree.structure(opt)
    other = from_optax(make(0.02))
    model, _ = step(other, MODEL, other.init(MODEL))
    raw = make(0.02)
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = raw.update(jax.grad(loss)(MODEL), raw.init(MODEL), MODEL)
        close(model, optax.apply_updates(MODEL, updates))


def test_the_line_search_of_lbfgs_is_taken_apart():
    @filter_jit
    def step(opt, model, state):
        value, grads = jax.value_and_grad(loss)(model)
        return opt.update(model, grads, state, value=value, grad=grads, value_fn=loss)

    model = MODEL
    opt = from_optax(optax.lbfgs(memory_size=3))
    state = opt.init(model)
    for _ in range(8):
        model, state = step(from_optax(optax.lbfgs(memory_size=3)), model, state)
    assert step.trace_count == 1 and float(loss(model)) < 6.0001


def counter(opts):
    """How often a step is traced for these."""

    @jax.jit
    def step(opt, model, state):
        return opt.update(model, model, state)[0]

    results = [step(opt, MODEL, opt.init(MODEL)) for opt in opts]
    return step._cache_size(), results


def test_numbers_close_to_one_keep_their_digits():
    opt = from_optax(optax.adam(0.1, b1=0.3, b2=0.99999))
    assert dict(opt.structure) == {"b1": 0.3, "b2": 0.99999}
    assert counter([opt, opt.replace(b2=0.9999), opt.replace(b2=0.9999)])[0] == 2
    assert "b2" in opt.replace(b2=jnp.asarray(0.999)).settings

    def average(share):
        return optax.stateless(lambda u, p: jax.tree.map(lambda x: (1 - share) * x, u))

    assert dict(from_optax(average(0.99)).structure) == {"share": 0.99}
    assert sorted(from_optax(average(0.3)).settings) == ["share"]


def test_numbers_at_which_a_transformation_looks_are_structure():
    def looks(limit, scale):
        def update(updates, state, params=None):
            if limit > 0.25:
                updates = jax.tree.map(lambda u: scale * u, updates)
            return updates, state

        return optax.GradientTransformation(optax.identity().init, update)

    opt = from_optax(optax.masked(looks(0.5, 2.0), MASK))
    assert dict(opt.structure) == {"limit": 0.5} and sorted(opt.settings) == ["scale"]
    made = [
        from_optax(looks(limit, scale)) for limit, scale in [(0.5, 2.0), (0.5, 3.0), (0.1, 3.0)]
    ]
    traces, results = counter([*made, from_optax(looks(jnp.asarray(0.1), 4.0))])
    assert traces == 3
    for model, factor in zip(results, (3.0, 4.0, 2.0, 2.0), strict=True):
        close(model, jax.tree.map(lambda x, factor=factor: factor * x, MODEL))


def with_rest(rest, scale=2.0):
    return optax.stateless(lambda u, p: jax.tree.map(lambda x: scale * x + len(str(rest)), u))


class ByIdentity:
    def __str__(self):
        return "four"


def test_what_cannot_be_compared_by_value_is_compiled_anew():
    assert counter([from_optax(with_rest(ByIdentity())) for _ in range(2)])[0] == 2
    assert counter([from_optax(with_rest({"a", "b"})) for _ in range(2)])[0] == 1
    assert counter([from_optax(with_rest({"a", n})) for n in ("b", "cc")])[0] == 2
    assert counter([from_optax(with_rest(n)) for n in (1, 1.5, True, "1", 1)])[0] == 4
    assert counter([from_optax(with_rest(np.arange(n))) for n in (2, 2, 3)])[0] == 2


@pytest.mark.parametrize("make", [lambda: [1], lambda: {1}, lambda: {1: 2}, lambda: np.arange(1)])
def test_what_was_captured_may_change_afterwards(make):
    rest, longer = make(), "123456789"

    def change():
        if isinstance(rest, list):
            rest[0] = longer
        elif isinstance(rest, set):
            rest.add(longer)
        elif isinstance(rest, dict):
            rest[1] = longer
        else:
            rest[0] = 123456789

    before = from_optax(with_rest(rest))
    _, (expected,) = counter([before])
    change()
    traces, results = counter([before, from_optax(with_rest(make())), from_optax(with_rest(rest))])
    assert traces == 2
    close(results[:2], [expected, expected])
    assert float(results[2]["b"][0]) > float(expected["b"][0])


def test_a_variable_that_is_assigned_later_does_not_matter():
    shift = 1

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x + shift, updates), state

    raw = optax.GradientTransformation(optax.identity().init, update)
    first = from_optax(raw)
    shift = 2
    second = from_optax(raw)
    traces, (a, b) = counter([first, second])
    assert traces == 2
    close(jax.tree.map(jnp.subtract, b, a), jax.tree.map(jnp.ones_like, a))


def test_it_is_an_ordinary_optimizer():
    opt = from_optax(optax.chain(optax.clip(0.3), optax.sgd(0.5)))
    assert isinstance(opt, Optimizer) and opt == from_optax(
        optax.chain(optax.clip(0.3), optax.sgd(0.5))
    )
    faster = opt.replace(step_size=-1)
    assert jax.tree.structure(faster) == jax.tree.structure(opt) and faster != opt
    assert "<chain of Optax>" in repr(opt) and "max_delta" in repr(opt)
    with pytest.raises(TypeError, match=r"`chain` does not take these settings(.|\n)*step_size"):
        opt.replace(learning_rate=1.0)
    nested = Optimizer(optax.chain, opt, Optimizer(optax.scale, 2.0))
    new, _ = nested.update(MODEL, jax.tree.map(jnp.ones_like, MODEL), nested.init(MODEL))
    close(new, jax.tree.map(lambda x: x - 0.3, MODEL))
    rates = jnp.asarray([-0.1, -0.2])
    swept = jax.vmap(lambda r: opt.replace(step_size=r).update(MODEL, MODEL, opt.init(MODEL))[0])(
        rates
    )
    assert swept["b"].shape == (2, 2)


def test_it_is_as_picklable_as_the_object_of_optax():
    opt = from_optax(optax.adamw(0.1))
    with pytest.raises(AttributeError, match="local object"):
        pickle.dumps(opt)
    again = cloudpickle.loads(cloudpickle.dumps(opt))
    traces, (a, b) = counter([opt, again])
    close(a, b)
    assert sorted(again.settings) == sorted(opt.settings) and traces <= 2


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (optax.adam, "call it first"),
        (Optimizer(optax.sgd, 0.1), "use it as it is"),
        ({"update": 1}, "an optimiser of Optax"),
    ],
)
def test_something_else_is_refused(given, instead):
    with pytest.raises(TypeError, match=rf"takes a transformation of Optax(.|\n)*{instead}"):
        from_optax(given)


def test_names_are_names_whatever_the_keys_are():
    def make(rates):
        return optax.stateless(lambda u, p: jax.tree.map(lambda x: sum(rates.values()) * x, u))

    opt = from_optax(make({"a b": 0.1, "if": 0.2, 3: 0.3, "x": 0.4, "x_1": 0.5}))
    assert sorted(opt.settings) == ["a_b", "rates_3", "value_if", "x", "x_1"]
    two = from_optax(optax.chain(make({"x": 0.1, "x_1": 0.4}), make({"x": 0.2})))
    assert sorted(two.settings) == ["x_1", "x_2", "x_3"]
