"""Loops under `jax.shard_map` with an operator that differs between devices.

A loop must keep the type of its carry, and the type tells over which axes of the mesh an array varies. Start vectors
and zeros are the same on all devices; after a product with such an operator they vary.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..show import listed, message, short
from ..transforms import varying_axes, varying_over
from ..trees import is_array

_T = TypeVar("_T")


def fori_loop(lower: Any, upper: Any, step: Callable[[Any, _T], _T], carry: _T) -> _T:
    """`jax.lax.fori_loop`, with a carry that varies from the start over all axes over which it will."""

    def first(carry: _T) -> _T:
        return step(jnp.asarray(lower), carry)

    return lax.fori_loop(lower, upper, step, settled(first, carry))


def settled(step: Callable[[_T], _T], carry: _T) -> _T:
    """The carry of a loop, made to vary over the axes that the result of its step varies over."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry
    leaves, structure = jax.tree.flatten(carry)

    def flat(leaves: list[Any]) -> list[Any]:
        return jax.tree.leaves(step(jax.tree.unflatten(structure, leaves)))

    while True:
        wanted = [*map(varying_axes, jax.make_jaxpr(flat)(leaves).out_avals)]
        if all(axes <= varying_axes(x) for x, axes in zip(leaves, wanted, strict=True)):
            return jax.tree.unflatten(structure, leaves)
        leaves = [*map(varying_over, leaves, wanted)]


def varying_like_result(fn: Callable[[_T], Any], x: _T) -> _T:
    """A tree of arrays, made to vary over all axes over which any array of `fn(x)` varies.

    Transposing a linear function that differs between devices sums over those that share its argument.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return x
    axes = varying_axes(*jax.make_jaxpr(fn)(x).out_avals)
    return jax.tree.map(lambda leaf: varying_over(leaf, axes), x)


def varying_like(x: Array, like: Any) -> Array:
    """An array, made to vary over all axes over which any array of a tree varies."""
    arrays = [leaf for leaf in jax.tree.leaves(like) if is_array(leaf)]
    return varying_over(x, varying_axes(*arrays))


def refuse_shared(tree: Any, axes: frozenset[Any], where: str) -> None:
    """Refuses equations that vary over axes of the mesh if they hold an array that does not: JAX's solvers would fail.

    Args:
        tree: what the equations are made of.
        axes: the axes.
        where: for the message.
    """
    for array in filter(is_array, jax.tree.leaves(tree)):
        if axes - varying_axes(array):
            names = listed(sorted(map(repr, axes)))
            raise NotImplementedError(
                message(
                    "JAX's solvers cannot share an array between the devices of `shard_map` whose equations differ",
                    where=where,
                    expected=f"arrays that vary over {names}",
                    got=f"an array that the devices share: {short(array)}",
                    instead="`jax.lax.pcast(array, axes, to='varying')`, where the operator or preconditioner is made",
                )
            )
