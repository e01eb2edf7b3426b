"""The interface of a method of estimation: what it receives and what it returns."""

import abc
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, fori_loop
from ..modules import Module
from ._gradient_pairs import GradientPairs
from ._probes import Probes, Rademacher, Steinhaus

# The fewest probes of an error estimate: the signs of fewer agree by chance too often, and then show no variance.
FEWEST_PROBES = 5
# Products with a partly used block are made in pieces of this many columns.
_PIECE = 16


class Budget(Module):
    """The number of products that may be made.

    Args:
        most: the number that shapes are made for.
        used: the number to make, from the method's minimum to `most`; an array where several budgets share a
            compilation.
    """

    most: int
    used: int | Array

    @property
    def is_shared(self) -> bool:
        """Whether `used` is known only when the program runs."""
        return not isinstance(self.used, int)

    def part(self, divisor: int) -> "Budget":
        """This budget divided by `divisor`, rounded down."""
        return Budget(self.most // divisor, self.used // divisor)

    def mask(self) -> Array | None:
        """The mask of used columns, of shape `(most,)`; None if all are used."""
        return jnp.arange(self.most) < self.used if self.is_shared else None

    def drawn(self, operator: Operator, probes: Probes, key: PRNGKeyArray) -> Array:
        """Probes as the columns of a matrix of shape `(size, most)`; unused columns are zero."""
        block = probes.draw(key, operator.size, self.most, operator.dtype)
        mask = self.mask()
        return block if mask is None else jnp.where(mask[None, :], block, 0)


class Outcome(Module):
    """The result of a method.

    Args:
        value: a scalar, or a diagonal; real if the operator is symmetric or real.
        variance: an unbiased estimate, if possible, of the mean of `|value - truth|**2`; real, like `value`.
        degrees_of_freedom: of the Student distribution of the error divided by its standard error; a scalar.
        matvecs: the number of products that were made.
        consistent: False if the products contradicted a tag that the method uses.
        gradient_pairs: the pairs of vectors that define the derivative.
    """

    value: Array
    variance: Array
    degrees_of_freedom: Array
    matvecs: Array
    consistent: Array
    gradient_pairs: GradientPairs


class Method(Module):
    """A way to estimate something from products with random vectors."""

    minimum: ClassVar[int]
    """The fewest products from which 95% intervals hold the truth in 93% of cases or more, for usual spectra."""
    needs_positive_semidefinite: ClassVar[bool] = False
    """Whether it refuses operators that do not promise to be positive semidefinite."""

    @abc.abstractmethod
    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace, or the diagonal.

        Args:
            operator: the operator, without derivatives.
            key: a random key.
            budget: from `minimum` products to fewer than the operator has rows.
        """


class TraceMethod(Method):
    """A way to estimate a trace. To add one, subclass it and define `minimum` and `estimate`."""


class DiagonalMethod(Method):
    """A way to estimate a diagonal. To add one, subclass it and define `minimum` and `estimate`.

    The outcome's `value` and `variance` have the shape `(size,)`. Its pairs of vectors are summed element by element:
    `d value = sum_j conj(left_j) * (dA right_j)`.
    """


def products(
    operator: Operator, block: Array, used: int | Array, *, adjoint: bool = False
) -> Array:
    """Products with the first `used` columns of a matrix; the others are zero and cost nothing.

    Columns from `used` on must be zero. `adjoint` multiplies by the conjugate transpose of the operator.
    """
    multiply = operator.adjoint_matmul if adjoint else operator.matmul
    columns = block.shape[1]
    if isinstance(used, int) or columns <= _PIECE:
        return multiply(block)
    padded = jnp.pad(block, ((0, 0), (0, -columns % _PIECE)))

    def add(piece: Array, out: Array) -> Array:
        start = piece * _PIECE
        vectors = lax.dynamic_slice_in_dim(padded, start, _PIECE, axis=1)
        return lax.dynamic_update_slice_in_dim(out, multiply(vectors), start, axis=1)

    pieces = -(-used // _PIECE)
    return fori_loop(0, pieces, add, jnp.zeros_like(padded))[:, :columns]


def default_probes(operator: Operator) -> Probes:
    """Signs, or complex phases for a complex operator: the least variance."""
    return Steinhaus() if jnp.issubdtype(operator.dtype, jnp.complexfloating) else Rademacher()
