"""The models of `training.py` in Vernal: layers on batches, an `Optimizer`, one compiled step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from _measure import Work
from _training_settings import RATE, Cnn, Gpt, Lstm, Mlp, ResNet, Training, stepping

import vernal
from vernal import nn


class Block(vernal.Module):
    norms: list
    attention: nn.MultiheadAttention
    mlp: nn.MLP

    def __init__(self, width: int, heads: int, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.norms = [nn.LayerNorm(width), nn.LayerNorm(width)]
        self.attention = nn.MultiheadAttention(heads, width, key=key1)
        self.mlp = nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=key2)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, causal=True)
        return x + self.mlp(self.norms[1](x))


class GptModel(vernal.Module):
    tokens: nn.Embedding
    positions: nn.Embedding
    blocks: Any
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, size: Gpt, key: jax.Array, stack: bool = False):
        key1, key2, key3, key4 = jax.random.split(key, 4)
        self.tokens = nn.Embedding(size.vocabulary, size.width, key=key1)
        self.positions = nn.Embedding(size.length, size.width, key=key2)

        def make(key: jax.Array) -> Block:
            return Block(size.width, size.heads, key)

        if stack:
            self.blocks = nn.Stack(make, size.blocks, key=key3)
        else:
            self.blocks = nn.Sequential([make(k) for k in jax.random.split(key3, size.blocks)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, use_bias=False, key=key4)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        return self.head(self.norm(self.blocks(x)))


class Residual(vernal.Module):
    convolutions: list
    norms: list
    shortcut: Any

    def __init__(self, before: int, after: int, stride: int, key: jax.Array):
        keys = jax.random.split(key, 3)

        def make(channels: int, size: int, step: int, key: jax.Array) -> nn.Conv2d:
            padding = size // 2
            return nn.Conv2d(channels, after, size, step, padding, use_bias=False, key=key)

        self.convolutions = [make(before, 3, stride, keys[0]), make(after, 3, 1, keys[1])]
        self.norms = [nn.BatchNorm(after, num_spatial_dims=2) for _ in range(2)]
        self.shortcut = nn.Identity()
        if stride > 1 or before != after:
            norm = nn.BatchNorm(after, num_spatial_dims=2)
            self.shortcut = nn.Sequential([make(before, 1, stride, keys[2]), norm])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(self.norms[0](self.convolutions[0](x)))
        return jax.nn.relu(self.norms[1](self.convolutions[1](y)) + self.shortcut(x))


def resnet_model(size: ResNet, key: jax.Array) -> Any:
    key1, key2, *keys = jax.random.split(key, 2 + len(size.blocks()))
    first, last = size.channels[0], size.channels[-1]
    return nn.Sequential(
        [
            nn.Conv2d(3, first, 7, 2, 3, use_bias=False, key=key1),
            nn.BatchNorm(first, num_spatial_dims=2),
            jax.nn.relu,
            nn.MaxPool2d(3, 2, 1),
            *[Residual(*block, key) for block, key in zip(size.blocks(), keys, strict=True)],
            nn.Lambda(lambda x: x.mean(axis=(-2, -1))),
            nn.Linear(last, size.classes, key=key2),
        ]
    )


class LstmModel(vernal.Module):
    lstm: nn.LSTM
    head: nn.Linear

    def __init__(self, size: Lstm, key: jax.Array):
        key1, key2 = jax.random.split(key)
        self.lstm = nn.LSTM(size.features, size.width, key=key1)
        self.head = nn.Linear(size.width, size.classes, key=key2)

    def __call__(self, xs: jax.Array) -> jax.Array:
        _, (hidden, _) = self.lstm(xs)
        return self.head(hidden[..., -1, :])


def cnn_model(size: Cnn, key: jax.Array) -> Any:
    key1, key2, key3 = jax.random.split(key, 3)
    return nn.Sequential(
        [
            nn.Conv2d(1, size.channels[0], kernel_size=3, padding=1, key=key1),
            jax.nn.relu,
            nn.MaxPool2d(2, stride=2),
            nn.Conv2d(*size.channels, kernel_size=3, padding=1, key=key2),
            jax.nn.relu,
            nn.MaxPool2d(2, stride=2),
            nn.Lambda(lambda x: x.reshape(*x.shape[:-3], -1)),
            nn.Linear(size.flat(), size.classes, key=key3),
        ]
    )


def mlp_model(size: Mlp, key: jax.Array) -> Any:
    return nn.MLP(size.features, size.classes, size.width, size.depth, jax.nn.relu, key=key)


MODELS = {Mlp: mlp_model, Cnn: cnn_model, Lstm: LstmModel, Gpt: GptModel, ResNet: resnet_model}


def training(size: Any, half: bool, **options: Any) -> Training:
    model = MODELS[type(size)](size, jax.random.key(0), **options)
    if half:
        policy = nn.Policy(params=jnp.float32, compute=jnp.bfloat16, output=jnp.float32)
        model = nn.cast(model, policy)
    optimiser = vernal.Optimizer(optax.adamw, learning_rate=RATE)

    def loss(model: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        logits, model = nn.apply(model, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), model

    slopes = vernal.filter_value_and_grad(loss, has_aux=True)

    @vernal.filter_jit(donate="all-except-first")
    def step(data: tuple[Any, Any], model: Any, state: Any) -> tuple[Any, Any, Any]:
        (value, model), gradients = slopes(model, *data)
        return value, *optimiser.update(model, gradients, state)

    data = tuple(map(jnp.asarray, size.data()))

    def count() -> int:
        _, trained = jax.eval_shape(slopes, model, *data)
        return sum(a.size for a in jax.tree.leaves(trained))

    once = stepping(lambda *state: step(data, *state), model, optimiser.init(model))
    return Training(Work(once), count)
