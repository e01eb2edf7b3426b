"""`StateIndex`, and the layers that hold one, by Equinox's rules."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jaxtyping import PRNGKeyArray

from .... import nn
from ...._ground import weak_like
from ._layer import LayerMeta

V = TypeVar("V")
Layer = TypeVar("Layer")


class StateIndex(nn.Variable[V]):
    """`vernal.nn.Variable` with Equinox's rules.

    Each is its own marker until `make_with_state` gives it another, so `State(model)` works for an existing model. A
    weakly typed value, such as a Python number, stays weakly typed.

    Args:
        init: the initial value.
        marker: as for `vernal.nn.Variable`.
    """

    def __init__(self, init: V, *, marker: Any = None):
        super().__init__(init, marker=object() if marker is None else marker)
        self.stored = jtu.tree_map(
            lambda stored, x: weak_like(stored, jax.typeof(jnp.asarray(x))), self.stored, init
        )

    @property
    def init(self) -> V:
        """The initial value."""
        return self.stored


class SpectralNorm(nn.SpectralNorm[Layer], metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.SpectralNorm` with a `StateIndex`.

    Args:
        layer: as in `vernal.nn.SpectralNorm`, like all other arguments.
        weight_name: likewise.
        num_power_iterations: likewise.
        eps: likewise.
        inference: likewise.
        key: likewise.
    """

    def __init__(
        self,
        layer: Layer,
        weight_name: str,
        num_power_iterations: int = 1,
        eps: float = 1e-12,
        inference: bool = False,
        *,
        key: PRNGKeyArray,
    ):
        # Equinox draws `u`, which its first iteration replaces, by the other half of the key.
        _, ours = jax.random.split(key)
        super().__init__(layer, weight_name, num_power_iterations, eps, inference, key=ours)
        self.vectors = StateIndex(self.vectors.stored)

    @property
    def uv_index(self) -> Any:
        """Equinox's name for `vectors`."""
        return self.vectors

    def _dtype_of_vectors(self, weight: Array, matrix: Array) -> Any:
        return weight.dtype

    def _fitting(
        self, matrix: Array, u: Array, v: Array, is_other: Array, trains: bool
    ) -> tuple[Array, Array]:
        return u, v
