"""The derivative of `g(A) w` with respect to A, where `g(A) w` was made by the Lanczos recurrence.

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

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..modules import Module
from ..transforms import filter_custom_jvp, is_zero, materialise
from ._lanczos_adjoint import Decomposition, inner, moving, multiply
from ._operator import Operator
from ._per_device import fori_loop

# A beta of at most this many roundings of the largest element of T ends the expansion.
_ROUNDINGS = 1024
# A function of numbers, element by element.
Elementwise = Callable[[Array], Array]


def derivative(f: Elementwise) -> Elementwise:
    """The derivative of a function that acts element by element.

    Args:
        f: the function.
    """
    return lambda x: jax.jvp(f, (x,), (jnp.ones_like(x),))[1]


def divided_differences(g: Elementwise, nodes: Array, others: Array | None = None) -> Array:
    """(g(x_i) - g(y_j)) / (x_i - y_j), the derivative where they are equal; of shape `(b, m, l)`.

    Args:
        g: the function, element by element; it may have complex values.
        nodes: x, of shape `(b, m)`.
        others: y, of shape `(b, l)`; None takes the same nodes.
    """
    others = nodes if others is None else others
    rows, columns = jnp.broadcast_arrays(nodes[:, :, None], others[:, None, :])
    gap = rows - columns
    # Where the difference would lose as much as the derivative at the middle.
    near = jnp.finfo(nodes.dtype).eps ** (1 / 3) * jnp.maximum(jnp.abs(rows), jnp.abs(columns))
    apart = jnp.abs(gap) > near
    left = g(nodes)
    right = left if others is nodes else g(others)
    quotient = (left[:, :, None] - right[:, None, :]) / jnp.where(apart, gap, 1).astype(left.dtype)
    # Between nodes that are apart, g need not be defined.
    middle = jnp.where(apart, rows, (rows + columns) / 2)
    return jnp.where(apart, quotient, derivative(g)(middle))


class Nodes(Module):
    """T = S diag(theta) S^T of each start vector.

    Args:
        nodes: theta, of shape `(b, m)`.
        vectors: S, of shape `(b, m, m)`.
    """

    nodes: Array
    vectors: Array


def carried(
    product: Array, operator: Operator, found: Decomposition, small: Nodes, differences: Array
) -> Array:
    """Attaches to `g(A) w`, of shape `(b, n)`, its derivative with respect to A.

    Args:
        product: g(A) w, which may depend on arrays that g closes over.
        operator: A.
        found: the decomposition from w.
        small: of its tridiagonal matrix.
        differences: the divided differences of g at the nodes.
    """
    return _carried(product, operator, found, small, differences)


@filter_custom_jvp
def _carried(
    product: Array, operator: Operator, found: Decomposition, small: Nodes, differences: Array
) -> Array:
    del operator, found, small, differences
    return product


@_carried.def_jvp(symbolic_zeros=True)
def _carried_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    product, operator, found, small, differences = primals
    product_dot = None if tangents[0] is None or is_zero(tangents[0]) else materialise(tangents[0])
    parts, dots = moving(operator, tangents[1])
    # This function again, not `product`: derivatives of the next order need its rule.
    product = carried(*primals)
    if not jax.tree.leaves(dots):
        return product, product_dot
    count, steps, size = found.basis.shape
    rows = found.basis.reshape(count * steps, size)
    _, changed = jax.jvp(
        lambda arrays: multiply(parts.operator(arrays), rows), (parts.arrays,), (dots,)
    )
    change = _applied(operator, found, small, differences, changed.reshape(found.basis.shape))
    return product, change if product_dot is None else product_dot + change


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


def carried_dense(value: Array, matrix: Array, vectors: Array, differences: Array) -> Array:
    """Attaches to `value`, which is `g(A)`, its derivative with respect to the Hermitian matrix A. It is made from the
    eigenvectors of A and the divided differences of g at its eigenvalues.

    Args:
        value: g(A), of shape `(n, n)`.
        matrix: A.
        vectors: its eigenvectors, as columns.
        differences: of shape `(n, n)`.
    """
    return _carried_dense(value, matrix, vectors, differences)


@filter_custom_jvp
def _carried_dense(value: Array, matrix: Array, vectors: Array, differences: Array) -> Array:
    del matrix, vectors, differences
    return value


@_carried_dense.def_jvp(symbolic_zeros=True)
def _carried_dense_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    value, _, vectors, differences = primals
    value_dot, matrix_dot = tangents[:2]
    value = carried_dense(*primals)
    if is_zero(matrix_dot):
        return value, value_dot
    middle = _sum("ki,kl,lj->ij", vectors.conj(), matrix_dot, vectors) * differences.astype(
        value.dtype
    )
    change = _sum("ki,ij,lj->kl", vectors, middle, vectors.conj())
    return value, change if is_zero(value_dot) else value_dot + change
