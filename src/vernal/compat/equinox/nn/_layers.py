"""Layers in which every field that is not static is a child, as in Equinox, including fields that a subclass adds."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jaxtyping import PRNGKeyArray

from .... import nn
from ._layer import LayerMeta

Layer = TypeVar("Layer")
_NONE: Any = object()


class StatefulLayer(nn.StatefulLayer, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.StatefulLayer`."""


class WeightNorm(nn.WeightNorm[Layer], metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.WeightNorm`."""


class Identity(nn.Identity, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Identity`."""


class Lambda(nn.Lambda, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Lambda`, whose function is a leaf."""


class Embedding(nn.Embedding, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Embedding`."""


class Sequential(nn.Sequential, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Sequential`, whose functions are leaves, and whose state may be anything, None too."""

    def __init__(self, layers: Iterable[Any]):
        super().__init__(layers)

    @jax.named_scope("eqx.nn.Sequential")
    def __call__(self, x: Any, state: Any = _NONE, *, key: PRNGKeyArray | None = None) -> Any:
        """Runs `x` through all layers.

        Args:
            x: what the first layer takes.
            state: passed through the layers that take one, if given.
            key: split into one for each layer.

        Returns:
            What the last layer returns; with a state, a pair of this and the new state.
        """
        return self._run(x, state, state is not _NONE, key)

    def __getitem__(self, i: int | slice) -> Any:
        return Sequential(self.layers[i]) if isinstance(i, slice) else self.layers[i]


class Conv(nn.Conv, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Conv`."""


class Conv1d(nn.Conv1d, Conv, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Conv1d`."""


class Conv2d(nn.Conv2d, Conv, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Conv2d`."""


class Conv3d(nn.Conv3d, Conv, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Conv3d`."""


class ConvTranspose(nn.ConvTranspose, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.ConvTranspose`."""


class ConvTranspose1d(nn.ConvTranspose1d, ConvTranspose, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.ConvTranspose1d`."""


class ConvTranspose2d(nn.ConvTranspose2d, ConvTranspose, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.ConvTranspose2d`."""


class ConvTranspose3d(nn.ConvTranspose3d, ConvTranspose, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.ConvTranspose3d`."""
