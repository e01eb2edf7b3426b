"""Transposing a loop whose steps are linear.

`jax.linear_transpose` transposes a program operation by operation, but the loops that have a reverse mode are made of
operations without a transpose. A linear function is its own derivative, so its transpose is its pullback, at zero as
anywhere else. A loop is linear in some of its inputs if its step is, and if neither the rest of the carry nor the
condition depends on these. The test is whether JAX can transpose the traced step.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._ground import jit_p
from ..show import message
from ..transforms import call_with_jvp, chosen
from ._machines import Inputs, Outputs, at
from ._spread import spread_of

CALLBACK = "calls `io_callback`, which may return something different the next time"

Cond = Callable[..., Any] | None
Step = Callable[..., Any]


def with_transpose(
    cond: Cond, step: Step, loop: Callable[[Inputs], Outputs], z: Inputs, *, once_only: bool
) -> Outputs:
    """Runs a bounded loop, which JAX can differentiate, but not transpose.

    Args:
        cond: the condition of the loop, or None.
        step: its step.
        loop: runs the loop.
        z: its inputs.
        once_only: whether a step has effects and must not be computed again.
    """

    def rule(primals: Any, tangents: Any) -> Any:
        if once_only:
            raise computed_again("bounded", CALLBACK)
        dots = tangents[0].flat
        marks = [not isinstance(dot, jax.custom_derivatives.SymbolicZero) for dot in dots]

        def of_chosen(*new: Any) -> Outputs:
            return loop(primals[0].put(primals[0].like(marks), new))

        return jax.jvp(of_chosen, tuple(chosen(primals[0].flat, marks)), tuple(chosen(dots, marks)))

    return call_with_jvp(loop, rule, z, is_linear=linear_in(cond, step))


def computed_again(kind: str, what: str) -> NotImplementedError:
    """The error for a loop with effects whose derivative would have them once more.

    Args:
        kind: of loop.
        what: a step does.
    """
    # The class of JAX's own refusal, of `jax.checkpoint`.
    return NotImplementedError(
        message(
            "a loop whose steps have effects cannot be differentiated",
            where=f'a loop of `kind="{kind}"`',
            expected="steps without side effects, because the derivative recomputes them",
            got=f"a step that {what}",
            instead="call it before the loop, and scan over the results; carry a value instead of a `Ref`; use "
            '`pure_callback` if the function has no side effects; or use `kind="lax"`, which recomputes no step',
        )
    )


def linear_in(cond: Cond, step: Step) -> Callable[[Inputs, Inputs], bool]:
    """For `call_with_jvp`: whether the loop is linear in the marked inputs."""

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
            return [*others, cond(consts, carry, buffers, jnp.int32(0))]

        given = [jax.typeof(x) for x in chosen(point.flat, which.flat)]
        if _depends(jax.make_jaxpr(rest)(*given).jaxpr):
            return False
        results = jax.eval_shape(of_step, *given)
        try:
            jax.eval_shape(lambda *cts: jax.linear_transpose(of_step, *given)(list(cts)), *results)
        except Exception:
            # JAX raises errors of several classes for an operation without a transpose.
            return False
        return True

    return is_linear


def _depends(jaxpr: Any) -> bool:
    """Whether the results of a program depend on its arguments."""
    return any(_used(jaxpr, [True] * len(jaxpr.outvars)))


def _used(jaxpr: Any, wanted: Sequence[bool]) -> list[bool]:
    """Which arguments of a program the wanted results depend on. All results of an operation other than `jit` are
    taken to depend on all its arguments."""
    needed = {v for v, want in zip(jaxpr.outvars, wanted, strict=True) if want and _is_variable(v)}
    for eqn in reversed(jaxpr.eqns):
        of_out = [v in needed for v in eqn.outvars]
        if not any(of_out):
            continue
        if eqn.primitive is jit_p:
            of_in = _used(eqn.params["jaxpr"].jaxpr, of_out)
        else:
            of_in = [True] * len(eqn.invars)
        needed |= {v for v, use in zip(eqn.invars, of_in, strict=True) if use and _is_variable(v)}
    return [v in needed for v in jaxpr.invars]


def _is_variable(atom: Any) -> bool:
    return not hasattr(atom, "val")
