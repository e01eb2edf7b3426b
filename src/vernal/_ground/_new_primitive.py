"""A new JAX primitive: its computation and its rules."""

from collections.abc import Callable
from typing import Any

import jax

from ._jax_private import (
    Primitive,
    Zero,
    fancy_primitive_batchers,
    lower_fun,
    primitive_jvps,
    primitive_transposes,
    register_lowering,
)


def new_primitive(
    name: str,
    compute: Callable[..., Any],
    batch: Callable[..., Any],
    *,
    jvp: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    abstract: Callable[..., Any] | None = None,
    lowered: Callable[..., Any] | None = None,
    multiple_results: bool = False,
) -> Any:
    """Creates an operation.

    Args:
        name: its name in a jaxpr.
        compute: `(*arrays, **params) -> array`, or a list of them with `multiple_results`.
        batch: `(axis, args, dims, **params) -> (results, dims)`.
        jvp: `(primals, tangents, **params) -> (results, tangents)`. By default the results have no derivative.
        transpose: `(cotangents, *args, **params) -> cotangents`, for a linear operation.
        abstract: the types of the results from those of the arguments. By default `compute`, which then returns some of
            its arguments.
        lowered: compiled in place of `compute`.
        multiple_results: whether `compute` returns a list of results.

    Returns:
        The primitive.
    """
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results

    def constant(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        del tangents
        out = primitive.bind(*primals, **params)
        return out, jax.tree.map(lambda x: Zero(jax.typeof(x).to_tangent_aval()), out)

    primitive.def_impl(compute)
    primitive.def_abstract_eval(abstract or compute)
    register_lowering(primitive, lower_fun(lowered or compute, multiple_results=multiple_results))
    fancy_primitive_batchers[primitive] = batch
    primitive_jvps[primitive] = jvp or constant
    if transpose is not None:
        primitive_transposes[primitive] = transpose
    return primitive
