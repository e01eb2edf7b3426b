"""Operators made of operators: block-diagonal operators and Kronecker products."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..show import short, type_error
from ._operator import Composite, Operator
from ._operators import as_operator
from ._vectors import Structure, check_block


def block_diagonal(*operators: Any) -> Operator:
    """The block-diagonal operator: it multiplies each of several vectors by its own operator.

    Args:
        *operators: square operators or matrices, at least one, all real or all complex.

    Returns:
        An operator on tuples of their vectors. It is symmetric or positive semidefinite if all of them are.

    Raises:
        TypeError: if there is none, one of them is not an operator, or some are real and some complex.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> operator = linalg.block_diagonal(2 * jnp.eye(2), 3 * jnp.eye(1))
        >>> print(operator.mv((jnp.ones(2), jnp.ones(1))))
        (Array([2., 2.], dtype=float32), Array([3.], dtype=float32))
    """
    where = "block_diagonal(*operators)"
    parts = tuple(as_operator(operator, where) for operator in operators)
    if not parts:
        raise type_error(
            "there is no operator to put on a diagonal",
            where=where,
            expected="at least one operator",
        )
    _check_kinds(parts, where)
    return _BlockDiagonal(
        symmetric=all(part.symmetric for part in parts),
        positive_semidefinite=all(part.positive_semidefinite for part in parts),
        parts=parts,
    )


def _check_kinds(parts: Sequence[Operator], where: str) -> None:
    if len({jnp.issubdtype(part.dtype, jnp.complexfloating) for part in parts}) > 1:
        raise type_error(
            "some of the operators are real and some complex",
            where=where,
            expected="operators that are either all real or all complex",
            got=", ".join(map(short, parts)),
            instead="`MatrixOperator(matrix.astype(complex))` of the real ones",
        )


class _BlockDiagonal(Operator):
    symmetric: bool
    positive_semidefinite: bool
    parts: tuple[Operator, ...]

    def in_structure(self) -> Structure:
        return tuple(part.in_structure() for part in self.parts)

    def mv(self, vector: Any) -> Any:
        return tuple(part.mv(x) for part, x in zip(self.parts, vector, strict=True))

    def adjoint_mv(self, vector: Any) -> Any:
        return tuple(part.adjoint_mv(x) for part, x in zip(self.parts, vector, strict=True))


def kronecker(left: Any, right: Any) -> Operator:
    """The Kronecker product of two operators, which multiplies matrices X from both sides: `left X right^T`.

    A product costs as many products with `left` as `right` has rows, and vice versa.

    Args:
        left: a square operator or matrix.
        right: another one, real or complex like `left`.

    Returns:
        An operator on arrays of shape `(left.size, right.size)`; read row by row, they are the vectors of
        `jnp.kron(left, right)`. It is symmetric or positive semidefinite if both are.

    Raises:
        TypeError: if one of them is not an operator, or one is real and the other complex.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> operator = linalg.kronecker(2 * jnp.eye(2), 3 * jnp.eye(3))
        >>> operator.size, float(operator.mv(jnp.ones((2, 3)))[0, 0])
        (6, 6.0)
    """
    where = "kronecker(left, right)"
    one, other = (as_operator(x, where) for x in (left, right))
    _check_kinds((one, other), where)
    return _Kronecker(
        symmetric=one.symmetric and other.symmetric,
        positive_semidefinite=one.positive_semidefinite and other.positive_semidefinite,
        left=one,
        right=other,
    )


class _Kronecker(Composite):
    symmetric: bool
    positive_semidefinite: bool
    left: Operator
    right: Operator

    def in_structure(self) -> Structure:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(self.left.dtype, self.right.dtype)
        return jax.ShapeDtypeStruct((self.left.size, self.right.size), dtype)

    def matmul(self, block: Array) -> Array:
        right = self._on_columns(block, self.right.matmul)
        return self._on_rows(right, self.left.matmul)

    def adjoint_matmul(self, block: Array) -> Array:
        right = self._on_columns(block, self.right.adjoint_matmul)
        return self._on_rows(right, self.left.adjoint_matmul)

    def _on_columns(self, block: Array, multiply: Any) -> Array:
        """Multiplies along the second axis of each matrix."""
        flat = jax.ShapeDtypeStruct((self.size,), self.dtype)
        check_block(flat, block, "kronecker(left, right).matmul(block)")
        cube = block.astype(self.dtype).reshape(self.left.size, self.right.size, -1)
        wide = jnp.moveaxis(cube, 1, 0)
        out = multiply(wide.reshape(self.right.size, -1).astype(self.right.dtype))
        return jnp.moveaxis(out.astype(cube.dtype).reshape(wide.shape), 0, 1)

    def _on_rows(self, cube: Array, multiply: Any) -> Array:
        """Multiplies along the first axis of each matrix, and flattens them again."""
        wide = cube.reshape(self.left.size, -1).astype(self.left.dtype)
        return multiply(wide).astype(cube.dtype).reshape(self.size, -1)
