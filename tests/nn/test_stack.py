"""`Stack`: against the list of its layers, and how small its program is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import vernal
from tests.nn._filled import filled
from tests.nn._jaxprs import equations
from vernal import nn


class Block(vernal.Module):
    """A layer with everything: weights, a function, a setting, randomness, further arguments, and a memory."""

    linear: nn.Linear
    dropout: nn.Dropout
    activation: object
    scale: float

    def __init__(self, key, size=4):
        self.linear = nn.Linear(size, size, key=key)
        self.dropout = nn.Dropout(0.3)
        self.activation = jax.nn.gelu
        self.scale = 0.5

    def __call__(self, x, shift=0.0, *, memory=None, gain=1.0, key=None):
        y = self.activation(self.linear(x)) + shift
        y = x + gain * self.scale * self.dropout(y, key=key, inference=key is None)
        return y if memory is None else (y + memory.mean(), memory + y)


def unrolled(layers, x, *args, key=None, **kwargs):
    keys = [None] * len(layers) if key is None else jax.random.split(key, len(layers))
    for layer, k in zip(layers, keys, strict=True):
        x = layer(x, *args, key=k, **kwargs)
    return x


def close(a, b, atol=1e-6):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)


def blocks(n, **settings):
    return filled(lambda key: nn.Stack(Block, n, key=key, **settings), jax.random.key(0))


SETTINGS = {
    "plain": {},
    "checkpoint, two in a turn": {"checkpoint": True, "unroll": 2},
    "a policy, all in one turn": {"checkpoint": jax.checkpoint_policies.dots_saveable, "unroll": 3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.sample(3)
def test_values_and_gradients_are_those_of_the_list(settings, getkey):
    stack = blocks(3, **settings)
    x, shift, key = jax.random.normal(getkey(), (4,)), jax.random.normal(getkey(), (4,)), getkey()

    @jax.jit
    def both(stack):
        def loss(call, layers, x, shift):
            return (call(layers, x, shift, key=key, gain=2.0) ** 2).sum()

        def run(stack, *args, **kwargs):
            return stack(*args, **kwargs)

        ours = jax.value_and_grad(loss, (1, 2, 3))(run, stack, x, shift)
        theirs = jax.value_and_grad(loss, (1, 2, 3))(unrolled, list(stack), x, shift)
        return ours, theirs

    (value, (layers, *rest)), (expected, (listed, *expected_rest)) = both(stack)
    close((value, rest), (expected, expected_rest))
    close(list(layers), listed)


def test_the_layers_are_those_that_the_split_key_makes(getkey):
    @jax.jit
    def both(key):
        return nn.Stack(Block, 3, key=key), [Block(k) for k in jax.random.split(key, 3)]

    stack, made = both(getkey())
    assert list(stack) == made and nn.Stack.of(made) == stack
    assert stack[-1] == made[2] and stack[1:] == nn.Stack.of(made[1:]) and len(stack[::2]) == 2
    assert jax.jit(lambda stack, i: stack[i])(stack, 1) == made[1]
    assert len(stack) == stack.num_layers == 3
    assert nn.Stack.of(made, checkpoint=True, unroll=2)[:2].checkpoint is True


class Branch(vernal.Module):
    """A residual branch that is dropped at a rate of its own, and scaled by its number."""

    linear: nn.Linear
    drop_path: nn.DropPath
    scale: jax.Array = vernal.field(trainable=False)

    def __init__(self, key, rate, index):
        self.linear = nn.Linear(4, 4, key=key)
        self.drop_path = nn.DropPath(rate)
        self.scale = 1 / (1 + index.astype(jnp.float32))

    def __call__(self, x, *, key=None):
        return x + self.drop_path(self.scale * jnp.tanh(self.linear(x)), key=key)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_differs_between_the_layers_is_made_of_each(checkpoint, getkey):
    rates, key, call_key, x = jnp.array([0.0, 0.5, 1.0]), getkey(), getkey(), jnp.ones(4)
    each = {"rate": rates, "index": jnp.arange(3)}
    stack = nn.Stack(Branch, 3, key=key, each=each, checkpoint=checkpoint)
    keys = jax.random.split(key, 3)
    made = [Branch(k, rate, i) for k, rate, i in zip(keys, rates, jnp.arange(3), strict=True)]
    close(list(stack), made)
    assert stack[2].drop_path.p == 1 and stack[1].scale == 0.5

    @jax.jit
    def both(stack, made, key):
        def loss(layers, call):
            return (call(layers, x, key=key) ** 2).sum()

        ours = jax.value_and_grad(loss)(stack, lambda stack, x, key: stack(x, key=key))
        return ours, jax.value_and_grad(loss)(made, unrolled)

    (value, gradient), (expected, listed) = both(stack, made, call_key)
    close((value, [layer.linear for layer in gradient]), (expected, [g.linear for g in listed]))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient.layers.linear))
    # The last branch is always dropped, the first one never.
    assert not gradient[2].linear.weight.any() and gradient[0].linear.weight.any()


def test_rates_of_layers_are_no_parameters(getkey):
    stack = nn.Stack(
        Branch, 3, key=getkey(), each={"rate": jnp.full(3, 0.5), "index": jnp.arange(3)}
    )
    parameters, _ = vernal.partition(stack, vernal.trainable(stack))
    assert len(jax.tree.leaves(parameters)) == 2
    x = jnp.ones(4)
    alone = unrolled([nn.inference_mode(layer) for layer in stack], x)
    close(nn.inference_mode(stack)(x), alone)
    draws = jax.vmap(lambda key: nn.keys(stack, key)(x))(jax.random.split(getkey(), 20))
    assert len({tuple(row) for row in draws.tolist()}) > 2


def sizes(n, **settings):
    stack = blocks(n, **settings)
    step = jax.jit(jax.grad(lambda stack, x: (stack(x, key=jax.random.key(1)) ** 2).sum()))
    traced = step.trace(stack, jnp.ones(4))
    return len(traced.lower().as_text().splitlines()), len(list(equations(traced.jaxpr)))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_program_is_as_small_for_64_layers_as_for_2(checkpoint):
    few, many = sizes(2, checkpoint=checkpoint), sizes(64, checkpoint=checkpoint)
    assert min(few) > 20
    assert all(n <= 1.3 * m for n, m in zip(many, few, strict=True))


def test_a_checkpoint_keeps_only_what_goes_from_layer_to_layer():
    def kept(checkpoint):
        stack = blocks(16, checkpoint=checkpoint)
        _, back = jax.eval_shape(lambda s, x: jax.vjp(lambda s, x: s(x), s, x), stack, jnp.ones(4))
        return sum(leaf.size for leaf in jax.tree.leaves(back))

    weights = 16 * (4 * 4 + 4)
    assert kept(True) <= weights + 16 * 4
    assert kept(True) < kept(jax.checkpoint_policies.dots_saveable) < kept(False)


def test_parameters_do_not_come_out_of_the_loop():
    stack = blocks(5)
    [scan] = [
        eqn for eqn in jax.make_jaxpr(stack)(jnp.ones(4)).jaxpr.eqns if eqn.primitive.name == "scan"
    ]
    assert [var.aval.shape for var in scan.outvars] == [(4,)]


def test_what_belongs_to_the_single_layers_goes_in_and_comes_out(getkey):
    stack, x = blocks(3), jax.random.normal(getkey(), (4,))
    memories, gains = jax.random.normal(getkey(), (3, 4)), jnp.array([1.0, 2.0, 3.0])

    @jax.jit
    def both(x, memories, gains):
        each = {"memory": memories, "gain": gains}
        ours = stack(x, each=each, collect=True)
        kept = []
        for layer, memory, gain in zip(stack, memories, gains, strict=True):
            x, memory = layer(x, memory=memory, gain=gain)
            kept.append(memory)
        return ours, (x, jnp.stack(kept))

    ours, expected = both(x, memories, gains)
    close(ours, expected)
    keys = jax.random.split(getkey(), 3)
    close(stack(x, each={"key": keys}), unrolled_with(keys, stack, x))


def unrolled_with(keys, layers, x):
    for layer, key in zip(layers, keys, strict=True):
        x = layer(x, key=key)
    return x


class Decoder(vernal.Module):
    attention: nn.MultiheadAttention

    def __init__(self, key):
        self.attention = nn.MultiheadAttention(2, 4, key=key)

    def __call__(self, x, *, cache=None, key=None):
        if cache is None:
            return x + self.attention(x, x, x, causal=True)
        y, cache = self.attention(x, x, x, cache=cache)
        return x + y, cache


def test_a_transformer_decodes_through_it_with_a_cache_for_each_layer(getkey):
    stack = filled(lambda key: nn.Stack(Decoder, 3, key=key), getkey())
    tokens = jax.random.normal(getkey(), (5, 4))

    @jax.jit
    def both(stack, tokens):
        # A batch axis of a cache is a layer of the stack.
        caches = nn.KVCache(8, 2, 2, batch=(3,))
        prompt, caches = stack(tokens[:3], each={"cache": caches}, collect=True)

        def one(caches, token):
            y, caches = stack(token[None], each={"cache": caches}, collect=True)
            return caches, y[0]

        caches, rest = jax.lax.scan(one, caches, tokens[3:])
        return caches.length, jnp.concatenate([prompt, rest]), unrolled(list(stack), tokens)

    length, decoded, expected = both(stack, tokens)
    assert (length == 5).all()
    close(decoded, expected)


class Normed(vernal.Module):
    linear: nn.Linear
    norm: nn.BatchNorm

    def __init__(self, key):
        self.linear = nn.Linear(3, 3, key=key)
        self.norm = nn.BatchNorm(3)

    def __call__(self, x, state=None, *, key=None):
        y = self.linear(x)
        return self.norm(y) if state is None else self.norm(y, state)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_layers_with_state_leave_theirs_behind_as_in_a_list(checkpoint, getkey):
    make = lambda key: nn.Stack(Normed, 2, key=key, checkpoint=checkpoint)  # noqa: E731 (one word)
    stack = filled(make, getkey())
    x = jax.random.normal(getkey(), (6, 3))

    @jax.jit
    def both(stack, x):
        def loss(model, x):
            y, model = nn.apply(model, x, key=jax.random.key(0))
            return (y**3).sum(), model

        layers = nn.Sequential(list(stack))
        return [vernal.filter_grad(loss, has_aux=True)(m, x) for m in (stack, layers)]

    (grads, after), (listed_grads, listed) = both(stack, x)
    # A shift before a BatchNorm has no effect, so its gradient is rounding.
    close(nn.Stack.of(listed_grads.layers).layers, grads.layers, atol=1e-5)
    close(nn.Stack.of(listed.layers).layers, after.layers)
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (after, stack)), strict=True))


def test_state_outside_of_the_model_goes_in_and_out_layer_by_layer(getkey):
    stack, state = nn.make_with_state(nn.Stack)(Normed, 2, key=getkey())
    x = jax.random.normal(getkey(), (6, 3))

    @jax.jit
    def call(stack, state, x):
        return stack(x, each={"state": state}, collect=True)

    y, state = call(stack, state, x)
    assert y.shape == x.shape
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(state))


def test_a_stack_can_hold_stacks_and_functions_and_trees(getkey):
    def make(key):
        return nn.Stack(lambda k: nn.Sequential([nn.Linear(3, 3, key=k), jnp.tanh]), 2, key=key)

    nested, x = filled(lambda key: nn.Stack(make, 3, key=key), getkey()), jnp.ones(3)
    assert nested.layers.layers.layers[0].weight.shape == (3, 2, 3, 3)
    close(
        *jax.jit(lambda m: (m(x), unrolled([layer for inner in m for layer in inner], x)))(nested)
    )

    class Swap(vernal.Module, layout="fields"):
        weight: jax.Array
        fn: object

        def __call__(self, pair):
            return {"a": self.fn(self.weight * pair["b"]), "b": pair["a"]}, pair["b"]

    swap = nn.Stack.of([Swap(x, jnp.sin), Swap(3 * x, jnp.sin)])
    y, kept = swap({"a": x, "b": 2 * x}, collect=True)
    close(kept, jnp.stack([2 * x, x]))
    close(y, {"a": jnp.sin(3 * x), "b": jnp.sin(2 * x)})


def test_frozen_marks_and_settings_reach_all_layers():
    stack = vernal.freeze(blocks(2), "layers.linear.bias")
    grads = jax.eval_shape(vernal.filter_grad(lambda s: s(jnp.ones(4)).sum()), stack)
    assert grads.layers.linear.bias == vernal.NoGradient() and grads.layers.linear.weight.shape == (
        2,
        4,
        4,
    )
    assert vernal.trainable(stack[0]).linear.bias is False
    assert nn.inference_mode(stack)[1].dropout.inference is True


def test_lists_of_layers_that_differ_are_refused_and_the_difference_is_named(getkey):
    block, small = filled(Block, getkey()), filled(lambda key: Block(key, size=3), getkey())
    with pytest.raises(ValueError, match=r"(?s)layers\)\[1\].*layer\.scale.*0\.5.*0\.1"):
        nn.Stack.of([block, vernal.tree_at(lambda b: b.scale, block, 0.1)])
    with pytest.raises(ValueError, match=r"(?s)may differ only in.*layer\.linear\.weight"):
        nn.Stack.of([block, small])
    with pytest.raises(ValueError, match="no layers to stack"):
        nn.Stack.of([])


def test_wrong_sizes_and_places_are_refused(getkey):
    with pytest.raises(ValueError, match=r"(?s)`Stack`.*num_layers.*at least 1"):
        nn.Stack(Block, 0, key=getkey())
    with pytest.raises(ValueError, match=r"(?s)`Stack`.*unroll.*at least 1"):
        nn.Stack(Block, 2, key=getkey(), unroll=0)
    stack = blocks(2)
    with pytest.raises(IndexError, match=r"(?s)is out of range.*stack\[2\].*from -2 to 1"):
        stack[2]
    with pytest.raises(ValueError, match="(?s)at least one layer.*some of the 2"):
        stack[2:]


def test_calls_that_no_loop_can_make_are_refused(getkey):
    stack, x = blocks(2), jnp.ones(4)
    with pytest.raises(ValueError, match=r"(?s)for every layer.*each\['gain'\].*num_layers=2"):
        stack(x, each={"gain": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"(?s)each\['rate'\].*num_layers=2.*lambda key: Layer"):
        nn.Stack(Branch, 2, key=jax.random.key(0), each={"rate": jnp.ones(3)})
    with pytest.raises(ValueError, match="(?s)collect=True.*must return a pair.*what to collect"):
        stack(x, collect=True)
    narrow = nn.Stack(lambda key: nn.Linear(4, 3, key=key), 2, key=getkey())
    with pytest.raises(ValueError, match=r"(?s)what the next one takes.*\[4\].*\[3\]"):
        narrow(x)


@pytest.mark.slow
def test_under_shard_map_the_parameters_alone_may_vary():
    def mlp(key):
        # Its first layer is the same on all devices.
        model = nn.MLP(3, 3, 3, 4, scan=True, key=key)
        return vernal.tree_at(lambda m: m.layers[0], model, nn.Identity())

    def stack(key):
        return nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=key)

    def own(models, x):
        return jnp.tanh(jax.tree.map(lambda a: a[0], models)(x))[None]

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    spread = jax.shard_map(own, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))

    def one_by_one(models, x):
        parts = [jax.tree.map(lambda a, i=i: a[i : i + 1], models) for i in range(2)]
        return jnp.concatenate([own(part, x) for part in parts])

    def answers(fn, models):
        grad = jax.grad(lambda models, x: fn(models, x).sum(), (0, 1))
        return jax.jit(lambda models, x: (fn(models, x), grad(models, x)))(models, jnp.arange(3.0))

    for make in mlp, stack:
        models = jax.vmap(make)(jax.random.split(jax.random.key(0), 2))
        got, expected = answers(spread, models), answers(one_by_one, models)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "pick",
    [
        lambda stack: vernal.tree_at(lambda s: s[0].weight, stack, replace_fn=jnp.zeros_like),
        lambda stack: vernal.freeze(stack, lambda s: s[0]),
        lambda stack: vernal.trainable(stack, lambda s: s[0:1]),
        lambda stack: vernal.tree_at(lambda s: list(s)[1].bias, stack, jnp.ones(3)),
    ],
)
def test_one_layer_is_no_node_to_pick(pick):
    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 3, key=jax.random.key(0))
    with pytest.raises(ValueError, match="one layer of a `Stack` cannot be picked"):
        pick(stack)


def test_a_layer_of_an_abstract_stack_has_its_own_shapes():
    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 3, key=jax.random.key(0))
    abstract = jax.eval_shape(lambda: stack)
    assert abstract[1].weight.shape == (3, 3)
    assert jax.tree.map(lambda _: True, stack)[1].weight is True
