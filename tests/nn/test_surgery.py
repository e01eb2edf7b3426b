"""Parameters that `tree_at` put into a layer: a wrong shape is refused, and the one that is left is used."""

import jax
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


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(("cell", "gates"), [(nn.RNNCell, 1), (nn.GRUCell, 3), (nn.LSTMCell, 4)])
def test_a_parameter_of_a_cell_that_would_be_broadcast_is_refused(cell, gates, use_bias, getkey):
    layer, x, h = cell(2, 3, use_bias, key=getkey()), jnp.ones(2), jnp.ones(3)
    state = (h, h) if cell is nn.LSTMCell else h
    rows = 3 * gates
    wrongs = [("weight_hh", wrong) for wrong in ((1, 3), (3,), (2 * rows, 3), (3, rows, 3))]
    wrongs += [("weight_ih", wrong) for wrong in ((1, 2), (2,), (2 * rows, 2), (3, rows, 2))]
    if use_bias:
        wrongs += [("bias", (1,)), ("bias", ())]
    if use_bias and cell is nn.GRUCell:
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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("parameter", ["running_mean", "running_var", "num_batches_tracked"])
def test_statistics_that_do_not_fit_are_refused(parameter, train):
    layer = vernal.tree_at(parameter, nn.BatchNorm(3), jnp.ones((4, 3)))
    with pytest.raises(ValueError, match=f"(?s)`BatchNorm` has the wrong shape.*`{parameter}`"):
        nn.apply(layer, jnp.ones((4, 3)), train=train)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("dtype", [bool, jnp.complex64])
def test_a_number_of_batches_that_does_not_count_is_refused(dtype, train):
    layer = vernal.tree_at("num_batches_tracked", nn.BatchNorm(3), jnp.ones((), dtype))
    with pytest.raises(ValueError, match="(?s)`num_batches_tracked`.*an integer or floating"):
        nn.apply(layer, jnp.ones((4, 3)), train=train)


@pytest.mark.parametrize("parameter", ["weight", "bias"])
@pytest.mark.parametrize("name", NORMS)
def test_a_complex_parameter_of_a_norm_of_real_numbers_is_refused(name, parameter):
    make, x, shape = NORMS[name]
    layer = vernal.tree_at(parameter, make(), jnp.ones(shape, jnp.complex64))
    with pytest.raises(ValueError, match=f"(?s)`{parameter}` of {name}.*floating-point.*c64"):
        call(layer, x)


def test_a_complex_slope_is_for_complex_numbers():
    layer = nn.PReLU(jnp.array(0.5j))
    with pytest.raises(ValueError, match=r"(?s)`negative_slope` of PReLU.*floating-point.*c64"):
        layer(jnp.array([-1.0]))
    np.testing.assert_array_equal(layer(jnp.array([-1.0 + 0.0j])), [-0.5j])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("values", jnp.ones((4, 2, 2)), r"wrong shape.*`values` of KVCache.*\(5, 2, 2\)"),
        ("values", jnp.ones((5, 1, 2)), r"wrong shape.*`values` of KVCache.*\(5, 2, 2\)"),
        ("length", jnp.ones(2, int), r"wrong shape.*`length` of KVCache.*\(\)"),
        (
            "length",
            jnp.ones(()),
            "would overflow, or be rounded.*`length` of KVCache.*at least 32 bits.*f32",
        ),
        (
            "length",
            jnp.ones((), jnp.int8),
            "would overflow, or be rounded.*`length` of KVCache.*i8",
        ),
    ],
)
def test_a_part_of_a_cache_that_does_not_fit_the_others_is_refused(name, value, text):
    cache, tokens = nn.KVCache(5, 2, 2), jnp.ones((3, 2, 2))
    assert cache.append(tokens, tokens).length == 3
    with pytest.raises(ValueError, match=f"(?s){text}"):
        vernal.tree_at(name, cache, value).append(tokens, tokens)


@pytest.mark.parametrize("parameter", ["running_mean", "running_var"])
def test_statistics_that_would_be_rounded_to_integers_are_refused(parameter):
    layer = vernal.tree_at(parameter, nn.BatchNorm(3), jnp.ones(3, int))
    with pytest.raises(ValueError, match=f"(?s)`{parameter}`.*floating-point numbers.*i32"):
        nn.apply(layer, jnp.full((4, 3), 0.5))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("i", [0, 1])
def test_vectors_that_would_be_rounded_to_integers_are_refused(i, train, getkey):
    normed = nn.SpectralNorm(nn.Linear(3, 2, key=getkey()), key=getkey())
    layer = vernal.tree_at(f"vectors.{i}", normed, replace_fn=lambda vector: vector.astype(int))
    text = rf"(?s)`SpectralNorm` has the wrong dtype.*`vectors\.{i}`.*floating-point numbers.*i32"
    with pytest.raises(ValueError, match=text):
        nn.apply(layer, jnp.ones(3), train=train)


def test_vectors_of_a_complex_weight_are_complex_and_of_a_real_one_real(getkey):
    for own, other, text in [
        (jnp.complex64, jnp.float32, "expected: complex numbers"),
        (jnp.float32, jnp.complex64, "expected: floating-point numbers"),
    ]:
        linear = nn.Linear(3, 2, dtype=own, key=getkey())
        layer = nn.SpectralNorm(linear, key=getkey())
        assert call(layer, jnp.ones(3, own)).dtype == own
        layer = vernal.tree_at("vectors.1", layer, jnp.ones(3, other))
        with pytest.raises(ValueError, match=text):
            call(layer, jnp.ones(3, own))


def test_lengths_of_another_kind_than_their_weight_are_refused(getkey):
    normed = nn.WeightNorm(nn.Linear(3, 2, key=getkey()))
    for dtype, got in [(jnp.complex64, "c64"), (jnp.int32, "i32")]:
        layer = vernal.tree_at("g", normed, jnp.ones((2, 1), dtype))
        with pytest.raises(ValueError, match=f"(?s)`g` of WeightNorm.*floating-point.*{got}"):
            layer(jnp.ones(3))


@pytest.mark.parametrize("name", ["keys", "values"])
def test_a_cache_that_would_round_to_integers_is_refused(name, getkey):
    layer, x = nn.MultiheadAttention(2, 4, key=getkey()), jnp.full((3, 4), 0.5)
    cache = layer.make_cache(5)
    layer(x, x, x, cache=cache)
    cache = vernal.tree_at(name, cache, replace_fn=lambda a: a.astype(int))
    with pytest.raises(ValueError, match=f"(?s)`{name}` of KVCache.*floating-point.*i32"):
        layer(x, x, x, cache=cache)


def test_a_table_with_another_number_of_columns_is_used_as_it_is(getkey):
    layer = vernal.tree_at("weight", nn.Embedding(3, 2, key=getkey()), jnp.ones((4, 5)))
    assert layer(1).shape == (5,)
    np.testing.assert_array_equal(layer.attend(jnp.ones(5)), np.full(4, 5.0))
    with pytest.raises(ValueError, match=r"(?s)Embedding\.attend.*\(\.\.\., 5\)"):
        layer.attend(jnp.ones(2))


@pytest.mark.parametrize("train", [True, False])
def test_a_weight_of_integers_that_would_stay_so_when_it_is_normalised_is_refused(train, getkey):
    linear = nn.Linear(3, 2, key=getkey())
    for normed in (nn.WeightNorm(linear), nn.SpectralNorm(linear, key=getkey())):
        layer = vernal.tree_at("layer.weight", normed, jnp.ones((2, 3), int))
        text = "(?s)has the wrong dtype.*`weight`.*floating-point or complex numbers.*i32"
        with pytest.raises(ValueError, match=text):
            nn.apply(layer, jnp.ones(3), train=train)


def test_a_weight_that_does_not_fit_the_vectors_of_its_norm_is_refused(getkey):
    normed = nn.SpectralNorm(nn.Linear(3, 2, use_bias=False, key=getkey()), key=getkey())
    for wrong, vector in [((5, 3), "vectors.0"), ((2, 4), "vectors.1")]:
        layer = vernal.tree_at("layer.weight", normed, jnp.ones(wrong))
        with pytest.raises(ValueError, match=f"(?s)`SpectralNorm` has the wrong shape.*`{vector}`"):
            call(layer, jnp.ones(3))


def test_a_weight_with_other_axes_is_refused_and_other_outputs_are_not(getkey):
    linear = nn.Linear(3, 2, use_bias=False, key=getkey())
    conv = nn.Conv2d(4, 2, 3, groups=2, use_bias=False, key=getkey())
    image = jnp.ones((4, 5, 5))
    for layer, x, wrong, text in [
        (linear, jnp.ones(3), (3,), r"\(out_features, in_features\)"),
        (linear, jnp.ones(3), (4, 2, 3), r"\(out_features, in_features\)"),
        (conv, image, (2, 2, 3), r"in_channels/groups, kernel_height, kernel_width\)"),
        (nn.Embedding(3, 2, key=getkey()), 0, (3,), r"\(num_embeddings, embedding_size\)"),
    ]:
        with pytest.raises(ValueError, match=f"(?s)`weight`.*{text}"):
            vernal.tree_at("weight", layer, jnp.ones(wrong))(x)
    wider = vernal.tree_at("weight", linear, jnp.ones((5, 3)))
    np.testing.assert_array_equal(wider(jnp.ones(3)), np.full(5, 3.0))
    larger = vernal.tree_at("weight", conv, jnp.ones((6, 2, 5, 5)))
    np.testing.assert_array_equal(larger(image), np.full((6, 1, 1), 50.0))


def test_other_inputs_are_those_of_the_weight(getkey):
    pruned = vernal.tree_at("weight", nn.Linear(3, 2, key=getkey()), replace_fn=lambda w: w[:, 1:])
    np.testing.assert_array_equal(pruned.weight.shape, (2, 2))
    assert pruned(jnp.ones((5, 2))).shape == (5, 2)
    with pytest.raises(ValueError, match=r"(?s)`Linear` was given.*in_features=2.*got: \(3,\)"):
        pruned(jnp.ones(3))
    conv = nn.Conv2d(3, 2, 3, key=getkey())
    grey = vernal.tree_at("weight", conv, replace_fn=lambda w: w.sum(1, keepdims=True))
    image = jax.random.normal(getkey(), (1, 5, 5))
    np.testing.assert_allclose(
        grey(image), conv(jnp.broadcast_to(image, (3, 5, 5))), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(
        ValueError, match=r"(?s)`Conv2d` was given.*in_channels=1.*got: \(3, 5, 5\)"
    ):
        grey(jnp.ones((3, 5, 5)))
    groups = nn.Conv1d(4, 4, 1, groups=2, key=getkey())
    with pytest.raises(ValueError, match="in_channels=2"):
        vernal.tree_at("weight", groups, replace_fn=lambda w: w[:, :1])(jnp.ones((4, 5)))


def test_a_kernel_of_numpy_has_the_dtype_that_jax_gives_it(getkey):
    conv = nn.Conv2d(1, 1, 3, use_bias=False, key=getkey())
    conv = vernal.tree_at("weight", conv, np.ones((1, 1, 3, 3)))
    assert conv(jnp.ones((1, 3, 3))) == 9


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    "settings",
    [
        {"padding": "SAME"},
        {"padding": "SAME_LOWER", "stride": 2},
        {"padding": 1, "dilation": 2},
        {"padding": "SAME", "padding_mode": "CIRCULAR"},
    ],
)
@pytest.mark.parametrize("make", [nn.Conv1d, nn.ConvTranspose1d])
@pytest.mark.sample(3)
def test_a_kernel_of_another_size_is_padded_for_its_size(make, settings, size, getkey):
    layer = make(2, 2, 3, key=getkey(), **settings)
    other = make(2, 2, size, key=getkey(), **settings)
    layer = vernal.tree_at(["weight", "bias"], layer, [other.weight, other.bias])
    x = jnp.asarray(CHANNELS[:2, :, 0].repeat(3, 1))
    np.testing.assert_array_equal(layer(x), other(x))


@pytest.mark.parametrize("make", [nn.Conv1d, nn.ConvTranspose1d])
def test_a_weight_with_channels_that_the_groups_do_not_divide_is_refused(make, getkey):
    layer = vernal.tree_at("weight", make(4, 4, 3, groups=2, key=getkey()), jnp.ones((3, 2, 3)))
    text = rf"(?s)`{make.__name__}` cannot be divided into its groups.*`weight`.*\(3, 2, 3\)"
    with pytest.raises(ValueError, match=text):
        layer(jnp.ones((4, 5)))


@pytest.mark.parametrize("layer", ["attention", "recurrent"])
def test_another_layer_in_the_place_of_a_dropout_is_refused(layer, getkey):
    x = jnp.ones((3, 4))
    if layer == "attention":
        model, args = nn.MultiheadAttention(2, 4, key=getkey()), (x, x, x)
    else:
        model, args = nn.GRU(4, 4, num_layers=2, key=getkey()), (x,)
    model = vernal.tree_at("dropout", model, nn.Identity())
    with pytest.raises(TypeError, match=r"(?s)must be a `Dropout`.*vernal\.nn\.Dropout\(0\.0\)"):
        model(*args)
    whole = vernal.tree_at("dropout", model, nn.Dropout(0.0))(*args)
    assert all(jnp.isfinite(leaf).all() for leaf in (whole if layer == "recurrent" else [whole]))


def test_cells_of_another_kind_or_size_are_refused(getkey):
    xs = jnp.ones((4, 2))
    layer = nn.LSTM(2, 3, num_layers=2, bidirectional=True, key=getkey())
    layer(xs)
    for place, cell, expected in [
        ((0, 0), nn.LSTMCell(2, 4, key=getkey()), r"LSTMCell\(2, 3\)"),
        ((0, 1), nn.LSTMCell(3, 3, key=getkey()), r"LSTMCell\(2, 3\)"),
        ((1, 0), nn.LSTMCell(3, 3, key=getkey()), r"LSTMCell\(6, 3\)"),
        ((1, 1), nn.GRUCell(6, 3, key=getkey()), r"LSTMCell\(6, 3\)"),
        ((0, 0), nn.Linear(2, 3, key=getkey()), r"LSTMCell\(2, 3\)"),
    ]:
        path = "cells.{}.{}".format(*place)
        other = vernal.tree_at(path, layer, cell)
        text = rf"(?s)wrong class or size.*`{path}` of LSTM.*expected: {expected}"
        with pytest.raises(ValueError, match=text):
            other(xs)


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
def test_another_number_of_cells_is_refused(make, getkey):
    xs, layer = jnp.ones((4, 2)), make(2, 3, num_layers=2, bidirectional=True, key=getkey())
    for layers, both in [(1, True), (3, True), (2, False)]:
        cells = make(2, 3, num_layers=layers, bidirectional=both, key=getkey()).cells
        text = rf"(?s)number of cells of.*`cells` of {make.__name__}.*num_layers=2 tuples of 2"
        with pytest.raises(ValueError, match=text):
            vernal.tree_at("cells", layer, cells)(xs)
    with pytest.raises(ValueError, match="number of cells of"):
        vernal.tree_at("cells", layer, ())(xs)


@pytest.mark.parametrize("num_layers", [3, 4])
def test_one_layer_in_the_place_of_a_stack_of_layers_is_refused(num_layers, getkey):
    stack = nn.Stack(lambda key: nn.Linear(3, 3, key=key), num_layers, key=getkey())
    fewer = nn.Stack(lambda key: nn.Linear(3, 3, key=key), 2, key=getkey()).layers
    one = nn.Linear(3, 3, key=getkey())
    # One of three rows looks like three layers, each with one row.
    refused = "with a leading axis" if num_layers == 4 else "`Linear` has the wrong shape"
    with pytest.raises(ValueError, match=refused):
        vernal.tree_at("layers", stack, one)(jnp.ones(3))
    text = (
        rf"(?s)every array of a `Stack`.*stack\.layers\.weight.*num_layers={num_layers}.*Stack\.of"
    )
    for use in (
        lambda stack: stack(jnp.ones(3)),
        lambda stack: stack[0],
        lambda stack: stack[1:],
        list,
    ):
        with pytest.raises(ValueError, match=text):
            use(vernal.tree_at("layers", stack, fewer))


@pytest.mark.parametrize("make", [nn.PReLU, lambda a: nn.Embedding(weight=a, dtype=a.dtype)])
def test_an_array_that_is_changed_in_place_later_changes_no_layer(make):
    # JAX goes on using the memory of a NumPy array that begins at a multiple of 64 bytes.
    memory = np.zeros(64 * 64 * 4 + 64, np.uint8)
    table = memory[-memory.ctypes.data % 64 :][: 64 * 64 * 4].view(np.float32).reshape(64, 64)
    layer = make(table)
    table[...] = 1.0
    [kept] = vernal.trees.named_leaves(layer).values()
    np.testing.assert_array_equal(kept, np.zeros((64, 64), np.float32))


@pytest.mark.parametrize("make", [nn.Conv1d, nn.ConvTranspose1d])
def test_an_empty_kernel_is_refused(make, getkey):
    layer = make(2, 2, 3, key=getkey())
    layer = vernal.tree_at("weight", layer, layer.weight[..., :0])
    with pytest.raises(ValueError, match=rf"(?s)kernel of `{make.__name__}` is empty.*\(2, 2, 0\)"):
        layer(jnp.ones((2, 8)))


def test_one_layer_in_the_place_of_a_list_of_layers_is_refused(getkey):
    model = nn.Sequential([nn.Linear(3, 3, key=getkey())])
    for one in (model[0], jnp.tanh):
        with pytest.raises(TypeError, match=r"(?s)must be a tuple.*\(layer,\)"):
            vernal.tree_at("layers", model, one)(jnp.ones(3))
    assert vernal.tree_at("layers", model, [jnp.tanh])(jnp.ones(3)).shape == (3,)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_cell_of_integers_is_refused(kind, getkey):
    layer = vernal.tree_at("**.weight_hh", kind(3, 4, key=getkey()), replace_fn=to_integers)
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(ValueError, match="(?s)has the wrong dtype.*`weight_hh`.*floating"),
    ):
        layer(jnp.ones((5, 3)))


def to_integers(x):
    return x.astype(jnp.int32)


@pytest.mark.parametrize("activation", [lambda x: jnp.concatenate([x, x]), jnp.sum])
def test_an_activation_that_changes_the_shape_of_a_state_is_refused(activation, getkey):
    cell = nn.RNNCell(3, 4, activation=activation, key=getkey())
    with pytest.raises(ValueError, match=r"(?s)activation of `RNNCell` changed.*to keep \(4,\)"):
        cell(jnp.ones(3), jnp.zeros(4))
    layer = nn.RNN(3, 4, activation=activation, key=getkey())
    with pytest.raises(ValueError, match=r"(?s)activation of `RNNCell` changed.*to keep \(4,\)"):
        layer(jnp.ones((5, 3)))
