"""`nn.apply`: state that no layer threads by hand, under every transformation, against state that is threaded."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import nn


def close(a, b, rtol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-5), a, b)


class Block(vernal.Module):
    linear: nn.Linear
    norm: nn.BatchNorm

    def __init__(self, key, axis_name=None):
        self.linear = nn.Linear(3, 3, key=key)
        self.norm = nn.BatchNorm(3, axis_name=axis_name, momentum=0.5)

    def __call__(self, x, state=None, *, key=None):
        x = self.linear(x)
        if state is None:
            return x + jnp.tanh(self.norm(x))
        y, state = self.norm(x, state)
        return x + jnp.tanh(y), state


class Net(nn.StatefulLayer):
    """Has everything: a layer called twice, one under `jit` and `checkpoint`, dropout."""

    first: Block
    second: Block
    dropout: nn.Dropout

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.first, self.second = Block(a), Block(b)
        self.dropout = nn.Dropout(0.5, inference=True)

    def __call__(self, x, state=None):
        if state is None:
            x = self.first(jax.jit(self.first)(x))
            return jax.checkpoint(self.second)(self.dropout(x))
        x, state = self.first(x, state)
        x, state = self.first(x, state)
        return self.second(x, state)


def make(key):
    """A model, and the same with its state outside."""
    return Net(key), *nn.make_with_state(Net)(key)


def statistics(model, state=None):
    norms = model.first.norm, model.second.norm
    read = (lambda v: v.value) if state is None else state.get
    return [(read(n.running_mean), read(n.running_var)) for n in norms]


def evaluate(model, x):
    return nn.apply(model, x, method=keep_dropout)


def keep_dropout(model, x):
    """The dropout of `Net` stays off."""
    return vernal.tree_at(lambda m: m.dropout.inference, model, True)(x)


def test_result_state_and_gradient_are_those_of_a_state_threaded_by_hand(getkey):
    whole, model, state = make(getkey())
    x = jax.random.normal(getkey(), (5, 3))

    def of_apply(model):
        y, model = evaluate(model, x)
        return (y**2).sum(), (y, model)

    def by_hand(model):
        y, new = model(x, state)
        return (y**2).sum(), (y, new)

    @vernal.filter_jit
    def everything():
        grads, (y, new) = vernal.filter_grad(of_apply, has_aux=True)(whole)
        plain, (y_plain, _) = jax.grad(of_apply, has_aux=True)(whole)
        expected, (expected_y, expected_new) = jax.grad(by_hand, has_aux=True)(model)
        found = [g.first.linear.weight for g in (grads, plain, expected)]
        return found, (y, y_plain, expected_y), (statistics(new), statistics(model, expected_new))

    grads, ys, states = everything()
    for pair in (grads[:2], grads[1:], ys[:2], ys[1:], states):
        close(*pair)
    assert not np.allclose(statistics(whole)[0][0], states[0][0][0])


def test_training_with_the_model_as_the_carry_of_a_scan(getkey):
    whole, model, state = make(getkey())
    xs = jnp.tile(jax.random.normal(getkey(), (5, 3)) + 1, (4, 1, 1))
    optimiser = vernal.Optimizer(optax.sgd, 0.01)

    def step(carry, x):
        def loss(model):
            y, model = evaluate(model, x)
            return ((y - 1) ** 2).mean(), model

        model, opt_state = carry
        (value, model), grads = vernal.filter_value_and_grad(loss, has_aux=True)(model)
        return optimiser.update(model, grads, opt_state), value

    def threaded(state, x):
        _, state = model(x, state)
        return state, None

    @jax.jit
    def everything(whole):
        carry, losses = jax.lax.scan(step, (whole, optimiser.init(whole)), xs)
        # Statistics alone, without training.
        after, _ = jax.lax.scan(lambda m, x: evaluate(m, x)[::-1], whole, xs)
        expected, _ = jax.lax.scan(threaded, state, xs)
        return carry[0], losses, statistics(after), statistics(model, expected)

    trained, losses, after, expected = everything(whole)
    assert jax.tree.structure(trained) == jax.tree.structure(whole)
    assert losses[-1] < losses[0]
    close(after, expected)
    everything(trained)
    assert everything._cache_size() == 1


class Ensemble(vernal.Module):
    models: Block

    def __call__(self, x):
        return vernal.filter_vmap(lambda model, x: model(x), in_axes=(0, None))(self.models, x)


def test_mapping_over_examples_over_the_whole_call_and_over_models(getkey):
    key, x = getkey(), jax.random.normal(getkey(), (5, 3))

    @jax.jit
    def everything(x):
        named = Block(key, axis_name="batch")
        plain = nn.apply(Block(key), x)
        inside = nn.apply(named, x, method=lambda m, x: jax.vmap(m, axis_name="batch")(x))
        outside = jax.vmap(nn.apply, in_axes=(None, 0), out_axes=(0, None), axis_name="batch")(
            named, x
        )
        models = jax.vmap(Block)(jnp.stack([key, key]))
        models = vernal.tree_at(lambda m: m.linear.bias, models, replace_fn=lambda b: b * 2)
        ys, ensemble = jax.vmap(nn.apply, in_axes=(0, None))(models, x)
        ys_inside, ensemble_inside = nn.apply(Ensemble(models), x)
        y, one = nn.apply(jax.tree.map(lambda a: a[1], models), x)
        second = jax.tree.map(lambda a: a[1], (ys, ensemble))
        examples = [(y, m.norm.running_var.value) for y, m in (plain, inside, outside)]
        return examples, [(ys, ensemble), (ys_inside, ensemble_inside.models)], [second, (y, one)]

    (plain, inside, outside), ensembles, members = everything(x)
    close(inside, plain)
    close(outside, plain)
    close(*ensembles)
    close(*members)
    with pytest.raises(
        ValueError, match="(?s)elements of `jax.vmap` disagree.*vernal.nn.BatchNorm"
    ):
        nn.apply(Block(key), x[:, None], method=lambda m, x: jax.vmap(m)(jnp.tile(x, (1, 2, 1))))


def test_a_stack_keeps_the_state_of_each_layer(getkey):
    key, x = getkey(), jax.random.normal(getkey(), (5, 3))
    stack = nn.Stack(Block, 3, key=key, checkpoint=True)

    def loss(model):
        y, model = nn.apply(model, x)
        return (y**2).sum(), (y, model)

    def listed(layers):
        new, y = [], x
        for layer in layers:
            y, layer = nn.apply(layer, y)
            new.append(layer)
        return (y**2).sum(), (y, new)

    @jax.jit
    def everything(stack):
        return jax.grad(loss, has_aux=True)(stack), jax.grad(listed, has_aux=True)(list(stack))

    (grads, (y, new)), (expected_grads, (expected, layers)) = everything(stack)
    close(y, expected)
    close(new, nn.Stack.of(layers, checkpoint=True))
    close(grads, nn.Stack.of(expected_grads, checkpoint=True))


def test_keys_and_training_are_for_the_call_and_the_model_keeps_its_own(getkey):
    key, x = getkey(), jnp.ones((5, 3))
    model = nn.Sequential([Block(getkey()), nn.Dropout(0.5)])
    y, new = nn.apply(model, x, key=key)
    expected, _ = nn.apply(model, x, method=lambda m, x: nn.keys(m, key)(x))
    assert (y == 0).any() and jnp.array_equal(y, expected)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    assert not vernal.tree_equal(new, model)
    y, same = nn.apply(new, x, train=False)
    assert vernal.tree_equal(same, new) and jnp.array_equal(y, nn.inference_mode(new)(x))
    # Nothing but `inference_mode` takes a layer out of inference.
    used = nn.inference_mode(new)
    for train in (None, True, False):
        again, same = nn.apply(used, x, train=train, key=key)
        assert vernal.tree_equal(same, used) and jnp.array_equal(again, y)
    with pytest.raises(
        TypeError, match="(?s)`train` must be a Python bool, known while tracing.*train="
    ):
        inspect.unwrap(nn.apply)(model, x, train=jnp.array(True))


class Two(vernal.Module):
    norm: nn.BatchNorm

    def encode(self, x, scale=1.0):
        return {"y": scale * self.norm(x), "name": "encoded", "fn": jnp.sin}


def test_methods_functions_and_results_of_any_kind():
    x, model = jnp.arange(6.0).reshape(3, 2), Two(nn.BatchNorm(2))
    out, new = nn.apply(model, x, method="encode", scale=2.0)
    assert out["name"] == "encoded" and out["fn"] is jnp.sin
    again, newer = nn.apply(model, x, method=Two.encode)
    close(out["y"], 2 * again["y"])
    close(new, newer)
    with pytest.raises(TypeError, match="(?s)no method 'decode'.*model.part.decode"):
        inspect.unwrap(nn.apply)(model, x, method="decode")


def test_a_model_without_state_comes_back_as_it_is(getkey):
    model, x = nn.Linear(3, 2, key=getkey()), jnp.ones(3)
    y, same = nn.apply(model, x)
    assert same is model and jnp.array_equal(y, model(x))
    assert nn.apply(nn.Lambda(lambda x: x + 1), 2)[0] == 3


def test_without_apply_a_layer_in_training_says_who_can_take_its_state():
    norm, x = nn.BatchNorm(3), jnp.arange(6.0).reshape(2, 3)
    for fn in (norm, jax.jit(norm)):
        with pytest.raises(RuntimeError, match="(?s)would be lost.*BatchNorm.*nn.apply"):
            fn(x)


@pytest.mark.parametrize(
    "transform", [lambda f: f, jax.jit, vernal.filter_jit, jax.grad, jax.checkpoint]
)
def test_the_layer_whose_state_would_be_lost_is_named_in_a_program_too(transform):
    layers = [nn.Lambda(jnp.sin), nn.Sequential([nn.BatchNorm(3)])]
    model, x = nn.Sequential(layers), jnp.arange(6.0).reshape(2, 3)
    with pytest.raises(RuntimeError, match="would be lost") as caught:
        transform(lambda model: model(x).sum())(model)
    (note,) = [note for note in caught.value.__notes__ if note.startswith("Raised in")]
    assert note.startswith("Raised in model.layers[1].layers[0].running_mean (Sequential > ")


@pytest.mark.parametrize("jit", [jax.jit, vernal.filter_jit])
def test_a_program_of_several_models_names_none_of_them(jit):
    inner = jit(lambda layer, x: layer(x))

    class First(vernal.Module):
        norm: nn.BatchNorm

        def __call__(self, x):
            return inner(self.norm, x)

    class Second(vernal.Module):
        other: nn.BatchNorm

        def __call__(self, x):
            return inner(self.other, x)

    for model in (First(nn.BatchNorm(3)), Second(nn.BatchNorm(3))):
        with pytest.raises(RuntimeError, match="would be lost") as caught:
            jax.jit(lambda model, x: model(x))(model, jnp.ones((4, 3)))
        notes = [note for note in caught.value.__notes__ if note.startswith("Raised in")]
        assert notes == ["Raised in model.running_mean (BatchNorm > Variable)"]


def test_one_layer_in_two_places_is_refused():
    norm = nn.BatchNorm(3)
    with pytest.raises(ValueError, match=r"(?s)appears twice.*model\[0\].*model\[2\]"):
        nn.apply([norm, jnp.sin, norm], jnp.ones((2, 3)), method=lambda model, x: model[0](x))


def test_no_tracer_leaks(getkey):
    model, x = Block(getkey()), jax.random.normal(getkey(), (5, 3))
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda m: nn.apply(m, x)[0].sum()))(model)


def test_the_flag_may_be_a_bool_of_numpy():
    norm, xs = nn.BatchNorm(2), jnp.array([[0.0, 1.0], [2.0, 5.0]])
    for flag in (True, False):
        ys, _ = nn.apply(norm, xs, train=flag)
        found, _ = inspect.unwrap(nn.apply)(norm, xs, train=np.bool_(flag))
        assert (found == ys).all()


def test_what_cannot_be_called_is_refused(getkey):
    layers = [nn.Linear(2, 2, key=getkey())]
    with pytest.raises(
        TypeError,
        match=r"(?s)needs a model that can be called.*got: \[Linear.*nn\.Sequential\(layers\)",
    ):
        nn.apply(layers, jnp.ones(2))
    y, _ = nn.apply(layers, jnp.ones(2), method=lambda layers, x: layers[0](x))
    assert (y == layers[0](jnp.ones(2))).all()
