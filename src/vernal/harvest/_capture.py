"""Captures: intermediate values of a function, as further results of it.

`capture` marks values with a label, by an operation that is the identity. `reap` collects the values marked with the
labels that it is given; they keep their derivatives. In a loop a value is collected at every step, along a leading
axis; under `jax.vmap` inside the function, for every element. The axes of loops come first, in either order.
"""

from collections.abc import Hashable
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax

from .._ground import jaxprs_in_params, new_primitive
from ..primitives import register_impl_finalisation
from ..trees import split

T = TypeVar("T")


def _itself(*args: Any, **params: Any) -> list[Any]:
    del params
    return list(args)


def _capture_batch(axis: Any, args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    """The values of all elements, along a leading axis, even if all are the same."""
    full = [
        jnp.broadcast_to(x, (axis.size, *jnp.shape(x))) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    out = capture_p.bind(*full, **params)
    for i, dim in enumerate(dims):
        # JAX requires an unmapped argument to give an unmapped result.
        if dim is None:
            out[i] = lax.index_in_dim(out[i], 0, keepdims=False) if axis.size else args[i]
    return out, [None if dim is None else 0 for dim in dims]


def _capture_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    return capture_p.bind(*primals, **params), list(tangents)


capture_p = new_primitive(
    "capture", _itself, _capture_batch, jvp=_capture_jvp, multiple_results=True
)
register_impl_finalisation(capture_p)


def capture(value: T, label: Hashable) -> T:
    """Marks a value, so that `vernal.harvest.reap` can return it along with the result.

    Args:
        value: a tree of arrays. (Leaves that are not arrays are kept.)
        label: the label to pass to `reap`.

    Returns:
        The value. Continue with it: a value that nothing depends on may be removed from the program.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.harvest import capture, reap
        >>> def f(slots, x):
        ...     return capture(x + 1, "shifted") ** 2
        >>> y, _, captured = reap(f, capture=["shifted"])((), jnp.array(2.0))
        >>> print(y, captured["shifted"])
        9.0 3.0
    """
    arrays, rest = split(value)
    return rest.fill(capture_p.bind(*arrays, label=label, rest=rest))


def captures(jaxpr: Any, labels: frozenset[Hashable] | None = None) -> bool:
    """Whether a program captures a value, at any depth.

    Args:
        jaxpr: the program.
        labels: the labels that count; None for all.

    Returns:
        True if there is a `vernal.harvest.capture` in it, with one of these labels.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.harvest import capture, captures
        >>> captures(jax.make_jaxpr(lambda x: capture(x + 1, "shifted"))(jnp.array(1)).jaxpr)
        True
    """
    if labels is not None and not labels:
        return False
    return any(
        (eqn.primitive is capture_p and (labels is None or eqn.params["label"] in labels))
        or any(captures(x, labels) for x in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )
