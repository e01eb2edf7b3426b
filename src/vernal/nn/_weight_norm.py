"""`WeightNorm`."""

from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import field
from ..show import short, type_error, value_error
from ._layer_arguments import check_kind, check_parameter, known_value
from ._mesh import beside
from ._normalised_layer import NormalisedLayer
from ._parametrised import resolve
from ._precision import largest_entry, widen

Layer = TypeVar("Layer")


class WeightNorm(NormalisedLayer, Generic[Layer]):
    r"""A layer whose weight is parametrised by its direction and its length: `g * v / |v|`.

    `v` is the layer's own weight, and `g` starts as its norm, so at first the layer computes what it did before.
    Replacing `v` (by `vernal.tree_at`, or from a checkpoint) changes the direction only: the length stays `g`.
    `vernal.nn.initialise` sets both. To use another weight, wrap a layer that has it, or first merge by
    `vernal.nn.resolve`, which returns the plain layer.

    T. Salimans and D. P. Kingma, "Weight Normalization: A Simple Reparameterization to Accelerate Training of Deep
    Neural Networks", NeurIPS 2016, arXiv:1602.07868.

    Args:
        layer: the layer.
        weight_name: the name of its weight.
        axis: the axis of the weight along which each index has its own norm; None for one norm of the whole weight.

    Attributes:
        layer: as given; its weight is `v`.
        g: the norms, of the shape of the weight but with size 1 in every axis except `axis`.

    Raises:
        TypeError: if `axis` is not an integer.
        ValueError: if the layer has no such weight, the weight has no such axis, or the norm overflows the weight's
            dtype; when called, if `g` has the wrong shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Linear(2, 3, key=jax.random.key(0))
        >>> normed = nn.WeightNorm(layer)
        >>> print(normed.g.shape, jnp.allclose(normed(jnp.ones(2)), layer(jnp.ones(2))))
        (3, 1) True
    """

    layer: Layer
    g: Array
    weight_name: str = field(static=True)
    axis: int | None = field(static=True)

    def __init__(self, layer: Layer, weight_name: str = "weight", axis: int | None = 0):
        self.layer = layer
        self.weight_name = weight_name
        if axis is not None and (isinstance(axis, bool) or not isinstance(axis, int | np.integer)):
            raise type_error(
                "the axis of `WeightNorm` must be one integer",
                where="argument `axis`",
                expected="an axis of the weight, or None for one norm of the whole weight",
                got=short(axis),
            )
        self.axis = axis = None if axis is None else int(axis)
        weight = self.own_weight(axis)
        self.g = self.norm(weight).astype(weight.dtype)
        _check_fits(weight, self.g)

    def norm(self, weight: Array) -> Array:
        """The norms of a weight.

        Args:
            weight: an array of the shape of the layer's own weight.

        Returns:
            The norms, of the shape of `g`, in at least float32.
        """
        _, largest, norm = self._in_parts(weight)
        return jnp.where(largest == 0, 0, largest * norm)

    def normalised(self, weight: Array) -> Array:
        """The weight that the layer uses.

        Args:
            weight: `v`.

        Returns:
            `g * v / |v|`; a row of zeros stays zero.
        """
        check_kind("WeightNorm", self.weight_name, weight, jnp.inexact)
        scaled, _, norm = self._in_parts(weight)
        check_parameter("WeightNorm", "g", self.g, norm.shape)
        kind = jnp.inexact if jnp.iscomplexobj(weight) else jnp.floating
        check_kind("WeightNorm", "g", self.g, kind)
        # Without the barrier XLA would merge both quotients into one, of products that overflow.
        factor = lax.optimization_barrier(widen(beside(self.g, norm)) / norm)
        return (scaled * factor).astype(weight.dtype)

    def _in_parts(self, weight: Array) -> tuple[Array, Array, Array]:
        """The weight divided by its largest entry, that entry, and the norm of the quotient. Where all entries are
        zero, the norm is 1."""
        weight = widen(weight)
        kept = None if self.axis is None else self.axis % weight.ndim
        axes = tuple(i for i in range(weight.ndim) if i != kept)
        largest = largest_entry(weight, axes)
        scaled = weight / jnp.where(largest == 0, 1, largest)
        squares = jnp.sum(jnp.abs(scaled) ** 2, axis=axes, keepdims=True)
        # The square root has no derivative at zero.
        return scaled, largest, jnp.sqrt(jnp.where(largest == 0, 1, squares))

    @jax.named_scope("vernal.nn.WeightNorm")
    def __call__(self, *args: Any, key: PRNGKeyArray | None = None, **kwargs: Any) -> Any:
        """Calls the layer with the normalised weight.

        Args:
            *args: the arguments of the layer; with batch axes, if it takes them.
            key: passed on to the layer, if given.
            **kwargs: further keyword arguments of the layer.

        Returns:
            What the layer returns.
        """
        layer = resolve(self)
        return layer(*args, **kwargs) if key is None else layer(*args, key=key, **kwargs)


def _check_fits(weight: Array, g: Array) -> None:
    """Refuses norms that are infinite although the weight is finite, where they are known."""
    lengths = known_value(g)
    if lengths is not None and np.isinf(lengths).any() and bool(jnp.isfinite(weight).all()):
        raise value_error(
            "the norm of the weight is too large for its dtype",
            where="WeightNorm(layer)",
            expected=f"a norm of at most {float(jnp.finfo(g.dtype).max):.3g}, as the weight is {g.dtype.name}",
            got=f"entries up to {float(jnp.abs(weight).max()):.3g}",
            instead="a smaller weight, or one of a wider dtype",
        )
