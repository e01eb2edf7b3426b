"""The models of `training.py` in Equinox: modules for one example, `jax.vmap`, `filter_jit`."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _measure import Work
from _training_settings import RATE, Cnn, Gpt, Lstm, Mlp, ResNet, Training, stepping


class Block(eqx.Module):
    norms: list
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, heads: int, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=key1)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=key2)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class GptModel(eqx.Module):
    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, size: Gpt, key: jax.Array):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(size.vocabulary, size.width, key=key1)
        self.positions = eqx.nn.Embedding(size.length, size.width, key=key2)
        keys = jax.random.split(key3, size.blocks)
        self.blocks = [Block(size.width, size.heads, key) for key in keys]
        self.norm = eqx.nn.LayerNorm(size.width)
        self.head = eqx.nn.Linear(size.width, size.vocabulary, use_bias=False, key=key4)

    def __call__(self, tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        count = tokens.shape[0]
        x = jax.vmap(self.tokens)(tokens) + jax.vmap(self.positions)(jnp.arange(count))
        mask = jnp.tril(jnp.ones((count, count), bool))
        for block in self.blocks:
            x = block(x, mask)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x)), state


def norm(channels: int) -> eqx.nn.BatchNorm:
    return eqx.nn.BatchNorm(channels, axis_name="batch", mode="batch")


class Residual(eqx.nn.StatefulLayer):
    convolutions: list
    norms: list
    shortcut: eqx.nn.Sequential

    def __init__(self, before: int, after: int, stride: int, key: jax.Array):
        keys = jax.random.split(key, 3)

        def make(channels: int, size: int, step: int, key: jax.Array) -> eqx.nn.Conv2d:
            padding = size // 2
            return eqx.nn.Conv2d(channels, after, size, step, padding, use_bias=False, key=key)

        self.convolutions = [make(before, 3, stride, keys[0]), make(after, 3, 1, keys[1])]
        self.norms = [norm(after), norm(after)]
        other = stride > 1 or before != after
        self.shortcut = eqx.nn.Sequential(
            [make(before, 1, stride, keys[2]), norm(after)] if other else [eqx.nn.Identity()]
        )

    def __call__(self, x: jax.Array, state: Any, *, key: Any = None) -> tuple[jax.Array, Any]:
        y, state = self.norms[0](self.convolutions[0](x), state)
        y, state = self.norms[1](self.convolutions[1](jax.nn.relu(y)), state)
        x, state = self.shortcut(x, state)
        return jax.nn.relu(x + y), state


def resnet_model(size: ResNet, key: jax.Array) -> Any:
    key1, key2, *keys = jax.random.split(key, 2 + len(size.blocks()))
    first, last = size.channels[0], size.channels[-1]
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, first, 7, 2, 3, use_bias=False, key=key1),
            norm(first),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(3, 2, 1),
            *[Residual(*block, key) for block, key in zip(size.blocks(), keys, strict=True)],
            eqx.nn.Lambda(lambda x: x.mean(axis=(-2, -1))),
            eqx.nn.Linear(last, size.classes, key=key2),
        ]
    )


class LstmModel(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, size: Lstm, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(size.features, size.width, key=key1)
        self.head = eqx.nn.Linear(size.width, size.classes, key=key2)

    def __call__(self, xs: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        def step(carry: Any, x: jax.Array) -> tuple[Any, None]:
            return self.cell(x, carry), None

        zeros = jnp.zeros(self.cell.hidden_size)
        (hidden, _), _ = jax.lax.scan(step, (zeros, zeros), xs)
        return self.head(hidden), state


def cnn_model(size: Cnn, key: jax.Array) -> Any:
    key1, key2, key3 = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, size.channels[0], kernel_size=3, padding=1, key=key1),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, stride=2),
            eqx.nn.Conv2d(*size.channels, kernel_size=3, padding=1, key=key2),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, stride=2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(size.flat(), size.classes, key=key3),
        ]
    )


class MlpModel(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, size: Mlp, key: jax.Array):
        self.mlp = eqx.nn.MLP(
            size.features, size.classes, size.width, size.depth, jax.nn.relu, key=key
        )

    def __call__(self, x: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        return self.mlp(x), state


MODELS = {Mlp: MlpModel, Cnn: cnn_model, Lstm: LstmModel, Gpt: GptModel, ResNet: resnet_model}


def training(size: Any, half: bool) -> Training:
    make = eqx.nn.make_with_state(lambda key: MODELS[type(size)](size, key))
    model, buffers = make(jax.random.key(0))
    optimiser = optax.adamw(RATE)

    def lower(a: Any) -> Any:
        return a.astype(jnp.bfloat16) if half and eqx.is_inexact_array(a) else a

    def loss(model: Any, buffers: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        model, x = jax.tree.map(lower, (model, x))
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, buffers = batched(x, buffers)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y)
        return losses.mean(), buffers

    @eqx.filter_jit(donate="all-except-first")
    def step(data: tuple[Any, Any], model: Any, buffers: Any, state: Any) -> tuple[Any, ...]:
        slopes = eqx.filter_value_and_grad(loss, has_aux=True)
        (value, buffers), gradients = slopes(model, buffers, *data)
        updates, state = optimiser.update(gradients, state, eqx.filter(model, eqx.is_array))
        return value, eqx.apply_updates(model, updates), buffers, state

    data = tuple(map(jnp.asarray, size.data()))
    state = optimiser.init(eqx.filter(model, eqx.is_array))
    count = sum(a.size for a in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    once = stepping(lambda *state: step(data, *state), model, buffers, state)
    return Training(Work(once), lambda: count)
