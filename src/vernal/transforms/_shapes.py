"""`filter_eval_shape` and `filter_make_jaxpr`: the shapes and the program of a function, without
computing anything."""

from collections.abc import Callable
from typing import Any, ParamSpec

import jax

from ..trees import has_shape, split
from ._transformed import Transformed, check_callable, inside, wrap

P = ParamSpec("P")


def filter_eval_shape(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of what a function would return. Nothing is computed.

    Args:
        fn: the function. It may be a class: `filter_eval_shape(Model, key=key)` is a model that takes no
            memory.
        *args: its arguments: any Python objects. `jax.ShapeDtypeStruct` may stand for an array.
        **kwargs: likewise.

    Returns:
        The result with a `jax.ShapeDtypeStruct` in place of every array. Everything else is unchanged.

    Raises:
        TypeError: if `fn` is not callable.
        TracedShapeError: if a shape depends on the value of an array.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> x = jax.ShapeDtypeStruct((3, 2), jnp.float32)
        >>> out, name = vernal.filter_eval_shape(lambda x, name: (x.T @ x, name), x, "gram")
        >>> out.shape, name
        ((2, 2), 'gram')
    """
    check_callable(fn, "filter_eval_shape")
    arrays, rest = split((fn, args, kwargs), has_shape)
    out, out_rest = jax.eval_shape(inside(fn, rest), arrays)
    return out_rest.fill(out)


class _MakeJaxpr(Transformed[P, tuple[Any, Any, Any]]):
    """What `filter_make_jaxpr` returns."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any, Any]:
        arrays, rest = split((self.fn, args, kwargs), has_shape)
        jaxpr, (out, out_rest) = jax.make_jaxpr(inside(self.fn, rest), return_shape=True)(arrays)
        structs, static = iter(out), iter(out_rest.fixed)
        mask = out_rest.mask
        return (
            jaxpr,
            out_rest.treedef.unflatten([next(structs) if m else None for m in mask]),
            out_rest.treedef.unflatten([None if m else next(static) for m in mask]),
        )


def filter_make_jaxpr(fun: Callable[P, Any]) -> _MakeJaxpr[P]:
    """The jaxpr of a function, for reading.

    Args:
        fun: the function. Its arguments may be any Python objects; `jax.ShapeDtypeStruct` may stand
            for an array.

    Returns:
        A function of the same arguments that returns `(jaxpr, structs, static)`: the jaxpr, whose
        inputs are the arrays of the function itself (if it is a module) and of its arguments, in
        order; the result with a `jax.ShapeDtypeStruct` in place of every array and None in place of
        everything else; and the result with None in place of every array.

    Raises:
        TypeError: if `fun` is not callable.
        TracedShapeError: at a call, if a shape depends on the value of an array.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> make = vernal.filter_make_jaxpr(lambda x, name: (2 * x, name))
        >>> jaxpr, structs, static = make(jnp.ones(3), "twice")
        >>> [equation.primitive.name for equation in jaxpr.eqns]
        ['mul']
        >>> structs[0].shape, static
        ((3,), (None, 'twice'))
    """
    check_callable(fun, "filter_make_jaxpr")
    return wrap(_MakeJaxpr(fun))
