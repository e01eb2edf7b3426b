"""Whole models in PyTorch and here: equal logits with the weights of the other, and equal losses in training.

Both compute in double precision, so that losses which agree to eight digits after twenty steps have had equal gradients
in each of them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import vernal
from vernal import nn
from vernal.saving import (
    Tied,
    attention_rules,
    conv_transpose_rules,
    from_torch,
    lstm_rules,
    to_torch,
)

STEPS, BATCH, CLASSES = 20, 4, 5

# --- a ResNet-18: four stages of two blocks, with the names of torchvision

WIDTHS = (3, 4, 5, 6)


class BasicBlock(vernal.Module):
    conv1: nn.Conv2d
    bn1: nn.BatchNorm
    conv2: nn.Conv2d
    bn2: nn.BatchNorm
    downsample: nn.Sequential | None

    def __init__(self, channels, width, stride, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, use_bias=False, key=k1)
        self.bn1 = nn.BatchNorm(width, num_spatial_dims=2)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, use_bias=False, key=k2)
        self.bn2 = nn.BatchNorm(width, num_spatial_dims=2)
        self.downsample = None
        if stride > 1 or channels != width:
            shortcut = nn.Conv2d(channels, width, 1, stride, use_bias=False, key=k3)
            self.downsample = nn.Sequential([shortcut, nn.BatchNorm(width, num_spatial_dims=2)])

    def __call__(self, x):
        y = jax.nn.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return jax.nn.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(vernal.Module):
    conv1: nn.Conv2d
    bn1: nn.BatchNorm
    maxpool: nn.MaxPool2d
    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential
    avgpool: nn.AdaptiveAvgPool2d
    fc: nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 10)
        self.conv1 = nn.Conv2d(3, WIDTHS[0], 7, 2, 3, use_bias=False, key=keys[8])
        self.bn1 = nn.BatchNorm(WIDTHS[0], num_spatial_dims=2)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, channels = [], WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            first = BasicBlock(channels, width, 1 if i == 0 else 2, keys[2 * i])
            stages.append(nn.Sequential([first, BasicBlock(width, width, 1, keys[2 * i + 1])]))
            channels = width
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, CLASSES, key=keys[9])

    def __call__(self, x):
        x = self.maxpool(jax.nn.relu(self.bn1(self.conv1(x))))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(self.avgpool(x)[..., 0, 0])


class TorchBasicBlock(torch.nn.Module):
    def __init__(self, channels, width, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(width)
        self.conv2 = torch.nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(width)
        self.downsample = None
        if stride > 1 or channels != width:
            self.downsample = torch.nn.Sequential(
                torch.nn.Conv2d(channels, width, 1, stride, bias=False),
                torch.nn.BatchNorm2d(width),
            )

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class TorchResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(WIDTHS[0])
        channels = WIDTHS[0]
        for i, width in enumerate(WIDTHS):
            first = TorchBasicBlock(channels, width, 1 if i == 0 else 2)
            stage = torch.nn.Sequential(first, TorchBasicBlock(width, width, 1))
            setattr(self, f"layer{i + 1}", stage)
            channels = width
        self.fc = torch.nn.Linear(channels, CLASSES)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((-2, -1)))


# --- blocks of transformers

SIZE, HEADS = 6, 2


class Block(vernal.Module):
    norm1: nn.LayerNorm
    attention: nn.MultiheadAttention
    norm2: nn.LayerNorm
    wide: nn.Linear
    narrow: nn.Linear
    causal: bool

    def __init__(self, causal, key):
        k1, k2, k3 = jax.random.split(key, 3)
        biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
        self.norm1 = nn.LayerNorm(SIZE)
        self.attention = nn.MultiheadAttention(HEADS, SIZE, **biases, key=k1)
        self.norm2 = nn.LayerNorm(SIZE)
        self.wide = nn.Linear(SIZE, 2 * SIZE, key=k2)
        self.narrow = nn.Linear(2 * SIZE, SIZE, key=k3)
        self.causal = causal

    def __call__(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, causal=self.causal)
        return x + self.narrow(jax.nn.gelu(self.wide(self.norm2(x)), approximate=False))


class TorchBlock(torch.nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(SIZE)
        self.attention = torch.nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        self.norm2 = torch.nn.LayerNorm(SIZE)
        self.wide = torch.nn.Linear(SIZE, 2 * SIZE)
        self.narrow = torch.nn.Linear(2 * SIZE, SIZE)
        self.causal = causal

    def forward(self, x):
        y, n = self.norm1(x), x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1) if self.causal else None
        x = x + self.attention(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm2(x))))


# --- a vision transformer


class ViT(vernal.Module):
    patches: nn.Conv2d
    token: jax.Array
    positions: jax.Array
    blocks: list[Block]
    norm: nn.LayerNorm
    head: nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.patches = nn.Conv2d(3, SIZE, 4, 4, key=k1)
        self.token = jnp.zeros((1, 1, SIZE))
        self.positions = jnp.zeros((1, 17, SIZE))
        self.blocks = [Block(False, k) for k in (k2, k3)]
        self.norm = nn.LayerNorm(SIZE)
        self.head = nn.Linear(SIZE, CLASSES, key=k4)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
        x = jnp.concatenate([jnp.broadcast_to(self.token, (len(x), 1, SIZE)), x], axis=1)
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


class TorchViT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, SIZE, 4, 4)
        self.token = torch.nn.Parameter(torch.zeros(1, 1, SIZE))
        self.positions = torch.nn.Parameter(torch.zeros(1, 17, SIZE))
        self.blocks = torch.nn.Sequential(TorchBlock(False), TorchBlock(False))
        self.norm = torch.nn.LayerNorm(SIZE)
        self.head = torch.nn.Linear(SIZE, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x)[:, 0]))


# --- a GPT with a tied head

VOCABULARY, CONTEXT = 11, 8


class GPT(vernal.Module):
    tokens: nn.Embedding
    positions: nn.Embedding
    blocks: nn.Stack
    norm: nn.LayerNorm

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.tokens = nn.Embedding(VOCABULARY, SIZE, key=k1)
        self.positions = nn.Embedding(CONTEXT, SIZE, key=k2)
        self.blocks = nn.Stack(lambda k: Block(True, k), 3, key=k3)
        self.norm = nn.LayerNorm(SIZE)

    def __call__(self, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[-1]), tokens.shape)
        x = self.blocks(self.tokens(tokens) + self.positions(positions))
        return self.norm(x) @ self.tokens.weight.T


class TorchGPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, SIZE)
        self.positions = torch.nn.Embedding(CONTEXT, SIZE)
        self.blocks = torch.nn.Sequential(*[TorchBlock(True) for _ in range(3)])
        self.norm = torch.nn.LayerNorm(SIZE)
        self.head = torch.nn.Linear(SIZE, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[-1]))
        return self.head(self.norm(self.blocks(x)))


# --- a U-Net


def double_conv(channels, width, key):
    k1, k2 = jax.random.split(key)
    return nn.Sequential(
        [
            nn.Conv2d(channels, width, 3, padding=1, key=k1),
            nn.BatchNorm(width, num_spatial_dims=2),
            jax.nn.relu,
            nn.Conv2d(width, width, 3, padding=1, key=k2),
            nn.GroupNorm(2, width, num_spatial_dims=2),
            nn.PReLU(),
        ]
    )


class UNet(vernal.Module):
    encoders: list[nn.Sequential]
    pool: nn.MaxPool2d
    ups: list[nn.ConvTranspose2d]
    decoders: list[nn.Sequential]
    head: nn.Conv2d

    def __init__(self, key):
        keys = jax.random.split(key, 8)
        sizes = [(3, 2), (2, 4), (4, 6)]
        self.encoders = [double_conv(n, m, keys[i]) for i, (n, m) in enumerate(sizes)]
        self.pool = nn.MaxPool2d(2, 2)
        self.ups = [
            nn.ConvTranspose2d(m, n, 2, 2, key=keys[3 + i])
            for i, (n, m) in enumerate([(4, 6), (2, 4)])
        ]
        self.decoders = [double_conv(2 * n, n, keys[5 + i]) for i, n in enumerate((4, 2))]
        self.head = nn.Conv2d(2, CLASSES, 1, key=keys[7])

    def __call__(self, x):
        skips = []
        for encoder in self.encoders:
            x = encoder(self.pool(x) if skips else x)
            skips.append(x)
        for up, decoder, skip in zip(self.ups, self.decoders, skips[-2::-1], strict=True):
            x = decoder(jnp.concatenate([skip, up(x)], axis=-3))
        return jnp.moveaxis(self.head(x), -3, -1)


def torch_double_conv(channels, width):
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, width, 3, padding=1),
        torch.nn.BatchNorm2d(width),
        torch.nn.ReLU(),
        torch.nn.Conv2d(width, width, 3, padding=1),
        torch.nn.GroupNorm(2, width),
        torch.nn.PReLU(),
    )


class TorchUNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(3, 2), (2, 4), (4, 6)]
        self.encoders = torch.nn.ModuleList([torch_double_conv(n, m) for n, m in sizes])
        self.pool = torch.nn.MaxPool2d(2)
        self.ups = torch.nn.ModuleList(
            [torch.nn.ConvTranspose2d(m, n, 2, 2) for n, m in [(4, 6), (2, 4)]]
        )
        self.decoders = torch.nn.ModuleList([torch_double_conv(2 * n, n) for n in (4, 2)])
        self.head = torch.nn.Conv2d(2, CLASSES, 1)

    def forward(self, x):
        skips = []
        for encoder in self.encoders:
            x = encoder(self.pool(x) if skips else x)
            skips.append(x)
        for up, decoder, skip in zip(self.ups, self.decoders, skips[-2::-1], strict=True):
            x = decoder(torch.cat([skip, up(x)], dim=1))
        return self.head(x).movedim(1, -1)


# --- a tagger of sequences of several lengths

TIME = 7
LENGTHS = np.array([7, 2, 5, 1])


class Tagger(vernal.Module):
    embedding: nn.Embedding
    lstm: nn.LSTM
    head: nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embedding = nn.Embedding(VOCABULARY, 4, key=k1)
        self.lstm = nn.LSTM(4, 3, num_layers=2, bidirectional=True, key=k2)
        self.head = nn.Linear(6, CLASSES, key=k3)

    def __call__(self, tokens):
        states, _ = self.lstm(self.embedding(tokens), length=jnp.asarray(LENGTHS))
        return self.head(states)


class TorchTagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 4)
        self.lstm = torch.nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(6, CLASSES)
        # What is added to another bias. Trained as well, it would make their sum, which is our bias, twice as fast.
        for name, parameter in self.lstm.named_parameters():
            parameter.requires_grad_("bias_hh" not in name)

    def forward(self, tokens):
        packed = torch.nn.utils.rnn.pack_padded_sequence(
            self.embedding(tokens), torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False
        )
        states, _ = torch.nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=TIME
        )
        return self.head(states)


# --- the comparison


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of both.

    Attributes:
        ours: makes ours from a key.
        theirs: makes PyTorch's.
        shape: of a batch of inputs.
        labels: the shape of a batch of labels.
        rules: between the names of both.
        integers: if given, the input is drawn from the integers below this.
        classes: the labels are drawn from the integers below this.
    """

    ours: Callable[[Any], Any]
    theirs: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    labels: tuple[int, ...]
    rules: Any = None
    integers: int | None = None
    classes: int = CLASSES


IMAGES, TOKENS = (BATCH, 3, 16, 16), (BATCH, CONTEXT)

CASES = {
    "ResNet": Case(ResNet, TorchResNet, (BATCH, 3, 32, 32), (BATCH,)),
    "ViT": Case(ViT, TorchViT, IMAGES, (BATCH,), attention_rules(*["blocks.*.attention"] * 2)),
    "GPT": Case(
        GPT,
        TorchGPT,
        TOKENS,
        TOKENS,
        {
            **attention_rules("blocks.layers.attention", "blocks.#.attention"),
            "blocks.layers.norm*.*": "blocks.#.norm*.*",
            "blocks.layers.wide.*": "blocks.#.wide.*",
            "blocks.layers.narrow.*": "blocks.#.narrow.*",
            "tokens.weight": Tied("tokens.weight", "head.weight"),
        },
        VOCABULARY,
        VOCABULARY,
    ),
    "U-Net": Case(
        UNet,
        TorchUNet,
        IMAGES,
        (BATCH, 16, 16),
        {**conv_transpose_rules("ups.*", "ups.*"), "**.negative_slope": "**.weight"},
    ),
    "tagger": Case(
        Tagger,
        TorchTagger,
        (BATCH, TIME),
        (BATCH, TIME),
        lstm_rules("lstm", "lstm", bidirectional=True),
        VOCABULARY,
    ),
}


def data(case):
    random = np.random.default_rng(0)
    shape = STEPS, *case.shape
    xs = random.integers(0, case.integers, shape) if case.integers else random.normal(size=shape)
    return xs, random.integers(0, case.classes, (STEPS, *case.labels))


def trained_there(model, xs, labels):
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for x, y in zip(torch.tensor(xs), torch.tensor(labels), strict=True):
        logits = model(x)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def logits_there(model, x):
    with torch.no_grad():
        return model.eval()(torch.tensor(x)).numpy()


@jax.jit
def logits_here(model, x):
    return nn.inference_mode(model)(x)


@jax.jit
def trained_here(model, xs, labels):
    optimizer = vernal.optim.Optimizer(optax.adam, 1e-2)

    def step(carry, batch):
        model, state = carry
        x, y = batch

        def loss(model):
            logits, model = nn.apply(model, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), model

        (value, model), grads = jax.value_and_grad(loss, has_aux=True)(model)
        return optimizer.update(model, grads, state), value

    (model, _), losses = jax.lax.scan(step, (model, optimizer.init(model)), (xs, labels))
    return model, losses


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_and_training_are_pytorchs_with_the_weights_of_either(case):
    with jax.enable_x64(True):
        torch.manual_seed(0)
        theirs = case.theirs().double()
        with torch.no_grad():
            # Norms begin as ones and zeros, biases and tokens as zeros, which could be exchanged unnoticed.
            for parameter in theirs.parameters():
                parameter.add_(torch.randn(parameter.shape) / 10)
        skeleton = jax.eval_shape(case.ours, jax.random.key(0))
        xs, labels = data(case)
        theirs(torch.tensor(xs[0]))
        ours = from_torch(skeleton, theirs.state_dict(), case.rules)
        close(logits_here(ours, xs[0]), logits_there(theirs, xs[0]))

        ours, losses = trained_here(ours, xs, labels)
        close(losses, trained_there(theirs, xs, labels))

        fresh = case.theirs().double()
        state = to_torch(ours, case.rules, like=fresh.state_dict())
        fresh.load_state_dict(state)
        close(logits_there(fresh, xs[0]), logits_here(ours, xs[0]))
        again = from_torch(skeleton, fresh.state_dict(), case.rules)
        jax.tree.map(np.testing.assert_array_equal, again, ours)
