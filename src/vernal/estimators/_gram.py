"""Operators divided by a unit, whose powers have traces: a symmetric one, and `A^* A`."""

from typing import Any

from jax import Array

from ..linalg import Composite, Operator


class InUnits(Composite):
    """A symmetric operator, divided by a unit: powers of its eigenvalues are representable."""

    symmetric: bool
    positive_semidefinite: bool
    operator: Operator
    unit: Array

    def in_structure(self) -> Any:
        return self.operator.in_structure()

    def matmul(self, block: Array) -> Array:
        return self.operator.matmul(block) / self.unit.astype(block.dtype)

    def adjoint_matmul(self, block: Array) -> Array:
        return self.matmul(block)

    def least_eigenvalue(self) -> Any:
        return self.operator.least_eigenvalue() / self.unit

    def products_at_once(self, columns: int) -> int:
        return self.operator.products_at_once(columns)


class Gram(InUnits):
    """`A^* A`, divided by the square of a unit."""

    def matmul(self, block: Array) -> Array:
        return self.back(self.half(block))

    def half(self, block: Array) -> Array:
        """Products with `A`, divided by the unit."""
        return super().matmul(block)

    def back(self, block: Array) -> Array:
        """Products with `A^*`, divided by the unit."""
        return self.operator.adjoint_matmul(block) / self.unit.astype(block.dtype)

    def least_eigenvalue(self) -> Any:
        return 0.0
