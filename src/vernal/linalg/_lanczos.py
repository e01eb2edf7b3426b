"""The Lanczos recurrence with full reorthogonalisation, for many start vectors at once.

Difficulty. In floating-point numbers the recurrence loses orthogonality as soon as an eigenvalue has
converged; and it breaks down when the start vector lies in an invariant subspace: then the next
vector is the zero vector over its length.

Plan. Every new vector is orthogonalised twice against all the vectors before it. A vector no longer
than the rounding errors of the products is replaced by zero, and so is everything that follows from
it: the decomposition is then exact, and smaller. Derivatives are in `_lanczos_adjoint`.

Invariants. `A Q = Q T + r e^*` with orthonormal columns in Q. Columns after a breakdown are zero, as
are their rows and columns in T. There is never a division by zero. Multiplying A by a power of two
multiplies T by it, and does not change Q.

Glossary: b start vectors; m steps; n the size of the operator; Q basis, of shape (m, n) for each
start vector (as rows, for the sake of contiguous memory); T the tridiagonal matrix, diagonal alpha,
off-diagonal beta; asymmetry: the largest element by which Q^* A Q differs from T where it must not.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..modules import Module
from ..show import short, value_error
from ..transforms import filter_custom_jvp
from ._arguments import positive_int
from ._lanczos_adjoint import Decomposition, inner, multiply, norms, rule
from ._operator import Operator
from ._operators import as_operator
from ._per_device import fori_loop, varying_like_result
from ._vectors import flat_vector, power_below

# A new vector of at most this many roundings of a product is pure rounding.
_ROUNDINGS = 4


class Tridiagonal(Module):
    """The result of `lanczos`: `A Q = Q T` except for the last column.

    Args:
        basis: Q, of shape `(n, steps)`; orthonormal columns, zero from `rank` on.
        diagonal: of T, of shape `(steps,)`.
        offdiagonal: of T, of shape `(steps - 1,)`, not negative.
        norm: of the start vector, which is `norm` times the first column of Q.
        rank: the number of steps that were made before the space was exhausted.
        asymmetry: the largest element of `Q^* A Q` that would be zero if A were symmetric; then it is of
            the size of rounding errors.
    """

    basis: Array
    diagonal: Array
    offdiagonal: Array
    norm: Array
    rank: Array
    asymmetry: Array

    def matrix(self) -> Array:
        """T as a matrix of shape `(steps, steps)`."""
        off = jnp.diag(self.offdiagonal, 1)
        return jnp.diag(self.diagonal) + off + off.T


def lanczos(operator: Any, vector: Any, steps: int) -> Tridiagonal:
    """Runs the Lanczos recurrence: finds an orthonormal basis in which a symmetric operator is tridiagonal.

    It uses full reorthogonalisation. If the space that the vector and its products span is exhausted
    before the last step (after one step, if the operator is a multiple of the identity), the rest is
    zero, and `rank` is the number of steps that were made.

    Derivatives with respect to the operator and the vector, in forward and in reverse mode, have their own
    recurrences, which make as many products and store only the basis. They belong to the steps that were
    made: after a breakdown they ignore directions that leave the exhausted space.

    C. Lanczos, "An iteration method for the solution of the eigenvalue problem of linear differential and integral
    operators", Journal of Research of the National Bureau of Standards 45 (1950), doi:10.6028/jres.045.026.
    N. Krämer, P. Moreno-Muñoz, H. Roy, S. Hauberg, "Gradients of functions of large matrices", Advances in Neural
    Information Processing Systems 37 (2024), arXiv:2405.17277.

    Args:
        operator: a symmetric operator (Hermitian, if it is complex).
        vector: the start vector, a tree of arrays like the operator's vectors.
        steps: the number of products to make, from 1 to the size of the operator.

    Returns:
        A `Tridiagonal`.

    Raises:
        TypeError: if `operator` is not an operator, `steps` is not a Python int, or the vector does not fit the
            operator.
        ValueError: if the operator is not declared symmetric, or `steps` is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.linalg import MatrixOperator, lanczos
        >>> operator = MatrixOperator(jnp.diag(jnp.array([1.0, 2.0, 3.0])), symmetric=True)
        >>> found = lanczos(operator, jnp.ones(3), 3)
        >>> print(jnp.linalg.eigvalsh(found.matrix()).round(4), found.rank)
        [1. 2. 3.] 3
    """
    operator = symmetric_operator(operator, "lanczos(operator)")
    steps = positive_int(steps, "steps", "lanczos(steps)")
    if steps > operator.size:
        raise value_error(
            "more steps were asked for than the operator has dimensions",
            where="lanczos(steps)",
            expected=f"at most {operator.size} steps for vectors of that size",
            got=f"steps={steps}",
            instead="`min(steps, operator.size)`",
        )
    start = flat_vector(operator.in_structure(), vector, "lanczos(vector)")
    found = decompose(operator, start[None, :], steps)
    return Tridiagonal(
        basis=found.basis[0].T,
        diagonal=found.diagonal[0],
        offdiagonal=found.offdiagonal[0],
        norm=found.norm[0],
        rank=jnp.sum(found.active()[0], dtype=jnp.int32),
        asymmetry=found.asymmetry[0],
    )


def symmetric_operator(operator: Any, where: str) -> Operator:
    """Converts to an operator declared symmetric; `ValueError` if it is not, `TypeError` if it is not an operator.

    Args:
        operator: the user's operator.
        where: for the message.
    """
    operator = as_operator(operator, where)
    if not operator.symmetric:
        raise value_error(
            "the operator is not declared symmetric, but the method needs a symmetric operator",
            where=where,
            expected="an operator with `symmetric=True`, equal to its conjugate transpose",
            got=short(operator),
            instead="`MatrixOperator(matrix, symmetric=True)` or `FunctionOperator(fn, example, "
            "symmetric=True)`, if it is symmetric",
        )
    return operator


def decompose(operator: Operator, starts: Array, steps: int) -> Decomposition:
    """The Lanczos recurrence from each row of a matrix.

    Args:
        operator: symmetric.
        starts: of shape `(b, n)`.
        steps: from 1 to n.
    """
    # In `shard_map` all results vary alike.
    starts = varying_like_result(lambda x: multiply(operator, x), starts)
    return _decompose(operator, starts, steps)


@filter_custom_jvp
def _decompose(operator: Operator, starts: Array, steps: int) -> Decomposition:
    real = jnp.finfo(starts.dtype).dtype
    size = norms(starts)
    first = jnp.where((size > 0)[:, None], starts / _or_one(size)[:, None].astype(starts.dtype), 0)
    count = starts.shape[0]
    empty = jnp.zeros((count, steps, starts.shape[1]), starts.dtype)
    zero = jnp.zeros((count, steps), real)
    state = _State(
        empty.at[:, 0].set(first), zero, zero, first, jnp.zeros(count, real), jnp.zeros(count, real)
    )
    state = fori_loop(0, steps, lambda k, state: _step(operator, k, steps, state), state)
    off, residual = state.offdiagonal[:, : steps - 1], state.offdiagonal[:, steps - 1]
    return Decomposition(state.basis, state.diagonal, off, size, residual, state.asymmetry)


_decompose.def_jvp(rule(_decompose), symbolic_zeros=True)


class _State(Module):
    """The state of the recurrence; `offdiagonal[:, k]` is the length of the vector that step k ended with."""

    basis: Array
    diagonal: Array
    offdiagonal: Array
    current: Array
    scale: Array
    asymmetry: Array


def _step(operator: Operator, k: Array, steps: int, state: _State) -> _State:
    product = multiply(operator, state.current)
    scale = jnp.maximum(state.scale, norms(product))
    elements = inner(state.basis, product)
    diagonal = elements[:, k].real
    before = jnp.where(k > 0, state.offdiagonal[:, k - 1], 0)
    place = jnp.arange(steps)[None, :]
    tridiagonal = jnp.where(place == k, diagonal[:, None], 0) + jnp.where(
        place == k - 1, before[:, None], 0
    )
    asymmetry = jnp.max(jnp.abs(elements - tridiagonal.astype(elements.dtype)), axis=1)
    left = product - combined(elements, state.basis)
    # In units, or products with what is left may be too small for the dtype.
    unit = power_below(norms(left))
    left = left / unit[:, None].astype(left.dtype)
    left = left - combined(inner(state.basis, left), state.basis)
    rest = norms(left)
    length = rest * unit
    threshold = _ROUNDINGS * jnp.finfo(length.dtype).eps * scale
    length = jnp.where(length > threshold, length, 0)
    follows = jnp.where((length > 0)[:, None], left / _or_one(rest)[:, None].astype(left.dtype), 0)
    # The last step has no next vector: it writes the current row again.
    row = jnp.where(k + 1 < steps, follows, state.current)
    return _State(
        basis=lax.dynamic_update_index_in_dim(
            state.basis, row, jnp.minimum(k + 1, steps - 1), axis=1
        ),
        diagonal=state.diagonal.at[:, k].set(diagonal),
        offdiagonal=state.offdiagonal.at[:, k].set(length),
        current=follows,
        scale=scale,
        asymmetry=jnp.maximum(state.asymmetry, asymmetry),
    )


def combined(weights: Array, basis: Array) -> Array:
    """Linear combinations of basis vectors, of shape `(b, n)`.

    Args:
        weights: of shape `(b, m)`.
        basis: of shape `(b, m, n)`.
    """
    return jnp.einsum("bm,bmn->bn", weights, basis, precision=lax.Precision.HIGHEST)


def _or_one(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)
