"""Affine maps of vectors."""

from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import PRNGKeyArray

from ..modules import Module, field
from ..trees import check_key
from ._init import limit, uniforms, weight_dtype
from ._layer_arguments import (
    Axis,
    as_flag,
    check_parameter,
    check_shape,
    check_size,
    check_weight,
)
from ._mesh import beside, product

_T = TypeVar("_T")


def features(layer: str, argument: str, size: Any) -> int | Literal["scalar"]:
    """A number of features, or `"scalar"`."""
    if isinstance(size, str) and size == "scalar":
        return "scalar"
    return check_size(layer, argument, size, minimum=0, words=', or "scalar"')


def vector_shape(name: str, size: int | Literal["scalar"]) -> tuple[Axis, ...]:
    """The expected shape of a vector of `size` features, or of a number for `"scalar"`, after batch axes."""
    return (...,) if size == "scalar" else (..., (name, size))


class Linear(Module):
    """The affine map `weight @ x + bias`.

    Weight and bias are drawn uniformly between `-1/sqrt(in_features)` and `1/sqrt(in_features)`.

    Args:
        in_features: the length of the input, or `"scalar"` for an input of shape `()`.
        out_features: the length of the output, or `"scalar"` for an output of shape `()`.
        use_bias: whether to add a bias.
        dtype: the dtype of the weights, floating-point or complex; `float32` by default (`float64`
            if JAX has 64-bit numbers switched on).
        key: a JAX random key for the initial weights.

    Attributes:
        weight: shape `(out_features, in_features)`; a scalar counts as 1.
        bias: shape `(out_features,)`, or None.

    Raises:
        ValueError: for a size that is not an integer of at least 0, or a `dtype` of integers; when
            called, for an input of the wrong shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal.nn as nn
        >>> layer = nn.Linear(2, 3, key=jax.random.key(0))
        >>> layer(jnp.ones(2)).shape
        (3,)
        >>> layer(jnp.ones((5, 2))).shape
        (5, 3)
    """

    weight: jax.Array
    bias: jax.Array | None
    in_features: int | Literal["scalar"] = field(static=True)
    out_features: int | Literal["scalar"] = field(static=True)
    use_bias: bool = field(static=True)

    def __init__(
        self,
        in_features: int | Literal["scalar"],
        out_features: int | Literal["scalar"],
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
    ):
        dtype = weight_dtype("Linear", dtype)
        self.in_features = features("Linear", "in_features", in_features)
        self.out_features = features("Linear", "out_features", out_features)
        self.use_bias = as_flag(type(self).__name__, "use_bias", use_bias)
        n_in = 1 if self.in_features == "scalar" else self.in_features
        n_out = 1 if self.out_features == "scalar" else self.out_features
        shapes = (n_out, n_in), (n_out,) if self.use_bias else None
        self.weight, self.bias = uniforms(check_key("Linear", key), shapes, limit(n_in), dtype)

    @jax.named_scope("vernal.nn.Linear")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> jax.Array:
        """Applies the map.

        Args:
            x: shape `(..., in_features)`, or `(...)` for a scalar, where `...` are batch axes: any
                number of them, or none.
            key: ignored; here so that all layers are called alike.

        Returns:
            Shape `(..., out_features)`, or `(...)`.
        """
        weight = jnp.asarray(self.weight)
        check_weight("Linear", weight, self._axes())
        # `vernal.tree_at` may have put in a weight for another number of features than `in_features`.
        n_in = "scalar" if self.in_features == "scalar" else weight.shape[1]
        check_shape("Linear", x, vector_shape("in_features", n_in))
        if self.in_features == "scalar":
            x = jnp.expand_dims(x, -1)
        y = product(jnp.asarray(x), weight)
        if self.bias is not None:
            check_parameter("Linear", "bias", self.bias, y.shape[-1:])
            y = y + beside(self.bias, y)
        return lax.squeeze(y, (y.ndim - 1,)) if self.out_features == "scalar" else y

    def _axes(self) -> tuple[Axis, ...]:
        """The axes of the weight. The number of its rows may change, if that of the bias does."""
        n_in = 1 if self.in_features == "scalar" else "in_features"
        n_out = 1 if self.out_features == "scalar" else "out_features"
        return n_out, n_in


class Identity(Module):
    """Returns its input.

    Args:
        *args: ignored, so that it can replace any other layer.
        **kwargs: ignored likewise.

    Example:
        >>> import vernal.nn as nn
        >>> nn.Identity(3, use_bias=False)("anything")
        'anything'
    """

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    @jax.named_scope("vernal.nn.Identity")
    def __call__(self, x: _T, *, key: PRNGKeyArray | None = None) -> _T:
        """Returns `x`.

        Args:
            x: anything.
            key: ignored; here so that all layers are called alike.

        Returns:
            The same object.
        """
        return x
