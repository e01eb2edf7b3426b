"""`g(A) w` from the Lanczos recurrence, with its derivatives with respect to A and to what g closes over.

Difficulty. Differentiating the recurrence itself divides by every beta, and after a breakdown (A a multiple of the
identity) it silently loses the part that leaves the exhausted space: the result would be finite and wrong.

Plan. Only the function is approximated, not its derivative. With T = S diag(theta) S^T, the polynomials p_k of the
recurrence (q_{k+1} = p_k(A) q_1) and the divided differences G_ij = (g(theta_i) - g(theta_j)) / (theta_i - theta_j),

    g[x, y] = sum_kl M_kl p_k(x) p_l(y)       M = S diag(S_1) G diag(S_1) S^T

holds at all pairs of nodes, and d g(A) w = |w| sum_kl M_kl p_k(A) dA q_{l+1}. Orthogonally to Q the sum over k is
made by the Clenshaw recurrence with the projected operator: one more product for each step. Within Q the derivative is
that of g of the small matrix Q^* A Q (Daleckii and Krein): products there would be spoilt by the converged
eigenvalues, at which the polynomials are unstable.

Invariants. Exact if the space is invariant, after a breakdown as well as after all n steps. Otherwise the projection
leaves out the last vector's share in dA, about 1 / n of the whole. Linear in dA, in ordinary operations: JAX
transposes it for reverse mode.

Glossary: b start vectors, m steps, as in `_lanczos`; theta nodes (b, m); S vectors (b, m, m); E = dA.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..modules import Module
from ..transforms import filter_custom_jvp, is_zero
from ._eigh import resolved
from ._elementwise import Derivative, Elementwise, along, is_along
from ._lanczos_adjoint import Decomposition, inner, moving, multiply
from ._operator import Operator
from ._per_device import fori_loop

# A beta of at most this many roundings of the largest element of T ends the expansion.
_ROUNDINGS = 1024
# Nodes that differ by at most this many eps of the largest are the same, up to rounding.
_SAME = 64
# Where the way between two nodes is divided: not in a place of which functions are symmetric.
_PART = 0.382


def divided_differences(g: Elementwise, nodes: Array, others: Array | None = None) -> Array:
    """(g(x_i) - g(y_j)) / (x_i - y_j), of shape `(b, m, l)`; the mean slope between them where that is as good, up to
    rounding. This is a Gauss rule of two points, so its second and third derivatives are right at equal nodes, too.

    It is as good where nodes are the same up to rounding, and where it agrees with the difference up to rounding. How
    close nodes must be for that depends on g: the eigenvalues of a matrix that has not full rank are zeros with
    rounding errors, alike for an exponential function, but not for a logarithm. It must agree on two parts of the way
    as well: on the whole it always does for an even function, and nodes that differ by their signs.

    Args:
        g: the function, element by element; it may have complex values.
        nodes: x, of shape `(b, m)`.
        others: y, of shape `(b, l)`; None takes the same nodes.
    """
    others = nodes if others is None else others
    x, y = nodes[:, :, None], others[:, None, :]
    gap, slope = x - y, _mean_slope(g, x, y)
    difference = g(nodes)[:, :, None] - g(others)[:, None, :]
    eps = float(jnp.finfo(nodes.dtype).eps)
    largest = jnp.max(jnp.abs(jnp.concatenate([nodes, others], axis=1)), axis=1, initial=0)
    near = jnp.abs(gap) <= _SAME * eps * largest[:, None, None]
    if is_along(g):
        near |= jnp.abs(gap) <= eps ** (1 / 3) * jnp.maximum(jnp.abs(x), jnp.abs(y))
    else:
        step = eps * largest[:, None]
        rounding = 4 * (_off(g, nodes, step)[:, :, None] + _off(g, others, step)[:, None, :])
        between = x + _PART * (y - x)
        agrees = _agrees(g, x, y, rounding)
        near |= agrees & _agrees(g, x, between, rounding) & _agrees(g, between, y, rounding)
    return jnp.where(near, slope, difference / jnp.where(near, 1, gap).astype(slope.dtype))


def _mean_slope(g: Elementwise, x: Array, y: Array) -> Array:
    """The mean of the derivative between x and y."""
    middle, half, slope = x / 2 + y / 2, (x - y) / (2 * 3**0.5), Derivative(g)
    return (slope(middle - half) + slope(middle + half)) / 2


def _agrees(g: Elementwise, x: Array, y: Array, rounding: Array) -> Array:
    """Whether the mean slope between x and y is what the values differ by."""
    slope = _mean_slope(g, x, y)
    # Less, not equal: where the slope is infinite, so is all of this, and the difference may be fine.
    return jnp.abs(g(x) - g(y) - (x - y).astype(slope.dtype) * slope) < rounding


def _off(g: Elementwise, nodes: Array, step: Array) -> Array:
    """How far rounding moves the values, if it moves nodes by a step."""
    by_slope = jnp.abs(Derivative(g)(nodes)) * step
    # The smaller one: a slope may be infinite at the end of the domain, and g undefined beyond it. Over many steps,
    # because the values of log(1 + x) do not change in one.
    moved = jnp.fmin(by_slope, jnp.abs(g(nodes + _SAME * step) - g(nodes)))
    return moved + jnp.finfo(nodes.dtype).eps * jnp.abs(g(nodes))


class Nodes(Module):
    """T = S diag(theta) S^T of each start vector.

    Args:
        nodes: theta, of shape `(b, m)`.
        vectors: S, of shape `(b, m, m)`.
    """

    nodes: Array
    vectors: Array


def carried(g: Elementwise, operator: Operator, found: Decomposition, small: Nodes) -> Array:
    """`g(A) w`, of shape `(b, n)`, with its derivatives with respect to A and to what g closes over.

    Args:
        g: acts element by element.
        operator: A.
        found: the decomposition from w.
        small: of its tridiagonal matrix.
    """
    return _carried(g, operator, found, small)


@filter_custom_jvp
def _carried(g: Elementwise, operator: Operator, found: Decomposition, small: Nodes) -> Array:
    del operator
    at = found.norm[:, None] * g(small.nodes) * small.vectors[:, 0]
    weights = _sum("bki,bi->bk", small.vectors, at).astype(found.basis.dtype)
    return _sum("bk,bkn->bn", weights, found.basis)


@_carried.def_jvp(symbolic_zeros=True)
def _carried_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    g, operator, found, small = primals
    parts, dots = moving(operator, tangents[1])
    g_dot = along(g, tangents[0])
    change = None if g_dot is None else carried(g_dot, operator, found, small)
    # This function again, not its value: derivatives of the next order need its rule.
    product = carried(*primals)
    if not jax.tree.leaves(dots):
        return product, change
    count, steps, size = found.basis.shape
    rows = found.basis.reshape(count * steps, size)
    _, changed = jax.jvp(
        lambda arrays: multiply(parts.whole(arrays), rows), (parts.arrays,), (dots,)
    )
    differences = divided_differences(g, small.nodes)
    if not is_along(g):
        small = Nodes(small.nodes, resolved(g, small.nodes, small.vectors))
    moved = _applied(operator, found, small, differences, changed.reshape(found.basis.shape))
    return product, moved if change is None else moved + change


def _applied(
    operator: Operator, found: Decomposition, small: Nodes, differences: Array, changed: Array
) -> Array:
    """d g(A) w, where the rows of `changed`, of shape `(b, m, n)`, are E q_k."""
    dtype = changed.dtype
    vectors, weights = small.vectors.astype(dtype), small.vectors[:, 0].astype(dtype)
    norm, divided = found.norm.astype(dtype)[:, None], differences.astype(dtype)
    inside = _sum("bkn,bln->bkl", found.basis.conj(), changed)
    outside = changed - _sum("bkl,bkn->bln", inside, found.basis)
    middle = divided * _sum("bki,bkj->bij", vectors, _sum("bkl,blj->bkj", inside, vectors))
    along = _sum("bki,bi->bk", vectors, _sum("bij,bj->bi", middle, weights))
    half = vectors * weights[:, None, :]
    expansion = _sum("bki,blj,bij->bkl", half, half, divided)
    terms = _sum("bkl,bln->bkn", expansion, outside)
    return norm * (_sum("bk,bkn->bn", along, found.basis) + _clenshaw(operator, found, terms))


def _clenshaw(operator: Operator, found: Decomposition, terms: Array) -> Array:
    """The sum of p_k(A) z_k over k, in the complement of the basis; z_k are the rows of `terms`."""
    dtype, steps = terms.dtype, terms.shape[1]
    off = jnp.pad(found.offdiagonal, ((0, 0), (0, 2)))
    scale = jnp.maximum(jnp.max(jnp.abs(found.diagonal), axis=1), jnp.max(off, axis=1))[:, None]
    # After a beta of pure rounding the polynomials grow without limit, and their weights vanish accordingly.
    sound = (
        lax.cummin((off > _ROUNDINGS * jnp.finfo(off.dtype).eps * scale).astype(jnp.int32), axis=1)
        > 0
    )
    inverse = jnp.where(sound, 1 / jnp.where(sound, off, 1), 0).astype(dtype)
    off, diagonal = off.astype(dtype), found.diagonal.astype(dtype)

    def step(i: Any, state: tuple[Array, Array]) -> tuple[Array, Array]:
        after, next_after = state
        k = steps - 1 - i
        product = multiply(operator, after)
        product = product - _sum("bk,bkn->bn", inner(found.basis, product), found.basis)
        moved = (product - diagonal[:, k, None] * after) * inverse[:, k, None]
        return terms[:, k] + moved - (off[:, k] * inverse[:, k + 1])[:, None] * next_after, after

    zero = jnp.zeros_like(terms[:, 0])
    return fori_loop(0, steps, step, (zero, zero))[0]


def _sum(formula: str, *operands: Array) -> Array:
    return jnp.einsum(formula, *operands, precision=lax.Precision.HIGHEST)


def carried_dense(g: Elementwise, matrix: Array, nodes: Array, vectors: Array) -> Array:
    """`g(A)`, of shape `(n, n)`, with its derivatives with respect to the Hermitian matrix A and to what g closes over.

    Args:
        g: acts element by element.
        matrix: A.
        nodes: its eigenvalues.
        vectors: its eigenvectors, as columns.
    """
    return _carried_dense(g, matrix, nodes, vectors)


@filter_custom_jvp
def _carried_dense(g: Elementwise, matrix: Array, nodes: Array, vectors: Array) -> Array:
    del matrix
    return _sum("ki,i,li->kl", vectors, g(nodes).astype(vectors.dtype), vectors.conj())


@_carried_dense.def_jvp(symbolic_zeros=True)
def _carried_dense_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    g, _, nodes, vectors = primals
    g_dot = along(g, tangents[0])
    change = None if g_dot is None else carried_dense(g_dot, *primals[1:])
    value = carried_dense(*primals)
    if is_zero(tangents[1]):
        return value, change
    differences = divided_differences(g, nodes[None])[0].astype(vectors.dtype)
    if not is_along(g):
        vectors = resolved(g, nodes, vectors)
    middle = differences * _sum("ki,kl,lj->ij", vectors.conj(), tangents[1], vectors)
    moved = _sum("ki,ij,lj->kl", vectors, middle, vectors.conj())
    return value, moved if change is None else moved + change
