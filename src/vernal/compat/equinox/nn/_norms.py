"""Norms that pass a state through, as Equinox's do."""

import warnings
from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.typing import DTypeLike

from .... import nn
from ....modules import field
from ._layer import LayerMeta

_NONE: Any = object()


class LayerNorm(nn.LayerNorm, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.LayerNorm` with Equinox's old arguments.

    Args:
        shape: as for `vernal.nn.LayerNorm`, like the next four.
        eps: likewise.
        use_weight: likewise.
        use_bias: likewise.
        dtype: likewise.
        elementwise_affine: the old spelling of `use_weight` and `use_bias` together.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        eps: float = 1e-5,
        use_weight: bool = True,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        *,
        elementwise_affine: bool | None = None,
    ):
        if elementwise_affine is not None:
            warnings.warn(
                "LayerNorm: `elementwise_affine` is deprecated; write `use_weight` and `use_bias`",
                stacklevel=2,
            )
            use_weight = use_bias = elementwise_affine
        # Type checkers believe in an `__init__` made of the fields, which is not there.
        super().__init__(shape, eps, use_weight, use_bias, dtype)  # pyright: ignore[reportCallIssue]

    def __call__(self, x: Any, state: Any = _NONE, *, key: Array | None = None) -> Any:
        """Calls the layer.

        Args:
            x: its input.
            state: passed through, if given.
            key: not used.

        Returns:
            The output; with a state, `(output, state)`.
        """
        out = super().__call__(x, key=key)
        return out if state is _NONE else (out, state)


class RMSNorm(nn.RMSNorm, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.RMSNorm`, which passes a state through."""

    def __call__(self, x: Any, state: Any = _NONE, *, key: Array | None = None) -> Any:
        """Calls the layer.

        Args:
            x: its input.
            state: passed through, if given.
            key: not used.

        Returns:
            The output; with a state, `(output, state)`.
        """
        out = super().__call__(x, key=key)
        return out if state is _NONE else (out, state)


class GroupNorm(nn.GroupNorm, metaclass=LayerMeta, layout="fields"):
    """`vernal.nn.GroupNorm`, whose input is always one example unless `num_spatial_dims` is given."""

    # Not a field in Equinox.
    num_spatial_dims: int | None = field(static=True, init=False, default=None)

    def _refuse_two_readings(self, x: Array, fitting: list[bool]) -> None:
        pass

    def __call__(self, x: Any, state: Any = _NONE, *, key: Array | None = None) -> Any:
        """Calls the layer.

        Args:
            x: its input.
            state: passed through, if given.
            key: not used.

        Returns:
            The output; with a state, `(output, state)`.
        """
        out = super().__call__(x, key=key)
        return out if state is _NONE else (out, state)
