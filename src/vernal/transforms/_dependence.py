"""Which results of an operation depend on which arguments, in their values or in their derivatives.

A function with a rule of its own may have a derivative by an argument that its value ignores: zeros, for example, that
add to a gradient. Its result is independent of an argument only if neither its value nor its rule uses it.
"""

from collections.abc import Sequence
from typing import Any

import jax

from .._ground import Zero, dce_jaxpr, partial_eval_jaxpr_nounits


def depending(
    rules: Any, program: Any, avals: Sequence[Any], unknown: Sequence[bool]
) -> list[bool]:
    """Which results depend on unknown arguments.

    Args:
        rules: the rules of the operation.
        program: the program of what it computes.
        avals: the types of its arguments.
        unknown: marks the arguments that are unknown.
    """
    depends = list(partial_eval_jaxpr_nounits(program, unknown, instantiate=False)[2])
    if rules.traits.has_own_rule and not all(depends):
        by_rule = _by_rule(rules, avals, unknown)
        return [either or other for either, other in zip(depends, by_rule, strict=True)]
    return depends


def _by_rule(rules: Any, avals: Sequence[Any], unknown: Sequence[bool]) -> list[bool]:
    """Which results have a derivative, by any argument, that uses an unknown argument or its tangent."""
    dot_avals = [aval.to_tangent_aval() for aval in avals]
    moves = [aval.dtype != jax.dtypes.float0 for aval in dot_avals]
    is_zero: list[bool] = []

    def dots_of(primals: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        rest = iter(given)
        dots = [next(rest) if m else Zero(t) for t, m in zip(dot_avals, moves, strict=True)]
        out_dots = rules.jvp(primals, dots)[1]
        is_zero[:] = [isinstance(dot, Zero) for dot in out_dots]
        return [dot for dot in out_dots if not isinstance(dot, Zero)]

    moving = [t for t, m in zip(dot_avals, moves, strict=True) if m]
    try:
        program = jax.make_jaxpr(dots_of)(avals, moving).jaxpr
    except Exception:
        # The user's rule may refuse, which is an error where its derivative is used, and not here.
        return [True] * len(rules.abstract(*avals)[0])
    late = [*unknown, *(u for u, m in zip(unknown, moves, strict=True) if m)]

    def uses_late(index: int) -> bool:
        wanted = [i == index for i in range(len(program.outvars))]
        return any(u and used for u, used in zip(late, dce_jaxpr(program, wanted)[1], strict=True))

    results = iter(range(len(program.outvars)))
    return [not zero and uses_late(next(results)) for zero in is_zero]
