"""The models of `training.py` in Flax NNX: layers on batches with channels last, `nnx.Optimizer`, `nnx.jit`."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _measure import Work
from _training_settings import RATE, Cnn, Gpt, Lstm, Mlp, ResNet, Training
from flax import nnx


class Block(nnx.Module):
    def __init__(self, width: int, heads: int, dtype: Any, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, dtype=dtype, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            heads, width, dtype=dtype, use_bias=False, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class GptModel(nnx.Module):
    def __init__(self, size: Gpt, dtype: Any, rngs: nnx.Rngs):
        width = size.width
        self.tokens = nnx.Embed(size.vocabulary, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(size.length, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(width, size.heads, dtype, rngs) for _ in range(size.blocks)])
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, size.vocabulary, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Convolution(nnx.Module):
    """A convolution and its norm."""

    def __init__(self, before: int, after: int, size: int, stride: int, dtype: Any, rngs: Any):
        self.convolution = nnx.Conv(
            *(before, after, (size, size), stride),
            padding=size // 2,
            use_bias=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm = nnx.BatchNorm(after, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.convolution(x))


class Residual(nnx.Module):
    def __init__(self, before: int, after: int, stride: int, dtype: Any, rngs: nnx.Rngs):
        self.first = Convolution(before, after, 3, stride, dtype, rngs)
        self.second = Convolution(after, after, 3, 1, dtype, rngs)
        other = stride > 1 or before != after
        self.shortcut = Convolution(before, after, 1, stride, dtype, rngs) if other else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.second(nnx.relu(self.first(x)))
        return nnx.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNetModel(nnx.Module):
    def __init__(self, size: ResNet, dtype: Any, rngs: nnx.Rngs):
        self.stem = Convolution(3, size.channels[0], 7, 2, dtype, rngs)
        self.blocks = nnx.List([Residual(*block, dtype, rngs) for block in size.blocks()])
        self.head = nnx.Linear(size.channels[-1], size.classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        x = nnx.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


class LstmModel(nnx.Module):
    def __init__(self, size: Lstm, dtype: Any, rngs: nnx.Rngs):
        cell = nnx.OptimizedLSTMCell(size.features, size.width, dtype=dtype, rngs=rngs)
        self.rnn = nnx.RNN(cell)
        self.head = nnx.Linear(size.width, size.classes, dtype=dtype, rngs=rngs)

    def __call__(self, xs: jax.Array) -> jax.Array:
        return self.head(self.rnn(xs)[..., -1, :])


class CnnModel(nnx.Module):
    def __init__(self, size: Cnn, dtype: Any, rngs: nnx.Rngs):
        first, second = size.channels
        self.first = nnx.Conv(1, first, (3, 3), padding=1, dtype=dtype, rngs=rngs)
        self.second = nnx.Conv(first, second, (3, 3), padding=1, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(size.flat(), size.classes, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, self.second):
            x = nnx.max_pool(nnx.relu(layer(x)), (2, 2), (2, 2))
        return self.head(x.reshape(len(x), -1))


class MlpModel(nnx.Module):
    def __init__(self, size: Mlp, dtype: Any, rngs: nnx.Rngs):
        sizes = [size.features, *[size.width] * size.depth, size.classes]
        self.layers = nnx.List(
            [nnx.Linear(*pair, dtype=dtype, rngs=rngs) for pair in itertools.pairwise(sizes)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


MODELS = {Mlp: MlpModel, Cnn: CnnModel, Lstm: LstmModel, Gpt: GptModel, ResNet: ResNetModel}


def training(size: Any, half: bool) -> Training:
    dtype = jnp.bfloat16 if half else jnp.float32
    model = MODELS[type(size)](size, dtype, nnx.Rngs(0))
    x, y = size.data()
    if x.ndim == 4:
        x = x.transpose(0, 2, 3, 1)
    optimiser = nnx.Optimizer(model, optax.adamw(RATE), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimiser: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        def loss(model: Any) -> jax.Array:
            logits = model(x).astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, gradients = nnx.value_and_grad(loss)(model)
        optimiser.update(model, gradients)
        return value

    x, y = jnp.asarray(x), jnp.asarray(y)
    count = sum(a.size for a in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return Training(Work(lambda: step(model, optimiser, x, y)), lambda: count)
