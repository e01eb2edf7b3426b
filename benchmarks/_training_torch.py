"""The models of `training.py` in PyTorch: fused attention, autocast for half precision, `AdamW`."""

import itertools
from typing import Any

import torch
from _measure import Work
from _training_settings import RATE, Cnn, Gpt, Lstm, Mlp, ResNet, Training
from torch import nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.projections(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GptModel(nn.Module):
    def __init__(self, size: Gpt):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.length, size.width)
        self.blocks = nn.Sequential(*[Block(size.width, size.heads) for _ in range(size.blocks)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def convolution(before: int, after: int, size: int, stride: int) -> nn.Module:
    layer = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after))


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.first = convolution(before, after, 3, stride)
        self.second = convolution(after, after, 3, 1)
        other = stride > 1 or before != after
        self.shortcut = convolution(before, after, 1, stride) if other else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(functional.relu(self.first(x)))
        return functional.relu(y + self.shortcut(x))


def resnet_model(size: ResNet) -> nn.Module:
    return nn.Sequential(
        convolution(3, size.channels[0], 7, 2),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *[Residual(*block) for block in size.blocks()],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(size.channels[-1], size.classes),
    )


class LstmModel(nn.Module):
    def __init__(self, size: Lstm):
        super().__init__()
        self.lstm = nn.LSTM(size.features, size.width, batch_first=True)
        # PyTorch adds two biases, where one does: the other stays zero.
        nn.init.zeros_(self.lstm.bias_hh_l0).requires_grad_(False)
        self.head = nn.Linear(size.width, size.classes)

    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        ys, _ = self.lstm(xs)
        return self.head(ys[:, -1])


def cnn_model(size: Cnn) -> nn.Module:
    first, second = size.channels
    return nn.Sequential(
        *(nn.Conv2d(1, first, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(first, second, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(size.flat(), size.classes)),
    )


def mlp_model(size: Mlp) -> nn.Module:
    sizes = [size.features, *[size.width] * size.depth]
    hidden = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*hidden), nn.Linear(size.width, size.classes))


MODELS = {Mlp: mlp_model, Cnn: cnn_model, Lstm: LstmModel, Gpt: GptModel, ResNet: resnet_model}


def training(size: Any, half: bool, compiled: bool = False) -> Training:
    x, y = (torch.from_numpy(a.copy()).to(DEVICE) for a in size.data())
    y = y.long()
    model = MODELS[type(size)](size).to(DEVICE)
    if x.ndim == 4:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    if compiled:
        model.compile()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, RATE, weight_decay=1e-4, fused=True)

    def step() -> torch.Tensor:
        optimiser.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            logits = model(x)
        loss = functional.cross_entropy(logits.flatten(0, -2).float(), y.flatten())
        loss.backward()
        optimiser.step()
        return loss.detach()

    def wait(loss: torch.Tensor) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    return Training(Work(step, wait), lambda: sum(p.numel() for p in trained))
