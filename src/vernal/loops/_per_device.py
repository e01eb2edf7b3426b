"""Loops and branches in which the devices of `jax.shard_map` go different ways, each independently.

The difficulty: the gradient of an array that is the same on all devices is a sum over all of them, and JAX puts that
sum where the array is first combined with one that differs. In a loop that one device has left already, or in a branch
that it does not take, the others would wait for it for ever. So the array is declared to vary before the loop, which
moves the sum behind the loop; and a collective in the user's function is refused.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from .._ground import equations_in, pvary_p
from ..primitives import linear_call
from ..show import is_traced, listed, value_error
from ..transforms import call_with_jvp, captured, program_of, varying_axes, varying_over
from ..trees import is_array


def vary_inside(tree: Any, axes: frozenset[Any]) -> Any:
    """Makes the arrays of callables vary over axes of `shard_map`, arrays that functions close over included.

    Args:
        tree: any tree of callables and arrays.
        axes: the axes.

    Returns:
        The tree; itself if there is nothing to change.
    """

    def is_alike(x: Any) -> bool:
        return is_traced(x) and is_array(x) and bool(axes - varying_axes(x))

    alike, rebuild = captured(tree, is_alike)
    return rebuild([varying_over(x, axes) for x in alike])


def without_gradient(x: Any, axes: frozenset[Any], where: str) -> Any:
    """Refuses the gradient of an array that a step or a branch depends on, and that `vary_inside` has not found.

    Args:
        x: the array.
        axes: the axes over which the devices go different ways.
        where: what depends on it, for the message.
    """
    if not is_traced(x) or not axes - varying_axes(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x

    def refuse(residuals: Any, cotangent: Any) -> Any:
        raise value_error(
            "an array that is the same on all devices has no gradient here",
            where=where,
            expected=f"an array that varies over {_names(axes)}, like the condition or the branch index",
            got=jax.typeof(x).str_short(),
            instead="pass it in the carry of the loop, or as an operand of the branch; or apply "
            "jax.lax.pcast(x, axes, to='varying') outside",
        )

    def rule(primals: Any, tangents: Any) -> Any:
        return same(*primals), linear_call(lambda _, dot: dot, refuse, (), tangents[0])

    def same(x: Any) -> Any:
        return call_with_jvp(lambda x: x, rule, x)

    return same(x)


def refuse_collectives(jaxpr: Any, axes: frozenset[Any], where: str) -> None:
    """Refuses a program with a collective in which devices may wait for others for ever.

    Args:
        jaxpr: the program.
        axes: the axes over which the devices go different ways.
        where: what was traced, for the message.
    """
    for name, over in _collectives(jaxpr):
        if axes & over:
            raise value_error(
                "a collective would wait for devices that take another branch or number of steps",
                where=where,
                expected="no collective over an axis along which the condition or the branch index varies",
                got=f"`{name}` over {_names(over)}, and a condition or branch index that varies over {_names(axes)}",
                instead="make the condition the same on all devices, `jax.lax.pmax(pred.astype(int), axis) > 0`; or "
                "move the collective outside",
            )


def _names(axes: frozenset[Any]) -> str:
    return listed(sorted(map(repr, axes)))


def _collectives(jaxpr: Any) -> Iterator[tuple[str, frozenset[Any]]]:
    """The operations of a program that name axes, and the axes."""
    for eqn in equations_in(jaxpr):
        if eqn.primitive in _LOCAL:
            continue
        for key in ("axes", "axis_name"):
            over = eqn.params.get(key, ())
            over = over if isinstance(over, tuple) else (over,)
            # An axis given by position is one of the array, not of the mesh.
            yield eqn.primitive.name, frozenset(a for a in over if isinstance(a, str))
        hidden = program_of(eqn)
        if hidden is not None:
            yield from _collectives(hidden)


_LOCAL = {jax.lax.axis_index_p, pvary_p}
