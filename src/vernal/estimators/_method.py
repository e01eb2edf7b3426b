"""What a method of estimation is, to those who write one: what it is given and what it hands back."""

import abc
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ..modules import Module
from ._gradient_pairs import GradientPairs
from ._probes import Probes, Rademacher, Steinhaus

# Products with a block that is only partly used are made in pieces of so many columns.
_PIECE = 16


class Budget(Module):
    """How many products may be made.

    Args:
        most: what shapes are made for.
        used: how many to make, from the method's minimum to `most`; an array where several budgets share a
            compilation.
    """

    most: int
    used: int | Array

    @property
    def is_shared(self) -> bool:
        """Whether `used` is known only when the program runs."""
        return not isinstance(self.used, int)

    def part(self, divisor: int) -> "Budget":
        """The whole number of times that `divisor` fits."""
        return Budget(self.most // divisor, self.used // divisor)

    def mask(self) -> Array | None:
        """Which of `most` columns are used, of shape `(most,)`; None for all of them."""
        return jnp.arange(self.most) < self.used if self.is_shared else None

    def drawn(self, operator: Operator, probes: Probes, key: PRNGKeyArray) -> Array:
        """Probes as the columns of a matrix of shape `(size, most)`; zeros in those that are not used."""
        block = probes.draw(key, operator.size, self.most, operator.dtype)
        mask = self.mask()
        return block if mask is None else jnp.where(mask[None, :], block, 0)


class Outcome(Module):
    """What a method found.

    Args:
        value: a scalar, or a diagonal; real if the operator is symmetric or real.
        variance: an unbiased estimate, if possible, of the mean of `|value - truth|**2`; real, like `value`.
        degrees_of_freedom: of Student's distribution of the error in units of its standard error; a scalar.
        matvecs: how many products were made.
        consistent: False if a tag that the method uses was seen to be false.
        gradient_pairs: the pairs of vectors of which the derivative is made.
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
    """The fewest products from which 95% intervals hold the truth in 93% of cases or more."""
    needs_positive_semidefinite: ClassVar[bool] = False
    """Whether it refuses operators that do not promise to be positive semidefinite."""

    @abc.abstractmethod
    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace, or the diagonal.

        Args:
            operator: carries no derivatives.
            key: a random key.
            budget: from `minimum` products to fewer than the operator has rows.
        """


class TraceMethod(Method):
    """A way to estimate a trace. Subclass it to add one: give `minimum`, and `estimate`."""


class DiagonalMethod(Method):
    """A way to estimate a diagonal. Subclass it to add one: give `minimum`, and `estimate`.

    The outcome's `value` and `variance` have the shape `(size,)`, and its pairs of vectors are summed element by
    element: `d value = sum_j conj(left_j) * (dA right_j)`.
    """


def products(
    operator: Operator, block: Array, used: int | Array, *, adjoint: bool = False
) -> Array:
    """Products with the first `used` columns of a matrix; the others are zero, and cost nothing.

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
    return lax.fori_loop(0, pieces, add, jnp.zeros_like(padded))[:, :columns]


def default_probes(operator: Operator) -> Probes:
    """Signs, of complex numbers for a complex operator: the least variance."""
    return Steinhaus() if jnp.issubdtype(operator.dtype, jnp.complexfloating) else Rademacher()
