"""Every public layer on an input whose axes all have one length, the batch too, where a mistaken axis would not fail.

The answers are PyTorch's, or those of a few lines of it for the layers that it has not. Weights and inputs are random,
so that no two axes can be exchanged unnoticed. Adding a layer is adding a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.nn._torch_parity import Row
from tests.nn.test_table import public_layers
from vernal import nn
from vernal.saving import (
    attention_rules,
    conv_transpose_rules,
    from_torch,
    gru_cell_rules,
    gru_rules,
    lstm_cell_rules,
    lstm_rules,
    rnn_cell_rules,
    rnn_rules,
    spectral_norm_rules,
    weight_norm_rules,
)

N = 4


class Function(torch.nn.Module):
    """A function as a module of PyTorch, with the parts that it has the weights of."""

    def __init__(self, function, *parts):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)
        self.function = function

    def forward(self, *inputs):
        return self.function(*self.parts, *inputs)


def row(ours, theirs, axes, rules=None, inputs=1, **calls):
    """A layer and a module, called with `inputs` arrays of a batch axis and so many `axes`, all of one length."""
    calls.setdefault("call_ours", lambda layer, *x: layer(*x))
    return Row(ours, theirs, ((N,) * axes,) * inputs, rules, **calls)


def _rotated(x):
    angles = torch.arange(N)[:, None] * 10_000.0 ** (-torch.arange(N // 2) / (N // 2)).double()
    first, second = x[..., : N // 2], x[..., N // 2 :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _linears(number):
    return [torch.nn.Linear(N, N) for _ in range(number)]


def _transposed_after(first, x):
    return torch.nn.functional.linear(first(x), first.weight.T)


class Tied(nn.StatefulLayer):
    """Two linear maps, of which the second has the transposed weight of the first."""

    shared: nn.Shared

    def __init__(self, key):
        layers = [nn.Linear(N, N, use_bias=False, key=key) for _ in range(2)]
        self.shared = nn.Shared(layers, lambda both: both[1].weight, lambda both: both[0].weight.T)

    def __call__(self, x):
        first, second = self.shared()
        return second(first(x))


def _cell(ours, theirs, rules, states=1):
    def call_ours(cell, x, *state):
        return cell(x, state if states > 1 else state[0])

    def call_theirs(cell, x, *state):
        return cell(x, state if states > 1 else state[0])

    return row(
        lambda k: ours(N, N, key=k),
        lambda: theirs(N, N),
        1,
        rules(),
        1 + states,
        call_ours=call_ours,
        call_theirs=call_theirs,
    )


def _recurrent(ours, theirs, rules):
    # Two layers in two directions: as many states as the batch is large, and sequences are long.
    return row(
        lambda k: ours(N, N, 2, bidirectional=True, key=k),
        lambda: theirs(N, N, 2, bidirectional=True, batch_first=True),
        2,
        rules(bidirectional=True),
        call_ours=lambda layer, x: layer(x),
        call_theirs=lambda module, x: _states_behind_the_batch(module(x)),
    )


def _states_behind_the_batch(found):
    outputs, state = found
    return outputs, jax.tree.map(lambda s: s.transpose(0, 1), state)


def _pair(name, *args, axes, rules=None, **settings):
    """A layer that has the name and the arguments of PyTorch's."""
    random = any(part in name for part in ("Linear", "Conv"))
    return row(
        lambda k: getattr(nn, name)(*args, **settings, **({"key": k} if random else {})),
        lambda: getattr(torch.nn, name)(*args, **settings),
        axes,
        rules,
    )


ROWS = {
    "Linear": _pair("Linear", N, N, axes=3),
    "Identity": row(lambda k: nn.Identity(), torch.nn.Identity, 3),
    "MLP": row(
        lambda k: nn.MLP(N, N, N, 1, jax.nn.relu, key=k),
        lambda: torch.nn.Sequential(*_linears(1), torch.nn.ReLU(), *_linears(1)),
        2,
        {"layers.0.*": "0.*", "layers.1.*": "2.*"},
    ),
    "Conv": row(lambda k: nn.Conv(2, N, N, 3, key=k), lambda: torch.nn.Conv2d(N, N, 3), 3),
    "ConvTranspose": row(
        lambda k: nn.ConvTranspose(2, N, N, 3, key=k),
        lambda: torch.nn.ConvTranspose2d(N, N, 3),
        3,
        conv_transpose_rules(),
    ),
    "Pool": row(
        lambda k: nn.Pool(0, jax.lax.add, 1, 3),
        lambda: Function(lambda x: 3 * torch.nn.functional.avg_pool1d(x, 3, 1)),
        2,
    ),
    "AdaptivePool": row(
        lambda k: nn.AdaptivePool(N, 2, jnp.max), lambda: torch.nn.AdaptiveMaxPool2d(N), 3
    ),
    "Upsample": row(
        lambda k: nn.Upsample((N, 7), method="linear"),
        lambda: torch.nn.Upsample((N, 7), mode="bilinear"),
        3,
    ),
    "PixelShuffle": _pair("PixelShuffle", 2, axes=3),
    "PixelUnshuffle": _pair("PixelUnshuffle", 2, axes=3),
    "LayerNorm": _pair("LayerNorm", N, axes=3),
    "LayerNorm of matrices": _pair("LayerNorm", (N, N), axes=3),
    "RMSNorm": row(
        lambda k: nn.RMSNorm(N, use_bias=False, eps=1e-3), lambda: torch.nn.RMSNorm(N, 1e-3), 3
    ),
    "GroupNorm": row(
        lambda k: nn.GroupNorm(2, N, num_spatial_dims=2), lambda: torch.nn.GroupNorm(2, N), 3
    ),
    "InstanceNorm": row(
        lambda k: nn.InstanceNorm(N, num_spatial_dims=2),
        lambda: torch.nn.InstanceNorm2d(N, affine=True),
        3,
    ),
    "BatchNorm": row(
        lambda k: nn.BatchNorm(N, num_spatial_dims=2),
        lambda: torch.nn.BatchNorm2d(N),
        3,
        call_ours=lambda layer, x: nn.apply(layer, x)[0],
    ),
    "BatchNorm in inference": row(
        lambda k: nn.BatchNorm(N, num_spatial_dims=2, inference=True),
        lambda: torch.nn.BatchNorm2d(N).eval(),
        3,
    ),
    "Dropout": row(
        lambda k: nn.Dropout(0.3, inference=True), lambda: torch.nn.Dropout(0.3).eval(), 3
    ),
    "DropPath": row(lambda k: nn.DropPath(0.3, inference=True), torch.nn.Identity, 3),
    "Embedding": row(
        lambda k: nn.Embedding(N, N, key=k), lambda: torch.nn.Embedding(N, N), 1, integers=N
    ),
    "RNNCell": _cell(nn.RNNCell, torch.nn.RNNCell, rnn_cell_rules),
    "GRUCell": _cell(nn.GRUCell, torch.nn.GRUCell, gru_cell_rules),
    "LSTMCell": _cell(nn.LSTMCell, torch.nn.LSTMCell, lstm_cell_rules, states=2),
    "RNN": _recurrent(nn.RNN, torch.nn.RNN, rnn_rules),
    "GRU": _recurrent(nn.GRU, torch.nn.GRU, gru_rules),
    "LSTM": _recurrent(nn.LSTM, torch.nn.LSTM, lstm_rules),
    # As many heads as tokens and examples, and a mask of as many rows as any of them.
    "MultiheadAttention": row(
        lambda k: nn.MultiheadAttention(
            N,
            N,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=k,
        ),
        lambda: torch.nn.MultiheadAttention(N, N, batch_first=True),
        2,
        attention_rules(),
        3,
        call_ours=lambda layer, *x: layer(*x, mask=jnp.tri(N, dtype=bool)),
        call_theirs=lambda module, *x: module(
            *x, attn_mask=~torch.ones(N, N, dtype=torch.bool).tril()
        )[0],
    ),
    "RotaryPositionalEmbedding": row(
        lambda k: nn.RotaryPositionalEmbedding(N), lambda: Function(_rotated), 3
    ),
    "WeightNorm": row(
        lambda k: nn.WeightNorm(nn.Linear(N, N, key=k)),
        lambda: torch.nn.utils.parametrizations.weight_norm(*_linears(1)),
        2,
        weight_norm_rules(),
    ),
    "SpectralNorm": row(
        lambda k: nn.SpectralNorm(nn.Linear(N, N, key=k), key=k),
        lambda: torch.nn.utils.parametrizations.spectral_norm(*_linears(1)),
        2,
        spectral_norm_rules(),
        call_ours=lambda layer, x: nn.apply(layer, x)[0],
    ),
    "Shared": row(
        Tied,
        lambda: Function(_transposed_after, torch.nn.Linear(N, N, bias=False)),
        2,
        {"shared.pytree.0.weight": "parts.0.weight"},
    ),
    "PReLU": row(
        lambda k: nn.PReLU(jnp.zeros((N, 1, 1))),
        lambda: torch.nn.PReLU(N),
        3,
        {"negative_slope": "weight"},
    ),
    "Lambda": row(
        lambda k: nn.Lambda(jnp.cumsum), lambda: Function(lambda x: x.flatten().cumsum(0)), 2
    ),
    "Sequential": row(
        lambda k: nn.Sequential([nn.Linear(N, N, key=k), jax.nn.relu, nn.Linear(N, N, key=k)]),
        lambda: torch.nn.Sequential(*_linears(1), torch.nn.ReLU(), *_linears(1)),
        2,
    ),
    "Stack": row(
        lambda k: nn.Stack(lambda k: nn.Linear(N, N, key=k), N, key=k),
        lambda: torch.nn.Sequential(*_linears(N)),
        2,
        {"layers.*": "#.*"},
    ),
    "Cast": row(
        lambda k: nn.cast(nn.Linear(N, N, key=k), nn.Policy()), lambda: torch.nn.Linear(N, N), 2
    ),
}
for d in (1, 2, 3):
    ROWS |= {
        f"Conv{d}d": _pair(f"Conv{d}d", N, N, 3, 1, 1, axes=1 + d),
        f"ConvTranspose{d}d": _pair(
            f"ConvTranspose{d}d", N, N, 3, 1, axes=1 + d, rules=conv_transpose_rules()
        ),
        f"AvgPool{d}d": _pair(f"AvgPool{d}d", 3, 1, 1, axes=1 + d),
        f"MaxPool{d}d": _pair(f"MaxPool{d}d", 3, 1, 1, axes=1 + d),
        f"AdaptiveAvgPool{d}d": _pair(f"AdaptiveAvgPool{d}d", 3, axes=1 + d),
        f"AdaptiveMaxPool{d}d": _pair(f"AdaptiveMaxPool{d}d", 3, axes=1 + d),
    }


def test_every_public_layer_has_a_row():
    made = {name: type(jax.eval_shape(row.ours, jax.random.key(0))) for name, row in ROWS.items()}
    # It is not called with an array.
    made["Shared"] = nn.Shared
    assert all(name.split()[0] == cls.__name__ for name, cls in made.items())
    assert public_layers() - {*made.values()} == set()


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.sample(3)
def test_axes_of_one_length_are_not_mistaken_for_each_other(row):
    with jax.enable_x64(True):
        torch.manual_seed(0)
        module = row.theirs().double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape) / 2)
            for buffer in module.buffers():
                # Statistics, which begin as zeros and ones.
                if buffer.is_floating_point():
                    buffer.add_(torch.rand(buffer.shape))
        layer = from_torch(
            jax.eval_shape(row.ours, jax.random.key(0)), module.state_dict(), row.rules
        )
        random = np.random.default_rng(0)
        inputs = [random.normal(size=(N, *shape)) for shape in row.shapes]
        if row.integers:
            inputs = [random.integers(0, row.integers, x.shape) for x in inputs]
        wanted = jax.tree.leaves(row.call_theirs(module, *map(torch.tensor, inputs)))
        found = jax.tree.leaves(jax.jit(row.call_ours)(layer, *inputs))
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-9, atol=1e-10)
