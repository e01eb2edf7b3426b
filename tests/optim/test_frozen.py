"""An optimiser has no state for what is frozen, and leaves it as it is."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from vernal import Module, Optimizer, filter_grad, filter_jit, freeze, partition, trainable
from vernal.nn import MLP
from vernal.optim import from_optax


def make():
    return MLP(4, 3, 8, 2, key=jax.random.key(0))


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def data():
    return jax.random.normal(jax.random.key(1), (16, 4))


def size_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("differentiate", [filter_grad, jax.grad])
def test_a_hundred_steps_with_decay_leave_what_is_frozen_bit_identical(differentiate):
    model = freeze(make(), "layers.0")
    opt = Optimizer(optax.adamw, 1e-2, weight_decay=0.1)
    x = data()

    @filter_jit
    def step(model, state):
        return opt.update(model, differentiate(loss)(model, x), state)

    new, state = model, opt.init(model)
    for _ in range(100):
        new, state = step(new, state)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(
            getattr(new.layers[0], name), getattr(model.layers[0], name), strict=True
        )
        assert not np.array_equal(getattr(new.layers[1], name), getattr(model.layers[1], name))
    assert step.trace_count == 1


def test_the_state_has_no_bytes_for_what_is_frozen():
    model = make()
    opt = Optimizer(optax.adam, 1e-2)
    counter = size_of(opt.init(freeze(model, "**")))
    assert counter == 4
    assert size_of(opt.init(model)) == counter + 2 * size_of(model)
    frozen = freeze(model, ["layers.0", "layers.1.weight"])
    kept = size_of(partition(frozen, trainable(frozen))[0])
    assert kept == 4 * (8 + 3 * 8 + 3)
    assert size_of(opt.init(frozen)) == counter + 2 * kept


def test_training_a_part_equals_training_it_alone():
    model = make()
    x = data()
    opt = Optimizer(
        optax.chain,
        Optimizer(optax.clip_by_global_norm, 0.01),
        Optimizer(optax.adamw, 1e-2, weight_decay=0.1),
    )

    def whole(last):
        hidden = jax.vmap(lambda v: model.layers[1](jax.nn.relu(model.layers[0](v))))(x)
        return jnp.mean(jax.vmap(last)(jax.nn.relu(hidden)) ** 2)

    frozen = freeze(model, ["layers.0", "layers.1"])
    last = model.layers[2]
    state, alone = opt.init(frozen), opt.init(last)
    for differentiate in (filter_grad, jax.grad, filter_grad):
        # The gradients that JAX computes for the frozen layers do not count in the norm either.
        frozen, state = opt.update(frozen, differentiate(loss)(frozen, x), state)
        last, alone = opt.update(last, filter_grad(whole)(last), alone)
        np.testing.assert_allclose(frozen.layers[2].weight, last.weight, rtol=1e-5)
        np.testing.assert_allclose(frozen.layers[2].bias, last.bias, rtol=1e-5)


def test_trainable_is_a_mask_for_optax():
    model = freeze(make(), "layers.0")
    raw = optax.masked(optax.adam(1e-2), trainable(model))
    opt = Optimizer(optax.adam, 1e-2)
    assert size_of(raw.init(model)) == size_of(opt.init(model))
    decayed = Optimizer(optax.adamw, 1e-2, weight_decay=0.5, mask=trainable(make(), "**.weight"))
    zeros = jax.tree.map(jnp.zeros_like, make())
    new, _ = decayed.update(make(), zeros, decayed.init(make()))
    np.testing.assert_array_equal(new.layers[0].bias, make().layers[0].bias)
    np.testing.assert_allclose(new.layers[0].weight, 0.995 * make().layers[0].weight, rtol=1e-6)


def test_the_state_of_another_marking_does_not_fit():
    opt = Optimizer(optax.adam, 1e-2)
    model = make()
    grads = filter_grad(loss)(model, data())
    with pytest.raises(ValueError, match="the gradients do not have the structure of the model"):
        opt.update(freeze(model, "layers.0"), grads, opt.init(model))


def other_states():
    """Models, optimisers, states that are those of something else, and what is said of them."""
    model = make()
    frozen = freeze(model, "layers.0")
    smaller = MLP(4, 3, 8, 1, key=jax.random.key(0))
    for opt in (Optimizer(optax.adam, 1e-2), Optimizer(optax.sgd, 1e-2, momentum=0.9)):
        yield frozen, opt, opt.init(model), r"layers\[0\]\.weight: expected None, got f32\[8,4\]"
        yield model, opt, opt.init(frozen), r"layers\[0\]\.weight: expected f32\[8,4\].*got None"
        yield smaller, opt, opt.init(model), r"layers\[2\]: expected nothing"
        yield model, opt, opt.init(smaller), r"layers\[2\]: expected Linear"
        yield model, opt, Optimizer(optax.lion, 1e-2).init(model), "got ScaleByLionState"
        yield model, opt, None, "got None"
    adam, sgd = Optimizer(optax.adam, 1e-2), Optimizer(optax.sgd, 1e-2)
    belief, chained = Optimizer(optax.adabelief, 1e-2), Optimizer(optax.chain, adam, sgd)
    # What the step would carry along, and what it would take for its own.
    yield model, sgd, adam.init(model), "expected EmptyState.., got ScaleByAdamState"
    yield model, adam, belief.init(model), "expected ScaleByAdamState.*got ScaleByBeliefState"
    yield model, Optimizer(optax.chain, sgd, adam), chained.init(model), "got ScaleByAdamState"


@pytest.mark.parametrize("jit", [lambda f: f, filter_jit], ids=["eager", "compiled"])
def test_a_state_of_another_model_is_refused(jit):
    for model, opt, state, told in other_states():
        grads = filter_grad(loss)(model, data())
        text = rf"(?s)optimiser state does not fit the model.*Optimizer\.update.*{told}.*optimiser\.init\(model\)"
        with pytest.raises(ValueError, match=text):
            jit(opt.update)(model, grads, state)
        fresh, _ = opt.update(model, grads, opt.init(model))
        assert jax.tree.structure(fresh) == jax.tree.structure(model)


@pytest.mark.parametrize("jit", [lambda f: f, filter_jit], ids=["eager", "compiled"])
def test_a_state_to_which_steps_have_added_is_not_another_one(jit):
    # The first step adds the measurement, and every step leaves something of the state as it is.
    measured = optax.monitor({"norm": optax.tree.norm})
    opt = from_optax(optax.chain(measured, optax.contrib.schedule_free_sgd(0.1)))
    model = {"w": jnp.ones(3)}
    state = opt.init(model)
    for _ in range(3):
        model, state = jit(opt.update)(model, model, state)
    assert float(state[0].measurements["norm"]) > 0
    with pytest.raises(ValueError, match="optimiser state does not fit the model"):
        jit(Optimizer(optax.sgd, 0.1).update)(model, model, state)


class Counted(Module):
    weight: jax.Array
    count: int


def test_a_number_that_counts_steps_is_told_to_belong_in_an_array():
    opt, model = Optimizer(optax.adam, 1e-2), Counted(jnp.ones(2), 0)
    state = opt.init(model)
    model = replace(model, count=1)
    with pytest.raises(ValueError, match="(?s)count: expected 1, got 0.*belongs in an array"):
        opt.update(model, model, state)


@pytest.mark.parametrize("shape", [(1,), (4,), ()])
def test_a_state_of_other_shapes_is_refused_even_where_it_would_be_broadcast(shape):
    opt = Optimizer(optax.adam, 1e-2)
    model, other = {"w": jnp.ones(3)}, {"w": jnp.ones(shape)}
    with pytest.raises(
        ValueError, match=r"(?s)optimiser state does not fit the model.*\['w'\]: expected f32\[3\]"
    ):
        opt.update(model, model, opt.init(other))


def test_an_error_that_has_nothing_to_do_with_the_state_passes_through():
    def factory(rate: float):
        return optax.stateless(lambda updates, params: updates["v"])

    model = {"w": jnp.ones(3)}
    opt = Optimizer(factory, 1e-2)
    with pytest.raises(KeyError):
        opt.update(model, model, opt.init(model))
