"""`WeightNorm`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..show import short, value_error
from ..trees import is_inexact_array, tree_at
from ._mesh import beside


class WeightNorm(Module):
    r"""A layer whose weight is given by its direction and its length: `g * v / |v|`.

    `v` is the layer's own weight, and `g` starts as its norm, so that the layer computes at first what it did before.

    T. Salimans and D. P. Kingma, "Weight Normalization: A Simple Reparameterization to Accelerate Training of Deep
    Neural Networks", NeurIPS 2016, arXiv:1602.07868.

    Args:
        layer: the layer.
        weight_name: the name of its weight.
        axis: the axis of the weight of which each index has a norm of its own; None for one norm of all.

    Attributes:
        layer: as given; its weight is `v`.
        g: the norms, of the shape of the weight with 1 for every axis but `axis`.

    Raises:
        ValueError: if the layer has no such weight, or the weight no such axis.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Linear(2, 3, key=jax.random.key(0))
        >>> normed = nn.WeightNorm(layer)
        >>> print(normed.g.shape, jnp.allclose(normed(jnp.ones(2)), layer(jnp.ones(2))))
        (3, 1) True
    """

    layer: Any
    g: Array
    weight_name: str = field(static=True)
    axis: int | None = field(static=True)

    def __init__(self, layer: Any, weight_name: str = "weight", axis: int | None = 0):
        self.layer = layer
        self.weight_name = weight_name
        self.axis = axis
        weight = getattr(layer, weight_name, None)
        if not is_inexact_array(weight) or (
            axis is not None and not -weight.ndim <= axis < weight.ndim
        ):
            raise value_error(
                "there is nothing to normalise",
                where=f"WeightNorm(layer, weight_name={weight_name!r}, axis={axis})",
                expected=f"a layer with a floating-point array `{weight_name}` that has this axis",
                got=f"{weight_name} = {short(weight)}",
            )
        self.g = self.norm(jnp.asarray(weight))

    def norm(self, weight: Array) -> Array:
        """The lengths of a weight.

        Args:
            weight: of the shape of the layer's own.

        Returns:
            Of the shape of `g`.
        """
        kept = None if self.axis is None else self.axis % weight.ndim
        axes = tuple(i for i in range(weight.ndim) if i != kept)
        squares = jnp.sum(jnp.abs(weight) ** 2, axis=axes, keepdims=True)
        # The root has no derivative at zero.
        return jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))

    @jax.named_scope("vernal.nn.WeightNorm")
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Any:
        """Calls the layer with the normalised weight.

        Args:
            x: what the layer takes; with batch axes, if it takes them.
            key: handed on to the layer, if given.

        Returns:
            What the layer returns.
        """
        v = getattr(self.layer, self.weight_name)
        norm = self.norm(v)
        # A row of zeros stays one.
        weight = v * (beside(self.g, norm) / jnp.where(norm == 0, 1, norm)).astype(v.dtype)
        layer = tree_at(lambda m: getattr(m, self.weight_name), self.layer, weight)
        return layer(x) if key is None else layer(x, key=key)
