"""`keys`: what the randomness of a layer depends on, and what it does not."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import PRNGKeyArray

import vernal
from tests.nn._filled import filled
from vernal import nn


class Block(vernal.Module):
    linear: nn.Linear
    dropout: nn.Dropout

    def __init__(self, key):
        self.linear = nn.Linear(8, 8, key=key)
        self.dropout = nn.Dropout(0.5)

    def __call__(self, x, *, key=None):
        return x + self.dropout(self.linear(x), key=key)


class Model(vernal.Module):
    blocks: object
    last: nn.Dropout
    extra: object = None

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Noise(vernal.Module):
    key: PRNGKeyArray | None = nn.key_field()

    def __call__(self, x, *, key=None):
        return x + jax.random.normal(self.key if key is None else key, x.shape)


def key_data(model):
    arrays = [
        leaf
        for leaf in jax.tree.leaves(model)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.dtype == jnp.uint32
    ]
    return [np.asarray(jax.random.key_data(k)) for k in arrays]


def test_every_layer_has_a_key_that_depends_on_nothing_but_its_name(getkey):
    blocks = [filled(Block, getkey(), seed=i) for i in range(3)]
    key = getkey()
    small = nn.keys(Model(blocks, nn.Dropout(0.5)), key)
    large = nn.keys(Model([*blocks, nn.Dropout(0.1)], nn.Dropout(0.5), [Noise()]), key)
    found = key_data(small)
    assert len({k.tobytes() for k in found}) == len(found) == 4
    assert [k.tobytes() for k in key_data((large.blocks[:3], large.last))] == [
        k.tobytes() for k in found
    ]
    x = jnp.ones(8)
    assert (small.blocks[2](x) == large.blocks[2](x)).all()
    # These very numbers: a checkpoint of a training run must continue alike in the next version.
    first = jax.random.key_data(nn.keys({"a": nn.Dropout()}, jax.random.key(0))["a"].key)
    assert first.tolist() == FIRST


FIRST = [3585336307, 2772470072]


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey], ids=["typed", "uint32"])
def test_a_stack_draws_the_numbers_of_the_list_in_its_place(make_key, getkey):
    blocks = [filled(Block, getkey(), seed=i) for i in range(3)]
    x, key = jnp.ones(8), make_key(5)

    @jax.jit
    def both(key):
        listed = Model(nn.Sequential(blocks).layers, nn.Dropout(0.5))
        stacked = Model(nn.Stack.of(blocks), nn.Dropout(0.5))
        nested = Model([nn.Stack.of([nn.Stack.of([b]) for b in blocks])], nn.Dropout(0.5))
        flat = Model([[[b] for b in blocks]], nn.Dropout(0.5))
        listed, stacked, nested, flat = (nn.keys(m, key) for m in (listed, stacked, nested, flat))
        scanned = stacked.last(stacked.blocks(x))
        drawn = [block.dropout.key for block in listed.blocks], stacked.blocks.layers.dropout.key
        return (
            drawn,
            (listed(x), scanned),
            nested.blocks[0].layers.layers.dropout.key,
            flat.blocks[0],
        )

    (one_by_one, at_once), outputs, nested, flat = both(key)
    assert (jnp.stack(one_by_one) == at_once).all()
    assert ((outputs[0] == 0) == (outputs[1] == 0)).all()
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-6)
    assert nested.shape[:2] == (3, 1)
    assert key_data(nested)[0].tobytes() == b"".join(k.tobytes() for k in key_data(flat))


def test_an_ensemble_has_different_keys_in_its_members(getkey):
    make = jax.vmap(lambda key: Model([Block(key)], nn.Dropout(0.5)))
    keys = jax.random.split(getkey(), 3)
    models = filled(make, keys)

    @jax.jit
    def three(models, keys):
        repeated = jax.vmap(nn.keys, in_axes=(0, None))(models, keys[1])
        alone = nn.keys(jax.tree.map(lambda a: a[1], models), keys[1])
        return jax.vmap(nn.keys)(models, keys), repeated, alone

    found, repeated, alone = three(models, keys)
    for per_member, same, one in zip(*map(key_data, (found, repeated, alone)), strict=True):
        assert len({k.tobytes() for k in per_member}) == 3
        assert (per_member[1] == one).all() and (same == one).all()


def test_a_key_of_the_call_goes_before_the_stored_one(getkey):
    model, key, x = nn.Sequential([nn.Dropout(0.5), Noise()]), getkey(), jnp.ones(20)
    stored = nn.keys(model, getkey())
    assert (stored(x, key=key) == model(x, key=key)).all()
    assert (stored(x) == stored(x)).all() and (stored(x) != stored(x, key=key)).any()


def test_layers_of_a_recurrent_network_do_not_share_their_mask(getkey):
    layer = filled(lambda key: nn.GRU(2, 8, 3, dropout_p=0.5, key=key), getkey())
    xs = jnp.ones((1, 2))
    stored = nn.keys(layer, getkey())
    ys, _ = stored(xs)
    key = nn.use_key(None, stored.dropout.key)
    np.testing.assert_array_equal(ys, layer(xs, key=key)[0])
    ones = stored.dropout(jnp.ones(64), key=jax.random.fold_in(key, 1))
    assert (ones != stored.dropout(jnp.ones(64), key=jax.random.fold_in(key, 2))).any()


@pytest.mark.parametrize("cls", [nn.RNN, nn.GRU, nn.LSTM])
@pytest.mark.sample(3)
def test_a_recurrent_network_draws_anew_at_each_use(cls, getkey):
    layer, xs = filled(lambda key: cls(2, 8, 2, dropout_p=0.5, key=key), getkey()), jnp.ones((3, 2))

    def calls(layer, xs):
        return jnp.stack([layer(xs)[0], layer(xs)[0]])

    def scan(layer, xs):
        return jax.lax.scan(lambda _, xs: (None, layer(xs)[0]), None, jnp.stack([xs, xs]))[1]

    key = getkey()
    first, second = nn.apply(layer, xs, key=key, method=calls)[0]
    assert (first != second).any()
    np.testing.assert_allclose(nn.apply(layer, xs, key=key, method=scan)[0], [first, second], 1e-5)
    with pytest.raises(RuntimeError, match=rf"{cls.__name__} needs a random key"):
        nn.apply(layer, xs)
    # No key where nothing is dropped.
    nn.apply(cls(2, 8, 1, dropout_p=0.5, key=getkey()), xs)
    nn.apply(layer, xs, train=False)


def test_taking_the_keys_out_gives_the_model_back(getkey):
    model = Model(
        [filled(Block, getkey()), jnp.tanh], nn.Dropout(0.5), nn.Stack.of([Noise(), Noise()])
    )
    stored = nn.keys(model, getkey())
    assert jax.tree.structure(stored) != jax.tree.structure(model)
    again = nn.keys(stored, None)
    assert again == model and jax.tree.structure(again) == jax.tree.structure(model)
    linear = nn.Linear(2, 2, key=getkey())
    assert nn.keys(linear, getkey()) is linear


def test_the_gradient_passes_by_the_keys(getkey):
    model, key, x = Model([filled(Block, getkey())], nn.Dropout(0.5)), getkey(), jnp.ones(8)
    grads = jax.jit(jax.grad(lambda m: (nn.keys(m, key)(x) ** 2).sum()))(model)
    assert jax.tree.structure(grads) == jax.tree.structure(model)
    stored = vernal.filter_grad(lambda m: (m(x) ** 2).sum())(nn.keys(model, key))
    np.testing.assert_allclose(
        stored.blocks[0].linear.weight, grads.blocks[0].linear.weight, rtol=1e-5
    )


def test_a_field_for_a_key_is_no_argument_and_not_shown():
    assert "key" not in inspect.signature(Noise).parameters
    assert repr(Noise()) == "Noise()" and Noise().key is None
    assert repr(nn.keys(Noise(), jax.random.key(0))) == "Noise()"


def test_a_layer_without_any_key_says_how_to_give_one():
    with pytest.raises(
        RuntimeError, match=r"(?s)Dropout needs a random key.*nn\.keys\(model, key\).*nn\.apply"
    ):
        nn.Dropout()(jnp.ones(3))


class Several(vernal.Module):
    """One dropout, used several times by one of many ways to do so."""

    dropout: nn.Dropout
    way: str

    def __call__(self, x):
        def step(_, x):
            return None, self.dropout(x)

        if self.way == "calls":
            return jnp.stack([self.dropout(x), self.dropout(x), self.dropout(x)])
        xs = jnp.stack([x, x, x])
        if self.way == "scan":
            return jax.lax.scan(step, None, xs)[1]
        if self.way == "our scan":
            return vernal.loops.scan(step, None, xs)[1]
        if self.way == "checkpoint":
            return jax.lax.scan(jax.checkpoint(step), None, xs)[1]
        if self.way == "map":
            return vernal.loops.map(self.dropout, xs)
        if self.way == "cond":
            return jnp.stack(
                [vernal.filter_cond(jnp.array(True), self.dropout, jnp.sin, x) for _ in range(3)]
            )
        return vernal.loops.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, c[1].at[c[0]].set(self.dropout(x))),
            (0, jnp.zeros((3, *x.shape))),
            kind=self.way,
            max_steps=3,
        )[1]


WAYS = ["calls", "scan", "our scan", "checkpoint", "map", "cond", "lax", "bounded", "checkpointed"]


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(6)
def test_each_use_of_a_layer_draws_anew(way, make_key):
    x, key = jnp.ones(64), make_key(0)
    model = Several(nn.Dropout(0.5), way)

    @jax.jit
    def run(x, key):
        return nn.apply(model, x, key=key)[0]

    ys = run(x, key)
    # No two alike, the same for the same key, and the same numbers whichever way it is written.
    assert len({np.asarray(y).tobytes() for y in ys}) == 3
    assert jnp.array_equal(ys, run(x, key)) and not jnp.array_equal(ys, run(x, make_key(1)))
    by_calls = nn.apply(Several(nn.Dropout(0.5), "calls"), x, key=key)[0]
    assert jnp.array_equal(ys, by_calls)
    _, same = nn.apply(model, x, key=key)
    assert vernal.tree_equal(same, model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(3)
def test_the_gradient_uses_the_masks_of_the_value(way):
    model, x, key = Several(nn.Dropout(0.5), way), jnp.ones(32), jax.random.key(0)

    def total(x):
        return nn.apply(model, x, key=key)[0].sum()

    def values_and_gradient(x):
        return nn.apply(model, x, key=key)[0].sum(0), jax.vjp(total, x)[1](1.0)[0]

    refused = {
        "lax": (ValueError, "Reverse-mode differentiation does not work"),
        "checkpointed": (NotImplementedError, "recomputes its steps(?s:.)*kind='bounded'"),
    }
    if way in refused:
        error, text = refused[way]
        with pytest.raises(error, match=text):
            values_and_gradient(x)
    else:
        np.testing.assert_allclose(*jax.jit(values_and_gradient)(x))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sample(3)
def test_without_apply_every_use_is_the_first(way):
    model, key = nn.keys(Several(nn.Dropout(0.5), way), jax.random.key(0)), jax.random.key(0)
    ys = jax.jit(lambda model: model(jnp.ones(64)))(model)
    first = nn.apply(Several(nn.Dropout(0.5), way), jnp.ones(64), key=key)[0][0]
    assert all(jnp.array_equal(y, first) for y in ys)


def test_each_layer_of_a_stack_draws_anew_at_each_use():
    class Again(vernal.Module):
        stack: nn.Stack | list

        def __call__(self, x):
            def once(x):
                if isinstance(self.stack, nn.Stack):
                    return self.stack(x)
                for layer in self.stack:
                    x = layer(x)
                return x

            return once(x), once(x)

    stack = nn.Stack(lambda key: nn.Dropout(0.2), 4, key=jax.random.key(0))
    x, key = jnp.ones(200), jax.random.key(1)
    first, second = nn.apply(Again(stack), x, key=key)[0]
    assert not jnp.array_equal(first, second)
    listed = nn.apply(Again(list(stack)), x, key=key)[0]
    np.testing.assert_allclose(listed, [first, second], rtol=1e-6)


def test_members_and_examples_that_have_keys_of_their_own():
    model, xs = Several(nn.Dropout(0.5), "scan"), jnp.ones((4, 32))
    keys = jax.random.split(jax.random.key(0), 4)
    ys = jax.vmap(lambda x, key: nn.apply(model, x, key=key)[0])(xs, keys)
    assert len({np.asarray(y).tobytes() for y in ys.reshape(-1, 32)}) == 12
