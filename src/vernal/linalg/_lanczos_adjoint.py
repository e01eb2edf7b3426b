"""Derivatives of the Lanczos recurrence, in forward and in reverse mode.

Difficulty. Differentiating the loop step by step stores the residuals of every product and of the orthogonalisations,
and it amplifies errors along vectors that are orthogonal only up to rounding.

Plan. With `w = A q_k`, a step of the recurrence is

    alpha_k = <q_k, w>        r = w - alpha_k q_k - beta_{k-1} q_{k-1}
    beta_k = |r|              q_{k+1} = r / beta_k

The tangents (d for "derivative of") follow from these equations, with one more product each:

    dw = dA q_k + A dq_k                        d alpha_k = Re <dq_k, w> + Re <q_k, dw>
    dr = dw - d alpha_k q_k - alpha_k dq_k - d beta_{k-1} q_{k-1} - beta_{k-1} dq_{k-1}
    d beta_k = Re <q_{k+1}, dr>                 x = (dr - d beta_k q_{k+1}) / beta_k

and because Q^*Q = I is preserved, the part of dq_{k+1} along the earlier vectors is known; for tangents, it plays the
part of reorthogonalisation: dq_{k+1} = x - Q (Q^* x + dQ^* q_{k+1}).

The reverse is the transpose of exactly these lines, in the opposite order. The lines for dw and d alpha together need
one product, with rho + 2 a q_k, where rho and a are the cotangents of r and alpha_k (A is symmetric: A^* = A).

Invariants. Forward and reverse are transposes of each other up to rounding. Vectors after a breakdown are zero, and so
are their tangents; there is no division by a beta that is zero.

Glossary: as in `_lanczos`. Cotangents are in the mathematical sense, d loss = Re <cotangent, d x>, the conjugates of
JAX's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..modules import Module
from ..primitives import local_linear_call
from ..transforms import is_zero, materialise
from ..trees import combine, is_array, is_inexact_array, partition
from ._operator import Operator
from ._per_device import fori_loop


class Decomposition(Module):
    """The result of the recurrence from b start vectors.

    Args:
        basis: of shape `(b, m, n)`.
        diagonal: of shape `(b, m)`.
        offdiagonal: of shape `(b, m - 1)`; zero from a breakdown on.
        norm: of the start vectors, of shape `(b,)`.
        residual: the length of the vector that the last step ended with, of shape `(b,)`; has no derivative.
        asymmetry: of shape `(b,)`; has no derivative.
    """

    basis: Array
    diagonal: Array
    offdiagonal: Array
    norm: Array
    residual: Array
    asymmetry: Array

    def active(self) -> Array:
        """Which steps were made, of shape `(b, m)`."""
        return jnp.concatenate([(self.norm > 0)[:, None], self.offdiagonal > 0], axis=1)


def inner(basis: Array, vectors: Array) -> Array:
    """Inner products with all basis vectors: `(b, m, n)` and `(b, n)` to `(b, m)`."""
    return jnp.einsum("bmn,bn->bm", basis.conj(), vectors, precision=lax.Precision.HIGHEST)


def multiply(operator: Operator, vectors: Array) -> Array:
    """Products with the rows of a matrix of shape `(b, n)`."""
    return operator.matmul(vectors.T).T


def norms(vectors: Array) -> Array:
    """Lengths of the rows, without intermediate overflow or underflow."""
    largest = jnp.max(jnp.abs(vectors), axis=1)
    unit = jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(
        jnp.sum(jnp.abs(vectors / unit[:, None].astype(vectors.dtype)) ** 2, axis=1)
    )


class Moving(NamedTuple):
    """A module in parts: differentiated arrays, other arrays, and everything else."""

    arrays: Any
    still: Any
    rest: Any

    def whole(self, arrays: Any) -> Any:
        """The module with `arrays` in place of those that are differentiated."""
        return combine(arrays, self.still, self.rest)


def moving(module: Any, module_dot: Any) -> tuple[Moving, Any]:
    """A module, such as an operator, in parts, and the tangents of those that have one."""

    def is_nothing(x: Any) -> bool:
        return x is None or is_zero(x)

    marks = jax.tree.map(
        lambda x: not is_nothing(x) and is_inexact_array(x), module_dot, is_leaf=is_nothing
    )
    arrays, others = partition(module, marks)
    still, rest = partition(others, is_array)
    return Moving(arrays, still, rest), partition(module_dot, marks)[0]


def rule(decompose: Callable[..., Decomposition]) -> Callable[..., Any]:
    """The rule for derivatives of `decompose(operator, starts, steps)`."""

    def jvp(primals: Any, tangents: Any) -> tuple[Decomposition, Decomposition]:
        operator, starts, steps = primals
        found = decompose(operator, starts, steps)
        parts, dots = moving(operator, tangents[0])
        start_dot = jnp.zeros_like(starts) if tangents[1] is None else materialise(tangents[1])

        def forward(given: Any, dots: Any) -> Any:
            arrays, still, found = given
            return _push(Moving(arrays, still, parts.rest), found, *dots)

        def transposed(given: Any, cotangents: Any) -> Any:
            arrays, still, found = given
            cotangents = jax.tree.map(materialise, cotangents, is_leaf=is_zero)
            return _pull(Moving(arrays, still, parts.rest), found, *cotangents)

        residuals = parts.arrays, parts.still, found
        basis, diagonal, offdiagonal, norm = local_linear_call(
            forward, transposed, residuals, (dots, start_dot)
        )
        none = jnp.zeros_like(found.norm)
        return found, Decomposition(basis, diagonal, offdiagonal, norm, none, none)

    return jvp


class _Steps(NamedTuple):
    """The decomposition in the form that both directions read: real numbers in the dtype of the vectors."""

    basis: Array
    diagonal: Array
    offdiagonal: Array
    inverse: Array

    @staticmethod
    def of(found: Decomposition) -> "_Steps":
        dtype = found.basis.dtype
        # One more element, so that the last step is like the others.
        off = jnp.pad(found.offdiagonal, ((0, 0), (0, 1)))
        inverse = jnp.where(off > 0, 1 / jnp.where(off > 0, off, 1), 0)
        return _Steps(
            found.basis, found.diagonal.astype(dtype), off.astype(dtype), inverse.astype(dtype)
        )

    def at(self, k: Any) -> tuple[Array, Array, Array, Array, Array, Array]:
        """q_{k-1}, q_k, q_{k+1}, beta_{k-1}, alpha_k, 1 / beta_k; zeros before the first and after the last."""
        last = self.basis.shape[1] - 1
        before = jnp.where(k > 0, self.basis[:, jnp.maximum(k - 1, 0)], 0)
        after = jnp.where(k < last, self.basis[:, jnp.minimum(k + 1, last)], 0)
        beta_before = jnp.where(k > 0, self.offdiagonal[:, jnp.maximum(k - 1, 0)], 0)
        beta = beta_before[:, None]
        return (
            before,
            self.basis[:, k],
            after,
            beta,
            self.diagonal[:, k, None],
            self.inverse[:, k, None],
        )

    def upto(self, k: Any) -> Array:
        """The basis with zeros after vector k."""
        return jnp.where((jnp.arange(self.basis.shape[1]) <= k)[None, :, None], self.basis, 0)


def _real_part(x: Array, y: Array) -> Array:
    """Re <x, y> for each row, of shape `(b, 1)`."""
    return jnp.sum(x.conj() * y, axis=1, keepdims=True).real.astype(x.dtype)


def _unit(found: Decomposition) -> tuple[Array, Array]:
    """The first basis vectors, and 1 / norm of the start vectors."""
    norm = found.norm[:, None]
    inverse = jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)
    return found.basis[:, 0], inverse.astype(found.basis.dtype)


def _push(parts: Moving, found: Decomposition, dots: Any, start_dot: Array) -> Any:
    """The tangents of basis, diagonal, off-diagonal and norm."""
    steps = _Steps.of(found)
    count = steps.basis.shape[1]
    first, inverse = _unit(found)
    norm_dot = _real_part(first, start_dot)
    first_dot = (start_dot - first * norm_dot) * inverse

    def products(arrays: Any, vectors: Array) -> Array:
        return multiply(parts.whole(arrays), vectors)

    def step(k: Any, state: Any) -> Any:
        basis_dot, diagonal_dot, off_dot = state
        before, q, after, beta, alpha, inverse = steps.at(k)
        before_dot = jnp.where(k > 0, basis_dot[:, jnp.maximum(k - 1, 0)], 0)
        beta_dot = jnp.where(k > 0, off_dot[:, jnp.maximum(k - 1, 0)], 0)[:, None]
        q_dot = basis_dot[:, k]
        w, w_dot = jax.jvp(products, (parts.arrays, q), (dots, q_dot))
        alpha_dot = _real_part(q_dot, w) + _real_part(q, w_dot)
        r_dot = w_dot - alpha_dot * q - alpha * q_dot - beta_dot * before - beta * before_dot
        next_beta_dot = jnp.where(inverse != 0, _real_part(after, r_dot), 0)
        x = (r_dot - next_beta_dot * after) * inverse
        known = steps.upto(k)
        along = inner(known, x) + inner(basis_dot, after)
        after_dot = x - jnp.einsum("bm,bmn->bn", along, known, precision=lax.Precision.HIGHEST)
        after_dot = jnp.where(inverse != 0, after_dot, 0)
        row = jnp.where(k + 1 < count, after_dot, q_dot)
        return (
            lax.dynamic_update_index_in_dim(basis_dot, row, jnp.minimum(k + 1, count - 1), axis=1),
            diagonal_dot.at[:, k].set(alpha_dot[:, 0]),
            off_dot.at[:, k].set(next_beta_dot[:, 0]),
        )

    zero = jnp.zeros_like(steps.diagonal)
    state = jnp.zeros_like(steps.basis).at[:, 0].set(first_dot), zero, zero
    basis_dot, diagonal_dot, off_dot = fori_loop(0, count, step, state)
    return basis_dot, diagonal_dot.real, off_dot[:, : count - 1].real, norm_dot[:, 0].real


def _pull(
    parts: Moving, found: Decomposition, basis: Array, diagonal: Array, off: Array, norm: Array
) -> Any:
    """The cotangents of the operator's arrays and of the start vectors: the transpose of `_push`, line by line."""
    steps = _Steps.of(found)
    count, dtype = steps.basis.shape[1], steps.basis.dtype

    def step(i: Any, state: Any) -> Any:
        total, of_basis, of_off = state
        k = count - 1 - i
        before, q, after, beta, alpha, inverse = steps.at(k)
        above, below = jnp.minimum(k + 1, count - 1), jnp.maximum(k - 1, 0)
        known = steps.upto(k)
        of_after = jnp.where(inverse != 0, of_basis[:, above], 0)
        along = inner(known, of_after)
        of_basis = of_basis - along.conj()[:, :, None] * after[:, None, :]
        x = of_after - jnp.einsum("bm,bmn->bn", along, known, precision=lax.Precision.HIGHEST)
        rho = (x - after * _real_part(after, x)) * inverse
        rho = rho + jnp.where(inverse != 0, of_off[:, k, None], 0) * after
        a = of_diagonal[:, k, None] - _real_part(q, rho)
        of_q = of_basis[:, k] - alpha * rho + multiply(parts.whole(parts.arrays), rho + 2 * a * q)
        of_before = of_basis[:, below] - beta * rho
        of_beta = of_off[:, below] - _real_part(before, rho)[:, 0]
        # In this order: for k = 0 there is no earlier vector, and `of_q` must be what remains there.
        of_basis = of_basis.at[:, below].set(of_before).at[:, k].set(of_q)
        change = pulled(parts, rho + a * q, q)
        of_off = of_off.at[:, below].set(jnp.where(k > 0, of_beta, of_off[:, below]))
        return jax.tree.map(jnp.add, total, change), of_basis, of_off

    of_diagonal = diagonal.astype(dtype)
    of_off = jnp.pad(off, ((0, 0), (0, 1))).astype(dtype)
    zero = jax.tree.map(jnp.zeros_like, parts.arrays)
    total, of_basis, _ = fori_loop(0, count, step, (zero, basis.conj(), of_off))
    first, inverse = _unit(found)
    of_first = of_basis[:, 0]
    of_start = (of_first - first * _real_part(first, of_first)) * inverse
    of_start = of_start + jnp.where(inverse != 0, norm[:, None].astype(dtype), 0) * first
    return total, of_start.conj()


def pulled(parts: Moving, left: Array, right: Array) -> Any:
    """The derivative of the sum of Re <left, A right> with respect to the arrays of A."""

    def share(arrays: Any) -> Array:
        return jnp.sum(left.conj() * multiply(parts.whole(arrays), right)).real

    out, pull = jax.vjp(share, parts.arrays)
    return pull(jnp.ones_like(out))[0]
