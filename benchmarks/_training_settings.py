"""The models that every library trains in `training.py`, as plain sizes, and what such a training is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from _measure import Work

RATE = 1e-3


class Gpt(NamedTuple):
    """Blocks of causal attention and an MLP, each behind a LayerNorm; learnt positions; a head of its own."""

    vocabulary: int
    width: int
    heads: int
    blocks: int
    batch: int
    length: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and those that follow them."""
        shape = (self.batch, self.length + 1)
        tokens = np.random.default_rng(0).integers(self.vocabulary, size=shape).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]


class ResNet(NamedTuple):
    """ResNet-18: K. He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1."""

    classes: int
    size: int
    batch: int
    channels: tuple[int, ...] = (64, 128, 256, 512)

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Images with channels first, and their classes."""
        rng = np.random.default_rng(0)
        images = rng.normal(size=(self.batch, 3, self.size, self.size)).astype(np.float32)
        return images, rng.integers(self.classes, size=self.batch).astype(np.int32)

    def blocks(self) -> list[tuple[int, int, int]]:
        """Channels in, channels out and stride of each block."""
        found, before = [], self.channels[0]
        for i, after in enumerate(self.channels):
            found += [(before, after, 1 if i == 0 else 2), (after, after, 1)]
            before = after
        return found


class Settings(NamedTuple):
    """The sizes of the models, and whether they compute in bfloat16, with parameters in float32."""

    gpt: Gpt
    resnet: ResNet
    half: bool


SMOKE = Settings(Gpt(50, 16, 2, 2, 2, 8), ResNet(10, 32, 8, (4, 4, 8, 8)), False)
CPU = Settings(Gpt(512, 128, 4, 4, 8, 128), ResNet(10, 32, 16, (16, 32, 64, 128)), False)
ACCELERATOR = Settings(Gpt(50_304, 768, 12, 12, 16, 1024), ResNet(1000, 224, 256), True)


class Training(NamedTuple):
    """A model, its optimiser and a batch, on the device.

    Attributes:
        work: starts a step of training, which keeps the new model and returns the loss.
        parameters: how many numbers are trained.
    """

    work: Work
    parameters: int


def stepping(step: Callable[..., tuple[Any, ...]], *state: Any) -> Callable[[], Any]:
    """A step without arguments, of one that takes the state and returns the loss and the new state."""

    def once() -> Any:
        nonlocal state
        loss, *state = step(*state)
        return loss

    return once
