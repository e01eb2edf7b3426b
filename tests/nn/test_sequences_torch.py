"""Attention and recurrence against PyTorch's. One row for each setting; adding one is adding a row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.nn._torch_parity import BATCH, Row, check
from vernal import nn
from vernal.saving import (
    Conversion,
    attention_rules,
    gru_cell_rules,
    gru_rules,
    lstm_cell_rules,
    lstm_rules,
    rnn_cell_rules,
    rnn_rules,
)

# --- attention

TOKENS = 4
PAST = np.tri(TOKENS, dtype=bool)
SEEN = (np.random.default_rng(3).random((TOKENS, 5)) < 0.6) | np.eye(TOKENS, 5, dtype=bool)
SCORES = np.random.default_rng(4).normal(size=(BATCH, 2, TOKENS, 5))
# How many keys there are, of 5.
THERE = np.arange(5) < np.array([5, 2])[:, None]


def attention(ours, theirs, keys=5, bias=True, **sizes):
    """Attention of ours and theirs with the keyword arguments of each, over sequences of `keys` keys and values."""
    names = ("query", "key", "value", "output")
    key, value = sizes.get("kdim", 6), sizes.get("vdim", 6)
    rules = dict(attention_rules(use_bias=bias))
    if sizes:
        three = tuple(f"{name}_proj.weight" for name in names[:3])
        del rules[three]
        rules |= dict(zip(three, [f"{n}_proj_weight" for n in "qkv"], strict=True))

    return Row(
        lambda k: nn.MultiheadAttention(
            2, 6, key, value, **{f"use_{name}_bias": bias for name in names}, key=k
        ),
        lambda: torch.nn.MultiheadAttention(6, 2, bias=bias, batch_first=True, **sizes),
        ((TOKENS, 6), (keys, key), (keys, value)),
        rules,
        call_ours=lambda layer, *x: layer(*x, **ours),
        call_theirs=lambda module, *x: module(
            *x, need_weights=False, **{k: torch.tensor(v) for k, v in theirs.items()}
        )[0],
    )


ROWS = {
    "MultiheadAttention": attention({}, {}),
    "MultiheadAttention without biases": attention({}, {}, bias=False),
    "MultiheadAttention, other sizes": attention({}, {}, kdim=3, vdim=4),
    "MultiheadAttention, masked": attention({"mask": SEEN}, {"attn_mask": ~SEEN}),
    "MultiheadAttention, causal": attention({"causal": True}, {"attn_mask": ~PAST}, keys=TOKENS),
    "MultiheadAttention, lengths": attention(
        {"mask": THERE[:, None, None]}, {"key_padding_mask": ~THERE}
    ),
    "MultiheadAttention, biased scores": attention(
        {"bias": SCORES}, {"attn_mask": SCORES.reshape(-1, TOKENS, 5)}
    ),
}

# --- recurrence: two biases of theirs are one of ours, so that each of their gradients is ours


def _last_third(bias):
    return np.split(bias, 3)[2]


RULES = {"RNN": rnn_rules, "GRU": gru_rules, "LSTM": lstm_rules}
CELL_RULES = {"RNN": rnn_cell_rules, "GRU": gru_cell_rules, "LSTM": lstm_cell_rules}


def cell(kind, use_bias=True, nonlinearity=None):
    gru, one = kind == "GRU", kind != "LSTM"
    gradients = {"bias": "bias_ih"} | (
        {"bias_n": Conversion("bias_hh", _last_third)} if gru else {}
    )
    return Row(
        lambda k: getattr(nn, f"{kind}Cell")(4, 3, use_bias, **_activation(nonlinearity), key=k),
        lambda: getattr(torch.nn, f"{kind}Cell")(4, 3, use_bias, **_nonlinearity(nonlinearity)),
        ((4,), (3,)) if one else ((4,), (3,), (3,)),
        CELL_RULES[kind](use_bias=use_bias),
        gradients if use_bias else None,
        call_ours=lambda layer, x, *h: jax.vmap(layer)(x, h[0] if one else h),
        call_theirs=lambda module, x, *h: module(x, h[0] if one else h),
    )


def _activation(name):
    return {} if name is None else {"activation": getattr(jax.nn, name)}


def _nonlinearity(name):
    return {} if name is None else {"nonlinearity": name}


TIME = 5
LENGTHS = [3, TIME]


def sequence(kind, layers=1, bidirectional=False, use_bias=True, lengths=None, nonlinearity=None):
    gru, one = kind == "GRU", kind != "LSTM"
    settings = {"bidirectional": bidirectional, "use_bias": use_bias}
    states = ((layers * (1 + bidirectional), 3),) * (1 if one else 2)
    gradients = dict(RULES[kind](**settings | {"use_bias": False}))
    for i, suffix in enumerate(["", "_reverse"][: 1 + bidirectional]):
        if use_bias:
            gradients[f"cells.*.{i}.bias"] = f"bias_ih_l*{suffix}"
        if use_bias and gru:
            gradients[f"cells.*.{i}.bias_n"] = Conversion(f"bias_hh_l*{suffix}", _last_third)

    def ours(layer, xs, *state):
        def run(x, n, *h):
            return layer(x, h[0] if one else h, length=n)

        return jax.vmap(run)(xs, jnp.array(lengths or [TIME] * BATCH), *state)

    def theirs(module, xs, *state):
        state = [s.transpose(0, 1).contiguous() for s in state]
        if lengths is not None:
            xs = torch.nn.utils.rnn.pack_padded_sequence(
                xs, torch.tensor(lengths), batch_first=True, enforce_sorted=False
            )
        ys, final = module(xs, state[0] if one else tuple(state))
        if lengths is not None:
            ys, _ = torch.nn.utils.rnn.pad_packed_sequence(ys, batch_first=True)
        return ys, [s.transpose(0, 1) for s in ([final] if one else final)]

    return Row(
        lambda k: getattr(nn, kind)(4, 3, layers, **settings, **_activation(nonlinearity), key=k),
        lambda: getattr(torch.nn, kind)(
            4,
            3,
            layers,
            batch_first=True,
            bidirectional=bidirectional,
            bias=use_bias,
            **_nonlinearity(nonlinearity),
        ),
        ((TIME, 4), *states),
        RULES[kind](**settings),
        gradients,
        call_ours=ours,
        call_theirs=theirs,
    )


for kind in RULES:
    ROWS |= {
        f"{kind}Cell": cell(kind),
        f"{kind}Cell without bias": cell(kind, use_bias=False),
        f"{kind}": sequence(kind),
        f"{kind}, layers without bias": sequence(kind, layers=2, use_bias=False),
        f"{kind}, both directions, lengths": sequence(
            kind, layers=2, bidirectional=True, lengths=LENGTHS
        ),
    }

ROWS |= {
    "RNNCell of relu": cell("RNN", nonlinearity="relu"),
    "RNN of relu, both directions, lengths": sequence(
        "RNN", layers=2, bidirectional=True, lengths=LENGTHS, nonlinearity="relu"
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.sample(6)
def test_values_and_gradients_are_pytorchs(row):
    check(row)
