"""What a method of diagonal estimation is, to those who write one."""

import abc

from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ._method import Budget, Method, Outcome


class DiagonalMethod(Method):
    """A way to estimate a diagonal from products with random vectors.

    Subclass it to add one: give `minimum`, and `estimate`.
    """

    @abc.abstractmethod
    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the diagonal.

        Args:
            operator: carries no derivatives.
            key: a random key.
            budget: from `minimum` products to fewer than the operator has rows.

        Returns:
            An `Outcome` whose `value` and `variance` have the shape `(size,)`. Its pairs of vectors are summed element
            by element: `d value = sum_j conj(left_j) * (dA right_j)`.
        """
