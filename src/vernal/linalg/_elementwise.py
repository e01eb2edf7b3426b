"""Functions that act element by element, and their derivatives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..modules import Module
from ._lanczos_adjoint import Moving, moving

# A function of numbers, element by element.
Elementwise = Callable[[Array], Array]


class Derivative(Module):
    """The derivative of a function that acts element by element.

    Args:
        f: the function.
    """

    f: Elementwise

    def __call__(self, x: Array) -> Array:
        return jax.jvp(self.f, (x,), (jnp.ones_like(x),))[1]


class _Along(Module):
    """The derivative of a function by what it closes over, along a tangent."""

    parts: Moving
    dots: Any

    def __call__(self, x: Array) -> Array:
        def value(arrays: Any) -> Array:
            return self.parts.whole(arrays)(x)

        return jax.jvp(value, (self.parts.arrays,), (self.dots,))[1]


def along(f: Elementwise, f_dot: Any) -> Elementwise | None:
    """The function that a function changes by, if what it closes over changes by `f_dot`; None if nothing does.

    Traces and products are linear in the function. So their derivatives by what it closes over are the same traces and
    products of this one, with the same derivatives by the operator.

    Args:
        f: the function, a module.
        f_dot: a tree like it, as a rule for derivatives receives it.
    """
    parts, dots = moving(f, f_dot)
    return _Along(parts, dots) if jax.tree.leaves(dots) else None


def source(g: Elementwise) -> Elementwise:
    """The function that g is a derivative of, by what that closes over; or g itself.

    A transpose does not know tangents. So what decides how to compute g may only depend on this function.
    """
    if isinstance(g, _Along):
        return source(g.parts.whole(g.parts.arrays))
    if isinstance(g, Derivative):
        inner = source(g.f)
        return g if inner is g.f else Derivative(inner)
    return g


def scale_of(g: Elementwise, nodes: Array) -> Array:
    """How far nodes, of shape `(..., m)`, must move for the slope of g to change by its own size; zero if it never
    does."""
    first = Derivative(source(g))
    second = Derivative(first)
    slope, curvature, change = (_largest(f(nodes)) for f in (first, second, Derivative(second)))
    # Where a curvature is so small that it is rounded to zero, nothing is known.
    unknown = jnp.where(change > 0, jnp.inf, 0)
    return jnp.where(curvature > 0, slope / jnp.where(curvature > 0, curvature, 1), unknown)


def _largest(values: Array) -> Array:
    """The largest modulus that is finite."""
    sizes = jnp.abs(values)
    return jnp.max(jnp.where(jnp.isfinite(sizes), sizes, 0), axis=-1, initial=0)
