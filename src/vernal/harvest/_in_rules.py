"""Slots inside of functions with derivative rules of their own (`jax.custom_jvp`, `jax.custom_vjp`).

The function gets the values of the slots as further arguments and results, and so does its rule: differentiated, such
a function is not run, its rule is, and what that sows is what counts. The rule is had, without opening
JAX's operation, by differentiating the operation as it is and tracing that.

A rule that runs the function again on the way back would sow twice. It is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ..transforms import call_with_jvp
from ._slots import Evaluate, Slots, Views, touches, unknown


def _bound(eqn: Any) -> Callable[..., list[Any]]:
    """The operation as it is, as a function of its arguments."""
    return lambda *args: eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _spread(floats: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Tangents for all arrays, given those of the inexact ones."""
    rest = iter(floats)
    return [next(rest) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in like]


def _floats(dots: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The tangents of the inexact arrays."""
    return [dot for dot, x in zip(dots, like, strict=True) if _is_float(x)]


def _inside(
    evaluate: Evaluate, closed: Any, args: Sequence[Any], views: Views, slots: Slots, values: Any
) -> tuple[list[Any], list[Any]]:
    """Evaluates a program with its own values of the slots. Returns the new ones and the results."""
    used = slots.used(views)
    inner = slots.inside(used, values)
    out, _ = evaluate(closed.jaxpr, closed.consts, args, views, inner)
    return inner.of(used), out


def custom_jvp(
    evaluate: Evaluate, eqn: Any, args: list[Any], views: Views, slots: Slots
) -> list[Any]:
    """Evaluates a function with a rule for forward mode. `views` says which parts of slots the arguments are, whose
    values are replaced by the new ones; `evaluate` is for the programs inside."""
    used = slots.used(views)

    program = eqn.params.get("call_jaxpr") or eqn.params["program"]

    def call(values: list[Any], args: list[Any]) -> Any:
        return _inside(evaluate, program, args, views, slots, values)

    def rule(primals: Any, tangents: Any) -> Any:
        (values, args), (_, dots) = primals, tangents
        floats = [
            jnp.zeros_like(x) if isinstance(dot, SymbolicZero) else dot
            for x, dot in zip(args, dots, strict=True)
            if _is_float(x)
        ]

        def derivative(args: list[Any], floats: list[Any]) -> Any:
            out, dots = jax.jvp(_bound(eqn), args, _spread(floats, args))
            return out, _floats(dots, out)

        closed = jax.make_jaxpr(derivative)(args, floats)
        of_args: Views = [*views, *[None] * len(floats)]
        new, both = _inside(evaluate, closed, [*args, *floats], of_args, slots, values)
        n = len(eqn.outvars)
        zeros = [*map(SymbolicZero.from_primal_value, new)]
        return (new, both[:n]), (zeros, _spread(both[n:], both[:n]))

    values, out = call_with_jvp(call, rule, slots.of(used), args)
    slots.set(used, values)
    return out


def custom_vjp(
    evaluate: Evaluate, eqn: Any, args: list[Any], views: Views, slots: Slots
) -> list[Any]:
    """Likewise, for a function with a rule for reverse mode."""
    used = slots.used(views)

    @jax.custom_vjp
    def call(values: list[Any], args: list[Any]) -> Any:
        return _inside(evaluate, eqn.params["call_jaxpr"], args, views, slots, values)

    def forward(values: list[Any], args: list[Any]) -> Any:
        closed, (_, pull) = jax.make_jaxpr(
            lambda *args: jax.vjp(_bound(eqn), *args), return_shape=True
        )(*args)
        new, both = _inside(evaluate, closed, args, views, slots, values)
        n = len(eqn.outvars)
        return (new, both[:n]), jax.tree.unflatten(jax.tree.structure(pull), both[n:])

    def backward(pull: Any, cotangents: Any) -> Any:
        _, dots = cotangents
        types = [v.aval for v in eqn.outvars]
        back = jax.make_jaxpr(lambda floats: pull(_spread(floats, types)))(_floats(dots, types))
        if touches(back.jaxpr):
            raise unknown(
                "a function whose derivative rule runs it again on the way back",
                "the layer outside of it; for a loop, `kind='bounded'` or `jax.lax.scan`",
            )
        return None, list(pull(dots))

    call.defvjp(forward, backward)
    values, out = call(slots.of(used), args)
    slots.set(used, values)
    return out
