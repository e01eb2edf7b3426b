"""`Operator`: the linear operators of this library, and their algebra.

Sums, products, multiples, shifts and adjoints multiply blocks of vectors as their parts do. Their tags are True only if
that follows from the tags of the parts; a traced value (a factor whose sign is unknown) proves nothing.
"""

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array, lax

from ..modules import AbstractVar, Module
from ..show import short, type_error
from ._blocks import block_size
from ._operands import as_number, check_alike, is_not_negative, refuse_vector
from ._per_device import varying_like_result
from ._vectors import (
    Structure,
    check_block,
    check_product,
    dtype_of,
    flat_vector,
    size_of,
    to_flat,
    to_tree,
)


class Operator(Module):
    """A square linear operator, known by its products with vectors.

    Most users need only `MatrixOperator` and `FunctionOperator`. To add a kind of operator, subclass this class and
    define `in_structure`, `mv`, and the two tags as fields. Override `matmul` if many products at once cost less than
    one by one.

    Vectors are trees of arrays, all real or all complex. Algorithms see them as flat arrays of one dtype, as columns
    of a matrix. That dtype is the widest of the tree, and at least single precision.

    A tag is a promise: algorithms may rely on it, and check it only where that costs nothing. See `Estimate.tags_hold`.

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
        """The structure of the operator's vectors: a tree of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def mv(self, vector: Any) -> Any:
        """Multiplies a vector by the operator.

        Args:
            vector: a tree of arrays like `in_structure()`.

        Returns:
            A tree of the same structure and shapes.
        """

    def adjoint_mv(self, vector: Any) -> Any:
        """Multiplies a vector by the conjugate transpose.

        By default it transposes `mv`. JAX can transpose every linear function except one that contains a loop of
        unknown length: in that case, override this method.

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

        flat = flat_vector(structure, vector, f"{where}.adjoint_mv(vector)")
        flat = varying_like_result(flat_mv, flat.conj())
        (out,) = jax.linear_transpose(flat_mv, flat)(flat)
        return to_tree(structure, out.conj())

    def least_eigenvalue(self) -> Any:
        """A lower bound of the eigenvalues, if the operator is positive semidefinite. See `logdet`."""
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
        """The relative error of a product: that of the least precise dtype in its vectors."""
        return max(
            float(jnp.finfo(leaf.dtype).eps) for leaf in jtu.tree_leaves(self.in_structure())
        )

    def matmul(self, block: Array) -> Array:
        """Multiplies flat vectors by the operator.

        Args:
            block: the vectors, as columns of a matrix of shape `(size, k)`.

        Returns:
            The products, likewise.

        Raises:
            TypeError: if the columns are not vectors of the operator, or a product does not look like the vector.
        """
        return self._of_columns(self.mv, block)

    def adjoint_matmul(self, block: Array) -> Array:
        """Multiplies flat vectors by the conjugate transpose.

        Args:
            block: the vectors, as columns of a matrix of shape `(size, k)`.

        Returns:
            The products, likewise.

        Raises:
            TypeError: if the columns are not vectors of the operator, or a product does not look like the vector.
        """
        return self._of_columns(self.adjoint_mv, block)

    def products_at_once(self, columns: int) -> int:
        """The number of products that `matmul` makes at once.

        Args:
            columns: the number of products that are wanted.

        Returns:
            A number from 1 to `columns`: the best one for this operator, as `FunctionOperator` explains.
        """
        structure = self.in_structure()

        def mv(vector: Any) -> Any:
            product = self.mv(vector)
            check_product(structure, product, type(self).__name__)
            return product

        return block_size(mv, structure, columns)

    @property
    def H(self) -> "Operator":
        """The conjugate transpose."""
        return self if self.symmetric else _Adjoint(False, False, self)

    @property
    def T(self) -> "Operator":
        """The transpose of a real operator. `TypeError` for a complex one, where `H` is nearly always meant."""
        if jnp.issubdtype(self.dtype, jnp.complexfloating):
            raise type_error(
                "`T` is ambiguous for a complex operator: transpose or conjugate transpose",
                where=f"{type(self).__name__}.T",
                expected="a real operator",
                got=short(self),
                instead="`operator.H` for the conjugate transpose",
            )
        return self.H

    def __add__(self, other: Any) -> "Operator":
        if not isinstance(other, Operator):
            return NotImplemented
        check_alike(self.in_structure(), other.in_structure(), "+")
        positive = self.positive_semidefinite and other.positive_semidefinite
        return _Sum(self.symmetric and other.symmetric, positive, self, other)

    def __sub__(self, other: Any) -> "Operator":
        return self + (-other) if isinstance(other, Operator) else NotImplemented

    def __neg__(self) -> "Operator":
        return -1.0 * self

    def __matmul__(self, other: Any) -> "Operator":
        if not isinstance(other, Operator):
            refuse_vector(other, "operator @ vector")
            return NotImplemented
        check_alike(self.in_structure(), other.in_structure(), "@")
        # Two factors that only look equal prove nothing.
        square = self is other and self.symmetric
        gram = square or _adjoint_of(self) is other or _adjoint_of(other) is self
        return _Product(gram, gram, self, other)

    def __rmatmul__(self, other: Any) -> "Operator":
        refuse_vector(other, "vector @ operator")
        return NotImplemented

    def __mul__(self, factor: Any) -> "Operator":
        if isinstance(factor, Operator):
            return NotImplemented
        number = as_number(factor, self.dtype, "factor * operator")
        positive = self.positive_semidefinite and is_not_negative(factor)
        symmetric = self.symmetric and not jnp.iscomplexobj(factor)
        return _Scaled(symmetric, positive, self, number)

    __rmul__ = __mul__
    __array_ufunc__ = None  # NumPy would multiply by an operator element by element.

    def shifted(self, shift: Any, *, positive_semidefinite: bool | None = None) -> "Operator":
        """This operator plus a multiple of the identity.

        Args:
            shift: a number, which may be traced.
            positive_semidefinite: whether the sum is positive semidefinite. None means yes for a positive semidefinite
                operator and a nonnegative Python number; the sign of a traced shift is unknown.

        Returns:
            An operator on the same vectors.

        Raises:
            TypeError: if `shift` is not a number, or complex and the operator is real.

        Example:
            >>> import jax.numpy as jnp
            >>> from vernal import linalg
            >>> operator = linalg.MatrixOperator(jnp.eye(2), positive_semidefinite=True).shifted(0.5)
            >>> print(operator.mv(jnp.ones(2)), operator.positive_semidefinite)
            [1.5 1.5] True
        """
        number = as_number(shift, self.dtype, "Operator.shifted(shift)")
        positive = positive_semidefinite
        if positive is None:
            positive = self.positive_semidefinite and is_not_negative(shift)
        symmetric = positive or (self.symmetric and not jnp.iscomplexobj(shift))
        return _Shifted(symmetric, positive, self, number)

    def _of_columns(self, mv: Callable[[Any], Any], block: Array) -> Array:
        structure = self.in_structure()
        where = type(self).__name__.removeprefix("_")

        def product(column: Array) -> Array:
            return to_flat(structure, mv(to_tree(structure, column)), where)

        check_block(jax.ShapeDtypeStruct((self.size,), self.dtype), block, f"{where}.matmul(block)")
        columns = block.shape[1]
        if columns == 0:
            return block
        at_once = self.products_at_once(columns)
        if at_once == columns:
            return jax.vmap(product, in_axes=1, out_axes=1)(block)
        # Reverse mode makes a product again instead of storing its intermediate values for all columns.
        product = jax.checkpoint(product, prevent_cse=False)
        return lax.map(product, block.T, batch_size=at_once).T


class Composite(Operator):
    """An operator defined by its products with blocks of flat vectors."""

    def mv(self, vector: Any) -> Any:
        """The product with a vector."""
        return self._single(self.matmul, vector)

    def adjoint_mv(self, vector: Any) -> Any:
        """The product of the conjugate transpose with a vector."""
        return self._single(self.adjoint_matmul, vector)

    @abc.abstractmethod
    def matmul(self, block: Array) -> Array:
        """Products with the columns of a matrix."""

    @abc.abstractmethod
    def adjoint_matmul(self, block: Array) -> Array:
        """Products of the conjugate transpose with the columns of a matrix."""

    def _single(self, matmul: Callable[[Array], Array], vector: Any) -> Any:
        structure, where = self.in_structure(), f"{type(self).__name__}.mv(vector)"
        flat = flat_vector(structure, vector, where)
        return to_tree(structure, matmul(flat[:, None])[:, 0])


class _Binary(Composite):
    symmetric: bool
    positive_semidefinite: bool
    left: Operator
    right: Operator

    def in_structure(self) -> Structure:
        return self.left.in_structure()


class _Sum(_Binary):
    def matmul(self, block: Array) -> Array:
        return self.left.matmul(block) + self.right.matmul(block)

    def adjoint_matmul(self, block: Array) -> Array:
        return self.left.adjoint_matmul(block) + self.right.adjoint_matmul(block)

    def least_eigenvalue(self) -> Any:
        return self.left.least_eigenvalue() + self.right.least_eigenvalue()


class _Product(_Binary):
    def matmul(self, block: Array) -> Array:
        return self.left.matmul(self.right.matmul(block))

    def adjoint_matmul(self, block: Array) -> Array:
        return self.right.adjoint_matmul(self.left.adjoint_matmul(block))


class _Unary(Composite):
    symmetric: bool
    positive_semidefinite: bool
    operator: Operator

    def in_structure(self) -> Structure:
        return self.operator.in_structure()


class _Adjoint(_Unary):
    @property
    def H(self) -> Operator:
        return self.operator

    def matmul(self, block: Array) -> Array:
        return self.operator.adjoint_matmul(block)

    def adjoint_matmul(self, block: Array) -> Array:
        return self.operator.matmul(block)


class _Scaled(_Unary):
    factor: Array

    def matmul(self, block: Array) -> Array:
        return self.factor * self.operator.matmul(block)

    def adjoint_matmul(self, block: Array) -> Array:
        return self.factor.conj() * self.operator.adjoint_matmul(block)

    def least_eigenvalue(self) -> Any:
        return self.factor.real * self.operator.least_eigenvalue()


class _Shifted(_Unary):
    shift: Array

    def matmul(self, block: Array) -> Array:
        return self.operator.matmul(block) + self.shift * block

    def adjoint_matmul(self, block: Array) -> Array:
        return self.operator.adjoint_matmul(block) + self.shift.conj() * block

    def least_eigenvalue(self) -> Any:
        known = self.operator.positive_semidefinite
        return self.shift.real + self.operator.least_eigenvalue() if known else 0.0


def _adjoint_of(operator: Operator) -> Operator | None:
    return operator.operator if isinstance(operator, _Adjoint) else None
