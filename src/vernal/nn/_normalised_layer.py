"""The base class of `WeightNorm` and `SpectralNorm`."""

import abc
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..modules import AbstractVar
from ..show import short, value_error
from ..trees import is_inexact_array, tree_at
from ._inference import inference_mode
from ._parametrised import Parametrised, resolve


class NormalisedLayer(Parametrised):
    """A layer that uses a function of its weight in place of the weight."""

    layer: AbstractVar[Any]
    weight_name: AbstractVar[str]

    @abc.abstractmethod
    def normalised(self, weight: Array) -> Array:
        """The weight that the layer uses.

        Args:
            weight: the layer's own.

        Returns:
            An array of the same shape and dtype.
        """

    def own_weight(self, axis: int | None) -> Array:
        """The weight of the layer before normalisation.

        Args:
            axis: an axis that it must have, or None.

        Returns:
            The array; if it is `Parametrised`, its value.

        Raises:
            ValueError: if the layer has no such weight.
        """
        layer = self.layer
        weight = getattr(layer, self.weight_name, None)
        if isinstance(layer, Parametrised) or isinstance(weight, Parametrised):
            # In inference mode, because a new state would be lost here.
            weight = getattr(resolve(inference_mode(layer)), self.weight_name, None)
        if is_inexact_array(weight) and (axis is None or -weight.ndim <= axis < weight.ndim):
            return jnp.asarray(weight)
        raise value_error(
            "the layer has no array to normalise",
            where=f"{type(self).__name__}(layer, weight_name={self.weight_name!r})",
            expected=f"a layer with a floating-point array `{self.weight_name}`"
            + ("" if axis is None else f" that has an axis {axis}"),
            got=f"{self.weight_name} = {short(weight)}",
        )

    def value(self) -> Any:
        """The layer with the normalised weight in place of its own.

        Returns:
            A plain layer.
        """
        weight = getattr(self.layer, self.weight_name)
        return with_weight(self.layer, self.weight_name, self.normalised(weight))


def with_weight(layer: Any, name: str, weight: Array) -> Any:
    """The layer with this weight instead of its own."""
    return tree_at(lambda layer: getattr(layer, name), layer, weight)
