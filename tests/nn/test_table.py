"""Every layer against every property that all layers share.

A new layer is a new row here: its constructor and an example input. A test below refuses a public class without a row.
"""

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import nn


@dataclasses.dataclass(frozen=True)
class Row:
    """A layer and the shape of one example of its input.

    Attributes:
        make: the layer, from a random key.
        shape: of the input, which is drawn from a normal distribution.
        integers: if given, the input is drawn from the integers below this instead.
        same_shape: whether the output has the shape of the input, so that the layer can be applied again.
    """

    make: Callable[[Any], Any]
    shape: tuple[int, ...]
    integers: int | None = None
    same_shape: bool = False

    def example(self, key, batch=()):
        shape = (*batch, *self.shape)
        if self.integers is not None:
            return jax.random.randint(key, shape, 0, self.integers)
        return jax.random.normal(key, shape)


class Through(vernal.Module):
    """A layer that takes or returns more than one array, as a function of one."""

    layer: Any
    call: Callable[..., Any]

    def __call__(self, x, *, key=None):
        return self.call(self.layer, x, key)


def _one_step_of_gru(cell, x, key):
    return cell(x, x[::-1], key=key)


def _one_step_of_lstm(cell, x, key):
    return cell(x, (x[::-1], -x), key=key)[1]


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


def _outputs_and_state(layer, xs, key):
    return jnp.concatenate([jnp.ravel(y) for y in jax.tree.leaves(layer(xs, key=key))])


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
    "AdaptiveAvgPool3d": Row(lambda k: nn.AdaptiveAvgPool3d(2), VOLUME),
    "AdaptiveMaxPool1d": Row(lambda k: nn.AdaptiveMaxPool1d(3), (2, 7)),
    "AdaptiveMaxPool2d": Row(lambda k: nn.AdaptiveMaxPool2d((2, 3)), IMAGE),
    "AdaptiveMaxPool3d": Row(lambda k: nn.AdaptiveMaxPool3d(2), VOLUME),
    "LayerNorm": Row(lambda k: nn.LayerNorm((4, 6, 5)), IMAGE, same_shape=True),
    "LayerNorm without bias": Row(lambda k: nn.LayerNorm(3, use_bias=False), (3,), same_shape=True),
    "RMSNorm": Row(lambda k: nn.RMSNorm(7), (7,), same_shape=True),
    "GroupNorm": Row(lambda k: nn.GroupNorm(2, 4), IMAGE, same_shape=True),
    "GroupNorm without weights": Row(
        lambda k: nn.GroupNorm(2, channelwise_affine=False), (4,), same_shape=True
    ),
    "Dropout": Row(lambda k: nn.Dropout(0.3), (50,), same_shape=True),
    "Dropout in inference": Row(lambda k: nn.Dropout(0.3, inference=True), (5,), same_shape=True),
    "Embedding": Row(lambda k: nn.Embedding(5, 3, key=k), (), integers=5),
    "GRUCell": Row(
        lambda k: Through(nn.GRUCell(3, 3, key=k), _one_step_of_gru),
        (3,),
        same_shape=True,
    ),
    "LSTMCell": Row(
        lambda k: Through(nn.LSTMCell(3, 3, key=k), _one_step_of_lstm),
        (3,),
        same_shape=True,
    ),
    "GRU": Row(
        lambda k: Through(nn.GRU(2, 3, 2, bidirectional=True, key=k), _outputs_and_state), (4, 2)
    ),
    "LSTM": Row(
        lambda k: Through(nn.LSTM(2, 3, 2, dropout_p=0.5, key=k), _outputs_and_state), (4, 2)
    ),
    "RotaryPositionalEmbedding": Row(
        lambda k: nn.RotaryPositionalEmbedding(4), (5, 4), same_shape=True
    ),
    "WeightNorm": Row(lambda k: nn.WeightNorm(nn.Linear(3, 3, key=k)), (3,), same_shape=True),
    "Shared": Row(lambda k: Through(_mirrored(k), _one_after_the_other), (3,), same_shape=True),
    "PReLU": Row(lambda k: nn.PReLU(), (3, 2), same_shape=True),
    "PReLU of several slopes": Row(
        lambda k: nn.PReLU(jax.random.normal(k, (4, 1, 1))), IMAGE, same_shape=True
    ),
    "Lambda": Row(lambda k: nn.Lambda(jnp.tanh), (3,), same_shape=True),
    "Sequential": Row(_digits_model, (1, 8, 8)),
    "Sequential of nothing": Row(lambda k: nn.Sequential([]), (3,), same_shape=True),
}

every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def public_layers():
    classes = [c for c in vars(nn).values() if inspect.isclass(c) and issubclass(c, vernal.Module)]
    return {c for c in classes if not inspect.isabstract(c)}


def class_of(row):
    made = jax.eval_shape(row.make, jax.random.key(0))
    return type(made.layer if isinstance(made, Through) else made)


def test_every_public_layer_has_a_row():
    assert public_layers() - {class_of(row) for row in ROWS.values()} == set()


def test_rows_are_named_after_their_layers():
    for name, row in ROWS.items():
        assert name.split()[0] == class_of(row).__name__


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(
        np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance
    )


@every_row
def test_plain_jit_accepts_the_layer_and_changes_nothing(row, getkey):
    layer, x, key = row.make(getkey()), row.example(getkey()), getkey()
    expected = layer(x, key=key)
    close(jax.jit(layer)(x, key=key), expected)
    close(jax.jit(lambda m, x: m(x, key=key))(layer, x), expected)


@every_row
def test_the_gradient_is_the_slope_along_a_random_direction(row, getkey):
    with jax.enable_x64(True):
        layer, x, key = row.make(getkey()), row.example(getkey()), getkey()
        # The input is differentiated too, unless it is an integer.
        wrt, rest = ((layer,), (x,)) if row.integers else ((layer, x), ())
        point, unravel = jax.flatten_util.ravel_pytree(wrt)
        direction = jax.random.normal(getkey(), point.shape)
        assert point.dtype == jnp.float64

        def loss(wrt):
            layer, x = (*wrt, *rest)
            return (layer(x, key=key) ** 2).sum()

        @jax.jit
        def both(wrt):
            grads, _ = jax.flatten_util.ravel_pytree(jax.grad(loss)(wrt))
            step = 1e-6
            ahead, behind = (
                loss(unravel(point + step * direction)),
                loss(unravel(point - step * direction)),
            )
            return grads @ direction, (ahead - behind) / (2 * step)

        np.testing.assert_allclose(*both(wrt), rtol=1e-5, atol=1e-7)


@every_row
def test_vmap_is_a_loop_over_examples(row, getkey):
    layer, xs, keys = row.make(getkey()), row.example(getkey(), (4,)), jax.random.split(getkey(), 4)
    batched = jax.vmap(lambda x, key: layer(x, key=key))(xs, keys)
    close(batched, jnp.stack([layer(x, key=key) for x, key in zip(xs, keys, strict=True)]))


@every_row
def test_vmap_makes_an_ensemble_and_runs_it(row, getkey):
    keys, x, key = jax.random.split(getkey(), 3), row.example(getkey()), getkey()

    @jax.jit
    def ensemble(keys):
        layers = jax.vmap(row.make)(keys)
        return jax.vmap(lambda m: m(x, key=key), axis_size=3)(layers)

    close(ensemble(keys)[1], row.make(keys[1])(x, key=key))


@every_row
def test_a_pickled_layer_comes_back_equal(row, getkey):
    layer, x, key = row.make(getkey()), row.example(getkey()), getkey()
    back = pickle.loads(pickle.dumps(layer))
    assert back == layer
    assert jax.tree.structure(back) == jax.tree.structure(layer)
    close(back(x, key=key), layer(x, key=key))


@every_row
def test_the_repr_shows_types_and_no_addresses(row, getkey):
    layer = row.make(getkey())
    text = repr(layer)
    assert text.startswith(f"{type(layer).__name__}(") and text.endswith(")")
    assert " at 0x" not in text and "Array(" not in text


@every_row
def test_bfloat16_weights_and_inputs_give_bfloat16(row, getkey):
    layer, x, key = row.make(getkey()), row.example(getkey()), getkey()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer)
    y = half(x if row.integers else x.astype(jnp.bfloat16), key=key)
    assert y.dtype == jnp.bfloat16
    close(y, layer(x, key=key), tolerance=0.1)


@every_row
def test_leaves_are_arrays_only(row, getkey):
    layer = row.make(getkey())
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(layer))
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(layer))


@every_row
def test_the_hash_is_that_of_an_identical_copy(row, getkey):
    layer = row.make(getkey())
    copy = jax.tree.map(lambda a: a, layer)
    assert copy == layer and hash(copy) == hash(layer)


@every_row
def test_masks_and_specifications_keep_the_structure(row, getkey):
    layer = row.make(getkey())
    mask = jax.tree.map(lambda a: a.ndim > 1, layer)
    assert type(mask) is type(layer)
    assert jax.tree.structure(mask) == jax.tree.structure(layer)
    assert jax.tree.structure(jax.eval_shape(lambda m: m, layer)) == jax.tree.structure(layer)


@every_row
def test_optax_trains_it(row, getkey):
    layer, x, key = row.make(getkey()), row.example(getkey()), getkey()
    optimiser = optax.adam(1e-3)
    state = optimiser.init(layer)

    @jax.jit
    def step(layer, state):
        grads = jax.grad(lambda m: (m(x, key=key) ** 2).sum())(layer)
        with jax.numpy_dtype_promotion("standard"):  # Optax itself multiplies floats by integers.
            updates, state = optimiser.update(grads, state, layer)
        return optax.apply_updates(layer, updates), state

    after = step(layer, state)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, (layer, state))


@every_row
def test_it_can_be_carried_by_scan_and_chosen_by_cond(row, getkey):
    layer, x, key = row.make(getkey()), row.example(getkey()), getkey()
    expected = layer(x, key=key)
    after, outputs = jax.lax.scan(lambda m, _: (m, m(x, key=key)), layer, length=2)
    assert jax.tree.structure(after) == jax.tree.structure(layer)
    close(outputs[1], expected)
    close(jax.lax.cond(True, lambda m: m(x, key=key), lambda m: 0 * m(x, key=key), layer), expected)
    if row.same_shape:
        twice = jax.lax.fori_loop(0, 2, lambda _, y: layer(y, key=key), x)
        close(twice, layer(expected, key=key))
