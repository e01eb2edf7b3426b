"""`create_vprim`: a new operation whose batching rule is derived from its other rules."""

from collections.abc import Callable
from typing import Any

from .. import transforms
from ._finalise import register_impl_finalisation


def define(*rules: Any) -> Any:
    """`create_vprim` for an operation with effects: `abstract_eval` returns `(avals, effects)`."""
    primitive = transforms.define(*rules)
    register_impl_finalisation(primitive)
    return primitive


def create_vprim(
    name: str,
    impl: Callable[..., Any],
    abstract_eval: Callable[..., Any],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
) -> Any:
    """Creates an operation from four rules; the rule for `vmap` is derived from them.

    The rules follow the conventions of JAX's primitives with several results. For arguments that are
    arbitrary Python objects, wrap them by `filter_primitive_def`, `filter_primitive_jvp` and
    `filter_primitive_transpose`. A rule may bind the operation again, and usually does.

    Args:
        name: its name in a jaxpr.
        impl: `impl(*arrays, **params)`, returns the results as a list. It is also compiled.
        abstract_eval: `abstract_eval(*avals, **params)`, returns the abstract results as a list.
        jvp: `jvp(primals, tangents, **params)`, returns the results and their tangents.
        transpose: `transpose(cotangents, *args, **params)`, returns for every argument its cotangent
            or None.

    Returns:
        A `jax.extend.core.Primitive`. Bind it with `filter_primitive_bind`, or with its `bind`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import create_vprim
        >>> def jvp(primals, tangents):
        ...     return cube.bind(*primals), [3 * primals[0] ** 2 * tangents[0]]
        >>> cube = create_vprim(
        ...     "cube", lambda x: [x**3], lambda x: [x], jvp, lambda cts, x: [None]
        ... )
        >>> jax.vmap(jax.grad(lambda x: cube.bind(x)[0]))(jnp.array([1.0, 2.0]))
        Array([ 3., 12.], dtype=float32)
    """
    return define(
        name,
        impl,
        lambda *avals, **params: (abstract_eval(*avals, **params), set()),
        jvp,
        transpose,
    )
