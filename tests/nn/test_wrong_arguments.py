"""Arguments of another kind than a layer takes are refused by name."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn

LAYERS = {
    "Linear": lambda key: nn.Linear(3, 3, key=key),
    "LayerNorm": lambda key: nn.LayerNorm(3),
    "RMSNorm": lambda key: nn.RMSNorm(3),
    "GroupNorm": lambda key: nn.GroupNorm(1, 3),
    "InstanceNorm": lambda key: nn.InstanceNorm(3),
    "BatchNorm": lambda key: nn.BatchNorm(3, inference=True),
    "Dropout": lambda key: nn.Dropout(0.5, inference=True),
    "PReLU": lambda key: nn.PReLU(),
    "Embedding": lambda key: nn.Embedding(3, 3, key=key),
    "Conv1d": lambda key: nn.Conv1d(3, 3, 1, key=key),
    "AvgPool1d": lambda key: nn.AvgPool1d(1),
}


def unchecked(fn, *args, **kwargs):
    """Without the checks of annotations that the tests run under."""
    return inspect.unwrap(fn)(*args, **kwargs)


@pytest.mark.parametrize("x", [None, "text", {"x": 1.0}], ids=["None", "text", "dict"])
@pytest.mark.parametrize("name", LAYERS)
def test_what_is_not_an_array_is_refused(name, x, getkey):
    layer = LAYERS[name](getkey())
    with pytest.raises(TypeError, match=f"(?s)`{name}` was not given an array.*argument `x`"):
        unchecked(type(layer).__call__, layer, x)


def test_the_state_of_a_cell_with_memory_is_a_pair(getkey):
    cell = nn.LSTMCell(3, 4, key=getkey())
    for state in (jnp.zeros((2, 4)), (jnp.zeros(4),), None):
        with pytest.raises(
            TypeError, match=r"(?s)the state of `LSTMCell` must be a pair.*\(h, c\)"
        ):
            unchecked(nn.LSTMCell.__call__, cell, jnp.ones(3), state)


def test_layers_come_in_a_list(getkey):
    layer = nn.Linear(3, 3, key=getkey())
    for wrong in (layer, jnp.tanh, 3):
        with pytest.raises(TypeError, match=r"(?s)must be in a list.*Sequential\(\[a\]\)"):
            unchecked(nn.Sequential.__init__, object.__new__(nn.Sequential), wrong)
        with pytest.raises(TypeError, match=r"(?s)must be in a list.*Stack.of\(\[layer, layer\]\)"):
            unchecked(nn.Stack.of.__func__, nn.Stack, wrong)
    with pytest.raises(
        TypeError, match=r"(?s)must be in a list.*2 arguments.*Sequential\(\[a, b\]\)"
    ):
        unchecked(nn.Sequential.__init__, object.__new__(nn.Sequential), layer, layer)


def test_a_policy_is_not_a_dtype(getkey):
    with pytest.raises(TypeError, match="(?s)`policy` must be a Policy.*nn.Policy"):
        unchecked(nn.cast, nn.Linear(3, 3, key=getkey()), jnp.bfloat16)


def test_rules_and_what_initialisers_return(getkey):
    layer = nn.Linear(3, 3, key=getkey())
    with pytest.raises(TypeError, match="(?s)rules must be a dictionary.*he_normal"):
        unchecked(nn.initialise, layer, ["**.weight"], getkey())
    with pytest.raises(ValueError, match="(?s)does not fit the array.*weight.*None"):
        nn.initialise(layer, {"weight": lambda key, shape, dtype: None}, getkey())


def test_a_method_is_a_name_or_a_function(getkey):
    with pytest.raises(TypeError, match="(?s)`method` must be a name or a function.*3"):
        unchecked(nn.apply, nn.Linear(3, 3, key=getkey()), jnp.ones(3), method=3)


def test_conditions_of_attention(getkey):
    layer, x = nn.MultiheadAttention(2, 4, key=getkey()), jnp.ones((5, 4))
    call = nn.MultiheadAttention.__call__
    with pytest.raises(TypeError, match="(?s)`window` must be a Python int.*mask="):
        unchecked(call, layer, x, x, x, window=jnp.array(2))
    with pytest.raises(TypeError, match="(?s)`cache` must be a KVCache.*make_cache"):
        unchecked(call, layer, x, x, x, cache=3)
    got = unchecked(call, layer, x, x, x, window=np.int64(2))
    assert vernal.tree_equal(got, layer(x, x, x, window=2))
    assert jax.tree.structure(got).num_leaves == 1


@pytest.mark.parametrize("value", ["blockwize", 3, "flash"])
def test_an_unknown_implementation_of_attention_is_refused(value, getkey):
    q = jnp.ones((3, 2, 4))
    with pytest.raises(ValueError, match=r"(?s)unknown implementation.*blockwise"):
        unchecked(nn.attention, q, q, q, implementation=value)
    layer, x = nn.MultiheadAttention(2, 4, key=getkey()), jnp.ones((5, 4))
    with pytest.raises(ValueError, match=r"(?s)unknown implementation.*blockwise"):
        unchecked(nn.MultiheadAttention.__call__, layer, x, x, x, implementation=value)


def test_a_string_is_not_a_flag(getkey):
    q, x = jnp.ones((3, 2, 4)), jnp.ones((5, 4))
    layer = nn.MultiheadAttention(2, 4, key=getkey())
    with pytest.raises(
        TypeError, match=r"(?s)`causal` of `attention` must be True or False.*'False'"
    ):
        unchecked(nn.attention, q, q, q, causal="False")
    with pytest.raises(TypeError, match=r"(?s)`causal` of `attention` must be True or False.*'no'"):
        unchecked(nn.MultiheadAttention.__call__, layer, x, x, x, causal="no")
    with pytest.raises(TypeError, match=r"(?s)`causal` of `ring_attention` must be True or False"):
        unchecked(nn.ring_attention, q, q, q, axis_name="i", causal="no")
    with pytest.raises(TypeError, match=r"(?s)`causal` of `attention`.*bool\[\].*`mask=`"):
        jax.jit(lambda causal: unchecked(nn.attention, q, q, q, causal=causal))(True)
    for dropout in (nn.Dropout(0.5), nn.DropPath(0.5)):
        with pytest.raises(TypeError, match=r"(?s)`inference` of `Drop\w+` must be True or False"):
            unchecked(type(dropout).__call__, dropout, q, inference="no", key=getkey())
    norm = vernal.tree_at(lambda norm: norm.inference, nn.BatchNorm(3), "no")
    with pytest.raises(TypeError, match=r"(?s)`inference` of `BatchNorm` must be True or False"):
        nn.apply(norm, jnp.ones((4, 3)))


NORMS = {
    "LayerNorm": lambda eps: unchecked(nn.LayerNorm.__init__, object.__new__(nn.LayerNorm), 3, eps),
    "RMSNorm": lambda eps: unchecked(nn.RMSNorm.__init__, object.__new__(nn.RMSNorm), 3, eps),
    "GroupNorm": lambda eps: unchecked(
        nn.GroupNorm.__init__, object.__new__(nn.GroupNorm), 1, 3, eps
    ),
    "InstanceNorm": lambda eps: unchecked(
        nn.InstanceNorm.__init__, object.__new__(nn.InstanceNorm), 3, eps
    ),
    "BatchNorm": lambda eps: unchecked(
        nn.BatchNorm.__init__, object.__new__(nn.BatchNorm), 3, None, eps
    ),
}


@pytest.mark.parametrize("eps", [-1.0, float("nan"), 1j])
@pytest.mark.parametrize("name", NORMS)
def test_an_eps_that_is_not_a_number_of_at_least_zero_is_refused(name, eps):
    with pytest.raises(ValueError, match=f"(?s)`{name}` was given a wrong `eps`.*at least 0"):
        NORMS[name](eps)
    for wrong in ("a", None, [1e-5]):
        with pytest.raises(ValueError, match=f"(?s)`{name}` was not given a number.*`eps`"):
            NORMS[name](wrong)


def test_the_second_argument_of_batch_norm_is_a_name():
    with pytest.raises(
        ValueError, match=r"(?s)`BatchNorm` was given an invalid argument.*`axis_name`.*1e-05"
    ):
        unchecked(nn.BatchNorm.__init__, object.__new__(nn.BatchNorm), 3, 1e-5, 0.1)


def test_a_stack_is_indexed_as_a_list_is(getkey):
    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 4, key=getkey())
    for index in (True, None, 1.0, "1", (0, 1), jnp.array([0, 2]), jnp.array([True] * 4), ...):
        with pytest.raises(
            TypeError, match="the index of a `Stack` must be one integer or a slice"
        ):
            unchecked(nn.Stack.__getitem__, stack, index)
    for index in (2, np.int64(2), jnp.array(2), -2):
        np.testing.assert_array_equal(stack[index].weight, stack.layers.weight[2])
    for index in (4, -5, np.int64(4), np.array(9)):
        with pytest.raises(IndexError, match="the index of a `Stack` is out of range"):
            unchecked(nn.Stack.__getitem__, stack, index)
    traced = jax.jit(lambda i: stack[i].weight)(2)
    np.testing.assert_array_equal(traced, stack.layers.weight[2])


def test_an_index_beyond_int32_is_clipped_as_any_other(getkey):
    table = nn.Embedding(300, 2, key=getkey())
    np.testing.assert_array_equal(table(2**40), table.weight[-1])
    np.testing.assert_array_equal(table(-(2**40)), table.weight[0])
    np.testing.assert_array_equal(table(-1), table.weight[-1])


FLAGS = {
    "use_bias of Linear": lambda flag, key: nn.Linear(3, 3, use_bias=flag, key=key),
    "use_bias of Conv1d": lambda flag, key: nn.Conv1d(3, 3, 1, use_bias=flag, key=key),
    "use_bias of ConvTranspose2d": lambda flag, key: nn.ConvTranspose2d(
        3, 3, 1, use_bias=flag, key=key
    ),
    "use_bias of GRUCell": lambda flag, key: nn.GRUCell(3, 3, use_bias=flag, key=key),
    "bidirectional of LSTM": lambda flag, key: nn.LSTM(3, 3, bidirectional=flag, key=key),
    "use_bias of MLP": lambda flag, key: nn.MLP(3, 3, 3, 1, jnp.tanh, use_bias=flag, key=key),
    "use_final_bias of MLP": lambda flag, key: nn.MLP(
        3, 3, 3, 1, jnp.tanh, use_final_bias=flag, key=key
    ),
    "scan of MLP": lambda flag, key: nn.MLP(3, 3, 3, 1, jnp.tanh, scan=flag, key=key),
    **{
        f"use_{name}_bias of MultiheadAttention": lambda flag, key, name=name: (
            nn.MultiheadAttention(1, 3, **{f"use_{name}_bias": flag}, key=key)
        )
        for name in ("query", "key", "value", "output")
    },
    "use_weight of LayerNorm": lambda flag, key: nn.LayerNorm(3, use_weight=flag),
    "use_bias of RMSNorm": lambda flag, key: nn.RMSNorm(3, use_bias=flag),
    "channelwise_affine of GroupNorm": lambda flag, key: nn.GroupNorm(
        1, 3, channelwise_affine=flag
    ),
    "channelwise_affine of InstanceNorm": lambda flag, key: nn.InstanceNorm(
        3, channelwise_affine=flag
    ),
    "channelwise_affine of BatchNorm": lambda flag, key: nn.BatchNorm(3, channelwise_affine=flag),
    "use_ceil of AvgPool1d": lambda flag, key: nn.AvgPool1d(1, use_ceil=flag),
    "disjoint of AdaptiveAvgPool2d": lambda flag, key: nn.AdaptiveAvgPool2d(1, disjoint=flag),
    "align_corners of Upsample": lambda flag, key: nn.Upsample((4,), align_corners=flag),
    "antialias of Upsample": lambda flag, key: nn.Upsample((4,), antialias=flag),
    "antialias of interpolate": lambda flag, key: nn.interpolate(
        jnp.ones((1, 4)), (4,), antialias=flag
    ),
    "ring of KVCache": lambda flag, key: nn.KVCache(2, 1, 3, 3, ring=flag),
}


def passing_for_flags():
    """The flags for which a string is taken, or that are refused with other words."""
    found = []
    for name, make in FLAGS.items():
        argument, layer = name.split(" of ")
        make(np.False_, jax.random.key(0))
        try:
            make("no", jax.random.key(0))
            found.append(name)
        except TypeError as error:
            if f"`{argument}` of `{layer}` must be True or False" not in str(error):
                found.append(f"{name}: {error}")
    return found


def test_a_string_is_no_flag_of_a_layer():
    # In a process without beartype, which would answer first.
    script = "from tests.nn.test_wrong_arguments import passing_for_flags as f; print(f())"
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        env=dict(os.environ, PYTHONPATH="src", JAX_PLATFORMS="cpu"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout == "[]\n", found.stdout + found.stderr
