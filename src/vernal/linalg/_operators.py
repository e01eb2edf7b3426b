"""Operators: what can be multiplied by vectors, as the one class that every estimator works with."""

import abc
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import Array, lax

from .._ground import callable_name
from ..modules import AbstractVar, Module, field
from ..show import short, type_error, value_error
from ..transforms import closure_to_pytree, gathered
from ._arguments import positive_int
from ._blocks import block_size
from ._vectors import Structure, check_product, dtype_of, size_of, structure_of, to_flat, to_tree

# Columns that XLA multiplies a matrix by at a time on a CPU.
_TILE = 16


class Operator(Module):
    """A square linear operator, known by its products with vectors.

    Subclass it to add a kind of operator: give `in_structure`, `mv`, and the two tags as fields. Overriding `matmul`
    pays where many products at once cost less than one by one. Most users need only `MatrixOperator` and
    `FunctionOperator`.

    Vectors are trees of arrays, all real or all complex. Algorithms see them as flat arrays of one dtype, as columns
    of a matrix; that dtype is the widest of the tree, and single precision at least.

    A tag is a promise: algorithms may use it, and check it only where that costs nothing. See `Estimate.tags_hold`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import linalg
        >>> class Circulant(linalg.Operator):
        ...     row: jax.Array
        ...     symmetric: bool = False
        ...     positive_semidefinite: bool = False
        ...
        ...     def in_structure(self):
        ...         return jax.ShapeDtypeStruct(self.row.shape, self.row.dtype)
        ...
        ...     def mv(self, vector):
        ...         product = jnp.fft.rfft(self.row).conj() * jnp.fft.rfft(vector)
        ...         return jnp.fft.irfft(product, self.row.size)
        >>> operator = Circulant(jnp.array([3.0, 1.0, 0.0, 0.0]))
        >>> print(operator.mv(jnp.array([1.0, 0.0, 0.0, 0.0])))
        [3. 0. 0. 1.]
        >>> print(operator.adjoint_mv(jnp.array([1.0, 0.0, 0.0, 0.0])))
        [3. 1. 0. 0.]
    """

    symmetric: AbstractVar[bool]
    """Whether the operator equals its conjugate transpose ("Hermitian", if it is complex)."""
    positive_semidefinite: AbstractVar[bool]
    """Whether it is symmetric without negative eigenvalues."""

    @abc.abstractmethod
    def in_structure(self) -> Structure:
        """The vectors that it takes and returns: a tree of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def mv(self, vector: Any) -> Any:
        """The product with a vector.

        Args:
            vector: a tree of arrays like `in_structure()`.

        Returns:
            A tree of the same structure and shapes.
        """

    def adjoint_mv(self, vector: Any) -> Any:
        """The product of the conjugate transpose with a vector.

        It is found by transposing `mv`, which every linear function of JAX's operations allows but one with a loop
        of unknown length in it: override it then.

        Args:
            vector: a tree of arrays like `in_structure()`.

        Returns:
            A tree of the same structure and shapes.

        Raises:
            TypeError: if a product does not look like the vector.
        """
        if self.symmetric:
            return self.mv(vector)
        structure, where = self.in_structure(), type(self).__name__

        def flat_mv(flat: Array) -> Array:
            return to_flat(structure, self.mv(to_tree(structure, flat)), where)

        flat = to_flat(structure, vector, where)
        (out,) = jax.linear_transpose(flat_mv, flat)(flat.conj())
        return to_tree(structure, out.conj())

    def least_eigenvalue(self) -> Any:
        """A number that no eigenvalue is known to be below, if it is positive semidefinite. See `logdet`."""
        return 0.0

    @property
    def size(self) -> int:
        """The number of rows."""
        return size_of(self.in_structure())

    @property
    def dtype(self) -> Any:
        """The dtype of its flat vectors."""
        return dtype_of(self.in_structure(), type(self).__name__)

    @property
    def eps(self) -> float:
        """The relative error of a product: that of the least precise numbers in its vectors."""
        return max(
            float(jnp.finfo(leaf.dtype).eps) for leaf in jtu.tree_leaves(self.in_structure())
        )

    def matmul(self, block: Array) -> Array:
        """Products with flat vectors.

        Args:
            block: the vectors, as columns of a matrix of shape `(size, k)`.

        Returns:
            The products, likewise.

        Raises:
            TypeError: if a product does not look like the vector.
        """
        return self._of_columns(self.mv, block)

    def adjoint_matmul(self, block: Array) -> Array:
        """Products of the conjugate transpose with flat vectors.

        Args:
            block: the vectors, as columns of a matrix of shape `(size, k)`.

        Returns:
            The products, likewise.

        Raises:
            TypeError: if a product does not look like the vector.
        """
        return self._of_columns(self.adjoint_mv, block)

    def products_at_once(self, columns: int) -> int:
        """How many products `matmul` makes together.

        Args:
            columns: how many are wanted.

        Returns:
            From 1 to `columns`; what is best for this operator, as `FunctionOperator` explains.
        """
        structure = self.in_structure()

        def mv(vector: Any) -> Any:
            product = self.mv(vector)
            check_product(structure, product, type(self).__name__)
            return product

        return block_size(mv, structure, columns)

    def _of_columns(self, mv: Callable[[Any], Any], block: Array) -> Array:
        structure = self.in_structure()
        where = type(self).__name__

        def product(column: Array) -> Array:
            return to_flat(structure, mv(to_tree(structure, column)), where)

        columns = block.shape[1]
        if columns == 0:
            return block
        at_once = self.products_at_once(columns)
        if at_once == columns:
            return jax.vmap(product, in_axes=1, out_axes=1)(block)
        # Reverse mode makes a product again rather than keep what it computed on the way, for all columns.
        product = jax.checkpoint(product, prevent_cse=False)
        return lax.map(product, block.T, batch_size=at_once).T


class MatrixOperator(Operator):
    """A square matrix as an operator.

    Args:
        matrix: of shape `(n, n)`, real or complex floating-point, of JAX or NumPy. Products with half-precision
            matrices are made in single precision.
        symmetric: whether it equals its conjugate transpose.
        positive_semidefinite: whether it is also without negative eigenvalues. Implies `symmetric`.

    Raises:
        TypeError: if it is not floating-point.
        ValueError: if it is not square.

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
        """All of them."""
        return columns

    @property
    def eps(self) -> float:
        """That of single precision at least, in which products are made."""
        return float(jnp.finfo(self.dtype).eps)

    def _times(self, matrix: Array, block: Array) -> Array:
        columns = block.shape[1]
        # With zeros for the missing columns: 30 columns of a large matrix take 1.6 times as long as 32.
        missing = -columns % _TILE
        padded = jnp.pad(block, ((0, 0), (0, missing))) if 8 * missing <= columns else block
        product = jnp.matmul(
            matrix.astype(self.dtype),
            padded.astype(self.dtype),
            precision=lax.Precision.HIGHEST,
        )
        # On a mesh, flat vectors lie whole on every device.
        return gathered(product)[:, :columns]


class FunctionOperator(Operator):
    """A linear function of a tree of arrays as an operator.

    Args:
        fn: `fn(vector) -> product`, linear, with a product that looks like the vector. It may close over anything:
            the arrays are leaves of the operator, so that derivatives with respect to them are right. A new operator
            with other arrays does not compile again if `fn` is a module, or a `functools.partial` of one function;
            a new closure does.
        example: a vector, or a tree of `jax.ShapeDtypeStruct`; only shapes and dtypes are looked at.
        symmetric: whether the operator equals its conjugate transpose.
        positive_semidefinite: whether it is also without negative eigenvalues. Implies `symmetric`.
        batch_size: how many products are made at once, of those that an estimator asks for together; the rest wait
            their turn. None chooses from what `fn` does: all at once if it computes little more than its result (a
            diagonal, a matrix); otherwise as many as fit what they compute on the way into 1 MiB (on an accelerator
            1 GiB) plus the size of the arrays that `fn` holds, which are read once for all of them. A network's
            Hessian comes to one product at a time on a CPU.

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
                "FunctionOperator needs the function that multiplies",
                where=where,
                expected="a callable",
                got=short(fn),
                instead="`MatrixOperator(matrix)` for a matrix",
            )
        if batch_size is not None:
            batch_size = positive_int(batch_size, "batch_size", "FunctionOperator(batch_size)")
        self.fn = closure_to_pytree(fn)
        leaves, treedef = jtu.tree_flatten(structure_of(example, where))
        # A `ShapeDtypeStruct` would be a leaf, in the place of an array.
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
        return self.fn(vector)

    def products_at_once(self, columns: int) -> int:
        """`batch_size`, or what is best."""
        if self.batch_size is None:
            return super().products_at_once(columns)
        return min(self.batch_size, columns)


def as_operator(operator: Any, where: str) -> Operator:
    """What a user gives as an operator: an `Operator`, a square matrix, or any object with `mv` and
    `in_structure()`. The tags of Lineax's operators are read.

    Args:
        operator: what was given; anything else is a `TypeError`.
        where: for the message.
    """
    if isinstance(operator, Operator):
        return operator
    if isinstance(operator, jax.Array | np.ndarray):
        return MatrixOperator(operator)
    if hasattr(operator, "mv") and hasattr(operator, "in_structure"):
        structure = operator.in_structure()
        symmetric, positive = _tags(operator, dtype_of(structure_of(structure, where), where))
        return FunctionOperator(
            operator.mv, structure, symmetric=symmetric, positive_semidefinite=positive
        )
    is_function = callable(operator)
    raise type_error(
        "a function alone does not say what it multiplies"
        if is_function
        else "this is not an operator",
        where=where,
        expected="a square matrix, an operator of vernal.linalg, or an object with `mv` and `in_structure()`",
        got=callable_name(operator) if is_function else short(operator),
        instead="`FunctionOperator(fn, example)` with a vector as the example",
    )


def _tags(operator: Any, dtype: Any) -> tuple[bool, bool]:
    """Whether an operator of Lineax is declared symmetric and positive semidefinite, in our sense.

    Lineax is asked only if somebody has imported it. What it calls symmetric equals its transpose, without
    conjugation.
    """
    lineax = sys.modules.get("lineax")
    if lineax is None or not isinstance(operator, lineax.AbstractLinearOperator):
        return False, False
    positive = bool(lineax.is_positive_semidefinite(operator))
    definite = positive or bool(lineax.is_negative_semidefinite(operator))
    real = not jnp.issubdtype(dtype, jnp.complexfloating)
    return definite or (real and bool(lineax.is_symmetric(operator))), positive
