"""`Dropout` with Equinox's leaves, and the argument that it had before `inference`."""

import warnings
from typing import Any

from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from .... import nn


def inference_of(inference: bool | None, deterministic: bool | None, where: str) -> bool | None:
    """Equinox's old name of `inference`, with a warning, in the place of the new one."""
    if deterministic is None:
        return inference
    warnings.warn(f"{where}: write `inference` for `deterministic`", stacklevel=3)
    return deterministic


class Dropout(nn.Dropout, layout="fields"):
    """`vernal.nn.Dropout`, of which `p` and `inference` are leaves.

    Args:
        p: as there.
        inference: likewise.
        deterministic: the old name of `inference`.
    """

    def __init__(
        self,
        p: float = 0.5,
        inference: bool = False,
        *,
        deterministic: bool | None = None,
    ):
        super().__init__(p, bool(inference_of(inference, deterministic, "Dropout")))

    def __call__(
        self,
        x: ArrayLike,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
    ) -> Array:
        """Drops out some elements.

        Args:
            x: as in `vernal.nn.Dropout`, and so are all others.
            key: likewise.
            inference: likewise.
            deterministic: the old name of `inference`.

        Returns:
            As there.
        """
        return super().__call__(
            x, key=key, inference=inference_of(inference, deterministic, "Dropout()")
        )

    @property
    def deterministic(self) -> Any:
        """The old name of `inference`."""
        return self.inference
