"""Replaces functions with a rule of `jax.custom_jvp` by Vernal's operations, in a traced program.

JAX 0.10 loses these rules where a `lax.scan` around them is differentiated twice: the second derivative is then
silently that of what the function computes. Vernal's operations keep theirs (see `_custom_derivatives.py`). So a loop
writes them into its program in place of JAX's, at any depth: where they are called, and in what the rules of Vernal's
operations compute.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer, eval_jaxpr

from .._ground import ClosedJaxpr, Jaxpr, custom_jvp_call_p, equations_in
from ._custom_derivatives import SymbolicZero, WithJvp, chosen, replaced
from ._known_operations import rules_of
from ._operations import vprim_p

# JAX 0.12 keeps the rules.
_FORGETFUL = jax.__version_info__ < (0, 12)


def keep_rules(jaxpr: Any) -> Any:
    """A program in which no rule of a `jax.custom_jvp` is lost.

    Args:
        jaxpr: the program.

    Returns:
        A program with the same arguments and results; the same object if it has no such rule.
    """
    if not _FORGETFUL or not any(map(_has_rules, equations_in(jaxpr))):
        return jaxpr
    return jaxpr.replace(eqns=[_kept(eqn) for eqn in jaxpr.eqns])


def _has_rules(eqn: Any) -> bool:
    return eqn.primitive is custom_jvp_call_p or _rules_to_keep(eqn) is not None


def _rules_to_keep(eqn: Any) -> Any:
    """The rules of one of Vernal's operations, or None. Steps that the derivative of a loop repeats hold theirs
    already."""
    rules = rules_of(eqn)
    return None if rules is None or rules.traits.replays else rules


def _kept(eqn: Any) -> Any:
    rules = _rules_to_keep(eqn)
    if isinstance(rules, _Kept):
        return eqn
    if rules is not None:
        # An operation with a hidden program, such as a linear solve, keeps it hidden: it stays one operation.
        program = eqn.params["program"] if eqn.primitive is vprim_p else None
        return eqn.replace(
            primitive=vprim_p, params={"rules": _Kept(rules, program), "program": program}
        )
    if eqn.primitive is not custom_jvp_call_p:
        return eqn.replace(params={name: _parameter(x) for name, x in eqn.params.items()})
    program = _parameter(eqn.params["call_jaxpr"])

    def run(*args: Any) -> Any:
        return eval_jaxpr(program.jaxpr, program.consts, *args)

    run.__name__ = program.jaxpr.debug_info.func_name
    rules = WithJvp(run, _rule_of(eqn), jtu.tree_structure(tuple(eqn.invars)))
    return eqn.replace(primitive=vprim_p, params={"rules": rules, "program": program})


class _Kept:
    """The rules of one of Vernal's operations, with every rule kept in its derivative and transpose.

    Args:
        rules: the rules of the operation.
        program: the program of what it computes; None if the outer program does not hold it.
    """

    def __init__(self, rules: Any, program: Any):
        self.name = rules.name
        self.traits = dataclasses.replace(rules.traits, is_written=program is not None)
        self.compute = rules.compute
        self.abstract = rules.abstract
        self._rules = rules

    def __repr__(self) -> str:
        return self.name

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return _with_rules_kept(self._rules.jvp, tuple(primals), tuple(tangents))

    def transpose(self, cotangents: Any, *args: Any) -> Any:
        return _with_rules_kept(self._rules.transpose, tuple(cotangents), *args)


def _with_rules_kept(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a rule with every rule inside it kept. Its arguments are arrays, or what JAX puts in their place."""
    arrays, structure = jtu.tree_flatten(args)
    program, out = jax.make_jaxpr(lambda *new: fn(*structure.unflatten(new)), return_shape=True)(
        *arrays
    )
    flat = eval_jaxpr(keep_rules(program.jaxpr), program.consts, *arrays)
    return jtu.tree_unflatten(jtu.tree_structure(out), flat)


def _parameter(value: Any) -> Any:
    """A parameter of an operation, with the rules kept in programs inside it."""
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=keep_rules(value.jaxpr))
    if isinstance(value, Jaxpr):
        return keep_rules(value)
    if isinstance(value, tuple):
        parts = map(_parameter, value)
        # `jax.lax.custom_linear_solve` has a named tuple of programs.
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _rule_of(eqn: Any) -> Callable[..., Any]:
    """The rule of JAX's operation, obtained by differentiating the operation rather than opening it. Traced once for
    each choice of differentiated arguments."""
    primitive, params = eqn.primitive, eqn.params
    traced: dict[Any, Any] = {}

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moved = [not isinstance(dot, SymbolicZero) for dot in tangents]

        def derivative(primals: Sequence[Any], dots: Sequence[Any]) -> Any:
            def call(*new: Any) -> Any:
                args = replaced(primals, moved, new)
                return primitive.bind(*args, **primitive.get_bind_params(params))

            return jax.jvp(call, chosen(primals, moved), dots)

        given = primals, chosen(tangents, moved)
        key = *moved, *map(jax.typeof, jtu.tree_leaves(given))
        program, out = traced.get(key, (None, None))
        if program is None:
            program, out = jax.make_jaxpr(derivative, return_shape=True)(*given)
            program = program.replace(jaxpr=keep_rules(program.jaxpr))
            if not any(isinstance(x, Tracer) for x in program.consts):
                traced[key] = program, out
        flat = eval_jaxpr(program.jaxpr, program.consts, *jtu.tree_leaves(given))
        return jtu.tree_unflatten(jtu.tree_structure(out), flat)

    return rule
