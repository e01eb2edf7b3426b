"""An ensemble that is called without `vmap`: all weights of all members would be taken for those of one layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn

# Three members, and three of everything else: nothing but the number of axes tells them from one layer.
VECTORS, SIGNAL, ROWS = jnp.ones((3, 3)), jnp.ones((3, 3)), jnp.array([0, 1, 2])
LAYERS = {
    "Linear": (lambda key: nn.Linear(3, 3, use_bias=False, key=key), VECTORS),
    "MLP": (
        lambda key: nn.MLP(3, 3, 3, 1, use_bias=False, use_final_bias=False, key=key),
        VECTORS,
    ),
    "scalar": (lambda key: nn.Linear("scalar", "scalar", use_bias=False, key=key), VECTORS),
    "to a scalar": (lambda key: nn.Linear(3, "scalar", use_bias=False, key=key), VECTORS),
    "Conv1d": (lambda key: nn.Conv1d(3, 3, 1, use_bias=False, key=key), SIGNAL),
    "ConvTranspose1d": (lambda key: nn.ConvTranspose1d(3, 3, 1, use_bias=False, key=key), SIGNAL),
    "Embedding": (lambda key: nn.Embedding(3, 3, key=key), ROWS),
    "BatchNorm": (lambda key: nn.BatchNorm(3, channelwise_affine=False), VECTORS),
    "SpectralNorm": (
        lambda key: nn.SpectralNorm(nn.Linear(3, 3, use_bias=False, key=key), key=key),
        VECTORS,
    ),
    "RNNCell": (
        lambda key: nn.Lambda(Step(nn.RNNCell(3, 3, use_bias=False, key=key))),
        VECTORS,
    ),
    "GRUCell": (
        lambda key: nn.Lambda(Step(nn.GRUCell(3, 3, use_bias=False, key=key))),
        VECTORS,
    ),
    "RNN": (
        lambda key: nn.Lambda(Sequence(nn.RNN(3, 3, use_bias=False, key=key))),
        VECTORS,
    ),
    "LSTM": (
        lambda key: nn.Lambda(Sequence(nn.LSTM(3, 3, use_bias=False, key=key))),
        VECTORS,
    ),
    "attention": (
        lambda key: nn.Lambda(Attention(nn.MultiheadAttention(1, 3, key=key))),
        VECTORS,
    ),
}


class Attention(vernal.Module):
    inside: nn.MultiheadAttention

    def __call__(self, x):
        return self.inside(x, x, x)


class Step(vernal.Module):
    inside: nn.RNNCell | nn.GRUCell

    def __call__(self, x):
        return self.inside(x, x)


class Sequence(vernal.Module):
    inside: nn.RNN | nn.LSTM

    def __call__(self, x):
        return self.inside(x)[0]


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.sample(6)
def test_all_members_at_once_are_refused(name, train, getkey):
    make, x = LAYERS[name]
    layers = vernal.filter_vmap(make)(jax.random.split(getkey(), 3))
    with pytest.raises(ValueError, match=r"(?s)has the wrong shape.*vernal\.filter_vmap"):
        nn.apply(layers, x, train=train)
    # What the message says instead.
    each = vernal.filter_vmap(
        lambda layer, x: nn.apply(layer, x, train=train)[0], in_axes=(0, None)
    )(layers, x)
    first = jax.tree.map(lambda leaf: leaf[0], layers)
    np.testing.assert_allclose(each[0], nn.apply(first, x, train=train)[0], atol=1e-6)
