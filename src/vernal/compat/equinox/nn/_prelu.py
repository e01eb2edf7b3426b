"""The rectifier whose parameter has a weak type, as Equinox's."""

from typing import Any

import jax.numpy as jnp

from .... import nn


class PReLU(nn.PReLU):
    """`vernal.nn.PReLU` whose slope is weakly typed, if it is given as a number.

    Args:
        init_alpha: the slope to begin with.
    """

    def __init__(self, init_alpha: Any = 0.25):
        self.negative_slope = jnp.asarray(init_alpha)
