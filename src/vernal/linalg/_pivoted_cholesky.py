"""`pivoted_cholesky`: a low-rank matrix plus a diagonal that approximates a kernel plus noise.

Plan. Rows of the kernel are added greedily: each time the one with the largest error so far. The approximation from
these rows (the Nystrom approximation: the partial Cholesky factor with the same pivots) is then made again by
differentiable operations, with the pivots held fixed. With D the noise and M = D^{-1/2} L,

    P = L L^* + D = C C^*      C = D^{1/2} (I + M (F + I)^{-1} M^*)      F F^* = I + M^* M  (Cholesky)

so only triangular equations of the rank's size are solved, and these are never singular.

Invariants. The rest of the kernel is positive semidefinite: A >= P, and C^{-1} A C^{-*} >= I. Rows of pure rounding
are zero in L.

Glossary: n points, r rank; K kernel without noise; A = K + D.

H. Harbrecht, M. Peters, R. Schneider, "On the low-rank approximation by the pivoted Cholesky decomposition", Applied
Numerical Mathematics 62 (2012), doi:10.1016/j.apnum.2011.10.001.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.scipy.linalg import solve_triangular

from ..modules import Module
from ..show import short, type_error, value_error
from ..transforms import filter_jit
from ..trees import tree_equal
from ._arguments import positive_int, real_array
from ._kernels import KernelOperator
from ._operator import Composite, Operator
from ._operators import MatrixOperator, as_operator
from ._per_device import fori_loop
from ._vectors import Structure, flat_vector, stop_gradient, times, to_tree

# An error below this many roundings of the largest diagonal element, for each row of the rank, counts as zero.
_ROUNDINGS = 8


class Preconditioner(Module):
    """A positive definite matrix P = C C^* close to an operator and cheap to divide by, made by `pivoted_cholesky`.

    Args:
        operator: the operator that P approximates.
        root: the square root of the noise: the diagonal of D^{1/2}, of shape `(n,)`.
        low_rank: M, of shape `(n, r)`.
        factor: F, of shape `(r, r)`.
    """

    operator: Operator
    root: Array
    low_rank: Array
    factor: Array

    def solve(self, vector: Any) -> Any:
        """Multiplies a vector by P^{-1}.

        Args:
            vector: a tree like a vector of the operator.

        Returns:
            A tree of the same structure and shapes.
        """
        structure = self.operator.in_structure()
        flat = flat_vector(structure, vector, "Preconditioner.solve(vector)")
        return to_tree(structure, self.divide_adjoint(self.divide(flat[:, None]))[:, 0])

    def divide(self, block: Array) -> Array:
        """Multiplies the columns of a matrix by C^{-1}.

        Args:
            block: of shape `(n, k)`.
        """
        block = block / self.root[:, None].astype(block.dtype)
        small = solve_triangular(self.factor, times(self.low_rank.conj().T, block), lower=True)
        small = solve_triangular(self._shifted(), small, lower=True, trans="C")
        return block - times(self.low_rank, small)

    def divide_adjoint(self, block: Array) -> Array:
        """Multiplies the columns of a matrix by C^{-*}.

        Args:
            block: of shape `(n, k)`.
        """
        small = times(self.low_rank.conj().T, block)
        small = solve_triangular(self._shifted(), small, lower=True)
        small = solve_triangular(self.factor, small, lower=True, trans="C")
        block = block - times(self.low_rank, small)
        return block / self.root[:, None].astype(block.dtype)

    def logdet(self) -> Array:
        """The logarithm of the determinant of P."""
        diagonal = jnp.diagonal(self.factor).real
        return 2 * (jnp.sum(jnp.log(self.root)) + jnp.sum(jnp.log(diagonal)))

    def whitened(self, operator: Operator) -> Operator:
        """The operator C^{-1} A C^{-*}. If P was made from A, no eigenvalue is below 1, up to rounding.

        Args:
            operator: A, which may have other arrays than the operator that P was made from.
        """
        same = tree_equal(stop_gradient(operator), stop_gradient(self.operator))
        return _Whitened(
            operator.symmetric, operator.positive_semidefinite, operator, self, jnp.asarray(same)
        )

    def _shifted(self) -> Array:
        return self.factor + jnp.eye(self.factor.shape[0], dtype=self.factor.dtype)


class _Whitened(Composite):
    symmetric: bool
    positive_semidefinite: bool
    operator: Operator
    preconditioner: Preconditioner
    is_its_own: Array

    def in_structure(self) -> Structure:
        return self.operator.in_structure()

    def matmul(self, block: Array) -> Array:
        right = self.preconditioner.divide_adjoint(block)
        return self.preconditioner.divide(self.operator.matmul(right))

    def adjoint_matmul(self, block: Array) -> Array:
        right = self.preconditioner.divide_adjoint(block)
        return self.preconditioner.divide(self.operator.adjoint_matmul(right))

    def least_eigenvalue(self) -> Array:
        # A has rounding errors, and the division by the least noise magnifies them.
        known = self.preconditioner
        eps = jnp.finfo(known.root.dtype).eps
        largest = 1 + jnp.sum(jnp.abs(known.low_rank) ** 2)
        least = jnp.maximum(1 - 16 * math.sqrt(len(known.root)) * eps * largest, 0)
        return jnp.where(self.is_its_own, least, 0)


def pivoted_cholesky(operator: Any, rank: int, *, noise: Any = None) -> Preconditioner:
    """Makes a preconditioner for a kernel plus noise: a partial Cholesky factor with pivots, plus the noise.

    It computes `rank` rows of the kernel, and needs memory for `rank` vectors. It can be differentiated with respect to
    the operator and the noise; the choice of the rows is held fixed, and affects only the accuracy of results.

    J. R. Gardner, G. Pleiss, D. Bindel, K. Q. Weinberger, A. G. Wilson, "GPyTorch: Blackbox matrix-matrix Gaussian
    process inference with GPU acceleration", Advances in Neural Information Processing Systems 31 (2018),
    arXiv:1809.11165.

    Args:
        operator: positive definite: a `kernel_operator` with noise, or a matrix.
        rank: the rank of the factor, from 1 to the size.
        noise: the positive part of the diagonal that is not the kernel's: a number, or an array of shape `()` or
            `(n,)`. Omit it for a `kernel_operator`, which knows its own.

    Returns:
        A `Preconditioner`, for `solve` and `vernal.estimators.logdet`.

    Raises:
        TypeError: if `operator` is neither a kernel operator nor a matrix, `rank` is not a Python int, or the noise not
            real numbers.
        ValueError: if the operator is not declared positive semidefinite, `rank` is out of range, the noise of a matrix
            is missing, that of a kernel is given twice, or it has the wrong shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> kernel = lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2))
        >>> operator = linalg.kernel_operator(kernel, jnp.linspace(0.0, 1.0, 50)[:, None], noise=0.1)
        >>> found = linalg.solve(operator, jnp.ones(50), preconditioner=linalg.pivoted_cholesky(operator, 5).solve)
        >>> print(found.tolerance_met)
        True
    """
    where = "pivoted_cholesky(operator, rank)"
    operator = as_operator(operator, where)
    if not isinstance(operator, KernelOperator | MatrixOperator):
        raise type_error(
            "the operator cannot compute single rows",
            where=where,
            expected="an operator made by `kernel_operator`, or a matrix",
            got=short(operator),
        )
    if not operator.positive_semidefinite:
        raise value_error(
            "the operator is not declared positive semidefinite, as a Cholesky factorisation needs",
            where=where,
            expected="an operator with `positive_semidefinite=True`",
            got=short(operator),
            instead="`MatrixOperator(matrix, positive_semidefinite=True)`, if it has no negative eigenvalues",
        )
    rank, size = positive_int(rank, "rank", where), operator.size
    if rank > size:
        raise value_error(
            "the rank is larger than the size of the operator",
            where=where,
            expected=f"at most {size}",
            got=f"rank={rank}",
        )
    if isinstance(operator, KernelOperator) == (noise is not None):
        raise value_error(
            "the noise must be given for a matrix, and only for a matrix",
            where="pivoted_cholesky(noise)",
            expected="`noise` for a matrix; None for a kernel operator, which has its own",
            got=f"noise={'None' if noise is None else 'given'} for {type(operator).__name__}",
        )
    given = operator.noise if isinstance(operator, KernelOperator) else noise
    real = jnp.finfo(operator.dtype).dtype
    added = real_array(given, "noise", "pivoted_cholesky(noise)", real)
    if not isinstance(added, Tracer) and np.any(np.asarray(added) < 0):
        raise value_error(
            "the noise is negative",
            where="pivoted_cholesky(noise)",
            expected="positive numbers: the part of the diagonal that the kernel does not explain",
            got=f"a least noise of {np.min(np.asarray(added)):g}",
        )
    if added.shape not in ((), (size,)):
        raise value_error(
            "the noise does not fit the operator",
            where="pivoted_cholesky(noise)",
            expected=f"an array of shape () or ({size},)",
            got=short(added),
        )
    return _factored(operator, rank, jnp.broadcast_to(added, (size,)))


@filter_jit
def _factored(operator: Any, rank: int, noise: Array) -> Preconditioner:
    pivots, is_used = _pivots(operator, rank, noise)
    rows = _rows(operator, pivots, noise)
    rows = jnp.where(is_used[:, None], rows, 0)
    among = jnp.where(is_used[None, :], rows[:, pivots], 0)
    lower = jnp.linalg.cholesky(among + jnp.diag((~is_used).astype(among.dtype)))
    low_rank = solve_triangular(lower, rows, lower=True).conj().T
    root = jnp.sqrt(noise)
    low_rank = low_rank / root[:, None].astype(low_rank.dtype)
    gram = times(low_rank.conj().T, low_rank)
    factor = jnp.linalg.cholesky(gram + jnp.eye(rank, dtype=gram.dtype))
    return Preconditioner(operator, root, low_rank, factor)


def _pivots(operator: Any, rank: int, noise: Array) -> tuple[Array, Array]:
    """The rows to take, and which of them are more than rounding. Has no derivatives."""
    left = lax.stop_gradient(_diagonal(operator, noise))
    least = _ROUNDINGS * rank * jnp.finfo(left.dtype).eps * jnp.max(left)

    def step(k: Any, state: tuple[Array, Array, Array, Array]) -> Any:
        left, lower, pivots, is_used = state
        pivot = jnp.argmax(left)
        row = lax.stop_gradient(_rows(operator, pivot[None], noise)[0])
        row = row - times(lower[:, pivot].conj()[None], lower)[0]
        used = left[pivot] > least
        scaled = row / jnp.sqrt(jnp.where(used, left[pivot], 1)).astype(row.dtype)
        scaled = jnp.where(used, scaled, 0)
        # Zero, so that a remainder of rounding is not taken again.
        left = (left - jnp.abs(scaled) ** 2).at[pivot].set(0)
        return (
            left,
            lower.at[k].set(scaled),
            pivots.at[k].set(pivot.astype(jnp.int32)),
            is_used.at[k].set(used),
        )

    empty = jnp.zeros((rank, operator.size), operator.dtype)
    state = left, empty, jnp.zeros(rank, jnp.int32), jnp.zeros(rank, bool)
    return fori_loop(0, rank, step, state)[2:]


def _diagonal(operator: Any, noise: Array) -> Array:
    """The diagonal of the kernel alone."""
    if isinstance(operator, KernelOperator):
        return operator.kernel_diagonal().real.astype(noise.dtype)
    return jnp.diagonal(operator.matrix).real.astype(noise.dtype) - noise


def _rows(operator: Any, places: Array, noise: Array) -> Array:
    """Rows of the kernel alone, of shape `(r, n)`."""
    if isinstance(operator, KernelOperator):
        return operator.kernel_rows(places).astype(operator.dtype)
    rows = operator.matrix[places].astype(operator.dtype)
    added = noise[places].astype(rows.dtype)
    return rows.at[jnp.arange(len(places)), places].add(-added)
