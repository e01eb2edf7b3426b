"""`Dropout` with Equinox's leaves, and the argument that it had before it was named `inference`."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import PRNGKeyArray

from .... import nn
from ....modules import field
from ._layer import LayerMeta


def inference_of(inference: bool | None, deterministic: bool | None, where: str) -> bool | None:
    """Equinox's old name of `inference`, with a warning, in the place of the new one."""
    if deterministic is None:
        return inference
    warnings.warn(f"{where}: write `inference` for `deterministic`", stacklevel=3)
    return deterministic


class Dropout(nn.Dropout, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.Dropout`, with `p` and `inference` as leaves.

    Args:
        p: as in `vernal.nn.Dropout`.
        inference: likewise.
        deterministic: the old name of `inference`.
    """

    # A leaf with a gradient, which is zero.
    p: Any
    # Not fields in Equinox.
    together: int | None = field(static=True, init=False, default=0)
    key: PRNGKeyArray | None = field(init=False, default=None)

    def __init__(
        self,
        p: Any = 0.5,
        inference: bool = False,
        *,
        deterministic: bool | None = None,
    ):
        super().__init__(p, bool(inference_of(inference, deterministic, "Dropout")))

    def __call__(
        self,
        x: Any,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> Any:
        """Applies dropout.

        Args:
            x: as in `vernal.nn.Dropout`, like all other arguments.
            key: likewise.
            inference: likewise.
            deterministic: the old name of `inference`.

        Returns:
            As in `vernal.nn.Dropout`.
        """
        inference = inference_of(inference, deterministic, "Dropout()")
        inference = self.inference if inference is None else inference
        if inference or (isinstance(self.p, int | float) and self.p == 0):
            return x
        key = nn.use_key(key, self.key, "Dropout")
        keep = 1 - lax.stop_gradient(self.p)
        kept = jax.random.bernoulli(key, keep, jnp.shape(x))
        return jnp.where(kept, x / keep, 0)

    @property
    def deterministic(self) -> Any:
        """The old name of `inference`."""
        return self.inference
