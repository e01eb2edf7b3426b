"""`PReLU`, and checks of activation functions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..modules import Module
from ..show import short, value_error
from ._keys import needs_keys
from ._layer_arguments import as_array, check_real, wrong_shape
from ._mesh import beside
from ._precision import narrow, widen


class PReLU(Module):
    """A rectifier whose slope for negative inputs is learnt.

        y = x if x >= 0 else slope * x

    He, Zhang, Ren, Sun, "Delving Deep into Rectifiers", 2015, arXiv:1502.01852.

    Args:
        init_alpha: the initial slope: a number, or an array to learn several slopes, which broadcasts against the last
            axes of the input, as in NumPy. (For one slope a channel of a `(channels, height, width)` input, use shape
            `(channels, 1, 1)`.) The default is the paper's. Only the shape says which slope applies where: an ensemble
            of layers with one slope each, called without `vernal.filter_vmap`, acts as one layer with that many slopes.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> vernal.nn.PReLU()(jnp.array([-1.0, 2.0]))
        Array([-0.25,  2.  ], dtype=float32)
    """

    negative_slope: Array

    def __init__(self, init_alpha: ArrayLike = 0.25):
        # Not weakly typed, as a bare number would become: the first update would change its type, and everything would
        # compile again. A copy: `asarray` may share the memory of a NumPy array.
        if isinstance(init_alpha, Array) and jnp.issubdtype(init_alpha.dtype, jnp.inexact):
            self.negative_slope = init_alpha
        else:
            # Integers are not parameters.
            self.negative_slope = jnp.array(init_alpha, jnp.result_type(float))

    @jax.named_scope("vernal.nn.PReLU")
    def __call__(self, x: ArrayLike, *, key: PRNGKeyArray | None = None) -> Array:
        """Applies the rectifier to each element.

        Args:
            x: an array that the slopes broadcast to: any array, if there is one slope. It may have any number of
                further axes in front, such as batch axes.
            key: not used; every layer takes one.

        Returns:
            An array of the shape and dtype of `x`, computed in at least float32. (An integer input gives floats.)

        Raises:
            ValueError: if the slopes do not broadcast to the shape of `x`.
        """
        x = as_array(self, x)
        slope = self.negative_slope
        check_real("PReLU", "negative_slope", slope, x)
        tail = x.shape[x.ndim - slope.ndim :] if slope.ndim <= x.ndim else None
        if tail is None or any(n not in (1, m) for n, m in zip(slope.shape, tail, strict=True)):
            raise wrong_shape(
                "PReLU", x.shape, (..., *("any" if n == 1 else n for n in slope.shape))
            )
        wide = widen(x)
        return narrow(jnp.where(wide >= 0, wide, beside(slope.astype(wide.dtype), wide) * wide), x)


def check_activation(layer: str, activation: Any, argument: str) -> None:
    """Refuses an activation that is not a function, or needs a random key: which neuron, step and example gets which
    key would be a guess."""
    if not callable(activation):
        raise value_error(
            f"an activation of `{layer}` must be a function",
            where=f"{layer}({argument}=...)",
            expected="a function of an array, or a layer",
            got=short(activation),
            instead="jax.nn.relu; for none, lambda x: x",
        )
    if needs_keys(activation):
        raise value_error(
            f"an activation of `{layer}` cannot be random: it is given no key",
            where=f"{layer}({argument}=...)",
            expected="a function, or a layer without randomness",
            got=short(activation),
            instead="nn.Sequential([nn.Linear(...), jax.nn.relu, nn.Dropout(...)]), with the random layer on its own",
        )


def check_result(
    layer: str, activation: Any, argument: str, value: Any, shape: tuple[int, ...]
) -> None:
    """Refuses the result of an activation that changed the shape of its array."""
    if jnp.shape(value) != shape:
        raise value_error(
            f"an activation of `{layer}` changed the shape of its input",
            where=f"{layer}({argument}=...)",
            expected=f"{short(activation)} to keep {shape}",
            got=str(jnp.shape(value)),
        )
