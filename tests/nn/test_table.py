"""Every layer against every property that all layers share.

A new layer is a new row here: its constructor and an example input. A test below refuses a public class without a row.
"""

import dataclasses
import functools
import inspect
import os
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from tests.nn._claims import Claims, cast
from vernal import nn
from vernal.testing import GetKey


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer and the shape of one example of its input.

    Attributes:
        make: the layer, from a random key.
        shape: of the input, which is drawn from a normal distribution.
        integers: if given, the input is drawn from the integers below this instead.
        same_shape: whether the output has the shape of the input, so that the layer can be applied again.
        batches: whether it takes batch axes; all layers do, but those that cannot know where an example begins.
    """

    make: Callable[[Any], Any]
    shape: tuple[int, ...]
    integers: int | None = None
    same_shape: bool = False
    batches: bool = True

    def examples(self, rng, batch):
        shape = (*batch, *self.shape)
        if self.integers is not None:
            return rng.integers(self.integers, size=shape).astype(np.int32)
        return rng.normal(size=shape).astype(np.float32)


class Through(vernal.Module):
    """A layer that takes or returns more than one array, as a function of one."""

    layer: Any
    call: Callable[..., Any]

    def __call__(self, x, *, key=None):
        return self.call(self.layer, x, key)


def _one_step_of_one_state(cell, x, key):
    return cell(x, x[..., ::-1], key=key)


def _one_step_of_lstm(cell, x, key):
    return cell(x, (x[..., ::-1], -x), key=key)[1]


def _with_one_large_singular_value(key):
    """Of two that are close to each other, power iteration finds neither soon."""
    layer = nn.Linear(3, 3, key=key)
    return vernal.tree_at(lambda layer: layer.weight, layer, layer.weight + 1)


def _mirrored(key):
    layers = nn.Linear(3, 3, key=key), nn.Linear(3, 3, key=key)
    return nn.Shared(layers, _second_weight, _first_weight)


def _first_weight(layers):
    return layers[0].weight


def _second_weight(layers):
    return layers[1].weight


def _one_after_the_other(shared, x, key):
    first, second = shared()
    return second(first(x, key=key), key=key)


def _in_training(layer, x, key):
    return nn.apply(layer, x, key=key)[0]


def _self_attention(layer, x, key):
    return layer(x, x, x, key=key, causal=True, rotary=nn.RotaryPositionalEmbedding(2))


def _outputs_and_state(layer, xs, key):
    batch = xs.shape[:-2]
    return jnp.concatenate(
        [y.reshape(*batch, -1) for y in jax.tree.leaves(layer(xs, key=key))], axis=-1
    )


def _digits_model(key):
    k1, k2 = jax.random.split(key)
    return nn.Sequential(
        [
            nn.Conv2d(1, 2, 3, key=k1),
            jax.nn.relu,
            nn.MaxPool2d(2, 2),
            jnp.ravel,
            nn.Dropout(0.2),
            nn.Linear(18, 3, key=k2),
        ]
    )


IMAGE, VOLUME = (4, 6, 5), (2, 4, 3, 5)

ROWS = {
    "Linear": Row(lambda k: nn.Linear(3, 2, key=k), (3,)),
    "Linear without bias": Row(
        lambda k: nn.Linear(3, 3, use_bias=False, key=k), (3,), same_shape=True
    ),
    "Linear of scalars": Row(lambda k: nn.Linear("scalar", "scalar", key=k), (), same_shape=True),
    "Identity": Row(lambda k: nn.Identity(), (3,), same_shape=True),
    "MLP": Row(lambda k: nn.MLP(3, 3, 5, 2, jax.nn.tanh, key=k), (3,), same_shape=True),
    "MLP without depth": Row(lambda k: nn.MLP(3, "scalar", 5, 0, key=k), (3,)),
    "MLP scanned": Row(lambda k: nn.MLP(3, 2, 4, 4, jax.nn.tanh, scan=True, key=k), (3,)),
    "MLP of PReLU": Row(lambda k: nn.MLP(3, 2, 4, 2, nn.PReLU(), key=k), (3,)),
    "Conv": Row(lambda k: nn.Conv(0, 3, 2, (), key=k), (3,)),
    "Conv1d": Row(lambda k: nn.Conv1d(2, 3, 3, stride=2, padding=1, key=k), (2, 7)),
    "Conv2d": Row(
        lambda k: nn.Conv2d(4, 4, 3, padding="SAME", groups=2, key=k), IMAGE, same_shape=True
    ),
    "Conv3d": Row(lambda k: nn.Conv3d(2, 1, 2, dilation=2, use_bias=False, key=k), VOLUME),
    "ConvTranspose": Row(lambda k: nn.ConvTranspose(2, 4, 1, 2, key=k), IMAGE),
    "ConvTranspose1d": Row(lambda k: nn.ConvTranspose1d(2, 3, 3, stride=2, key=k), (2, 7)),
    "ConvTranspose2d": Row(lambda k: nn.ConvTranspose2d(4, 2, 3, groups=2, key=k), IMAGE),
    "ConvTranspose3d": Row(lambda k: nn.ConvTranspose3d(2, 1, 2, use_bias=False, key=k), VOLUME),
    "Pool": Row(lambda k: nn.Pool(0, jax.lax.add, 1, 3), (2, 7)),
    "AvgPool1d": Row(lambda k: nn.AvgPool1d(3, 2, 1), (2, 7)),
    "AvgPool2d": Row(lambda k: nn.AvgPool2d((2, 3)), IMAGE),
    "AvgPool3d": Row(lambda k: nn.AvgPool3d(2, 2, use_ceil=True), VOLUME),
    "MaxPool1d": Row(lambda k: nn.MaxPool1d(3, 2, 1), (2, 7)),
    "MaxPool2d": Row(lambda k: nn.MaxPool2d((2, 3)), IMAGE),
    "MaxPool3d": Row(lambda k: nn.MaxPool3d(2, 2, use_ceil=True), VOLUME),
    "AdaptivePool": Row(lambda k: nn.AdaptivePool(2, 1, jnp.mean), (2, 7)),
    "AdaptiveAvgPool1d": Row(lambda k: nn.AdaptiveAvgPool1d(3), (2, 7)),
    "AdaptiveAvgPool2d": Row(lambda k: nn.AdaptiveAvgPool2d((2, 3)), IMAGE),
    "AdaptiveAvgPool2d of disjoint parts": Row(
        lambda k: nn.AdaptiveAvgPool2d((4, 3), disjoint=True), IMAGE
    ),
    "AdaptiveAvgPool3d": Row(lambda k: nn.AdaptiveAvgPool3d(2), VOLUME),
    "AdaptiveMaxPool1d": Row(lambda k: nn.AdaptiveMaxPool1d(3), (2, 7)),
    "AdaptiveMaxPool2d": Row(lambda k: nn.AdaptiveMaxPool2d((2, 3)), IMAGE),
    "AdaptiveMaxPool3d": Row(lambda k: nn.AdaptiveMaxPool3d(2), VOLUME),
    "Upsample": Row(lambda k: nn.Upsample(scale=(2, 1.5)), IMAGE),
    "Upsample to a size": Row(lambda k: nn.Upsample((4, 2, 7), method="cubic"), VOLUME),
    "PixelShuffle": Row(lambda k: nn.PixelShuffle(2), IMAGE),
    "PixelUnshuffle": Row(lambda k: nn.PixelUnshuffle(2), (2, 4, 6)),
    "LayerNorm": Row(lambda k: nn.LayerNorm((4, 6, 5)), IMAGE, same_shape=True),
    "LayerNorm without bias": Row(lambda k: nn.LayerNorm(3, use_bias=False), (3,), same_shape=True),
    "RMSNorm": Row(lambda k: nn.RMSNorm(7), (7,), same_shape=True),
    "GroupNorm": Row(lambda k: nn.GroupNorm(2, 4, num_spatial_dims=2), IMAGE, same_shape=True),
    "GroupNorm of any shape": Row(
        lambda k: nn.GroupNorm(2, 4), IMAGE, same_shape=True, batches=False
    ),
    "GroupNorm without weights": Row(
        lambda k: nn.GroupNorm(2, channelwise_affine=False, num_spatial_dims=0),
        (4,),
        same_shape=True,
    ),
    "InstanceNorm": Row(lambda k: nn.InstanceNorm(4, num_spatial_dims=2), IMAGE, same_shape=True),
    "InstanceNorm of any shape": Row(
        lambda k: nn.InstanceNorm(4), IMAGE, same_shape=True, batches=False
    ),
    "BatchNorm": Row(
        lambda k: Through(nn.BatchNorm(3), _in_training), (5, 3), same_shape=True, batches=False
    ),
    "BatchNorm in inference": Row(
        lambda k: nn.BatchNorm(4, inference=True, num_spatial_dims=2), IMAGE, same_shape=True
    ),
    "Dropout": Row(lambda k: nn.Dropout(0.3), (50,), same_shape=True),
    "Dropout of channels": Row(lambda k: nn.Dropout(0.3, together=2), IMAGE, same_shape=True),
    "DropPath": Row(lambda k: nn.DropPath(0.3), (3, 2), same_shape=True),
    "DropPath of examples": Row(lambda k: nn.DropPath(0.3, together=2), (3, 2), same_shape=True),
    "Dropout in inference": Row(lambda k: nn.Dropout(0.3, inference=True), (5,), same_shape=True),
    "Embedding": Row(lambda k: nn.Embedding(5, 3, key=k), (), integers=5),
    "RNNCell": Row(
        lambda k: Through(nn.RNNCell(3, 3, key=k), _one_step_of_one_state),
        (3,),
        same_shape=True,
    ),
    "GRUCell": Row(
        lambda k: Through(nn.GRUCell(3, 3, key=k), _one_step_of_one_state),
        (3,),
        same_shape=True,
    ),
    "LSTMCell": Row(
        lambda k: Through(nn.LSTMCell(3, 3, key=k), _one_step_of_lstm),
        (3,),
        same_shape=True,
    ),
    "RNN": Row(
        lambda k: Through(nn.RNN(2, 3, 2, bidirectional=True, key=k), _outputs_and_state), (4, 2)
    ),
    "GRU": Row(
        lambda k: Through(nn.GRU(2, 3, bidirectional=True, key=k), _outputs_and_state), (4, 2)
    ),
    "LSTM": Row(
        lambda k: Through(nn.LSTM(2, 3, 2, dropout_p=0.5, key=k), _outputs_and_state), (4, 2)
    ),
    "MultiheadAttention": Row(
        lambda k: Through(
            nn.MultiheadAttention(4, 4, qk_size=2, num_key_value_heads=2, key=k), _self_attention
        ),
        (3, 4),
        same_shape=True,
    ),
    "RotaryPositionalEmbedding": Row(
        lambda k: nn.RotaryPositionalEmbedding(4), (5, 4), same_shape=True
    ),
    "WeightNorm": Row(lambda k: nn.WeightNorm(nn.Linear(3, 3, key=k)), (3,), same_shape=True),
    "Shared": Row(lambda k: Through(_mirrored(k), _one_after_the_other), (3,), same_shape=True),
    # After so many iterations the vectors, which have no derivative, are those at which it is zero.
    "SpectralNorm": Row(
        lambda k: Through(
            nn.SpectralNorm(_with_one_large_singular_value(k), num_power_iterations=50, key=k),
            _in_training,
        ),
        (3,),
        same_shape=True,
    ),
    "SpectralNorm in inference": Row(
        lambda k: nn.SpectralNorm(nn.Linear(3, 3, key=k), inference=True, key=k),
        (3,),
        same_shape=True,
    ),
    "PReLU": Row(lambda k: nn.PReLU(), (3, 2), same_shape=True),
    "PReLU of several slopes": Row(
        lambda k: nn.PReLU(jax.random.normal(k, (4, 1, 1))), IMAGE, same_shape=True
    ),
    "Lambda": Row(lambda k: nn.Lambda(jnp.tanh), (3,), same_shape=True),
    "Sequential": Row(_digits_model, (1, 8, 8), batches=False),
    "Sequential of layers": Row(
        lambda k: nn.Sequential([nn.Linear(3, 3, key=k), nn.Dropout(0.5)]), (3,), same_shape=True
    ),
    "Stack": Row(
        lambda k: nn.Stack(
            lambda k: nn.Sequential([nn.Linear(3, 3, key=k), jnp.tanh, nn.Dropout(0.5)]), 2, key=k
        ),
        (3,),
        same_shape=True,
    ),
    "Cast": Row(lambda k: nn.cast(nn.Linear(3, 3, key=k), nn.Policy()), (3,), same_shape=True),
    "Sequential of nothing": Row(lambda k: nn.Sequential([]), (3,), same_shape=True),
}


def public_layers():
    classes = [c for c in vars(nn).values() if inspect.isclass(c) and issubclass(c, vernal.Module)]
    called = [c for c in classes if any("__call__" in vars(base) for base in c.__mro__)]
    return {c for c in called if not inspect.isabstract(c)}


def class_of(row):
    made = jax.eval_shape(row.make, jax.random.key(0))
    return type(made.layer if isinstance(made, Through) else made)


def test_every_public_layer_has_a_row():
    assert public_layers() - {class_of(row) for row in ROWS.values()} == set()


def test_rows_are_named_after_their_layers():
    for name, row in ROWS.items():
        assert name.split()[0] == class_of(row).__name__


claim = Claims(ROWS)


@pytest.fixture(scope="module")
def getkey():
    """One seed for the file, because all tests of a row share what was computed once; in CI always the same."""
    seed = os.environ.get("VERNAL_GETKEY_SEED", "0" if "CI" in os.environ else None)
    return GetKey(None if seed is None else int(seed))


@pytest.fixture(params=ROWS)
def layer(request, getkey):
    """The layer of each row."""
    return claim.case(request.param, getkey.seed).layer


@claim()
@pytest.mark.sample(8)
def test_plain_jit_accepts_the_layer_and_changes_nothing(case):
    as_argument = jax.jit(lambda m, x: m(x, key=case.key))(case.layer, case.x)
    return (jax.jit(case.layer)(case.x, key=case.key), as_argument), (case.y, case.y)


@claim()
@pytest.mark.sample(2)
def test_vmap_is_a_loop_over_examples(case):
    def one(x_and_key):
        x, key = x_and_key
        return case.layer(x, key=key)

    batch = case.xs[0], case.keys[0]
    return jax.vmap(one)(batch), jax.lax.map(one, batch)


@claim()
@pytest.mark.sample(2)
def test_vmap_makes_an_ensemble_and_runs_it(case):
    # Making one is not compiled again: only the types are compared.
    made = jax.eval_shape(jax.vmap(case.row.make, axis_size=3), jax.random.split(case.key, 3))
    assert made == jax.eval_shape(lambda: case.ensemble)
    outputs = jax.vmap(lambda m: m(case.x, key=case.key), axis_size=3)(case.ensemble)
    return outputs[1], case.y


@claim()
@pytest.mark.sample(2)
def test_it_can_be_carried_by_scan_and_chosen_by_cond(case):
    layer, x, y, key = case.layer, case.x, case.y, case.key
    after, outputs = jax.lax.scan(lambda m, _: (m, m(x, key=key)), layer, length=2)
    assert jax.tree.structure(after) == jax.tree.structure(layer)
    chosen = jax.lax.cond(True, lambda m: m(x, key=key), lambda m: jnp.zeros_like(y), layer)
    if not case.row.same_shape:
        return (outputs[1], chosen), (y, y)
    twice = jax.lax.fori_loop(0, 2, lambda _, y: layer(y, key=key), x)
    return (outputs[1], chosen, twice), (y, y, layer(y, key=key))


@claim(tolerance=0.1)
@pytest.mark.sample(2)
def test_weights_and_inputs_of_half_precision_give_half_precision(case):
    def half(dtype):
        layer, x = cast((case.layer, case.x), dtype)
        return layer(x, key=case.key)

    y = half(jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: half(jnp.float16)).dtype == jnp.float16
    return y.astype(jnp.float32), case.y


def as_function(case, layer):
    """`call(apply, *point)`, a function of weights and input, and the point: an integer input is left out of it."""
    weights, rest = vernal.partition(layer, vernal.trainable(layer))

    def call(apply, weights, xs=case.xs):
        return apply(vernal.combine(weights, rest), xs)

    return call, (weights,) if case.row.integers else (weights, case.xs)


@claim("float64")
@pytest.mark.sample(8)
def test_the_gradient_is_the_slope_along_a_random_direction(case):
    call, point = as_function(case, case.layer)
    rng = np.random.default_rng(case.seed)
    direction = jax.tree.map(lambda a: rng.normal(size=a.shape), point)

    def loss(step):
        there = jax.tree.map(lambda a, d: a + step * d, point, direction)
        y = call(lambda m, xs: m(xs[0, 0], key=case.key), *there)
        assert y.dtype == jnp.float64
        return (y**2).sum()

    ahead, behind = jax.lax.map(loss, jnp.array([1e-6, -1e-6]))
    return jax.grad(loss)(jnp.zeros(())), (ahead - behind) / 2e-6


@claim("float64", about=lambda row: row.batches)
@pytest.mark.sample(2)
def test_batch_axes_mean_vmap_in_values_and_gradients(case):
    # In inference, because random layers draw for every example by itself where `vmap` would repeat one draw.
    call, point = as_function(case, nn.inference_mode(case.layer))

    def values_and_gradients(apply):
        ys, pull = jax.vjp(functools.partial(call, apply), *point)
        return ys, pull(jax.tree.map(lambda y: jnp.cos(jnp.arange(y.size)).reshape(y.shape), ys))

    def mapped(layer, xs):
        ys = jax.vmap(jax.vmap(layer))(xs)
        return ys[0], ys

    return values_and_gradients(lambda m, xs: (m(xs[0]), m(xs))), values_and_gradients(mapped)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.sample(2)
def test_in_double_precision_the_weights_are_double_too(row):
    with jax.enable_x64(True):
        leaves = jax.tree.leaves(jax.eval_shape(row.make, jax.random.key(0)))
    assert all(a.dtype == jnp.float64 for a in leaves if jnp.issubdtype(a.dtype, jnp.inexact))


def same(back, layer):
    assert jax.tree.structure(back) == jax.tree.structure(layer)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(layer), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.sample(4)
def test_a_pickled_layer_comes_back_equal(layer):
    back = pickle.loads(pickle.dumps(layer))
    same(back, layer)
    assert back == layer


@pytest.mark.sample(2)
def test_a_saved_layer_comes_back_equal(layer, tmp_path):
    vernal.save(tmp_path / "layer", layer)
    same(vernal.load(tmp_path / "layer", jax.eval_shape(lambda: layer)), layer)


def test_the_repr_shows_types_and_no_addresses(layer):
    text = repr(layer)
    assert text.startswith(f"{type(layer).__name__}(") and text.endswith(")")
    assert " at 0x" not in text and "Array(" not in text


def test_leaves_are_arrays_only(layer):
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(layer))


def test_the_hash_is_that_of_an_identical_copy(layer):
    copy = jax.tree.map(lambda a: a, layer)
    assert copy == layer and hash(copy) == hash(layer)


def test_masks_and_specifications_keep_the_structure(layer):
    mask = jax.tree.map(lambda a: a.ndim > 1, layer)
    assert type(mask) is type(layer)
    assert jax.tree.structure(mask) == jax.tree.structure(layer)
    assert jax.tree.structure(jax.eval_shape(lambda m: m, layer)) == jax.tree.structure(layer)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.sample(4)
def test_optax_trains_it(name, getkey):
    case = claim.case(name, getkey.seed)
    optimiser = optax.adam(1e-3)

    def step(layer, state):
        grads = jax.grad(lambda m: (m(case.x, key=case.key) ** 2).sum())(layer)
        with jax.numpy_dtype_promotion("standard"):  # Optax itself multiplies floats by integers.
            updates, state = optimiser.update(grads, state, layer)
        return optax.apply_updates(layer, updates), state

    before = jax.eval_shape(lambda m: (m, optimiser.init(m)), case.layer)
    assert jax.eval_shape(step, *before) == before
