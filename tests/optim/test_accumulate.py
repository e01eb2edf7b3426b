"""Micro-batches one after another give what the whole batch gives, wherever it lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

import vernal
from vernal import nn
from vernal.optim import accumulate_gradients
from vernal.sharding import data_parallel, fsdp, make_mesh, place, shard_batch, tensor_parallel

ROWS = 32
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(16, size=(ROWS, 3)).astype(np.int32)
MASK = (np.arange(ROWS)[:, None] % 4 < np.arange(3)).astype(np.float32)


class Tied(vernal.Module):
    """Embedding, perceptron, and the table of the embedding again."""

    table: nn.Embedding
    mlp: nn.MLP

    def __call__(self, tokens):
        return self.table.attend(self.mlp(self.table(tokens)))


def make():
    k1, k2 = jax.random.split(jax.random.key(0))
    return Tied(nn.Embedding(16, 8, key=k1), nn.MLP(8, 8, 16, 1, jnp.tanh, key=k2))


def losses(model, batch):
    tokens, mask = batch
    return mask * jnp.sum(jnp.tanh(model(tokens)), axis=-1)


def mean(model, batch):
    return jnp.mean(losses(model, batch))


def total(model, batch):
    return jnp.sum(losses(model, batch)), jnp.sum(batch[1])


def of_total(model, batch):
    return jnp.sum(losses(model, batch)) / jnp.sum(batch[1])


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


PAIRS = {False: (mean, mean), True: (total, of_total)}


@pytest.mark.parametrize("weighted", PAIRS)
def test_the_numbers_are_those_of_the_whole_batch(weighted):
    loss, whole = PAIRS[weighted]
    model = vernal.freeze(make(), "mlp.layers.0.bias")
    found = accumulate_gradients(loss, 8, weighted=weighted)(model, (TOKENS, MASK))
    want = vernal.filter_value_and_grad(whole)(model, (TOKENS, MASK))
    assert jax.tree.structure(found) == jax.tree.structure(want)
    same(found, want)


def test_a_micro_batch_without_weight_is_no_nan():
    mask = np.where(np.arange(ROWS)[:, None] % 8 == 0, 0, MASK).astype(np.float32)
    found = accumulate_gradients(total, 8, weighted=True)(make(), (TOKENS, mask))
    same(found, vernal.filter_value_and_grad(of_total)(make(), (TOKENS, mask)))


LAYOUTS = {
    "data": (dict(data=8), lambda model, mesh: data_parallel()),
    "fsdp": (dict(data=8), lambda model, mesh: fsdp(model, mesh, "data", min_bytes=1)),
    "tensor": (
        dict(data=4, model=2),
        lambda model, mesh: (
            {"table.weight": P("model", None)}
            | {f"mlp.{n}": s for n, s in tensor_parallel(model.mlp, mesh, "model").items()}
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tied_head_and_a_spread_batch_give_the_same_on_every_mesh(layout, automatic):
    sizes, rules = LAYOUTS[layout]
    mesh, model = make_mesh(**sizes, automatic=automatic), make()
    spread = place(model, mesh, rules(model, mesh))
    batch = shard_batch((TOKENS, MASK), mesh, "data")

    @vernal.filter_jit
    def both(model, batch):
        parts = accumulate_gradients(total, 4, weighted=True)(model, batch)
        return parts, vernal.filter_value_and_grad(of_total)(model, batch)

    want = vernal.filter_value_and_grad(of_total)(model, (TOKENS, MASK))
    for found in both(spread, batch):
        same(found, want)


def test_micro_batches_draw_different_numbers_from_one_key():
    layer = nn.Dropout(0.5)

    def loss(model, x, *, key):
        return jnp.mean(model["w"] * layer(x[0], key=key))

    found = accumulate_gradients(loss, 2)(
        {"w": jnp.ones(64)}, jnp.ones((2, 64)), key=jax.random.key(0)
    )
    # Each entry is dropped by neither, one or both of the two; with one mask it would be by neither or both.
    assert len(np.unique(found[1]["w"])) == 3


def test_half_precision_is_summed_in_single_precision():
    model = {"w": jnp.ones((), jnp.bfloat16)}
    x = jnp.full((1024,), 1 / 3, jnp.bfloat16)
    gradient = accumulate_gradients(lambda m, x: jnp.mean(m["w"] * x), 1024)(model, x)[1]["w"]
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient, x[0])


@pytest.mark.parametrize(
    ("batch", "options", "text"),
    [
        ((np.ones((6, 2)),), {}, "cannot be divided into equal micro-batches"),
        ((np.ones((8, 2)), np.ones((4, 2))), {}, "expected: arrays with 8 rows"),
        (("name",), {}, "the batch has no arrays"),
        ((np.ones((8, 2)),), {"weighted": True}, "must return a sum and its weight"),
    ],
)
def test_a_batch_or_a_loss_that_does_not_fit_is_refused(batch, options, text):
    run = accumulate_gradients(lambda m, b: jnp.sum(m) * jnp.sum(b[0]), 4, **options)
    with pytest.raises((ValueError, TypeError), match=text):
        run(jnp.ones(2), jax.tree.map(lambda x: x if isinstance(x, str) else jnp.asarray(x), batch))


def test_rows_that_do_not_divide_over_devices_are_refused():
    batch = shard_batch((TOKENS, MASK), make_mesh(data=8), "data")
    with pytest.raises(ValueError, match="a multiple of 8 micro-batches times 8 devices"):
        accumulate_gradients(mean, 8)(make(), batch)


@pytest.mark.parametrize(
    "out", [lambda x: (x, x), lambda x: {"loss": x}, lambda x: None, lambda x: x[None]]
)
def test_a_loss_that_is_not_one_number_is_refused(out):
    model, batch = jnp.ones(2), jnp.ones((4, 2))
    with pytest.raises(TypeError, match="(?s)the loss must return one number.*nothing else"):
        accumulate_gradients(lambda m, b: out(jnp.sum(m)), 2)(model, batch)
    with pytest.raises(TypeError, match="a weighted loss must return a sum and its weight"):
        accumulate_gradients(lambda m, b: (out(jnp.sum(m)), 1.0), 2, weighted=True)(model, batch)


def test_no_micro_batches_are_refused():
    with pytest.raises(ValueError, match="must be at least 1"):
        accumulate_gradients(mean, 0)
