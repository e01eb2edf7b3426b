"""Quadrature rules for the integral w^* f(A) w from the products that were made, and their errors.

All derivatives of a logarithm of even order are negative, and those of odd order positive. So the Gauss rule is never
below the integral, and the Gauss-Radau rule, which has one node at a lower bound of the eigenvalues, is never above
it. Half of their distance bounds the error of their midpoint, whatever the spectrum is. Roots and other powers,
inverses and exp(-x) are bounded in the same way, perhaps with the roles exchanged. For any other function the second
rule, which is exact for one degree more than the Gauss rule, gives an error estimate. So these two are used for every
operator with a known lower bound of its spectrum, if only that it is positive semidefinite.

For other operators the second rule is the generalised averaged rule. Its recurrence continues with its own elements in
reverse order; it has 2 m - 1 nodes, and is exact for at least one degree more than the Gauss rule. Once the rules
converge, their difference is the error of the Gauss rule.

All rules come from the same recurrence: T with other or more rows.

G. H. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", Princeton University Press (2010),
chapter 6. Z. Bai, M. Fahey, G. Golub, "Some large-scale matrix computation problems", Journal of Computational and
Applied Mathematics 74 (1996), doi:10.1016/0377-0427(96)00018-0. M. M. Spalevic, "On generalized averaged Gaussian
formulas", Mathematics of Computation 76 (2007), doi:10.1090/S0025-5718-07-01975-8. L. Reichel, M. M. Spalevic, T. Tang,
"Generalized averaged Gauss quadrature rules for the approximation of matrix functionals", BIT Numerical Mathematics 56
(2016), doi:10.1007/s10543-015-0592-7.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..linalg import (
    Decomposition,
    Elementwise,
    Hermitian,
    Operator,
    carried,
    decompose,
    power_below,
    stop_gradient,
)
from ..modules import Module

# How far rounding may move eigenvalues, in eps of the largest.
_ROUNDINGS = 4


def gauss(found: Decomposition) -> Array:
    """T, of shape `(b, m, m)`.

    Rows of steps that were not made hold the first diagonal element instead, which lies among the eigenvalues and has
    no weight.
    """
    there = found.active()
    diagonal = jnp.where(there, found.diagonal, found.diagonal[:, :1])
    return _dense(diagonal, jnp.where(there[:, 1:], found.offdiagonal, 0))


def averaged(found: Decomposition) -> Array:
    """T followed by its rows but the last in reverse, `(b, 2 m - 1, 2 m - 1)`, coupled by the last residual."""
    there = found.active()
    diagonal = jnp.where(there, found.diagonal, found.diagonal[:, :1])
    off = jnp.where(there[:, 1:], found.offdiagonal, 0)
    return _dense(
        jnp.concatenate([diagonal, diagonal[:, -2::-1]], axis=1),
        jnp.concatenate([off, found.residual[:, None], off[:, -2::-1]], axis=1),
    )


def eigen(matrices: Array) -> tuple[Array, Array]:
    """Eigenvalues and eigenvectors, without derivatives; scaled by a power of two, so that nothing under- or
    overflows."""
    largest = jnp.max(jnp.abs(matrices), axis=(-2, -1), keepdims=True)
    scale = power_below(largest)
    found = Hermitian.of(matrices / scale)
    return found.nodes * scale[..., 0], found.vectors


def lower_end(nodes: Array, least: Array, floor: float) -> Array:
    """A lower bound of the eigenvalues.

    Args:
        nodes: the Ritz values of each probe, `(b, m)`.
        least: the declared lower bound of the eigenvalues.
        floor: the least bound, relative to the largest eigenvalue.

    Returns:
        An array of shape `(b,)`. The declared bound is ignored where an eigenvalue contradicts it by more than
        rounding.
    """
    scale, lowest = jnp.max(jnp.abs(nodes), axis=-1), jnp.min(nodes, axis=-1)
    said = least - _ROUNDINGS * jnp.finfo(nodes.dtype).eps * scale
    end = jnp.where(said <= lowest, jnp.maximum(said, floor * scale), floor * scale)
    return jnp.maximum(jnp.minimum(end, lowest), jnp.finfo(nodes.dtype).tiny)


def radau(ends: Array, found: Decomposition) -> Array:
    """T with one more row, such that it has a given eigenvalue: of shape `(b, m + 1, m + 1)`.

    Args:
        ends: the eigenvalue for each probe, not above those of T: `(b,)`.
        found: the decomposition that gives T. Where the last residual is zero, the new row has no weight.
    """
    off = jnp.concatenate([found.offdiagonal, found.residual[:, None]], axis=1)
    scale = power_below(jnp.maximum(jnp.max(jnp.abs(found.diagonal), axis=1), jnp.max(off, axis=1)))
    at, unit = ends / scale, scale[:, None]
    squares = (off / unit).T ** 2
    # The pivots of T minus the eigenvalue: positive up to rounding.
    tiny = jnp.finfo(off.dtype).eps ** 2

    def eliminate(pivot: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        element, square = row
        return jnp.maximum(element - at - square / pivot, tiny), None

    elements = (found.diagonal / unit).T
    first = jnp.maximum(elements[0] - at, tiny)
    pivot, _ = lax.scan(eliminate, first, (elements[1:], squares[:-1]))
    last = (at + squares[-1] / pivot) * scale
    return _dense(jnp.concatenate([found.diagonal, last[:, None]], axis=1), off)


def _dense(diagonal: Array, off: Array) -> Array:
    """Symmetric tridiagonal matrices of shape `(..., m, m)`, from their diagonals and off-diagonals."""
    i = jnp.arange(diagonal.shape[-1])
    empty = jnp.zeros((*diagonal.shape, len(i)), diagonal.dtype)
    with_diagonal = empty.at[..., i, i].set(diagonal)
    return with_diagonal.at[..., i[:-1], i[1:]].set(off).at[..., i[1:], i[:-1]].set(off)


class Rule(Module):
    """A quadrature rule for each probe.

    Args:
        nodes: of shape `(b, q)`.
        weights: likewise.
    """

    nodes: Array
    weights: Array

    def __call__(self, f: Elementwise) -> Array:
        """The integrals of f, of shape `(b,)`."""
        return jnp.sum(self.weights * f(self.nodes), axis=-1)


class Sums(Module):
    """The quadrature from each probe of a block.

    Args:
        rule: gives w^* f(A) w. It has no derivatives with respect to the operator.
        gaps: two rules, the Gauss rule first. Their difference is the estimated distance of `rule` from the limit of
            infinitely many steps.
        found: the decomposition, differentiable with respect to the operator.
        small: of its tridiagonal matrix.
        consistent: False if a product contradicted the operator's tags, `(b,)`.
    """

    rule: Rule
    gaps: tuple[Rule, Rule]
    found: Decomposition
    small: Hermitian
    consistent: Array

    def products(self, g: Elementwise, operator: Operator) -> Array:
        """g(A) w for each probe w, of shape `(b, n)`."""
        return carried(g, operator, self.found, self.small)


def sums(operator: Operator, starts: Array, steps: int, floor: Any, least: Any = None) -> Sums:
    """The quadrature from each probe of a block. `least` is a lower bound of the eigenvalues; None if unknown."""
    found = decompose(operator, starts, steps)
    still, size = stop_gradient(found), operator.size
    matrices = gauss(found)
    raw, vectors = eigen(matrices)
    nodes = limited(raw, floor)
    small = Hermitian(matrices, nodes, vectors)
    agrees = consistent(still.asymmetry, raw, size, floor)

    # A function that is constant in pieces is finite even at NaN.
    is_fine = jnp.all(jnp.isfinite(still.diagonal), axis=1)
    squares = jnp.where(is_fine, still.norm**2, jnp.nan)

    def rule(nodes: Array, vectors: Array) -> Rule:
        return Rule(nodes, squares[:, None] * vectors[:, 0] ** 2)

    first = rule(nodes, vectors)
    if least is None:
        return Sums(first, (first, rule(*eigen(averaged(still)))), found, small, agrees)
    agrees &= is_above(least, raw, size)
    ends = lower_end(nodes, lax.stop_gradient(least), operator.eps)
    more_nodes, more_vectors = eigen(radau(ends, still))
    # With negative eigenvalues there is no such rule, and its nodes may be anywhere.
    exists = is_above(jnp.zeros_like(ends), raw, size)
    more_nodes = jnp.where(exists[:, None], more_nodes, ends[:, None])
    # The first node is known; the computed one would carry rounding errors of the size of the largest.
    more_nodes = jnp.maximum(more_nodes.at[:, 0].set(ends), ends[:, None])
    second = rule(more_nodes, more_vectors)
    both = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), first, second)
    middle = Rule(both.nodes, both.weights / 2)
    return Sums(middle, (first, middle), found, small, agrees)


def consistent(asymmetry: Array, nodes: Array, size: int, floor: float | None) -> Array:
    """Whether an operator appears to satisfy its tags.

    Args:
        asymmetry: the largest element that should not be there.
        nodes: eigenvalues, or Ritz values, in the last dimension.
        size: of the operator.
        floor: as for `limited`.
    """
    scale = jnp.max(jnp.abs(nodes), axis=-1)
    eps = jnp.finfo(nodes.dtype).eps
    # The square root, because an operator that computes in a lower precision does not count as asymmetric.
    symmetric = asymmetry <= jnp.sqrt(eps) * scale
    if floor is None:
        return symmetric
    least = jnp.min(nodes, axis=-1)
    if floor:
        return symmetric & (least >= floor * scale) & (least > 0)
    return symmetric & (least >= -16 * math.sqrt(size) * eps * scale)


def is_above(least: Array, nodes: Array, size: int) -> Array:
    """Whether no eigenvalue is below `least`, up to rounding. Other arguments are as for `consistent`."""
    scale = jnp.max(jnp.abs(nodes), axis=-1)
    rounding = 16 * math.sqrt(size) * jnp.finfo(nodes.dtype).eps * scale
    return jnp.min(nodes, axis=-1) >= least - rounding


def limited(nodes: Array, floor: Any) -> Array:
    """Nodes clipped from below at `floor` times the largest modulus; None does not clip."""
    if floor is None:
        return nodes
    scale = jnp.max(jnp.abs(nodes), axis=-1, keepdims=True)
    lowest = jnp.maximum(scale * floor, jnp.finfo(nodes.dtype).tiny if floor else 0)
    return jnp.maximum(nodes, lowest)


def rounding_of(f: Elementwise, nodes: Array, floor: float | None, eps: float) -> Array:
    """How far errors of the nodes, of eps times the largest, move the values of a function."""
    step = eps * jnp.max(jnp.abs(nodes), axis=-1, keepdims=True)
    below, here = nodes - step, f(nodes)
    if floor is not None:
        below = jnp.maximum(below, nodes / 2)
    return jnp.maximum(jnp.abs(f(nodes + step) - here), jnp.abs(f(below) - here))
