"""`PReLU` whose parameter is weakly typed, as in Equinox."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from .... import nn
from ._layer import LayerMeta


class PReLU(nn.PReLU, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.PReLU` whose slope is weakly typed if it is a Python number; it computes in the promoted dtype.

    Args:
        init_alpha: the initial slope.
    """

    def __init__(self, init_alpha: Any = 0.25):
        self.negative_slope = jnp.asarray(init_alpha)

    @jax.named_scope("eqx.nn.PReLU")
    def __call__(self, x: Any, *, key: PRNGKeyArray | None = None) -> Array:
        """Applies the rectifier.

        Args:
            x: an array that the slopes broadcast to.
            key: not used.

        Returns:
            The shape of `x`.
        """
        return jnp.where(x >= 0, x, self.negative_slope * x)
