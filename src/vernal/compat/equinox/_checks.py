"""Checks of conditions of any dtype, not only of bools: nonzero is true, as in Equinox."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ... import runtime
from ...trees import is_array_like


def _as_bools(pred: Any) -> Any:
    counts = is_array_like(pred) and jnp.result_type(pred) != jnp.bool_
    return jnp.asarray(pred) != 0 if counts else pred


def error_if(x: Any, pred: Any, msg: str, *, on_error: Any = "default") -> Any:
    """`vernal.error_if`.

    Args:
        x: as in `vernal.error_if`, like all other arguments.
        pred: likewise, of any dtype.
        msg: likewise.
        on_error: likewise.

    Returns:
        As in `vernal.error_if`.
    """
    out = runtime.error_if(x, _as_bools(pred), msg, on_error=on_error)
    return jtu.tree_map(
        lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, out
    )


def branched_error_if(
    x: Any, pred: Any, index: Any, msgs: Sequence[str], *, on_error: Any = "default"
) -> Any:
    """`vernal.branched_error_if`.

    Args:
        x: as in `vernal.branched_error_if`, like all other arguments.
        pred: likewise, of any dtype.
        index: likewise.
        msgs: likewise.
        on_error: likewise.

    Returns:
        As in `vernal.branched_error_if`.
    """
    return runtime.branched_error_if(x, _as_bools(pred), index, msgs, on_error=on_error)
