"""Finalisation: a program without the operations that exist only for transformations.

When a program will not be differentiated or mapped any more, its derivative rules, guards and other
operations of ours only get in the way: of people who read the jaxpr, and of exporters, which know
only JAX's own operations. Finalising replaces

    an operation that is registered           by the operations that compute it
    a call with a derivative rule             by the function
    `stop_gradient`, names for checkpointing  by their argument

at every depth: in loops, branches, inner `jit`s, `jax.checkpoint`, `jax.shard_map`.

A jaxpr is finalised by evaluating it equation by equation, under a trace that writes the new one. An
equation that holds nothing to replace is evaluated unchanged, so that operations that take programs
in their own ways are left alone.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
from jax.core import eval_jaxpr

from .._ground import (
    ClosedJaxpr,
    custom_jvp_call_p,
    custom_vjp_call_p,
    jaxprs_in_params,
    name_p,
    remat_p,
    stop_gradient_p,
)
from ..modules import module_update_wrapper
from ..transforms import Transformed, check_callable, vprim_p
from ..trees import Rest, split

P = ParamSpec("P")
T = TypeVar("T")

# For each operation that finalisation replaces, a function from its arguments and parameters to its result.
primitive_finalisations: dict[Any, Callable[..., Any]] = {
    custom_jvp_call_p: lambda *args, call_jaxpr, **params: _plain(call_jaxpr, args),
    custom_vjp_call_p: lambda *args, call_jaxpr, **params: _plain(call_jaxpr, args),
    stop_gradient_p: lambda x: x,
    name_p: lambda x, **params: x,
}


def register_impl_finalisation(prim: Any) -> None:
    """Makes finalisation replace an operation by its implementation.

    Vernal's operations, and those that `create_vprim` makes, are registered already.

    Args:
        prim: a `jax.extend.core.Primitive` whose implementation (`def_impl`) JAX can trace.

    Example:
        >>> from jax.extend.core import Primitive
        >>> from vernal.primitives import finalise_make_jaxpr, register_impl_finalisation
        >>> twice = Primitive("twice")
        >>> rule = twice.def_impl(lambda x: x + x)
        >>> rule = twice.def_abstract_eval(lambda x: x)
        >>> register_impl_finalisation(twice)
        >>> finalise_make_jaxpr(lambda x: twice.bind(x))(1.0)
        { lambda ; a:f32[]. let b:f32[] = add a a in (b,) }
    """
    # The implementation is looked up when it is needed: it may be defined later.
    primitive_finalisations[prim] = lambda *args, **params: prim.impl(*args, **params)


register_impl_finalisation(vprim_p)


def _plain(closed: Any, args: Sequence[Any]) -> list[Any]:
    return eval_jaxpr(closed.jaxpr, closed.consts, *args)


def _is_final(jaxpr: Any) -> bool:
    return all(
        eqn.primitive not in primitive_finalisations and all(map(_is_final, _inside(eqn)))
        for eqn in jaxpr.eqns
    )


def _inside(eqn: Any) -> Iterator[Any]:
    return jaxprs_in_params(eqn.params)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr, each equation in its final form."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else known[atom]

    for eqn in jaxpr.eqns:
        # The settings (precision, mesh, ...) under which the equation was traced.
        with eqn.ctx.manager:
            out = _equation(eqn, [read(atom) for atom in eqn.invars])
        out = out if eqn.primitive.multiple_results else [out]
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any]) -> Any:
    primitive, params = eqn.primitive, dict(eqn.params)
    if primitive in primitive_finalisations:
        # The replacement may itself need to be finalised.
        closed, out = jax.make_jaxpr(
            lambda *args: primitive_finalisations[primitive](*args, **params), return_shape=True
        )(*args)
        final = _evaluate(closed.jaxpr, closed.consts, args)
        return jax.tree.structure(out).unflatten(final)
    if all(map(_is_final, _inside(eqn))):
        return primitive.bind(*args, **primitive.get_bind_params(params))
    if primitive is remat_p:
        return _remat(args, **params)
    if primitive.name == "shard_map":
        return _shard_map(args, **params)
    params = {key: _parameter(value) for key, value in params.items()}
    return primitive.bind(*args, **primitive.get_bind_params(params))


def _parameter(value: Any) -> Any:
    if isinstance(value, ClosedJaxpr):
        return finalise_jaxpr(value)
    if isinstance(value, tuple):
        parts = [_parameter(part) for part in value]
        # `jax.lax.custom_linear_solve` has a named tuple of jaxprs.
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _remat(args: list[Any], *, jaxpr: Any, **params: Any) -> Any:
    """The program of `jax.checkpoint` can hold no constants: they become arguments."""
    avals = [v.aval for v in jaxpr.invars]
    closed = jax.make_jaxpr(lambda *args: _evaluate(jaxpr, (), args))(*avals)
    consts = closed.consts
    without = jax.make_jaxpr(
        lambda *args: eval_jaxpr(closed.jaxpr, args[: len(consts)], *args[len(consts) :])
    )(*consts, *avals)
    return remat_p.bind(*consts, *args, jaxpr=without.jaxpr, **params)


def _shard_map(
    args: list[Any],
    *,
    jaxpr: Any,
    mesh: Any,
    in_specs: Any,
    out_specs: Any,
    newly_manual_axes: Any,
    check_vma: bool,
) -> Any:
    """The program of `jax.shard_map` can only be traced inside of it, where the axes have names."""
    return jax.shard_map(
        lambda *args: tuple(_evaluate(jaxpr, (), args)),
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        axis_names=set(newly_manual_axes),
        check_vma=check_vma,
    )(*args)


def finalise_jaxpr(jaxpr: Any) -> Any:
    """Removes the operations that exist only for transformations from a program.

    Args:
        jaxpr: a `jax.extend.core.ClosedJaxpr`, as `jax.make_jaxpr` returns it.

    Returns:
        A program of the same arguments with the same results. Vernal's operations, and those registered
        by `register_impl_finalisation`, are replaced by the operations that compute them, functions with
        derivative rules by the plain functions, and `stop_gradient` by its argument.

    Example:
        >>> import jax
        >>> from vernal.primitives import finalise_jaxpr, nondifferentiable
        >>> jaxpr = jax.make_jaxpr(lambda x: jax.lax.stop_gradient(nondifferentiable(x)) + 1)(1.0)
        >>> finalise_jaxpr(jaxpr)
        { lambda ; a:f32[]. let b:f32[] = add a 1.0:f32[] in (b,) }
    """
    if _is_final(jaxpr.jaxpr):
        return jaxpr
    return jax.make_jaxpr(lambda *args: _evaluate(jaxpr.jaxpr, jaxpr.consts, args))(*jaxpr.in_avals)


def finalise_eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates a program in its final form: `jax.core.eval_jaxpr` of `finalise_jaxpr`.

    Args:
        jaxpr: a `jax.extend.core.Jaxpr`.
        consts: the values of its constants.
        *args: its arguments.

    Returns:
        Its results.

    Example:
        >>> import jax
        >>> from vernal.primitives import finalise_eval_jaxpr
        >>> closed = jax.make_jaxpr(jax.nn.relu)(1.0)
        >>> finalise_eval_jaxpr(closed.jaxpr, closed.consts, 2.0)
        [Array(2., dtype=float32, weak_type=True)]
    """
    return _evaluate(jaxpr, consts, args)


def finalise_jaxpr_as_fn(jaxpr: Any) -> Callable[..., list[Any]]:
    """Converts a program, in its final form, to a function.

    Args:
        jaxpr: a `jax.extend.core.ClosedJaxpr`.

    Returns:
        A function from the arguments of the program to the list of its results.

    Example:
        >>> import jax
        >>> from vernal.primitives import finalise_jaxpr_as_fn
        >>> finalise_jaxpr_as_fn(jax.make_jaxpr(jax.nn.relu)(1.0))(2.0)
        [Array(2., dtype=float32, weak_type=True)]
    """
    return lambda *args: _evaluate(jaxpr.jaxpr, jaxpr.consts, args)


def finalise_make_jaxpr(
    fn: Callable[..., Any], *, return_shape: bool = False
) -> Callable[..., Any]:
    """`jax.make_jaxpr` in final form.

    Args:
        fn: a function of arrays.
        return_shape: whether to return the shapes and structure of the result too.

    Returns:
        A function of the same arguments that returns the program of `fn` for them; with
        `return_shape`, `(program, shapes)`.

    Example:
        >>> import jax
        >>> from vernal.primitives import finalise_make_jaxpr
        >>> finalise_make_jaxpr(lambda x: jax.lax.stop_gradient(x) + 1)(1.0)
        { lambda ; a:f32[]. let b:f32[] = add a 1.0:f32[] in (b,) }
    """
    check_callable(fn, "finalise_make_jaxpr")
    make = jax.make_jaxpr(fn, return_shape=True)

    def make_final(*args: Any, **kwargs: Any) -> Any:
        jaxpr, shape = make(*args, **kwargs)
        final = finalise_jaxpr(jaxpr)
        return (final, shape) if return_shape else final

    return make_final


class _Final(Transformed[P, T]):
    """The function that `finalise_fn` returns."""

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        arrays, rest = split((self.fn, args, kwargs))

        def flat(arrays: list[Any]) -> tuple[list[Any], Rest]:
            fn, args, kwargs = rest.fill(arrays)
            return split(fn(*args, **kwargs))

        closed, (_, out_rest) = jax.make_jaxpr(flat, return_shape=True)(arrays)
        return out_rest.fill(_evaluate(closed.jaxpr, closed.consts, arrays))


def finalise_fn(fn: Callable[P, T]) -> Callable[P, T]:
    """Converts a function to its final form: `finalise_jaxpr` as a transformation of functions.

    Args:
        fn: a function of any Python objects. Everything that is not an array is static.

    Returns:
        A function with the same results, without derivative rules, guards and the like. Pass it to a
        program exporter.

    Raises:
        TypeError: if `fn` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import finalise_fn
        >>> jax.make_jaxpr(finalise_fn(lambda x: jnp.sin(jax.lax.stop_gradient(x))))(1.0)
        { lambda ; a:f32[]. let b:f32[] = sin a in (b,) }
    """
    check_callable(fn, "finalise_fn")
    return module_update_wrapper(_Final(fn))
