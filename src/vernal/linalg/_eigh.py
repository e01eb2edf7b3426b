"""Eigenvectors of small matrices, and which of their derivatives are more than rounding errors.

Difficulty. The derivative of an eigenvector divides by the gaps between eigenvalues. In the derivatives of f(A) these
quotients cancel, but for their rounding errors: next to f'' the second derivative is off by some eps f' / gap, and next
to f''' the third by eps f' / gap^2. So it depends on f how small a gap may be: an exponential function of a matrix of
size 1e-14 is nearly linear, and nothing of its second derivative is left.

Plan. Where a gap is too small for an error of at most 1e-3, the derivative is NaN. Where f'' or f''' is zero everywhere
the size of the matrix takes the place of the scale of f.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ..transforms import filter_custom_jvp, is_zero
from ._elementwise import Derivative, Elementwise
from ._vectors import times

# The largest relative error of a derivative.
_ERROR = 1e-3


@filter_custom_jvp
def eigh(matrices: Array) -> tuple[Array, Array]:
    """Eigenvalues, and eigenvectors as columns, of Hermitian matrices. The derivative of a vector is NaN where another
    eigenvalue is too close: it would be that of rounding errors.

    Args:
        matrices: of shape `(..., m, m)`; the lower triangle counts.
    """
    nodes, vectors = jnp.linalg.eigh(matrices, symmetrize_input=False)
    return nodes, vectors


@eigh.def_jvp
def _eigh_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    nodes, vectors = eigh(*primals)
    inside = times(times(vectors.conj().mT, tangents[0]), vectors)
    gaps = nodes[..., None, :] - nodes[..., :, None]
    largest = jnp.max(jnp.abs(nodes), axis=-1, initial=0)[..., None, None]
    apart = jnp.abs(gaps) > jnp.finfo(nodes.dtype).eps ** 0.5 * largest
    inverse = jnp.where(apart, 1 / jnp.where(apart, gaps, 1), jnp.nan)
    inverse = jnp.where(jnp.eye(nodes.shape[-1], dtype=bool), 0, inverse).astype(inside.dtype)
    moved = jnp.diagonal(inside, axis1=-2, axis2=-1).real
    return (nodes, vectors), (moved, times(vectors, inside * inverse))


@filter_custom_jvp
def resolved(f: Elementwise, nodes: Array, vectors: Array) -> Array:
    """Eigenvectors that are used in derivatives of f(A), with derivatives that are NaN where they would be wrong.

    Args:
        f: acts element by element.
        nodes: eigenvalues, of shape `(..., m)`.
        vectors: eigenvectors, as columns: `(..., m, m)`.
    """
    del f, nodes
    return vectors


@resolved.def_jvp(symbolic_zeros=True)
def _resolved_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    f, nodes, vectors = primals
    if is_zero(tangents[2]):
        return resolved(*primals), None
    factor = _resolution(f, nodes).astype(vectors.dtype)
    return resolved(*primals), tangents[2] * factor


@filter_custom_jvp
def _resolution(f: Elementwise, nodes: Array) -> Array:
    """1 for vectors with second derivatives of f(A), NaN for others; of shape `(..., 1, m)`."""
    return jnp.where(_is_apart(f, nodes, 2), 1, jnp.nan).astype(nodes.dtype)


@_resolution.def_jvp(symbolic_zeros=True)
def _resolution_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    if is_zero(tangents[1]):
        return _resolution(*primals), None
    f, nodes = primals
    lost = jnp.where(_is_apart(f, nodes, 3), 0, jnp.nan).astype(nodes.dtype)
    return _resolution(*primals), lost * tangents[1][..., None, :]


def _is_apart(f: Elementwise, nodes: Array, order: int) -> Array:
    """Whether all other nodes are far enough for derivatives of an order, of shape `(..., 1, m)`."""
    largest = jnp.max(jnp.abs(nodes), axis=-1, initial=0)
    f = Derivative(f)
    slope = scale = _most(f(nodes))
    for _ in range(order - 1):
        f = Derivative(f)
        curvature = _most(f(nodes))
        scale = jnp.where(curvature > 0, curvature, scale / largest)
    least = (jnp.finfo(nodes.dtype).eps * slope / (_ERROR * scale)) ** (1 / (order - 1))
    gaps = jnp.abs(nodes[..., None, :] - nodes[..., :, None])
    gaps = jnp.where(jnp.eye(nodes.shape[-1], dtype=bool), jnp.inf, gaps)
    is_constant = slope == 0
    nearest = jnp.min(gaps, axis=-2, keepdims=True, initial=jnp.inf)
    return is_constant[..., None, None] | (nearest > least[..., None, None])


def _most(values: Array) -> Array:
    """The largest modulus that is finite."""
    sizes = jnp.abs(values)
    return jnp.max(jnp.where(jnp.isfinite(sizes), sizes, 0), axis=-1, initial=0)
