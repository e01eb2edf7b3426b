"""Matrices, functions and foreign objects as operators."""

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array, lax

from .._ground import callable_name
from ..modules import field
from ..show import short, type_error, value_error
from ..transforms import closure_to_pytree, gathered
from ._arguments import positive_int
from ._operator import Operator
from ._vectors import (
    Structure,
    check_block,
    check_vector,
    dtype_of,
    is_random_key,
    structure_of,
)

# Columns that XLA multiplies a matrix by at a time on a CPU.
_TILE = 16


class MatrixOperator(Operator):
    """A square matrix as an operator.

    Args:
        matrix: a JAX or NumPy array of shape `(n, n)`, real or complex floating-point. Products with half-precision
            matrices are made in single precision.
        symmetric: whether it equals its conjugate transpose.
        positive_semidefinite: whether it also has no negative eigenvalues. Implies `symmetric`.

    Raises:
        TypeError: if the matrix is not floating-point.
        ValueError: if the matrix is not square.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.linalg import MatrixOperator
        >>> operator = MatrixOperator(jnp.diag(jnp.array([1.0, 2.0])), positive_semidefinite=True)
        >>> print(operator.mv(jnp.ones(2)), operator.symmetric)
        [1. 2.] True
    """

    matrix: Array
    symmetric: bool
    positive_semidefinite: bool

    def __init__(
        self, matrix: Any, *, symmetric: bool = False, positive_semidefinite: bool = False
    ):
        self.matrix = jnp.asarray(matrix)
        self.symmetric = symmetric or positive_semidefinite
        self.positive_semidefinite = positive_semidefinite
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise value_error(
                "the operator is not square",
                where="MatrixOperator(matrix)",
                expected="a matrix of shape (n, n)",
                got=short(self.matrix),
                instead="`jax.vmap` over a batch of matrices; `FunctionOperator` for vectors of other shapes",
            )
        dtype_of(self.in_structure(), "MatrixOperator(matrix)")

    def in_structure(self) -> jax.ShapeDtypeStruct:
        """One flat vector."""
        return jax.ShapeDtypeStruct(self.matrix.shape[:1], self.matrix.dtype)

    def mv(self, vector: Array) -> Array:
        """The product with a vector of shape `(n,)`."""
        return self.matmul(vector[:, None])[:, 0].astype(self.matrix.dtype)

    def adjoint_mv(self, vector: Array) -> Array:
        """The product of the conjugate transpose with a vector of shape `(n,)`."""
        return self.adjoint_matmul(vector[:, None])[:, 0].astype(self.matrix.dtype)

    def matmul(self, block: Array) -> Array:
        """Products with the columns of a matrix of shape `(n, k)`."""
        return self._times(self.matrix, block)

    def adjoint_matmul(self, block: Array) -> Array:
        """Products of the conjugate transpose with the columns of a matrix of shape `(n, k)`."""
        return self._times(self.matrix if self.symmetric else self.matrix.conj().T, block)

    def products_at_once(self, columns: int) -> int:
        """All products at once."""
        return columns

    @property
    def eps(self) -> float:
        """The relative error of a product; products are made in at least single precision."""
        return float(jnp.finfo(self.dtype).eps)

    def _times(self, matrix: Array, block: Array) -> Array:
        check_block(self.in_structure(), block, "MatrixOperator.mv(vector)")
        columns = block.shape[1]
        # Padded with columns of zeros: 30 columns of a large matrix take 1.6 times as long as 32.
        missing = -columns % _TILE
        padded = jnp.pad(block, ((0, 0), (0, missing))) if 8 * missing <= columns else block
        product = jnp.matmul(
            matrix.astype(self.dtype),
            padded.astype(self.dtype),
            precision=lax.Precision.HIGHEST,
        )
        # On a mesh, flat vectors are replicated on every device.
        return gathered(product)[:, :columns]


class FunctionOperator(Operator):
    """A linear function of a tree of arrays as an operator.

    Args:
        fn: `fn(vector) -> product`, linear, with a product of the structure, shapes and kind of the vector. It may
            close over anything: the arrays are leaves of the operator, so derivatives with respect to them are right.
            A new operator with other arrays does not compile again if `fn` is a module, or a `functools.partial` of
            one function; a new closure does.
        example: a vector, or a tree of `jax.ShapeDtypeStruct`; only shapes and dtypes are used.
        symmetric: whether the operator equals its conjugate transpose.
        positive_semidefinite: whether it also has no negative eigenvalues. Implies `symmetric`.
        batch_size: the number of products that are made at once; if an estimator asks for more, they are made in
            batches. None chooses from the operations of `fn`: all at once if it computes little more than its result
            (a diagonal, a matrix); otherwise as many as keep all intermediate values within 1 MiB (1 GiB on an
            accelerator) plus the size of the arrays that `fn` holds, which are read once for all of them. For a
            network's Hessian on a CPU, that is one product at a time.

    Raises:
        TypeError: if `fn` cannot be called, `example` is not a tree of floating-point arrays, or `batch_size` is
            traced or not a whole number.
        ValueError: if `batch_size` is less than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.linalg import FunctionOperator
        >>> example = {"a": jnp.zeros(2), "b": jnp.zeros(())}
        >>> operator = FunctionOperator(lambda v: {"a": 3 * v["a"], "b": -v["b"]}, example, symmetric=True)
        >>> operator.size
        3
    """

    fn: Callable[[Any], Any]
    shapes: tuple[Any, ...] = field(static=True)
    symmetric: bool
    positive_semidefinite: bool
    batch_size: int | None

    def __init__(
        self,
        fn: Callable[[Any], Any],
        example: Any,
        *,
        symmetric: bool = False,
        positive_semidefinite: bool = False,
        batch_size: int | None = None,
    ):
        where = "FunctionOperator(fn, example)"
        if not callable(fn):
            raise type_error(
                "FunctionOperator needs a function that computes `A @ v`",
                where=where,
                expected="a callable",
                got=short(fn),
                instead="`MatrixOperator(matrix)` for a matrix",
            )
        if batch_size is not None:
            batch_size = positive_int(batch_size, "batch_size", "FunctionOperator(batch_size)")
        self.fn = closure_to_pytree(fn)
        leaves, treedef = jtu.tree_flatten(structure_of(example, where))
        # A `ShapeDtypeStruct` would be a leaf, as an array is.
        self.shapes = treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        self.symmetric = symmetric or positive_semidefinite
        self.positive_semidefinite = positive_semidefinite
        self.batch_size = batch_size
        dtype_of(self.in_structure(), where)

    def in_structure(self) -> Structure:
        """Shapes and dtypes of the example."""
        treedef, leaves = self.shapes
        return treedef.unflatten([jax.ShapeDtypeStruct(*leaf) for leaf in leaves])

    def mv(self, vector: Any) -> Any:
        """The product with a tree of arrays like the example."""
        check_vector(self.in_structure(), vector, "FunctionOperator.mv(vector)")
        return self.fn(vector)

    def products_at_once(self, columns: int) -> int:
        """`batch_size`, or the best number if it is None."""
        if self.batch_size is None:
            return super().products_at_once(columns)
        return min(self.batch_size, columns)


def as_operator(operator: Any, where: str) -> Operator:
    """Converts to an `Operator`: from a square matrix, or any object with `mv` and `in_structure()`. The tags of
    Lineax's operators are read.

    Args:
        operator: one of these; anything else is a `TypeError`.
        where: for the message.
    """
    if isinstance(operator, Operator):
        return operator
    is_array = isinstance(operator, jax.Array | np.ndarray)
    if is_array and not is_random_key(operator):
        return MatrixOperator(operator)
    if not is_array and hasattr(operator, "mv") and hasattr(operator, "in_structure"):
        structure = operator.in_structure()
        symmetric, positive = _tags(operator, dtype_of(structure_of(structure, where), where))
        return FunctionOperator(
            operator.mv, structure, symmetric=symmetric, positive_semidefinite=positive
        )
    is_function = callable(operator)
    raise type_error(
        "a function needs an example of the vectors that it multiplies"
        if is_function
        else "not an operator",
        where=where,
        expected="a square matrix, an operator of vernal.linalg, or an object with `mv` and `in_structure()`",
        got=callable_name(operator) if is_function else short(operator),
        instead="`FunctionOperator(fn, example)` with a vector as the example",
    )


def refuse_empty(operator: Operator, where: str) -> None:
    """`ValueError` for an operator without rows, where algorithms would divide by their number."""
    if operator.size == 0:
        raise value_error(
            "the operator is empty",
            where=where,
            expected="vectors with at least one element",
            got=short(operator.in_structure()),
        )


def _tags(operator: Any, dtype: Any) -> tuple[bool, bool]:
    """Whether an operator of Lineax is declared symmetric and positive semidefinite, in our sense.

    Lineax is asked only if it has been imported. It calls an operator symmetric if it equals its transpose, without
    conjugation.
    """
    lineax = sys.modules.get("lineax")
    if lineax is None or not isinstance(operator, lineax.AbstractLinearOperator):
        return False, False
    positive = bool(lineax.is_positive_semidefinite(operator))
    definite = positive or bool(lineax.is_negative_semidefinite(operator))
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return definite or (real and bool(lineax.is_symmetric(operator))), positive
