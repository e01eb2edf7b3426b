"""Which results of a function have a derivative: JAX's symbolic zeros, through its public API.

A loop must know before it runs which parts of its carry are differentiated: the others need no cotangents, and their
operations need not even have a derivative. Inside `jax.jvp` a value without a derivative has a tangent that is known
to be zero. The rule of a `jax.custom_jvp` sees these zeros, so an identity function with such a rule reports them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ..transforms import chosen, replaced


def differentiable(x: Any) -> bool:
    """Whether a value has a tangent at all."""
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def perturbed_outputs(
    fn: Callable[..., list[Any]], args: Sequence[Any], which: Sequence[bool]
) -> list[bool]:
    """Which outputs of `fn(*args)` depend differentiably on the arguments marked in `which`.

    Only traces `fn`, which takes and returns arrays.
    """
    found: list[bool] = []

    @jax.custom_jvp
    def identity(outs: list[Any]) -> list[Any]:
        return outs

    def look(primals: Any, tangents: Any) -> Any:
        found[:] = [not isinstance(dot, SymbolicZero) for dot in tangents[0]]
        return primals[0], tangents[0]

    identity.defjvp(look, symbolic_zeros=True)

    def trace(*args: Any) -> list[Any]:
        def of_chosen(*new: Any) -> list[Any]:
            outs = fn(*replaced(args, which, new))
            found[:] = [False] * len(outs)
            return identity(outs)

        some = chosen(args, which)
        return jax.jvp(of_chosen, tuple(some), tuple(some))[0]

    outs = jax.eval_shape(trace, *args)
    return [yes and differentiable(out) for yes, out in zip(found, outs, strict=True)]
