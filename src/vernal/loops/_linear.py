"""Transposing a loop whose steps are linear.

`jax.linear_transpose` transposes a program operation by operation, and the loops that have a reverse mode are made of
operations that have no transpose as they stand. But a linear function is its own derivative, so its transpose is its
pullback, at zero as anywhere else. A loop is linear in some of its inputs if its step is, and if nothing else in the
carry, nor the condition, depends on these. The traced step tells: JAX must be able to transpose it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._ground import (
    Primitive,
    fancy_primitive_batchers,
    has_transpose,
    jax_primitives,
    jaxprs_in_params,
    lower_fun,
    primitive_jvps,
    primitive_transposes,
    register_lowering,
)
from ..show import value_error
from ..transforms import call_with_jvp, chosen
from ._machines import Inputs, Outputs, at
from ._spread import spread_of

Cond = Callable[..., Any] | None
Step = Callable[..., Any]


def with_transpose(
    cond: Cond, step: Step, traced: Any, run: Callable[[Inputs], Outputs], z: Inputs
) -> Outputs:
    """Runs a loop that JAX can differentiate, but not transpose.

    Args:
        cond: its condition.
        step: its step.
        traced: the user's step, as a jaxpr.
        run: runs it.
        z: its inputs.
    """
    if not _may_be_linear(traced):
        out = run(z)
        return out.like(_not_linear_p.bind(*out.flat))

    def rule(primals: Any, tangents: Any) -> Any:
        dots = tangents[0].flat
        marks = [not isinstance(dot, jax.custom_derivatives.SymbolicZero) for dot in dots]

        def of_chosen(*new: Any) -> Outputs:
            return run(primals[0].put(primals[0].like(marks), new))

        return jax.jvp(of_chosen, tuple(chosen(primals[0].flat, marks)), tuple(chosen(dots, marks)))

    return call_with_jvp(run, rule, z, is_linear=linear_in(cond, step))


def linear_in(cond: Cond, step: Step) -> Callable[[Inputs, Inputs], bool]:
    """For `call_with_jvp`: whether the loop is linear in those of its inputs that are marked."""

    def is_linear(z: Inputs, seeds: Inputs) -> bool:
        spread = spread_of(step, z, seeds)
        which, linear = spread.which, spread.out.flat
        point = z._replace(xs=at(z.xs, 0))

        def outputs(*new: Any) -> list[Any]:
            consts, carry, buffers, x = point.put(which, new)
            return Outputs(*step(consts, carry, buffers, jnp.int32(0), x, False)).flat

        def of_step(*new: Any) -> list[Any]:
            return chosen(outputs(*new), linear)

        def rest(*new: Any) -> list[Any]:
            others = chosen(outputs(*new), [not mark for mark in linear])
            if cond is None:
                return others
            consts, carry, buffers, _ = point.put(which, new)
            return [*others, cond(consts, carry, buffers)]

        given = [jax.typeof(x) for x in chosen(point.flat, which.flat)]
        if _depends(jax.make_jaxpr(rest)(*given).jaxpr):
            return False
        results = jax.eval_shape(of_step, *given)
        try:
            jax.eval_shape(lambda *cts: jax.linear_transpose(of_step, *given)(list(cts)), *results)
        except Exception:
            # Whatever JAX says of an operation that it cannot transpose.
            return False
        return True

    return is_linear


def _refuse(cotangents: Any, *args: Any) -> Any:
    raise value_error(
        "this loop cannot be transposed",
        where="jax.linear_transpose of a loop of kind 'bounded'",
        expected="steps that are linear, made of operations that JAX can transpose",
        got="a step with an operation that has no transpose",
        instead="`jax.vjp`, which takes the derivative first",
    )


# The identity, with the derivative of the identity, on the results of what cannot be transposed.
_not_linear_p = Primitive("not_linear")
_not_linear_p.multiple_results = True
_not_linear_p.def_impl(lambda *args: list(args))
_not_linear_p.def_abstract_eval(lambda *args: list(args))
register_lowering(_not_linear_p, lower_fun(lambda *args: list(args), multiple_results=True))
fancy_primitive_batchers[_not_linear_p] = lambda axis, args, dims: (
    _not_linear_p.bind(*args),
    list(dims),
)
primitive_jvps[_not_linear_p] = lambda primals, tangents: (
    _not_linear_p.bind(*primals),
    list(tangents),
)
primitive_transposes[_not_linear_p] = _refuse


def _may_be_linear(jaxpr: Any) -> bool:
    """Whether each operation of a program that computes with floating-point numbers has a transpose."""
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        if inner and not all(map(_may_be_linear, inner)):
            return False
        floats = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.invars)
        if not inner and floats and not has_transpose(eqn.primitive):
            return False
    return True


def _depends(jaxpr: Any) -> bool:
    """Whether the results of a program depend on its arguments."""
    return any(_used(jaxpr, [True] * len(jaxpr.outvars)))


def _used(jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
    """Which arguments of a program some of its results depend on. All results of an operation depend on all its
    arguments, but of a `jit`."""
    needed = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and _is_variable(v)}
    for eqn in reversed(jaxpr.eqns):
        of_out = [v in needed for v in eqn.outvars]
        if not any(of_out):
            continue
        if eqn.primitive is jax_primitives.jit_p:
            of_in = _used(eqn.params["jaxpr"].jaxpr, of_out)
        else:
            of_in = [True] * len(eqn.invars)
        needed |= {v for v, use in zip(eqn.invars, of_in, strict=True) if use and _is_variable(v)}
    return [v in needed for v in jaxpr.invars]


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")
