"""`from_optax` keeps Optax objects whole: equal results, no settings, and no array is left inside."""

import copy
import functools

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from vernal import Module, filter_jit
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


# For each kind of transformation: how it is made of a learning rate.
OBJECTS = {
    "adam": optax.adam,
    "adamw": lambda r: optax.adamw(r, weight_decay=0.1, b2=0.99999),
    "sgd": lambda r: optax.sgd(r, momentum=0.3, nesterov=True),
    "chain": lambda r: optax.chain(optax.clip_by_global_norm(0.7), optax.adam(r), optax.scale(0.5)),
    "masked": lambda r: optax.masked(optax.adamw(r, mask=MASK), MASK),
    "multi_transform": lambda r: optax.multi_transform(
        {"a": optax.adam(r), "b": optax.sgd(r)}, LABELS
    ),
    "MultiSteps": lambda r: optax.MultiSteps(optax.adam(r), 2),
    "schedule": lambda r: optax.adam(
        optax.warmup_cosine_decay_schedule(0.1, float(r), 10, 900, 1e-4)
    ),
    "our schedule": lambda r: optax.sgd(Schedule(optax.linear_schedule, r, 0.1, 50)),
    "lambda": lambda r: optax.sgd(lambda count: r / (1.0 + count)),
    "partial": lambda r: optax.sgd(functools.partial(lambda rate, n: rate / (1.0 + n), r)),
    "inject_hyperparams": lambda r: optax.inject_hyperparams(optax.adam)(r),
    "sm3": optax.sm3,
    "noisy_sgd": lambda r: optax.noisy_sgd(r, key=jax.random.key(3)),
    "apply_if_finite": lambda r: optax.apply_if_finite(optax.sgd(r), 3),
    "schedule_free": lambda r: optax.contrib.schedule_free_sgd(r, b1=0.9),
    "own": own,
}


def some(update, init, model, steps=200):
    """The model after many steps, in one program."""

    def step(carry, _):
        model, state = carry
        return update(model, jax.grad(loss)(model), state), None

    return jax.jit(lambda model: jax.lax.scan(step, (model, init(model)), None, steps)[0][0])(model)


def close(a, b, tol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.sample(6)
def test_two_hundred_steps_equal_those_of_optax(name):
    raw = OBJECTS[name](0.05)
    opt = from_optax(raw)
    assert opt.settings == {} and opt.structure == ()

    def update(model, grads, state):
        updates, state = raw.update(grads, state, model)
        return optax.apply_updates(model, updates), state

    with jax.numpy_dtype_promotion("standard"):
        expected = some(update, raw.init, MODEL)
    close(some(opt.update, opt.init, MODEL), expected)


def stepper():
    @filter_jit
    def step(opt, model, state):
        return opt.update(model, jax.grad(loss)(model), state)[0]

    return step


@pytest.mark.parametrize("name", ["adam", "chain", "sgd", "masked", "MultiSteps"])
@pytest.mark.sample(6)
def test_an_array_in_an_object_is_a_leaf(name):
    """A constant of the compiled program would give the first rate's step to the others."""
    step = stepper()
    for rate in (0.05, 0.02, 0.7):
        opt = from_optax(OBJECTS[name](jnp.asarray(rate)))
        (number,) = {float(x) for x in jax.tree.leaves(opt)}
        assert abs(number) == pytest.approx(rate)
        raw = OBJECTS[name](rate)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = raw.update(jax.grad(loss)(MODEL), raw.init(MODEL), MODEL)
            close(step(opt, MODEL, opt.init(MODEL)), optax.apply_updates(MODEL, updates))
    # Its mask is a dictionary, which could change: each object is only itself.
    assert step.trace_count == (3 if name == "masked" else 1)


def test_an_array_in_a_transformation_that_is_a_setting_is_a_leaf_too():
    step = stepper()
    for rate in (0.5, 0.25):
        opt = Optimizer(optax.chain, Optimizer(optax.clip, 10.0), optax.sgd(jnp.asarray(rate)))
        assert len(jax.tree.leaves(opt)) == 2
        new = step(opt, MODEL, opt.init(MODEL))
        close(new, jax.tree.map(lambda p, g, r=rate: p - r * g, MODEL, jax.grad(loss)(MODEL)))
    assert step.trace_count == 1


@pytest.mark.parametrize("name", ["adam", "MultiSteps", "schedule", "lambda", "own"])
@pytest.mark.sample(3)
def test_numbers_are_structure_and_every_object_steps_by_its_own(name):
    step, make = stepper(), OBJECTS[name]
    opts = [from_optax(make(rate)) for rate in (0.05, 0.05, 0.02, 0.02)]
    for opt, rate in zip(opts, (0.05, 0.05, 0.02, 0.02), strict=True):
        raw = make(rate)
        with jax.numpy_dtype_promotion("standard"):
            updates, _ = raw.update(jax.grad(loss)(MODEL), raw.init(MODEL), MODEL)
            expected = optax.apply_updates(MODEL, updates)
        close(step(opt, MODEL, opt.init(MODEL)), expected)
        count = step.trace_count
        step(opt, MODEL, opt.init(MODEL))
        assert step.trace_count == count


def test_fresh_objects_of_optax_run_the_same_program():
    step = stepper()
    for _ in range(4):
        opt = from_optax(optax.adam(0.05))
        step(opt, MODEL, opt.init(MODEL))
    assert step.trace_count == 1


def test_what_optax_calls_its_variables_is_no_setting():
    opt = from_optax(optax.chain(optax.clip(0.3), optax.sgd(0.5)))
    for name in ("step_size", "max_delta", "learning_rate"):
        with pytest.raises(
            TypeError, match=r"does not take these settings(.|\n)*Optimizer\(optax.adam, learning"
        ):
            opt.replace(**{name: -0.2})
    nested = Optimizer(optax.chain, opt, Optimizer(optax.scale, 2.0))
    with pytest.raises(TypeError, match="no setting is called 'max_delta'"):
        nested.replace(max_delta=1.0)
    assert float(nested.replace(step_size=3.0).settings["args"][1].settings["step_size"]) == 3.0
    new, _ = nested.update(MODEL, jax.tree.map(jnp.ones_like, MODEL), nested.init(MODEL))
    close(new, jax.tree.map(lambda x: x - 0.3, MODEL))


def test_the_state_of_injected_hyperparameters_is_left_to_its_owner():
    opt = from_optax(optax.inject_hyperparams(optax.sgd)(0.5))
    state = opt.init(MODEL)
    state.hyperparams["learning_rate"] = jnp.asarray(0.25)
    new, _ = opt.update(MODEL, jax.tree.map(jnp.ones_like, MODEL), state)
    close(new, jax.tree.map(lambda x: x - 0.25, MODEL))


def test_it_is_an_ordinary_optimizer_and_as_picklable_as_the_object_of_optax():
    opt = from_optax(optax.adamw(0.1))
    assert isinstance(opt, Optimizer) and "Optimizer(" in repr(opt)
    step = stepper()
    expected = step(opt, MODEL, opt.init(MODEL))
    for again in (copy.deepcopy(opt), cloudpickle.loads(cloudpickle.dumps(opt))):
        close(step(again, MODEL, again.init(MODEL)), expected)


def test_a_module_with_the_two_methods_is_a_transformation():
    class Descent(Module):
        rate: jax.Array

        def init(self, params):
            return ()

        def update(self, updates, state, params=None):
            return jax.tree.map(lambda u: -self.rate * u, updates), state

    opt = from_optax(Descent(jnp.asarray(0.5)))
    assert len(jax.tree.leaves(opt)) == 1
    new, _ = opt.update(MODEL, MODEL, opt.init(MODEL))
    close(new, jax.tree.map(lambda x: 0.5 * x, MODEL))


@pytest.mark.parametrize(
    "given", [optax.adam, Optimizer(optax.sgd, 0.1), {"update": 1}], ids=["factory", "ours", "dict"]
)
def test_something_else_is_refused(given):
    with pytest.raises(TypeError, match=r"takes an Optax transformation(.|\n)*call a factory"):
        from_optax(given)
