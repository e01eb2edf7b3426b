"""Three steps of training: fully sharded and tensor parallel, on meshes of both types, they are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import nn
from vernal.sharding import (
    fsdp,
    gather,
    init_sharded,
    make_mesh,
    shard_batch,
    shardings,
    tensor_parallel,
)

MESHES = {
    "explicit": make_mesh(data=4, model=2),
    "automatic": make_mesh(data=4, model=2, automatic=True),
}
OPTIMIZER = vernal.Optimizer(optax.adam, 1e-2)


class Block(vernal.Module):
    attention: nn.MultiheadAttention
    mlp: nn.MLP

    def __init__(self, key):
        key1, key2 = jax.random.split(key)
        self.attention = nn.MultiheadAttention(
            4, 8, num_key_value_heads=2, use_query_bias=True, use_output_bias=True, key=key1
        )
        self.mlp = nn.MLP(8, 8, 16, depth=1, activation=jax.nn.gelu, key=key2)

    def __call__(self, x):
        x = x + self.attention(x, x, x, causal=True)
        return x + self.mlp(x)


def make_mlp(key):
    return nn.MLP(8, 8, 16, depth=2, activation=jax.nn.gelu, key=key)


def make_stack(key):
    return nn.Stack(Block, 2, key=key)


def full(model, mesh):
    return fsdp(model, mesh, "data", min_bytes=64)


def tensor(model, mesh):
    return tensor_parallel(model, mesh, "model")


def both(model, mesh):
    return fsdp(model, mesh, "data", min_bytes=64, rules=tensor(model, mesh))


KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 3, 8)))
Y = np.asarray(jax.random.normal(jax.random.key(2), (8, 3, 8)))


def step(model, state, x, y):
    loss, grads = vernal.filter_value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
    model, state = OPTIMIZER.update(model, grads, state)
    return model, state, loss


def three_steps(step, model, state, x, y):
    losses = []
    for _ in range(3):
        model, state, loss = step(model, state, x, y)
        losses.append(float(loss))
    return gather((model, state)), losses


@functools.cache
def on_one_device(make):
    model = jax.jit(make)(KEY)
    return three_steps(vernal.filter_jit(step), model, OPTIMIZER.init(model), X, Y)


slow = pytest.mark.slow
CASES = [
    (make_mlp, both, "explicit", ()),
    (make_mlp, full, "automatic", ()),
    (Block, tensor, "explicit", slow),
    (Block, both, "automatic", slow),
    (make_stack, full, "explicit", slow),
]


@pytest.mark.parametrize(
    ("make", "make_rules", "kind"),
    [
        pytest.param(*case, marks=marks, id=f"{case[0].__name__}-{case[1].__name__}-{case[2]}")
        for *case, marks in CASES
    ],
)
def test_a_spread_step_is_that_of_one_device(make, make_rules, kind):
    mesh = MESHES[kind]

    def rules(model):
        return make_rules(model, mesh)

    model = init_sharded(make, KEY, mesh, rules)
    state = init_sharded(OPTIMIZER.init, model, mesh, rules, like=model)
    placed = shardings((model, state), mesh, rules, like=model)
    batch = shard_batch((X, Y), mesh, "data")
    spread = vernal.filter_jit(
        step, donate="all", in_shardings=(*placed, None, None), out_shardings=(*placed, None)
    )

    # The batch is used again.
    def compiled(model, state, x, y):
        return spread(model, state, *jax.tree.map(jnp.copy, (x, y)))

    found, losses = three_steps(compiled, model, state, *batch)
    expected, whole_losses = on_one_device(make)
    np.testing.assert_allclose(losses, whole_losses, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected
    )
    assert spread.trace_count == 1
    # The memory of the old model and state is that of the new ones.
    assert all(x.is_deleted() for x in jax.tree.leaves((model, state)))
