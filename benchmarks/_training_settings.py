"""The models that every library trains in `training.py` and `cold.py`, as sizes, and what a training is."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from _measure import Work

RATE = 1e-3


class Mlp(NamedTuple):
    """Layers with ReLU, `depth` of them hidden."""

    width: int
    depth: int
    batch: int
    features: int = 64
    classes: int = 10
    unit = "examples"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Vectors, and their classes."""
        return _classified((self.batch, self.features), self.classes)


class Cnn(NamedTuple):
    """The model of `examples/digits.py`: twice a convolution, ReLU and pooling, and a layer."""

    channels: tuple[int, int]
    size: int
    batch: int
    classes: int = 10
    unit = "images"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Images with channels first, and their classes."""
        return _classified((self.batch, 1, self.size, self.size), self.classes)

    def flat(self) -> int:
        """How many numbers the last layer takes."""
        return self.channels[1] * (self.size // 4) ** 2


class Lstm(NamedTuple):
    """One layer of LSTM with one bias, whose last hidden state is classified."""

    width: int
    length: int
    batch: int
    features: int = 32
    classes: int = 10
    unit = "sequences"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Sequences of vectors, and their classes."""
        return _classified((self.batch, self.length, self.features), self.classes)


class Gpt(NamedTuple):
    """Blocks of causal attention and an MLP, each behind a LayerNorm; learnt positions; a head of its own."""

    vocabulary: int
    width: int
    heads: int
    blocks: int
    sequences: int
    length: int
    unit = "tokens"

    @property
    def batch(self) -> int:
        """How many tokens a step trains on."""
        return self.sequences * self.length

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens, and those that follow them."""
        shape = (self.sequences, self.length + 1)
        tokens = np.random.default_rng(0).integers(self.vocabulary, size=shape).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]


class ResNet(NamedTuple):
    """ResNet-18: K. He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1."""

    classes: int
    size: int
    batch: int
    channels: tuple[int, ...] = (64, 128, 256, 512)
    unit = "images"

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Images with channels first, and their classes."""
        return _classified((self.batch, 3, self.size, self.size), self.classes)

    def blocks(self) -> list[tuple[int, int, int]]:
        """Channels in, channels out and stride of each block."""
        found, before = [], self.channels[0]
        for i, after in enumerate(self.channels):
            found += [(before, after, 1 if i == 0 else 2), (after, after, 1)]
            before = after
        return found


def _classified(shape: tuple[int, ...], classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=shape).astype(np.float32), rng.integers(
        classes, size=shape[0], dtype=np.int32
    )


class Settings(NamedTuple):
    """The models to train, and whether they compute in bfloat16, with parameters in float32."""

    sizes: dict[str, Any]
    half: bool


SMOKE = Settings({"GPT": Gpt(50, 16, 2, 2, 2, 8)}, False)
CPU = Settings(
    {
        "MLP, 2 of 32": Mlp(32, 2, 32),
        "MLP, 3 of 256": Mlp(256, 3, 128),
        "MLP, 3 of 1024": Mlp(1024, 3, 256),
        "MLP, 40 of 64": Mlp(64, 40, 64),
        "CNN": Cnn((32, 64), 8, 64),
        "LSTM": Lstm(128, 64, 32),
        "GPT": Gpt(512, 128, 4, 4, 8, 128),
        "ResNet-18": ResNet(10, 32, 16, (16, 32, 64, 128)),
    },
    False,
)
ACCELERATOR = Settings(
    {"GPT": Gpt(50_304, 768, 12, 12, 16, 1024), "ResNet-18": ResNet(1000, 224, 256)}, True
)


class Training(NamedTuple):
    """A model, its optimiser and a batch, on the device.

    Attributes:
        work: starts a step of training, which keeps the new model and returns the loss.
        parameters: computes how many numbers are trained.
    """

    work: Work
    parameters: Callable[[], int]


def stepping(step: Callable[..., tuple[Any, ...]], *state: Any) -> Callable[[], Any]:
    """A step without arguments, of one that takes the state and returns the loss and the new state."""

    def once() -> Any:
        nonlocal state
        loss, *state = step(*state)
        return loss

    return once
