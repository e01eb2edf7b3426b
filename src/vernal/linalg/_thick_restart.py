"""The Lanczos recurrence with thick restarts: extreme eigenpairs of a symmetric operator in bounded memory.

Difficulty. A basis that grows until the pairs have converged does not fit into memory. And a Krylov space holds one
vector of each eigenspace: it finds one copy of a repeated eigenvalue, with a perfect residual, and the next smaller
eigenvalue in place of the other copy.

Plan. When the basis is full, its best Ritz vectors are kept, with the residual vector that all of them share, and the
recurrence continues from there (Wu and Simon 2000). Once the wanted pairs have converged, one more cycle starts from a
new random vector orthogonal to them. If it finds no pair that belongs before them, they are the answer; otherwise the
search continues with the pairs that it found.

Invariants. The rows of the basis are orthonormal or zero, and `small` is its projection of A, measured, not assumed.
Where the recurrence breaks down, it continues with a random vector orthogonal to all rows before.

Glossary: n size; m rows of the basis; k pairs wanted; theta Ritz values; beta length of the residual vector.

K. Wu and H. Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM Journal on Matrix
Analysis and Applications 22 (2000), doi:10.1137/S0895479898334605.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import Module
from ._lanczos_adjoint import norms
from ._operator import Operator
from ._per_device import fori_loop, settled, varying_like_result
from ._vectors import power_below

# Roundings of the largest product: a vector below the first number is pure rounding, and a residual below the second
# cannot be improved.
_BREAKDOWN, _FLOOR = 4, 16
# Outside of a space that is full, a random vector leaves at most this many roundings.
_NOTHING = 1000


class Wanted(Module):
    """Which pairs are sought, and to what accuracy.

    Args:
        count: k.
        rows: m.
        order: the indices of ascending eigenvalues in the order of interest.
        rtol: the tolerance of a residual, relative to the modulus of its eigenvalue.
        most: the largest number of products.
    """

    count: int
    rows: int
    order: Callable[[Array], Array]
    rtol: Array
    most: Array

    @property
    def kept(self) -> int:
        """The number of Ritz vectors that are kept at a restart."""
        return self.count + (self.rows - self.count) // 2 if self.rows > self.count else self.count

    def tolerance(self, values: Array, scale: Array) -> Array:
        """The largest allowed length of a residual."""
        rounding = _FLOOR * jnp.finfo(values.dtype).eps * scale
        return jnp.maximum(self.rtol * jnp.abs(values), rounding)


class Found(Module):
    """The state of the search: between two cycles, the basis that the next one starts with.

    Args:
        basis: of shape `(m + 1, n)`.
        small: the projection of A, of shape `(m, m)`.
        start: the number of known rows of `small`.
        expected: the elements of its next column above the diagonal, if A is symmetric.
        length: beta.
        values: the best Ritz values, of shape `(k,)`.
        vectors: their Ritz vectors, of shape `(k, n)`.
        scale: the length of the longest product.
        asymmetry: the largest element that would be zero if A were symmetric.
        matvecs: the number of products that were made.
        is_check: whether the next cycle looks for missed pairs.
        is_done: whether the search has ended.
    """

    basis: Array
    small: Array
    start: Array
    expected: Array
    length: Array
    values: Array
    vectors: Array
    scale: Array
    asymmetry: Array
    matvecs: Array
    is_check: Array
    is_done: Array


def search(operator: Operator, wanted: Wanted, key: PRNGKeyArray) -> Found:
    """The wanted pairs of a symmetric operator, as accurate as `wanted.most` products allow."""
    rows, size, dtype = wanted.rows, operator.size, operator.dtype
    zero, no = jnp.zeros((), jnp.finfo(dtype).dtype), jnp.asarray(False)
    first = _outside(jnp.zeros((1, size), dtype), _random(key, size, dtype))
    first = varying_like_result(lambda x: operator.matmul(x[:, None])[:, 0], first)
    empty = Found(
        basis=jnp.zeros((rows + 1, size), dtype).at[0].set(first),
        small=jnp.zeros((rows, rows), dtype),
        start=jnp.zeros((), jnp.int32),
        expected=jnp.zeros(rows, dtype),
        length=zero,
        values=jnp.zeros(wanted.count, zero.dtype),
        vectors=jnp.zeros((wanted.count, size), dtype),
        scale=zero,
        asymmetry=zero,
        matvecs=jnp.zeros((), jnp.int32),
        is_check=no,
        is_done=no,
    )

    def unfinished(found: Found) -> Array:
        finite = jnp.isfinite(found.scale) & jnp.all(jnp.isfinite(found.values))
        # The pairs themselves are multiplied once more at the end.
        room = found.matvecs + rows - found.start + wanted.count <= wanted.most
        return ~found.is_done & finite & room

    def again(found: Found) -> Found:
        return _cycle(operator, wanted, key, found)

    return lax.while_loop(unfinished, again, again(settled(again, empty)))


def _cycle(operator: Operator, wanted: Wanted, key: PRNGKeyArray, found: Found) -> Found:
    """Fills the basis, and restarts with its best part."""
    count, rows, size = wanted.count, wanted.rows, operator.size
    found = fori_loop(found.start, rows, lambda j, found: _step(operator, key, j, found), found)
    values, mixing = jnp.linalg.eigh(found.small)
    order = wanted.order(values)
    values, mixing = values[order], mixing[:, order]
    coupling = found.length.astype(mixing.dtype) * mixing[-1].conj()
    best, bounds = values[:count], jnp.abs(coupling[:count])
    tolerance = wanted.tolerance(best, found.scale)
    good = jnp.all(bounds <= tolerance)
    # A basis of the whole space misses nothing.
    same = jnp.all(jnp.abs(best - found.values) <= tolerance) & found.is_check
    is_done = good & (same | (rows == size))
    ritz = jnp.matmul(mixing.T, found.basis[:rows], precision=lax.Precision.HIGHEST)
    start = jnp.where(good, count, min(wanted.kept, rows - 1)).astype(jnp.int32)
    is_kept = jnp.arange(rows, dtype=jnp.int32) < start
    basis = jnp.where(is_kept[:, None], ritz, 0)
    fresh = _outside(basis, _random(jax.random.fold_in(key, -1 - found.matvecs), size, basis.dtype))
    follows = jnp.where(good, fresh, found.basis[rows])
    return Found(
        basis=jnp.pad(basis, ((0, 1), (0, 0))).at[start].set(follows),
        small=jnp.diag(jnp.where(is_kept, values, 0)).astype(basis.dtype),
        start=start,
        expected=jnp.where(is_kept & ~good, coupling, 0),
        length=found.length,
        values=best,
        vectors=ritz[:count],
        scale=found.scale,
        asymmetry=found.asymmetry,
        matvecs=found.matvecs,
        is_check=good,
        is_done=is_done,
    )


def _step(operator: Operator, key: PRNGKeyArray, j: Any, found: Found) -> Found:
    """Multiplies row j of the basis, and makes the next one."""
    rows, size = found.small.shape[0], found.basis.shape[1]
    basis, eps = found.basis[:rows], jnp.finfo(found.scale.dtype).eps
    product = operator.matmul(found.basis[j][:, None])[:, 0]
    scale = jnp.maximum(found.scale, _norm(product))
    elements = _along(basis, product)
    place = jnp.arange(rows, dtype=jnp.int32)
    before = jnp.where(place == j - 1, found.length.astype(elements.dtype), 0)
    expected = jnp.where(j == found.start, found.expected, before)
    # All except the real part of the diagonal is known beforehand.
    difference = elements - jnp.where(place == j, elements.real.astype(elements.dtype), expected)
    # While missed pairs are looked for, the kept ones are eigenvectors only up to the tolerance.
    difference = jnp.where(found.is_check & (place < found.start), 0, difference)
    left = product - _sum(elements, basis)
    # In units, or products with what is left may be too small for the dtype.
    unit = power_below(_norm(left))
    left = left / unit.astype(left.dtype)
    left = left - _sum(_along(basis, left), basis)
    rest = _norm(left)
    length = rest * unit
    broken = length <= _BREAKDOWN * eps * scale
    follows = lax.cond(
        broken,
        lambda: _outside(
            basis, _random(jax.random.fold_in(key, j + found.matvecs), size, basis.dtype)
        ),
        lambda: left / jnp.where(broken, 1, rest).astype(left.dtype),
    )
    # The diagonal is real; both assignments agree there.
    elements = jnp.where(place == j, elements.real.astype(elements.dtype), elements)
    small = found.small.at[j, :].set(elements.conj()).at[:, j].set(elements)
    return Found(
        basis=found.basis.at[j + 1].set(follows),
        small=small,
        start=found.start,
        expected=found.expected,
        length=jnp.where(broken, 0, length),
        values=found.values,
        vectors=found.vectors,
        scale=scale,
        asymmetry=jnp.maximum(found.asymmetry, jnp.max(jnp.abs(difference))),
        matvecs=found.matvecs + 1,
        is_check=found.is_check,
        is_done=found.is_done,
    )


def _outside(basis: Array, vector: Array) -> Array:
    """The unit vector of the part orthogonal to a basis; zero if that part is pure rounding."""
    whole = _norm(vector)
    for _ in range(2):
        vector = vector - _sum(_along(basis, vector), basis)
    left = _norm(vector)
    there = left > _NOTHING * jnp.finfo(left.dtype).eps * whole
    return jnp.where(there, vector / jnp.where(there, left, 1).astype(vector.dtype), 0)


def _random(key: PRNGKeyArray, size: int, dtype: Any) -> Array:
    return jax.random.normal(key, (size,), dtype)


def _along(basis: Array, vector: Array) -> Array:
    return jnp.matmul(basis.conj(), vector, precision=lax.Precision.HIGHEST)


def _sum(weights: Array, basis: Array) -> Array:
    return jnp.matmul(weights, basis, precision=lax.Precision.HIGHEST)


def _norm(vector: Array) -> Array:
    return norms(vector[None])[0]
