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

from ..transforms import filter_custom_jvp
from ._elementwise import Elementwise, along
from ._lanczos_adjoint import Decomposition, inner, moving, multiply
from ._operator import Operator
from ._per_device import fori_loop
from ._sound import guarded
from ._spectral import Hermitian, column_of, difference

# A beta of at most this many roundings of the largest element of T ends the expansion.
_ROUNDINGS = 1024


def carried(g: Elementwise, operator: Operator, found: Decomposition, small: Hermitian) -> Array:
    """`g(A) w`, of shape `(b, n)`, with its derivatives with respect to A and to what g closes over.

    Args:
        g: acts element by element.
        operator: A.
        found: the decomposition from w.
        small: of its tridiagonal matrix.
    """
    return _carried(g, operator, found, small)


@filter_custom_jvp
def _carried(g: Elementwise, operator: Operator, found: Decomposition, small: Hermitian) -> Array:
    del operator
    weights = found.norm[:, None] * column_of(g, small)
    return _sum("bk,bkn->bn", weights.astype(found.basis.dtype), found.basis)


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
    # The next derivative would be that of the steps. It differs from that of the trace by the more, the closer
    # eigenvalues are, without limit.
    found, small = guarded((found, small), small.matrix, jnp.zeros(count, bool))
    moved = _applied(g, operator, found, small, changed.reshape(found.basis.shape))
    return product, moved if change is None else moved + change


def _applied(
    g: Elementwise, operator: Operator, found: Decomposition, small: Hermitian, changed: Array
) -> Array:
    """d g(A) w, where the rows of `changed`, of shape `(b, m, n)`, are E q_k."""
    dtype = changed.dtype
    norm = found.norm.astype(dtype)[:, None]
    inside = _sum("bkn,bln->bkl", found.basis.conj(), changed)
    outside = changed - _sum("bkl,bkn->bln", inside, found.basis)
    along = difference(g, small, inside, small)[:, :, 0].astype(dtype)
    corner = jnp.zeros_like(small.matrix).at[:, 0, 0].set(1)
    expansion = difference(g, small, corner, small).astype(dtype)
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
