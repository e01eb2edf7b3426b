"""Slots and checks inside functions with derivative rules (`jax.custom_jvp`, `jax.custom_vjp`, `linear_call`).

The function takes and returns the values of the slots as further arguments and results, and so does its rule: under
differentiation JAX runs the rule instead of the function, so what the rule sows counts. The rule is obtained without
opening JAX's operation, by tracing the derivative of the operation.

A rule that runs the function again in the backward pass would sow twice, and is refused. Checks are allowed there: the
derivative of a loop runs its steps again, and only the checks of active elements count.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from .._ground import UndefinedPrimal, Zero
from ..primitives import local_linear_call
from ..transforms import (
    call_with_jvp,
    chosen,
    is_zero,
    linear_by_transpose,
    replaced,
    traits_of,
)
from ._slots import Evaluate, Slots, Views, touches, unknown
from ._sow import reaping


def _bound(eqn: Any) -> Callable[..., list[Any]]:
    """The unchanged operation as a function of its arguments."""
    return lambda *args: eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))


def _traced(fn: Callable[..., Any], *, return_shape: bool = False) -> Callable[..., Any]:
    """`jax.make_jaxpr` inside a rule, whose caller evaluates the program and keeps what it sows."""

    def trace(*args: Any) -> Any:
        with reaping():
            return jax.make_jaxpr(fn, return_shape=return_shape)(*args)

    return trace


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _spread(floats: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """Tangents for all arrays, from those of the inexact ones."""
    rest = iter(floats)
    return [next(rest) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0) for x in like]


def _floats(dots: Sequence[Any], like: Sequence[Any]) -> list[Any]:
    """The tangents of the inexact arrays."""
    return [dot for dot, x in zip(dots, like, strict=True) if _is_float(x)]


def _inside(
    evaluate: Evaluate, closed: Any, args: Sequence[Any], views: Views, slots: Slots, values: Any
) -> tuple[list[Any], list[Any]]:
    """Evaluates a program with its own values of the slots. Returns the new values and the results."""
    used = slots.used(views)
    inner = slots.inside(used, values)
    out, _ = evaluate(closed.jaxpr, closed.consts, args, views, inner)
    return inner.of(used), out


def custom_jvp(
    evaluate: Evaluate, eqn: Any, args: list[Any], views: Views, slots: Slots
) -> list[Any]:
    """Evaluates a function with a rule for forward mode, and updates the values of `slots`. `views` are those of the
    arguments; `evaluate` evaluates the programs inside."""
    used, empty = slots.used(views), slots.without_values()

    program = eqn.params.get("call_jaxpr") or eqn.params["program"]
    traits = traits_of(eqn)
    if traits.replays and touches(program.jaxpr):
        raise in_derivative()

    def call(values: list[Any], args: list[Any]) -> Any:
        return _inside(evaluate, program, args, views, empty, values)

    def rule(primals: Any, tangents: Any) -> Any:
        (values, args), (_, dots) = primals, tangents
        # Only arguments that are differentiated: the rule of the function may refuse others.
        moved = [
            _is_float(x) and not isinstance(dot, SymbolicZero)
            for x, dot in zip(args, dots, strict=True)
        ]
        floats = chosen(dots, moved)

        def derivative(args: list[Any], floats: list[Any]) -> Any:
            def call(*new: Any) -> list[Any]:
                return _bound(eqn)(*replaced(args, moved, new))

            out, dots = jax.jvp(call, chosen(args, moved), floats)
            return out, _floats(dots, out)

        closed = _traced(derivative)(args, floats)
        of_args: Views = [*views, *[None] * len(floats)]
        new, both = _inside(evaluate, closed, [*args, *floats], of_args, empty, values)
        n = len(eqn.outvars)
        zeros = [*map(SymbolicZero.from_primal_value, new)]
        return (new, both[:n]), (zeros, _spread(both[n:], both[:n]))

    values, out = call_with_jvp(
        call,
        rule,
        slots.of(used),
        args,
        one_way=traits.one_way,
        may_check=traits.may_check,
        has_own_rule=True,
    )
    slots.update(used, values)
    return out


def custom_vjp(
    evaluate: Evaluate, eqn: Any, args: list[Any], views: Views, slots: Slots
) -> list[Any]:
    """Like `custom_jvp`, for a function with a rule for reverse mode."""
    used, empty = slots.used(views), slots.without_values()

    @jax.custom_vjp
    def call(values: list[Any], args: list[Any]) -> Any:
        return _inside(evaluate, eqn.params["call_jaxpr"], args, views, empty, values)

    def forward(values: list[Any], args: list[Any]) -> Any:
        closed, (_, pull) = _traced(lambda *args: jax.vjp(_bound(eqn), *args), return_shape=True)(
            *args
        )
        new, both = _inside(evaluate, closed, args, views, empty, values)
        n = len(eqn.outvars)
        told = [values[used.index(i)] for i in empty.told]
        return (new, both[:n]), (told, jax.tree.unflatten(jax.tree.structure(pull), both[n:]))

    def backward(residuals: Any, cotangents: Any) -> Any:
        (told, pull), (_, dots) = residuals, cotangents
        of_args, of_out = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        floats = _floats(dots, of_out)
        back = _traced(lambda floats: _floats(pull(_spread(floats, of_out)), of_args))(floats)
        if touches(back.jaxpr):
            raise unknown(
                "a function whose derivative rule recomputes it in the backward pass",
                "call the layer outside of it; for a loop, use `kind='bounded'` or `jax.lax.scan`",
            )
        inner = empty.inside(empty.told, told)
        out, _ = evaluate(back.jaxpr, back.consts, floats, [None] * len(floats), inner)
        return None, _spread(out, of_args)

    call.defvjp(forward, backward)
    values, out = call(slots.of(used), args)
    slots.update(used, values)
    return out


def by_transpose(evaluate: Evaluate, eqn: Any, args: list[Any], slots: Slots) -> list[Any]:
    """Like `custom_jvp`, for what remains of a rule for reverse mode: a linear function that is only transposed."""
    rules, empty = eqn.params["rules"], slots.without_values()
    name, n = rules.traits.transposed
    unknowns = [UndefinedPrimal(jax.typeof(x)) for x in args[n:]]

    def back(residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        values, rest = residuals[: len(empty.told)], residuals[len(empty.told) :]
        known = [not isinstance(ct, Zero) for ct in cotangents]
        alive: list[bool] = []

        def transposed(rest: Any, given: Any) -> list[Any]:
            found = rules.transpose(replaced(cotangents, known, given), *rest, *unknowns)[n:]
            alive[:] = [ct is not None and not isinstance(ct, Zero) for ct in found]
            return chosen(found, alive)

        given = chosen(cotangents, known)
        closed = _traced(transposed)(rest, given)
        flat, inner = [*rest, *given], empty.inside(empty.told, values)
        out, _ = evaluate(closed.jaxpr, closed.consts, flat, [None] * len(flat), inner)
        return replaced([None] * len(alive), alive, out)

    residuals = [*slots.of(slots.told), *args[:n]]
    return linear_by_transpose(name, back, residuals, args[n:], [v.aval for v in eqn.outvars])


def in_derivative() -> NotImplementedError:
    return unknown(
        "the derivative of a checkpointed loop, which recomputes its steps",
        "a loop with kind='bounded', or a scan with kind='lax'; if the state is the random keys of "
        "nn.apply(model, x, key=key), nn.keys(model, key)(x), which gives each layer one key for all steps",
    )


def linear(evaluate: Evaluate, eqn: Any, args: list[Any], views: Views, slots: Slots) -> list[Any]:
    """Like `custom_jvp`, for a linear function with its own transpose, which holds checks but no slots."""
    del views
    if not slots.told or touches(eqn.params["forward"].jaxpr):
        raise in_derivative()
    transpose, empty = eqn.params["transposed"], slots.without_values()
    n = transpose.num_residuals
    types = [jax.typeof(x) for x in args[n:]]

    def masked(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(residuals: Any, *given: Any) -> Any:
            told, rest = residuals
            closed, out = _traced(fn, return_shape=True)(rest, *given)
            flat = [*rest, *given]
            inner = empty.inside(empty.told, told)
            results, _ = evaluate(closed.jaxpr, closed.consts, flat, [None] * len(flat), inner)
            return jax.tree.unflatten(jax.tree.structure(out), results)

        return run

    def forward(residuals: Any, dots: list[Any]) -> list[Any]:
        program = eqn.params["forward"]
        return masked(lambda rest, *dots: eval_jaxpr(program.jaxpr, program.consts, *rest, *dots))(
            residuals, *dots
        )

    def transposed(residuals: Any, cotangents: list[Any]) -> list[Any]:
        known = [None if is_zero(ct) else ct for ct in cotangents]

        def back(rest: Any, *given: Any) -> Any:
            cts = iter(given)
            full = [
                Zero(v.aval.to_ct_aval()) if ct is None else next(cts)
                for ct, v in zip(known, eqn.outvars, strict=True)
            ]
            return transpose(rest, full, [t.to_ct_aval() for t in types])

        return masked(back)(residuals, *[ct for ct in known if ct is not None])

    residuals = slots.of(slots.told), args[:n]
    return local_linear_call(forward, transposed, residuals, args[n:])
