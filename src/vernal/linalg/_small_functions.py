"""Functions of the small matrices that a Krylov method makes.

Difficulty. A derivative needs the upper right block of

    f( [ L  M ] )
     ( [ 0  R ] )

for the small matrices L and R of two bases. This matrix is not symmetric even if L and R are, and its eigenvectors may
coincide: f cannot be taken of its eigenvalues.

Plan. For symmetric L and R the block is `S_L (G * (S_L^T M S_R)) S_R^T` with the divided differences G of f (Daleckii
and Krein), which are derivatives where eigenvalues coincide. Otherwise f itself takes the larger matrix.

Invariants. The first derivatives of f(A) v never differentiate an eigenvector. Higher ones do, and are NaN where two
eigenvalues of a small matrix are too close for that.

Glossary: S eigenvectors, as columns; theta eigenvalues; column: the first column of f of a small matrix.
"""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from ..modules import Module
from ._eigh import eigh, resolved
from ._elementwise import Derivative
from ._frechet import divided_differences
from ._vectors import times


class SmallFunction(Module):
    """A function of small square matrices.

    Args:
        f: the user's function.
    """

    f: Callable[[Array], Array]

    @abc.abstractmethod
    def column(self, matrix: Array) -> Array:
        """The first column of f of a matrix of shape `(m, m)`."""

    @abc.abstractmethod
    def block(self, left: Array, middle: Array, right: Array) -> Array:
        """The upper right block of f of the block triangular matrix."""

    @abc.abstractmethod
    def adjoint(self) -> "SmallFunction":
        """The function g with `g(A^*) = f(A)^*`."""

    @abc.abstractmethod
    def rounding(self, matrix: Array, eps: float) -> Array:
        """How far errors of the matrix, of eps times its largest element, move the column."""


class OfEigenvalues(SmallFunction):
    """A function of the eigenvalues of symmetric matrices.

    Args:
        f: acts element by element.
        positive: whether eigenvalues below zero are rounding errors.
    """

    positive: bool

    def column(self, matrix: Array) -> Array:
        nodes, vectors = self._eigen(matrix)
        values = self.f(nodes)
        # A node without weight counts for nothing, whatever f is there.
        values = jnp.where(vectors[0] == 0, 0, values) * vectors[0].astype(values.dtype)
        return times(vectors.astype(values.dtype), values)

    def block(self, left: Array, middle: Array, right: Array) -> Array:
        (rows, s_left), (columns, s_right) = self._eigen(left), self._eigen(right)
        s_left, s_right = resolved(self.f, rows, s_left), resolved(self.f, columns, s_right)
        differences = divided_differences(self.f, rows[None], columns[None])[0]
        inner = times(times(s_left.T, middle.astype(left.dtype)), s_right)
        inner = jnp.where(inner == 0, 0, differences) * inner.astype(differences.dtype)
        return times(times(s_left.astype(inner.dtype), inner), s_right.T.astype(inner.dtype))

    def adjoint(self) -> SmallFunction:
        return OfEigenvalues(_Conjugate(self.f), self.positive)

    def rounding(self, matrix: Array, eps: float) -> Array:
        nodes, vectors = self._eigen(matrix)
        step = eps * jnp.max(jnp.abs(nodes))
        # The smaller one: a slope may be infinite at the end of the domain, and f undefined beyond it.
        by_slope = jnp.abs(Derivative(self.f)(nodes)) * step
        moved = jnp.fmin(by_slope, jnp.abs(self.f(nodes + step) - self.f(nodes)))
        return jnp.linalg.norm(jnp.where(vectors[0] == 0, 0, moved * vectors[0]))

    def _eigen(self, matrix: Array) -> tuple[Array, Array]:
        nodes, vectors = eigh(matrix)
        return jnp.maximum(nodes, 0) if self.positive else nodes, vectors


class OfMatrix(SmallFunction):
    """A function of any square matrix, of any size."""

    def column(self, matrix: Array) -> Array:
        value = self._of(matrix)
        return jnp.where(commutes(matrix, value), value[:, 0], jnp.nan)

    def block(self, left: Array, middle: Array, right: Array) -> Array:
        m = len(left)
        whole = jnp.block([[left, middle.astype(left.dtype)], [jnp.zeros_like(middle.T), right]])
        return self._of(whole)[:m, m:]

    def adjoint(self) -> SmallFunction:
        return OfMatrix(_Adjoint(self.f))

    def rounding(self, matrix: Array, eps: float) -> Array:
        change = self.block(matrix, jnp.eye(len(matrix), dtype=matrix.dtype), matrix)[:, 0]
        return eps * jnp.max(jnp.abs(matrix)) * jnp.linalg.norm(change)

    def _of(self, matrix: Array) -> Array:
        # Accelerators multiply in lower precision by default.
        with jax.default_matmul_precision("highest"):
            value = self.f(matrix)
        if jnp.iscomplexobj(value) and not jnp.iscomplexobj(matrix):
            real = jnp.finfo(value.dtype).eps ** 0.5 * jnp.max(jnp.abs(value))
            value = jnp.where(jnp.max(jnp.abs(value.imag)) <= real, value.real, jnp.nan)
        return value.astype(matrix.dtype)


def commutes(matrix: Array, value: Array) -> Array:
    """Whether `f(M) M = M f(M)` up to rounding: so it is for a function of a matrix, not for one that acts element by
    element."""
    difference = jnp.max(jnp.abs(times(value, matrix) - times(matrix, value)))
    eps = float(jnp.finfo(matrix.dtype).eps)
    largest = jnp.max(jnp.abs(matrix)) * jnp.max(jnp.abs(value))
    return difference <= len(matrix) * eps**0.5 * largest


class _Conjugate(Module):
    f: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        return self.f(x).conj()


class _Adjoint(Module):
    f: Callable[[Array], Array]

    def __call__(self, matrix: Array) -> Array:
        return self.f(matrix.conj().T).conj().T
