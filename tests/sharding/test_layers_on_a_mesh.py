"""Every layer on meshes, as `_same.py` says: those of the table of layers, and calls that the table does not make."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn.test_table import ROWS
from tests.sharding._same import AUTO, BATCH, EXPLICIT, Computation, check_same
from vernal import nn

KEY = jax.random.key(1)
# Rows that are also called by `jax.vmap`: one for every way in which layers treat their parameters.
MAPPED = "Linear", "Embedding", "MLP", "Conv2d", "LayerNorm", "PReLU of several slopes", "GRUCell"


def filled(rng, make):
    """What `make` returns, with positive numbers (as a variance has to be) in its floating-point arrays."""

    def fill(a):
        if not jnp.issubdtype(a.dtype, jnp.floating):
            return jnp.zeros(a.shape, a.dtype)
        return jnp.asarray(rng.uniform(0.1, 0.5, size=a.shape), a.dtype)

    return jax.tree.map(fill, jax.eval_shape(make, KEY))


def called(layer, xs):
    return layer(xs, key=KEY)


def mapped(layer, xs):
    return jax.vmap(lambda x: layer(x, key=KEY))(xs)


def in_table(name):
    row = ROWS[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    layer, xs = filled(rng, row.make), row.examples(rng, (BATCH,))
    if not row.batches:
        return Computation(mapped, layer, xs)
    return Computation(called, layer, xs, mapped if name in MAPPED else None)


def trained(layer, xs):
    """Layers with state: the result, and the new state."""
    y, layer = nn.apply(layer, xs, key=KEY)
    return y, layer


def _megatron(key):
    """A block of which every pair of matrices is a pair of heads or hidden features."""
    k1, k2 = jax.random.split(key)
    return nn.MultiheadAttention(4, 8, key=k1), nn.MLP(8, 8, 16, 1, jnp.tanh, key=k2)


def _block(block, xs):
    attention, mlp = block
    xs = xs + attention(xs, xs, xs, causal=True)
    return xs + mlp(xs)


def _cached(attention, xs):
    cache = attention.make_cache(6, batch=xs.shape[:1])
    y, cache = attention(xs[:, :3], xs[:, :3], xs[:, :3], cache=cache)
    z, cache = attention(xs[:, 3:], xs[:, 3:], xs[:, 3:], cache=cache)
    return jnp.concatenate([y, z], axis=1)


def _blockwise(attention, xs):
    return attention(xs, xs, xs, causal=True, implementation="blockwise")


def _with_lengths(gru, xs):
    return gru(xs, length=jnp.sum(xs > 0, axis=(1, 2), dtype=jnp.int32) % 5)


def _with_state(layer, xs):
    layer, state = nn.make_with_state(lambda: layer)()
    return layer(xs, state)


# Name: the constructor, the call, and the shape of one example.
MORE = {
    "BatchNorm of the batch": (lambda k: nn.BatchNorm(4, num_spatial_dims=1), trained, (4, 3)),
    "BatchNorm with a State": (lambda k: nn.BatchNorm(4, mode="ema"), _with_state, (4,)),
    "SpectralNorm": (lambda k: nn.SpectralNorm(nn.Linear(4, 6, key=k), key=k), trained, (4,)),
    "Stack with state": (
        lambda k: nn.Stack(
            lambda k: nn.Sequential([nn.Linear(4, 4, key=k), nn.BatchNorm(4)]), 3, key=k
        ),
        trained,
        (4,),
    ),
    "Stack with checkpoints": (
        lambda k: nn.Stack(lambda k: nn.Linear(4, 4, key=k), 2, checkpoint=True, key=k),
        called,
        (4,),
    ),
    "Transformer block": (_megatron, _block, (3, 8)),
    "Attention with a cache": (lambda k: nn.MultiheadAttention(2, 8, key=k), _cached, (4, 8)),
    "Attention by blocks": (lambda k: nn.MultiheadAttention(2, 8, key=k), _blockwise, (70, 8)),
    "GRU with lengths": (lambda k: nn.GRU(4, 4, key=k), _with_lengths, (5, 4)),
    "Depthwise Conv2d": (lambda k: nn.Conv2d(4, 8, 3, groups=4, key=k), called, (4, 5, 5)),
    "Embedding of sequences": (lambda k: nn.Embedding(8, 6, key=k), called, (3,)),
}


def by_hand(name):
    make, run, shape = MORE[name]
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.startswith("Embedding"):
        xs = rng.integers(8, size=(BATCH, *shape)).astype(np.int32)
    else:
        xs = rng.normal(size=(BATCH, *shape)).astype(np.float32)
    return Computation(run, filled(rng, make), xs)


CASES = {name: in_table for name in ROWS} | {name: by_hand for name in MORE}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(8)
def test_a_layer_is_the_same_on_a_mesh_with_explicit_axes(name):
    check_same(CASES[name](name), EXPLICIT)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_the_same_on_a_mesh_with_automatic_axes(name):
    check_same(CASES[name](name), AUTO)
