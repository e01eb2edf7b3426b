"""Functions of the small matrices that a Krylov method makes.

Difficulty. A derivative needs the upper right block of

    f( [ L  M ] )
     ( [ 0  R ] )

for the small matrices L and R of two bases. This matrix is not symmetric even if L and R are, and its eigenvectors may
coincide: f cannot be taken of its eigenvalues.

Plan. For symmetric L and R the block comes from the eigenvalues and vectors of both (`_spectral`), with all its
derivatives. Otherwise f itself takes the larger matrix.

Glossary: S eigenvectors, as columns; theta eigenvalues; column: the first column of f of a small matrix.
"""

import abc
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from ..modules import Module
from ._elementwise import Derivative, scale_of
from ._lanczos_adjoint import norms
from ._spectral import Hermitian, column_of, difference
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
    def rounding(self, matrix: Array, step: Array) -> Array:
        """How far errors of the matrix of length `step` move the column."""

    @abc.abstractmethod
    def scale(self, matrix: Array) -> Array:
        """How far eigenvalues must move for the slope of f to change by its own size; zero if unknown."""


class OfEigenvalues(SmallFunction):
    """A function of the eigenvalues of symmetric matrices.

    Args:
        f: acts element by element.
        positive: whether eigenvalues below zero are rounding errors.
    """

    positive: bool

    def column(self, matrix: Array) -> Array:
        return column_of(self.f, self._eigen(matrix))

    def block(self, left: Array, middle: Array, right: Array) -> Array:
        return difference(self.f, self._eigen(left), middle, self._eigen(right))

    def adjoint(self) -> SmallFunction:
        return OfEigenvalues(_Conjugate(self.f), self.positive)

    def rounding(self, matrix: Array, step: Array) -> Array:
        small = self._eigen(matrix)
        nodes, weights = small.nodes, small.vectors[0]
        # The smaller one: a slope may be infinite at the end of the domain, and f undefined beyond it.
        by_slope = jnp.abs(Derivative(self.f)(nodes)) * step
        moved = jnp.fmin(by_slope, jnp.abs(self.f(nodes + step) - self.f(nodes)))
        return _norm(jnp.where(weights == 0, 0, moved * weights))

    def scale(self, matrix: Array) -> Array:
        return scale_of(self.f, self._eigen(matrix).nodes)

    def _eigen(self, matrix: Array) -> Hermitian:
        found = Hermitian.of(matrix)
        nodes = jnp.maximum(found.nodes, 0) if self.positive else found.nodes
        return Hermitian(matrix, nodes, found.vectors)


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

    def rounding(self, matrix: Array, step: Array) -> Array:
        change = self.block(matrix, jnp.eye(len(matrix), dtype=matrix.dtype), matrix)[:, 0]
        return step * _norm(change)

    def scale(self, matrix: Array) -> Array:
        m, eye = len(matrix), jnp.eye(len(matrix), dtype=matrix.dtype)
        # The first row of f of this block matrix holds f, f', f'' / 2.
        shift = jnp.kron(jnp.eye(3, k=1, dtype=matrix.dtype), eye)
        row = self._of(jnp.kron(jnp.eye(3, dtype=matrix.dtype), matrix) + shift)[:m]
        slope, curvature = _norm(row[:, m : 2 * m]), 2 * _norm(row[:, 2 * m :])
        return jnp.where(curvature > 0, slope / jnp.where(curvature > 0, curvature, 1), 0)

    def _of(self, matrix: Array) -> Array:
        # Accelerators multiply in lower precision by default.
        with jax.default_matmul_precision("highest"):
            value = self.f(matrix)
        if jnp.iscomplexobj(value) and not jnp.iscomplexobj(matrix):
            real = jnp.finfo(value.dtype).eps ** 0.5 * jnp.max(jnp.abs(value))
            value = jnp.where(jnp.max(jnp.abs(value.imag)) <= real, value.real, jnp.nan)
        return value.astype(matrix.dtype)


def _norm(x: Array) -> Array:
    """The Frobenius norm, however small or large the elements are."""
    return norms(jnp.ravel(x)[None])[0]


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
