"""One orthonormal basis of a Krylov space, and the operator in it: by Lanczos or, if it is not symmetric, by Arnoldi.

Difficulty. Both recurrences end early when the space is exhausted. What they found is then exact, but its derivative
leaves the space, and differentiating the recurrence loses that part without a word.

Plan. Rows of steps that were not made hold the Rayleigh quotient of the start vector, so that a function of the small
matrix is evaluated where it is defined. Derivatives of the basis are NaN after an early end.

Invariants. `A V = V H` but for the last column; V has orthonormal rows (they are the vectors), zero from `rank` on.

Glossary: m steps; n the size of the operator.

W. E. Arnoldi, "The principle of minimized iterations in the solution of the matrix eigenvalue problem", Quarterly of
Applied Mathematics 9 (1951), doi:10.1090/qam/42792.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..modules import Module
from ..transforms import filter_custom_jvp
from ._lanczos import decompose
from ._lanczos_adjoint import multiply, norms
from ._operator import Operator
from ._per_device import fori_loop
from ._vectors import power_below, times

# A new vector of at most this many roundings of a product is pure rounding.
_ROUNDINGS = 4


class Krylov(Module):
    """A basis from one start vector.

    Args:
        basis: V, of shape `(m, n)`.
        matrix: the operator in the basis, `(m, m)`: real and tridiagonal by Lanczos, Hessenberg by Arnoldi.
        norm: the length of the start vector.
    """

    basis: Array
    matrix: Array
    norm: Array


def krylov(operator: Operator, start: Array, steps: int) -> tuple[Krylov, Array, Array]:
    """A basis, the number of its vectors, and the largest element that would be zero if the operator were symmetric
    (zero if it is not declared so).

    Args:
        operator: A.
        start: of shape `(n,)`.
        steps: m, at most n.
    """
    if operator.symmetric:
        found = decompose(operator, start[None, :], steps)
        off = jnp.diag(found.offdiagonal[0], 1)
        basis, norm, asymmetry = found.basis[0], found.norm[0], found.asymmetry[0]
        matrix, rank = jnp.diag(found.diagonal[0]) + off + off.T, jnp.sum(found.active()[0])
    else:
        basis, matrix, norm, rank = _arnoldi(operator, start, steps)
        asymmetry = jnp.zeros_like(norm)
    found = Krylov(basis, shortened(matrix, rank), norm)
    basis, matrix, norm = _guarded(found, start, rank == steps)
    return Krylov(basis, matrix, norm), rank, lax.stop_gradient(asymmetry)


def shortened(matrix: Array, steps: Array | int) -> Array:
    """The small matrix of fewer steps, in the same shape; after no step at all, the identity."""
    there = jnp.arange(len(matrix)) < steps
    first = jnp.where(there[0], matrix[0, 0], 1)
    inside = jnp.where(there[:, None] & there[None, :], matrix, 0)
    return inside + jnp.diag(jnp.where(there, 0, first))


def _arnoldi(operator: Operator, start: Array, steps: int) -> tuple[Array, Array, Array, Array]:
    """The recurrence, every vector orthogonalised twice; JAX differentiates it."""
    first, norm = _normalised(start, jnp.asarray(0, jnp.finfo(start.dtype).dtype))

    def step(k: Array, state: Any) -> Any:
        basis, matrix, current, scale, rank = state
        product = multiply(operator, current[None, :])[0]
        scale = jnp.maximum(scale, lax.stop_gradient(norms(product[None, :])[0]))
        along = times(basis.conj(), product)
        left = product - times(along, basis)
        # In units, or products with what is left may be too small for the dtype.
        unit = power_below(norms(left[None, :])[0])
        left = left / unit.astype(left.dtype)
        again = times(basis.conj(), left)
        left = left - times(again, basis)
        rounding = _ROUNDINGS * float(jnp.finfo(start.dtype).eps)
        follows, rest = _normalised(left, rounding * scale / unit)
        length = (rest * unit).astype(start.dtype)
        column = along + again * unit.astype(start.dtype)
        column = column.at[k + 1].set(length, mode="drop")
        basis = basis.at[k + 1].set(follows, mode="drop")
        made = rank + ((length > 0) & (k + 1 < steps)).astype(rank.dtype)
        return basis, matrix.at[:, k].set(column), follows, scale, made

    basis = jnp.zeros((steps, len(start)), start.dtype).at[0].set(first)
    matrix = jnp.zeros((steps, steps), start.dtype)
    state = basis, matrix, first, jnp.zeros_like(norm), (norm > 0).astype(int)
    basis, matrix, _, _, rank = fori_loop(0, steps, step, state)
    return basis, matrix, norm, rank


def _normalised(vector: Array, threshold: Array) -> tuple[Array, Array]:
    """A vector over its length, and the length; zeros if that is at most the threshold. Never divides by zero."""
    unit = lax.stop_gradient(norms(vector[None, :])[0])
    there = ~(unit <= threshold)
    unit = jnp.where(there, unit, 1)
    scaled = jnp.where(there, vector / unit.astype(vector.dtype), 1)
    length = jnp.sqrt(jnp.sum(scaled.real**2 + scaled.imag**2))
    return (
        jnp.where(there, scaled / length.astype(vector.dtype), 0),
        jnp.where(there, unit * length, 0),
    )


@filter_custom_jvp
def _guarded(found: Krylov, start: Array, complete: Array) -> tuple[Array, Array, Array]:
    del start, complete
    return found.basis, found.matrix, found.norm


@_guarded.def_jvp
def _guarded_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    factor = jnp.where(primals[2], 1, jnp.nan)
    dots = jax.tree.map(lambda x: x * factor.astype(x.dtype), tangents[0])
    # In reverse mode, the recurrence from a zero vector would mask this NaN on the way to the vector.
    lost = jnp.sum(tangents[1]) * jnp.where(primals[2], 0, jnp.nan).astype(tangents[1].dtype)
    basis = dots.basis + lost
    return _guarded(*primals), (basis, dots.matrix, dots.norm)
