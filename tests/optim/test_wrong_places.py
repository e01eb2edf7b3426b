"""A model, a factory or a setting in the place of another is refused when the optimiser is made."""

import jax
import jax.numpy as jnp
import optax
import pytest

import vernal
from vernal import Optimizer, nn
from vernal.optim._refusals import refuse_a_model_first


class Rate(vernal.Module):
    """A schedule as a module, with an array that is learnt."""

    peak: jax.Array

    def __call__(self, count):
        return self.peak / (1 + count)


MODEL = vernal.nn.Linear(3, 2, key=jax.random.key(0))


@pytest.mark.parametrize("after", [[optax.adam], [optax.sgd, 1e-3], [optax.adam(1e-3)]])
def test_a_model_in_the_place_of_the_factory_is_refused(after):
    name = "sgd" if after[0] is optax.sgd else "adam"
    match = rf"(?s)the factory must come first.*got: {{}}.*instead: .*{name}, \.\.\.\).*init"
    with pytest.raises(TypeError, match=match.format("Linear")):
        vernal.Optimizer(MODEL, *after)
    for model in ({"w": jnp.ones(3)}, 1e-3):
        with pytest.raises(TypeError, match=match.format("")):
            refuse_a_model_first("Optimizer", model, tuple(after))


class Weights(vernal.Module):
    """A model that cannot be called."""

    w: jax.Array


@pytest.mark.parametrize("rate", [Weights(jnp.ones(3)), {"w": jnp.ones(3)}, [0.1]])
def test_a_model_in_the_place_of_the_learning_rate_is_refused(rate):
    with pytest.raises(
        TypeError,
        match=r"(?s)must be a number or a schedule.*where: .*adam.*instead: .*init\(model",
    ):
        vernal.Optimizer(optax.adam, rate)


def test_a_model_that_can_be_called_is_refused_by_the_step():
    opt = vernal.Optimizer(optax.adam, MODEL)
    with pytest.raises(ValueError, match="`Linear` was given an input of the wrong shape") as info:
        opt.update(MODEL, MODEL, opt.init(MODEL))
    assert "Raised in model.settings['learning_rate'] (Optimizer > Linear)" in info.value.__notes__


class Gated(vernal.Module):
    """A schedule for one number at a time, as of a sweep."""

    peak: jax.Array

    def __call__(self, count):
        return jax.lax.cond(self.peak > 0, lambda: self.peak / (1 + count), lambda: 0.0)


def test_a_sweep_over_a_schedule_is_no_model():
    opt = vernal.Optimizer(optax.sgd, Gated(jnp.array([0.5, 0.0])))
    step = jax.vmap(lambda opt, x: opt.update(x, jnp.ones(2), opt.init(x))[0], (0, None))
    assert jnp.allclose(step(opt, jnp.ones(2)), jnp.array([[0.5, 0.5], [1.0, 1.0]]))


def test_a_schedule_may_be_a_module_of_the_user():
    opt = vernal.Optimizer(optax.sgd, Rate(jnp.array(0.5)))
    model, state = jnp.ones(2), opt.init(jnp.ones(2))
    model, state = opt.update(model, jnp.ones(2), state)
    assert jnp.allclose(model, 0.5)
    assert jnp.allclose(opt.update(model, jnp.ones(2), state)[0], 0.25)


def test_a_factory_without_its_settings_is_refused():
    match = (
        r"(?s)a factory was given without its settings.*Optimizer\(chain.*Optimizer\(clip, \.\.\.\)"
    )
    with pytest.raises(TypeError, match=match):
        vernal.Optimizer(optax.chain, optax.clip, vernal.Optimizer(optax.sgd, 0.1))
    with pytest.raises(TypeError, match="a factory was given without its settings"):
        vernal.Optimizer(optax.multi_transform, {"a": optax.sgd}, {"a": "a"})

    def mine(inner, rate):
        return optax.chain(optax.clip(1.0), inner(rate))

    opt = vernal.Optimizer(mine, optax.sgd, 0.1)
    model, _ = opt.update(jnp.ones(2), jnp.full(2, 9.0), opt.init(jnp.ones(2)))
    assert jnp.allclose(model, 0.9)


@pytest.mark.parametrize("order", ["grads state model", "model state grads"])
@pytest.mark.parametrize("make", [optax.adam, optax.sgd])
@pytest.mark.sample(3)
def test_the_order_of_optax_is_refused(order, make):
    model = vernal.nn.Sequential([MODEL, vernal.nn.BatchNorm(2)])
    opt = vernal.Optimizer(make, 0.1)
    grads = vernal.filter_grad(lambda model: vernal.nn.apply(model, jnp.ones((4, 3)))[0].sum())(
        model
    )
    values = {"model": model, "grads": grads, "state": opt.init(model)}
    args = [values[name] for name in order.split()]
    match = r"(?s)state is in the place of the gradients.*optimiser\.update\(model, grads, state\)"
    with pytest.raises(ValueError, match=match):
        opt.update(*args)
    with pytest.raises(ValueError, match=match):
        vernal.filter_jit(opt.update)(*args)
    with pytest.raises(ValueError, match="do not have the structure of the model"):
        opt.update(model, {"w": jnp.ones(3)}, values["state"])


def test_an_array_in_the_place_of_a_number_is_refused_by_the_step():
    """It would be a rate for each column of a weight."""
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    rates = jnp.array([0.1, 0.2, 0.3, 0.4])
    nested = vernal.Optimizer(optax.adam, vernal.optim.Schedule(optax.constant_schedule, rates))
    for many, name in [
        (vernal.Optimizer(optax.sgd, rates), "sgd, learning_rate"),
        (vernal.Optimizer(optax.chain, vernal.Optimizer(optax.sgd, rates)), "sgd, learning_rate"),
        (nested, "constant_schedule, value"),
    ]:
        with pytest.raises(ValueError, match=rf"(?s)one number where a step.*{name}=.*f32\[4\]"):
            many.update(params, params, many.init(params))
    many = vernal.Optimizer(optax.sgd, rates)

    def step(optimizer):
        return optimizer.update(params, params, optimizer.init(params))[0]["b"][0]

    assert jnp.allclose(jax.vmap(step)(many), 1 - rates)


def test_assigning_a_setting_says_what_to_write():
    optimizer = vernal.Optimizer(optax.sgd, 0.1)
    with pytest.raises(
        AttributeError, match=r"instead: new = old\.replace\(learning_rate=\.\.\.\)"
    ):
        optimizer.learning_rate = 0.2
    with pytest.raises(TypeError, match="no setting is called 'learning_rte'"):
        optimizer.replace(learning_rte=0.2)


def test_a_mask_that_is_an_array_is_told_to_be_a_bool():
    mask = {"w": jnp.array(True)}
    with pytest.raises(TypeError, match=r"vernal\.Static\(True\) for `mask\['w'\]`"):
        vernal.Optimizer(optax.adamw, 1e-2, weight_decay=0.1, mask=mask).init({"w": jnp.ones(2)})


def mlp(depth):
    return nn.MLP(4, 4, 8, depth=depth, key=jax.random.key(0))


OTHER_TREES = {
    "mask": lambda tree: Optimizer(optax.adamw, 0.1, mask=tree),
    "masked": lambda tree: Optimizer(optax.masked, Optimizer(optax.adam, 0.1), tree),
    "nested": lambda tree: Optimizer(
        optax.chain, Optimizer(optax.clip, 1.0), Optimizer(optax.adamw, 0.1, mask=tree)
    ),
    "labels": lambda tree: Optimizer(
        optax.multi_transform,
        {True: Optimizer(optax.sgd, 0.1), False: Optimizer(optax.adam, 0.1)},
        tree,
    ),
}


@pytest.mark.parametrize("name", OTHER_TREES)
def test_a_mask_or_labels_of_another_model_are_told_by_path(name):
    opt = OTHER_TREES[name](vernal.trainable(mlp(2), "**.weight"))
    setting = "param_labels" if name == "labels" else "mask"
    wrong = (
        rf"masks or labels does not have the structure(.|\n)*setting `{setting}`(.|\n)*layers\[2\]"
    )
    with pytest.raises(ValueError, match=wrong):
        opt.init(mlp(1))
    opt.init(mlp(2))


def test_a_mask_that_was_made_before_freezing_is_told_by_path():
    model = mlp(1)
    opt = Optimizer(optax.adamw, 0.1, mask=vernal.trainable(model, "**.weight"))
    frozen = vernal.freeze(model, "layers[0].**")
    wrong = r"does not have the structure(.|\n)*layers\[0\].weight(.|\n)*after `freeze`"
    with pytest.raises(ValueError, match=wrong):
        opt.init(frozen)
    with pytest.raises(ValueError, match=wrong):
        opt.update(frozen, frozen, opt.init(model))
