"""Parameters that `tree_at` put into a layer: a wrong shape is refused, and the one that is left is used."""

import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn

CHANNELS = np.arange(24.0, dtype=np.float32).reshape(4, 3, 2) ** 1.5
NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm((3, 2)), CHANNELS, (3, 2)),
    "RMSNorm": (lambda: nn.RMSNorm(2), CHANNELS, (2,)),
    "GroupNorm": (lambda: nn.GroupNorm(1, 3, num_spatial_dims=1), CHANNELS, (3,)),
    "InstanceNorm": (lambda: nn.InstanceNorm(3, num_spatial_dims=1), CHANNELS, (3,)),
    "BatchNorm": (
        lambda: nn.BatchNorm(3, num_spatial_dims=1, inference=True),
        CHANNELS,
        (3,),
    ),
}


def call(layer, x):
    return nn.apply(layer, x)[0]


@pytest.mark.parametrize("parameter", ["weight", "bias"])
@pytest.mark.parametrize("name", NORMS)
def test_a_parameter_of_a_norm_that_would_be_broadcast_is_refused(name, parameter):
    make, x, shape = NORMS[name]
    for wrong in ((), (1,), (*shape, 1), (7,)):
        layer = vernal.tree_at(parameter, make(), jnp.ones(wrong))
        with pytest.raises(ValueError, match=f"(?s)`{name}` has the wrong shape.*`{parameter}`"):
            call(layer, x)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_may_have_one_of_its_parameters(name):
    make, x, shape = NORMS[name]
    plain = make()
    weight = jnp.arange(1.0, 1.0 + float(np.prod(shape))).reshape(shape)
    normalised = np.asarray(call(plain, x))
    along = np.asarray(weight).reshape(shape + (1,) * (name not in ("LayerNorm", "RMSNorm")))
    for kept, gone, expected in [
        ("weight", "bias", normalised * along),
        ("bias", "weight", normalised + along),
    ]:
        layer = vernal.tree_at(kept, plain, weight)
        layer = vernal.tree_at(gone, layer, None)
        np.testing.assert_allclose(call(layer, x), expected, rtol=1e-6)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_parameter_of_a_cell_that_would_be_broadcast_is_refused(cell, getkey):
    layer, x, h = cell(2, 3, key=getkey()), jnp.ones(2), jnp.ones(3)
    state = (h, h) if cell is nn.LSTMCell else h
    wrongs = [("weight_hh", (1, 3)), ("weight_hh", (3,)), ("bias", (1,)), ("bias", ())]
    if cell is nn.GRUCell:
        wrongs += [("bias_n", (1,)), ("bias_n", ())]
    for parameter, wrong in wrongs:
        text = f"(?s)`{cell.__name__}` has the wrong shape.*`{parameter}`"
        with pytest.raises(ValueError, match=text):
            vernal.tree_at(parameter, layer, jnp.ones(wrong))(x, state)


def test_a_bias_that_would_be_broadcast_is_refused(getkey):
    for layer, x, wrong in [
        (nn.Linear(3, 1, key=getkey()), jnp.ones(3), (5,)),
        (nn.Linear(3, 2, key=getkey()), jnp.ones(3), (5, 2)),
        (nn.Conv1d(3, 2, 1, key=getkey()), jnp.ones((3, 2)), (2,)),
    ]:
        text = f"(?s)`{type(layer).__name__}` has the wrong shape.*`bias`"
        with pytest.raises(ValueError, match=text):
            vernal.tree_at("bias", layer, jnp.ones(wrong))(x)


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm", "BatchNorm"])
def test_a_weight_alone_is_along_the_channels_where_all_axes_have_one_length(name):
    plain = {
        "GroupNorm": lambda: nn.GroupNorm(3, 3, num_spatial_dims=2),
        "InstanceNorm": lambda: nn.InstanceNorm(3, num_spatial_dims=2),
        "BatchNorm": lambda: nn.BatchNorm(3, num_spatial_dims=2, inference=True),
    }[name]()
    x = np.arange(81.0, dtype=np.float32).reshape(3, 3, 3, 3) ** 1.5
    weight = np.array([1.0, np.nan, 3.0], np.float32)
    layer = vernal.tree_at("bias", vernal.tree_at("weight", plain, jnp.asarray(weight)), None)
    expected = np.asarray(call(plain, x)) * weight[:, None, None]
    np.testing.assert_allclose(call(layer, x), expected, rtol=1e-6)
