"""`Policy` and `cast`: the dtypes of every equation of the traced program, and what is left alone."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from tests.nn._filled import filled
from tests.nn._jaxprs import equations
from vernal import nn

MIXED = nn.Policy(params=jnp.float32, compute=jnp.bfloat16, output=jnp.float32)
PRODUCTS = {"dot_general", "conv_general_dilated"}
BFLOAT16, FLOAT32 = {jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float32)}
REDUCTIONS = {"reduce_sum", "reduce_max", "exp", "sqrt", "div"}


class Block(vernal.Module):
    norm: nn.LayerNorm
    attention: nn.Linear
    linear: nn.Linear
    dropout: nn.Dropout

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.norm = nn.LayerNorm(8)
        self.attention = nn.Linear(8, 24, key=k1)
        self.linear = nn.Linear(8, 8, key=k2)
        self.dropout = nn.Dropout(0.1)

    def __call__(self, x, *, key=None):
        y = jax.vmap(self.norm)(x)
        y = jax.vmap(self.attention)(y).reshape(-1, 3, 2, 4)
        y = nn.attention(y[:, 0], y[:, 1], y[:, 2], causal=True).reshape(-1, 8)
        return x + self.dropout(jax.vmap(self.linear)(y), key=key)


class Model(vernal.Module):
    embed: nn.Embedding
    conv: nn.Conv1d
    blocks: nn.Stack
    head: nn.Linear
    counts: jax.Array

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.embed = nn.Embedding(5, 8, key=k1)
        self.conv = nn.Conv1d(8, 8, 3, padding="SAME", key=k2)
        self.blocks = nn.Stack(Block, 2, key=k3)
        self.head = nn.Linear(8, 3, key=k4)
        self.counts = jnp.arange(3)

    def __call__(self, tokens, x, *, key=None):
        y = jax.vmap(self.embed)(tokens) + x
        y = self.blocks(self.conv(y.T).T, key=key)
        return {"logits": jax.vmap(self.head)(y), "tokens": tokens, "counts": self.counts}


ABSTRACT = jax.eval_shape(Model, jax.random.key(0))


@pytest.fixture(scope="module")
def model():
    return nn.cast(filled(Model, jax.random.key(0)), MIXED)


def inputs():
    return jnp.array([0, 3, 1, 4]), jnp.linspace(-1, 1, 32).reshape(4, 8)


def loss(model, key):
    return (nn.keys(model, key)(*inputs())["logits"] ** 2).sum()


def dtypes(equation):
    return {v.aval.dtype for v in equation.invars if jnp.issubdtype(v.aval.dtype, jnp.floating)}


def test_products_are_in_bfloat16_and_sums_of_many_in_float32():
    model, key = nn.cast(ABSTRACT, MIXED), jax.random.key(1)
    forward = list(equations(jax.make_jaxpr(loss)(model, key)))
    both = list(equations(jax.make_jaxpr(vernal.filter_value_and_grad(loss))(model, key)))
    assert {e.primitive.name for e in both if e.primitive.name in PRODUCTS} == PRODUCTS
    for passes, allowed in ((forward, [BFLOAT16]), (both, [BFLOAT16, BFLOAT16 | FLOAT32])):
        # Backward, the gradient of the scores comes out of a softmax, and is float32 in its product with the keys.
        products = [dtypes(e) for e in passes if e.primitive.name in PRODUCTS]
        assert len(products) > 5 and all(found in allowed for found in products)
    reductions = [e for e in forward if e.primitive.name in REDUCTIONS]
    assert {e.primitive.name for e in reductions} == REDUCTIONS
    assert all(dtypes(e) == FLOAT32 for e in reductions)


def test_gradients_and_steps_of_an_optimizer_have_the_dtype_of_the_parameters():
    model, optimizer = nn.cast(ABSTRACT, MIXED), vernal.Optimizer(optax.adamw, 1e-3)

    def step(model, key):
        state = optimizer.init(model)
        grads = vernal.filter_grad(loss)(model, key)
        return grads, state, *optimizer.update(model, grads, state)

    grads, state, after, after_state = jax.eval_shape(step, model, jax.random.key(1))
    assert grads.model.counts == vernal.NoGradient()
    assert {g.dtype for g in jax.tree.leaves(grads)} == FLOAT32
    assert jax.tree.leaves(after) == jax.tree.leaves(model)
    assert jax.tree.leaves(after_state) == jax.tree.leaves(state)


def test_it_computes_what_the_model_does_up_to_rounding(model):
    y, exact = jax.jit(lambda m: (m(*inputs()), m.model(*inputs())))(nn.inference_mode(model))
    assert y["logits"].dtype == jnp.float32
    assert (y["logits"] != exact["logits"]).any()
    np.testing.assert_allclose(y["logits"], exact["logits"], atol=0.05)
    # Integers are what they were.
    assert (y["tokens"] == inputs()[0]).all() and y["counts"].dtype == jnp.int32


def test_it_is_saved_as_it_is_stored(model, tmp_path):
    vernal.save(tmp_path / "model", model)
    back = vernal.load(tmp_path / "model", jax.tree.map(jnp.zeros_like, model))
    assert back == model
    assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(back))


def test_layers_have_the_keys_that_they_have_without_it(model):
    key = jax.random.key(3)
    inside, outside = nn.keys(model.model, key), nn.keys(model, key).model
    assert (inside.blocks.layers.dropout.key == outside.blocks.layers.dropout.key).all()


def test_a_key_is_handed_on_only_to_a_model_that_takes_one(getkey):
    class Plain(vernal.Module):
        def __call__(self, x):
            return x

    half, x = nn.Policy(compute=jnp.bfloat16), jnp.ones(50)
    model = nn.Sequential([nn.cast(Plain(), half), nn.cast(nn.Dropout(0.5), half)])
    assert 0 < (model(x, key=getkey()) == 0).sum() < 50


def test_state_keeps_its_dtype_and_is_updated_through_the_wrapper(getkey):
    norm, x = nn.BatchNorm(3), 5 * jax.random.normal(getkey(), (40, 3))
    half = nn.cast(norm, nn.Policy(params=jnp.bfloat16, compute=jnp.bfloat16))

    @jax.jit
    def both(x):
        rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
        return nn.apply(half, x), nn.apply(norm, rounded)

    (y, after), (expected, alone) = both(x)
    assert y.dtype == jnp.bfloat16 and after.model.weight.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.05)
    before, inside, outside = map(slots, (norm, after.model, alone))
    assert inside == outside and inside != before
    cache = nn.KVCache(2, 1, 2)
    echo = nn.cast(nn.Lambda(lambda cache: cache), half.policy)
    assert echo(cache) == cache
    explicit, state = nn.make_with_state(lambda: norm)()
    _, state = jax.jit(nn.cast(explicit, half.policy))(x, state)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == FLOAT32

    def make():
        return nn.Sequential(
            [nn.cast(nn.BatchNorm(3), half.policy), nn.cast(jax.nn.relu, half.policy)]
        )

    model, state = nn.make_with_state(make)()
    found = jax.eval_shape(model, x, state)
    assert model.is_stateful() and jax.tree.structure(found) == jax.tree.structure((x, state))


def slots(model):
    found = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, nn.Variable))
    return [x for x in found if isinstance(x, nn.Variable)]


def test_parameters_that_are_kept_are_stored_and_computed_with_in_their_own_dtype(model):
    low = nn.Policy(params=jnp.bfloat16, compute=jnp.bfloat16)
    kept = nn.cast(model.model, low, keep={"**.norm.**": jnp.float32, "head.bias": "float16"})
    for m in (kept.model, kept.computing()):
        norm = m.blocks.layers.norm
        assert norm.weight.dtype == norm.bias.dtype == jnp.float32
        assert (m.head.bias.dtype, m.head.weight.dtype) == (jnp.float16, jnp.bfloat16)
        assert m.counts.dtype == jnp.int32
    half = nn.cast(nn.inference_mode(model.model), low, keep={"**.norm.**": jnp.float32})
    assert jax.eval_shape(half, *inputs())["logits"].dtype == jnp.bfloat16


def test_none_leaves_dtypes_as_they_are(getkey):
    linear = nn.Linear(2, 2, dtype=jnp.float16, key=getkey())
    same = nn.cast(linear, nn.Policy())
    assert same.model == linear and same.computing() == linear
    x = jnp.ones(2, jnp.float16)
    assert (same(x) == linear(x)).all() and same(x).dtype == jnp.float16
    abstract = jax.eval_shape(lambda: linear)
    assert nn.cast(abstract, MIXED).model.weight.dtype == jnp.float32


def test_what_is_no_precision_is_refused():
    for wrong in (jnp.int32, jnp.complex64, "single or so"):
        with pytest.raises(ValueError, match=r"(?s)floating-point dtype.*Policy\(compute=...\)"):
            inspect.unwrap(nn.Policy)(compute=wrong)
    linear = nn.Linear(2, 2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"(?s)floating-point dtype.*keep\['bias'\].*int8"):
        nn.cast(linear, MIXED, keep={"bias": jnp.int8})
    with pytest.raises(ValueError, match=r"(?s)where: cast.*'bais': no leaf there"):
        nn.cast(linear, MIXED, keep={"bais": jnp.float32})
