"""`kernel_operator`: the matrix of a kernel between points, never stored whole.

A product makes a few rows of the matrix at a time and multiplies all vectors by them. Reverse mode makes the rows
again, block by block, so its memory, too, is that of one block.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array, lax

from .._ground import callable_name
from ..show import short, type_error, value_error
from ..transforms import check_callable, closure_to_pytree, filter_eval_shape
from ..trees import is_array
from ._arguments import positive_int, real_array
from ._operator import Operator

# Elements of the matrix in memory at once.
_CPU, _ACCELERATOR = 2**20, 2**26


def kernel_operator(
    kernel: Callable[[Any, Any], Any],
    points: Any,
    *,
    noise: Any = 0.0,
    batch_size: int | None = None,
) -> Operator:
    """The matrix of a kernel between points, `K[i, j] = kernel(points[i], points[j])`, plus noise on the diagonal.

    Each product makes it a few rows at a time, so memory grows with the number of points, not with its square. It can
    be differentiated with respect to the kernel's parameters, the points and the noise.

    Args:
        kernel: `kernel(a, b)` returns a number for two points. A module, whose arrays are its parameters, or a
            function, whose parameters are the arrays that it closes over. It must be symmetric (`kernel(b, a)` is the
            conjugate of `kernel(a, b)`) and positive semidefinite; this is not checked.
        points: an array of shape `(n, ...)`, or a tree of such arrays. A point is the tree of their elements at one
            index.
        noise: a nonnegative number, or array of shape `()` or `(n,)`, that is added to the diagonal.
        batch_size: the number of rows that are made at once. None takes as many as have 2**20 elements (2**26 on an
            accelerator).

    Returns:
        A positive semidefinite operator on vectors of shape `(n,)`, with the dtype that the kernel returns.

    Raises:
        TypeError: if `kernel` is not a function or does not return a floating-point number for two points, `noise` is
            not real numbers, or `batch_size` is traced or not an int.
        ValueError: if `points` are not arrays of one length, `noise` has the wrong shape, or `batch_size` is less
            than 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> kernel = lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2))
        >>> operator = linalg.kernel_operator(kernel, jnp.array([[0.0], [5.0]]), noise=0.5)
        >>> print(operator.mv(jnp.array([1.0, 2.0])))
        [1.5 3. ]
    """
    where = "kernel_operator(kernel, points)"
    check_callable(kernel, "kernel_operator")
    size = _count(points, where)
    points = jtu.tree_map(jnp.asarray, points)
    point = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), points)
    value = filter_eval_shape(kernel, point, point)
    if not (_is_number(value) and jnp.issubdtype(value.dtype, jnp.inexact)):
        raise type_error(
            f"the kernel `{callable_name(kernel)}` must return one floating-point number for two points",
            where=where,
            expected="an array of shape ()",
            got=short(value),
            instead="a function of two points, called as `kernel(points[i], points[j])`",
        )
    real = jnp.finfo(value.dtype).dtype
    added = real_array(noise, "noise", "kernel_operator(noise)", real)
    if added.shape not in ((), (size,)):
        raise value_error(
            "the noise does not fit the points",
            where="kernel_operator(noise)",
            expected=f"an array of shape () or ({size},)",
            got=short(added),
        )
    if batch_size is not None:
        batch_size = positive_int(batch_size, "batch_size", "kernel_operator(batch_size)")
    return KernelOperator(
        kernel=closure_to_pytree(kernel),
        points=points,
        noise=added,
        count=size,
        kind=jnp.dtype(value.dtype).name,
        batch_size=batch_size,
    )


class KernelOperator(Operator):
    """The operator that `kernel_operator` returns."""

    kernel: Callable[[Any, Any], Any]
    points: Any
    noise: Array
    count: int
    kind: str
    batch_size: int | None
    symmetric: bool = True
    positive_semidefinite: bool = True

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.count,), jnp.dtype(self.kind))

    def least_eigenvalue(self) -> Array:
        return jnp.min(self.noise)

    def kernel_diagonal(self) -> Array:
        """The diagonal without noise."""
        return jax.vmap(self.kernel)(self.points, self.points)

    def kernel_rows(self, places: Array) -> Array:
        """Some rows, without noise, of shape `(len(places), n)`."""
        some = jtu.tree_map(lambda x: x[places], self.points)
        return jax.vmap(lambda a: jax.vmap(lambda b: self.kernel(a, b))(self.points))(some)

    def mv(self, vector: Array) -> Array:
        return self.matmul(vector[:, None])[:, 0].astype(self.kind)

    def matmul(self, block: Array) -> Array:
        def row(point: Any) -> Array:
            entries = jax.vmap(lambda other: self.kernel(point, other))(self.points)
            return jnp.matmul(entries.astype(block.dtype), block, precision=lax.Precision.HIGHEST)

        # Reverse mode makes the rows again.
        row = jax.checkpoint(row, prevent_cse=False)
        product = lax.map(row, self.points, batch_size=self._rows())
        return product + self.noise.astype(block.dtype).reshape(-1, 1) * block

    def adjoint_matmul(self, block: Array) -> Array:
        return self.matmul(block)

    def products_at_once(self, columns: int) -> int:
        return columns

    def _rows(self) -> int:
        room = _CPU if jax.default_backend() == "cpu" else _ACCELERATOR
        return min(self.batch_size or max(1, room // max(1, self.count)), self.count)


def _is_number(value: Any) -> bool:
    return isinstance(value, jax.ShapeDtypeStruct) and value.shape == ()


def _count(points: Any, where: str) -> int:
    """The number of points; `ValueError` if they are not arrays of one length."""
    leaves = jtu.tree_leaves(points)
    if leaves and all(is_array(x) and x.ndim > 0 for x in leaves):
        lengths = {len(x) for x in leaves}
        if len(lengths) == 1 and 0 not in lengths:
            return lengths.pop()
    raise value_error(
        "the points must be arrays of the same length",
        where=where,
        expected="an array of shape (n, ...), or a tree of such arrays, with n at least 1",
        got=short(points),
        instead="an array with one point in each row",
    )
