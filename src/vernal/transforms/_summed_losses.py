"""Reverse mode inside `shard_map`: the losses of all devices are differentiated together, by what they share.

JAX transposes the whole program there, so an array that is the same on all devices receives the sum of the derivatives
of all devices. That is the derivative of their mean times the number of devices, and a later mean does not change it.
"""

from collections.abc import Sequence
from typing import Any

from .._ground import callable_name
from ..show import value_error
from ._placement import varying_axes


def refuse_sum_over_devices(
    fn: Any, values: Sequence[Any], chosen: Sequence[Any], transform: str
) -> None:
    """Refuses values that differ between devices if one of the differentiated arrays does not."""
    axes = frozenset[Any]().union(
        *(varying_axes(value) - varying_axes(x) for value in values for x in chosen)
    )
    if not axes:
        return
    names = ", ".join(map(repr, sorted(axes)))
    loss = "output" if transform in ("filter_jacrev", "filter_hessian") else "loss"
    raise value_error(
        f"the {loss} of `{callable_name(fn)}` differs between devices, and a differentiated array does not",
        where=f"{transform}({callable_name(fn)}), along the mesh axes {names}",
        expected=f"one {loss} for all devices together, or arrays that all differ between them",
        got=f"a separate {loss} on each device; JAX would differentiate their sum",
        instead=f"end it with `return jax.lax.pmean({loss}, {names if len(axes) == 1 else f'({names})'})`, or with "
        "psum if you mean the sum; the derivative needs no mean afterwards. For the derivative on each device alone, "
        f"differentiate `jax.lax.pcast(x, {names if len(axes) == 1 else f'({names})'}, to='varying')`",
    )
