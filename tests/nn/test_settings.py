"""Settings of layers are what they say: one flag, one number, one function; nothing that only passes for it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import vernal
from vernal import nn
from vernal.nn._attention import attend
from vernal.nn._layer_arguments import as_number

CONDITIONS = dict.fromkeys(
    ("causal", "window", "segments", "mask", "bias", "query_positions", "key_positions")
) | {"causal": False}
KEY = jax.random.key(0)


def unchecked(fn, *args, **kwargs):
    """Without the checks of annotations that the tests run under."""
    return inspect.unwrap(fn)(*args, **kwargs)


def made(cls, *args, **kwargs):
    """A layer constructed without those checks."""
    layer = object.__new__(cls)
    unchecked(cls.__init__, layer, *args, **kwargs)
    return layer


@pytest.mark.parametrize(
    "scale",
    [jnp.array([0.1, 10.0]), jnp.ones((2, 1)), "0.5", [0.5]],
    ids=["S", "T1", "text", "list"],
)
def test_the_scale_of_attention_is_one_number(scale):
    q = jnp.ones((2, 2, 4))
    with pytest.raises((TypeError, ValueError), match="(?s)not given a number.*argument `scale`"):
        inspect.unwrap(attend)(q, q, q, **CONDITIONS, scale=scale)
    with pytest.raises(ValueError, match="(?s)scale of attention must be real.*1j"):
        nn.attention(q, q, q, scale=1j)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_the_scale_of_attention_may_be_traced(implementation):
    q = jax.random.normal(KEY, (5, 2, 4))

    def f(scale):
        return nn.attention(q, q, q, scale=scale, implementation=implementation).sum()

    assert jnp.allclose(jax.jit(f)(0.3), f(0.3), rtol=1e-5)
    slope = (f(0.31) - f(0.29)) / 0.02
    assert jnp.allclose(jax.grad(f)(jnp.array(0.3)), slope, rtol=1e-2)


def test_a_window_is_not_a_flag():
    q = jnp.ones((2, 2, 4))
    with pytest.raises(TypeError, match="(?s)`window` must be a Python int.*True"):
        unchecked(nn.attention, q, q, q, window=True)


def test_inference_is_a_flag_and_structure():
    true = np.bool_(True)
    for layer in (made(nn.Dropout, inference=true), made(nn.BatchNorm, 2, inference=true)):
        assert layer.inference is True
    assert unchecked(nn.inference_mode, nn.Dropout(), true).inference is True
    for wrong in ("False", None, jnp.ones(2) > 0):
        with pytest.raises((TypeError, ValueError), match="True or False|ambiguous|single element"):
            unchecked(nn.inference_mode, nn.Dropout(), wrong)


def test_flags_of_fields_and_functions():
    with pytest.raises(
        TypeError, match="(?s)`trainable` of a field must be True or False.*'False'"
    ):
        unchecked(vernal.field, trainable="False")
    with pytest.raises(TypeError, match="(?s)`static` of a field must be True or False.*'False'"):
        unchecked(vernal.field, static="False")
    with pytest.raises(TypeError, match="`layers` of `resolve` must be True or False"):
        unchecked(nn.resolve, [1], layers="False")
    stack = nn.Stack(lambda key: nn.Linear(2, 2, key=key), 2, key=KEY)
    with pytest.raises(TypeError, match="`collect` of `Stack` must be True or False"):
        unchecked(type(stack).__call__, stack, jnp.ones(2), collect="False")


@pytest.mark.parametrize("checkpoint", ["False", "dots", 2.5])
def test_the_checkpoint_of_a_stack_is_a_flag_or_a_policy(checkpoint):
    with pytest.raises(TypeError, match="(?s)`checkpoint` of `Stack` must be.*policy"):
        made(nn.Stack, lambda key: nn.Linear(2, 2, key=key), 2, key=KEY, checkpoint=checkpoint)


def test_a_numpy_bool_is_no_leaf_of_a_stack():
    stack = made(
        nn.Stack, lambda key: nn.Linear(2, 2, key=key), 2, key=KEY, checkpoint=np.bool_(True)
    )
    assert stack.checkpoint is True


def test_a_stack_is_made_by_a_function():
    with pytest.raises(TypeError, match=r"(?s)makes its layers by a function.*Stack.of\(layers\)"):
        made(nn.Stack, [nn.Linear(2, 2, key=KEY)] * 2, 2, key=KEY)


@pytest.mark.parametrize("axis", [(0, 1), "0", True])
def test_the_axis_of_weight_norm_is_one_integer(axis):
    with pytest.raises(TypeError, match="axis of `WeightNorm` must be one integer"):
        made(nn.WeightNorm, nn.Linear(3, 2, key=KEY), axis=axis)
    assert made(nn.WeightNorm, nn.Linear(3, 2, key=KEY), axis=np.int32(1)).axis == 1


def test_a_size_is_not_a_flag():
    with pytest.raises(ValueError, match="(?s)`Linear` was given a wrong size.*True"):
        made(nn.Linear, True, 2, key=KEY)


def test_more_heads_than_features():
    with pytest.raises(ValueError, match="(?s)more heads than features.*number of heads first"):
        nn.MultiheadAttention(8, 2, key=KEY)
    nn.MultiheadAttention(8, 2, qk_size=4, vo_size=4, key=KEY)


def test_the_state_of_a_recurrent_layer_is_described():
    states = jnp.ones((1, 3))
    with pytest.raises(ValueError, match=r"(?s)wrong structure.*tuple \(hidden, memory\)"):
        unchecked(nn.LSTM.__call__, nn.LSTM(2, 3, key=KEY), jnp.ones((5, 2)), [states] * 2)
    with pytest.raises(ValueError, match="(?s)wrong structure.*one array"):
        unchecked(nn.GRU.__call__, nn.GRU(2, 3, key=KEY), jnp.ones((5, 2)), (states, states))


class Counting(vernal.Module):
    count: nn.Variable

    def __init__(self, value):
        self.count = nn.Variable(value)

    def __call__(self, x):
        return self.count.update(self.count.value + 1, x)


def test_a_variable_names_itself():
    with pytest.raises(ValueError, match=r"(?s)Variable.update.*y = variable.update\(value, y\)"):
        nn.apply(Counting(jnp.array(0)), None)


@pytest.mark.parametrize("value", [jnp.array(3.0), jnp.arange(3)])
def test_a_constant_in_a_variable_is_an_array(value):
    class Reset(Counting):
        def __call__(self, x):
            constant = np.zeros(self.count.value.shape, self.count.value.dtype)
            return self.count.update(constant, x)

    _, model = nn.apply(Reset(value), jnp.ones(2))
    new = model.count.value
    assert isinstance(new, jax.Array)
    assert vernal.tree_equal(new, jnp.zeros_like(value))
    assert new.sharding == value.sharding


def test_a_constant_that_is_returned_or_captured_is_an_array():
    model = nn.Sequential([nn.Lambda(lambda x: np.zeros(3, np.float32)), nn.Lambda(lambda x: x)])
    y, _, captured = nn.apply(model, jnp.ones(2), capture="layers.*")
    assert all(isinstance(x, jax.Array) for x in (y, *captured.values()))


def test_a_model_without_values_is_not_called():
    shapes = jax.eval_shape(lambda: nn.Sequential([nn.Linear(2, 2, key=KEY), nn.BatchNorm(2)]))
    model = nn.initialise(shapes, {"**": jax.nn.initializers.ones}, KEY)
    with pytest.raises(TypeError, match=r"(?s)has no value.*model.layers\[1\].running_mean"):
        nn.apply(model, jnp.ones((3, 2)))
    out, _ = vernal.filter_eval_shape(nn.apply, shapes, jnp.ones((3, 2)))
    assert out.shape == (3, 2)
    with pytest.raises(TypeError, match="(?s)the arrays have no values.*filter_eval_shape"):
        vernal.filter_grad(lambda model: model(jnp.ones(2)).sum())(shapes)


def test_the_rule_for_a_transposed_convolution_can_be_pasted():
    layer = nn.ConvTranspose1d(2, 4, 3, key=KEY)
    state = torch.nn.ConvTranspose1d(2, 4, 3).state_dict()
    with pytest.raises(ValueError, match=r"conv_transpose_rules\('', '', groups=...\)"):
        vernal.saving.from_torch(layer, state)
    vernal.saving.from_torch(layer, state, vernal.saving.conv_transpose_rules("", "", groups=1))
    nested = {"up": layer}
    state = {f"up.{name}": x for name, x in state.items()}
    with pytest.raises(ValueError, match=r"conv_transpose_rules\('up', 'up', groups=...\)"):
        vernal.saving.from_torch(nested, state)


def test_a_mask_is_no_path():
    with pytest.raises(TypeError, match=r"(?s)a mask is a string.*trainable\(model, 'weight'\)"):
        vernal.Optimizer(optax.adamw, 1e-2, weight_decay=0.5, mask="weight")


@pytest.mark.parametrize("labels", [bool, str])
def test_labels_may_be_a_model_of_labels(labels):
    keys = jax.random.split(KEY)
    model = nn.Sequential([nn.Linear(2, 2, key=keys[0]), nn.Linear(2, 1, key=keys[1])])
    tree = jax.tree.map(labels, vernal.trainable(model, "layers.1"))
    parts = {
        labels(True): vernal.Optimizer(optax.adamw, 1e-2),
        labels(False): vernal.Optimizer(optax.set_to_zero),
    }
    optimiser = vernal.Optimizer(optax.multi_transform, parts, tree)
    new, _ = optimiser.update(model, jax.tree.map(jnp.ones_like, model), optimiser.init(model))
    assert vernal.tree_equal(new.layers[0], model.layers[0])
    assert not vernal.tree_equal(new.layers[1], model.layers[1])


def test_model_and_gradients_exchanged():
    model = vernal.freeze(nn.Linear(2, 2, key=KEY), "bias")
    slopes = vernal.filter_grad(lambda model: model(jnp.ones(2)).sum())(model)
    optimiser = vernal.Optimizer(optax.adamw, 1e-2)
    with pytest.raises(TypeError, match="(?s)gradients in place of arrays.*in this order"):
        optimiser.update(slopes, model, optimiser.init(model))


def test_a_setting_that_is_differentiated_keeps_its_derivative():
    slope = jax.grad(lambda x: as_number("layer", "setting", x, "a number") ** 2)(3.0)
    assert slope == 6
