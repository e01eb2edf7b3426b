"""`svds`: the largest singular values of a linear map, and their vectors."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import Module
from ..show import value_error
from ..transforms import closure_to_pytree
from ..trees import check_key, is_array
from ._eigsh import eigsh
from ._operator import Operator
from ._operators import FunctionOperator
from ._per_device import varying_like_result
from ._vectors import dtype_of, power_of_two, structure_of


class SingularTriplets(Module):
    """The result of `svds`: `A v = value u`, and `A^* u = value v`.

    Args:
        values: the largest singular values, of shape `(k,)`, in descending order.
        left: the vectors u: a tree like a product, with a leading axis of length k; zero where the value is zero.
        right: the vectors v: likewise, a tree like the argument of the map.
        errors: an upper bound of the distance of each value from a singular value.
        matvecs: the number of products with `A^* A` that were made.
        tolerance_met: whether the pairs of `A^* A` meet the tolerance.
        is_finite: whether values and vectors are free of NaN and infinity.
    """

    values: Array
    left: Any
    right: Any
    errors: Array
    matvecs: Array
    tolerance_met: Array
    is_finite: Array


def svds(
    linear: Any,
    k: int,
    *,
    example: Any = None,
    rtol: Any = 1e-5,
    max_matvecs: int | None = None,
    rows: int | None = None,
    key: PRNGKeyArray | None = None,
) -> SingularTriplets:
    """Finds the largest singular values of a linear map that need not be square.

    They are the square roots of the largest eigenvalues of `A^* A`, which `eigsh` finds; derivatives, too, are those of
    `eigsh`. Singular values below the square root of machine epsilon (3e-4 in single precision) times the largest are
    lost in its rounding; `errors` shows it.

    Args:
        linear: an operator, a matrix of shape `(m, n)`, or a linear function of a tree.
        k: the number of singular values.
        example: for a function, a vector that it takes; only shapes and dtypes are used.
        rtol: as for `eigsh`, for the eigenvalues of `A^* A`.
        max_matvecs: as for `eigsh`. Each product is one with A and one with its conjugate transpose.
        rows: as for `eigsh`.
        key: likewise.

    Returns:
        A `SingularTriplets`.

    Raises:
        TypeError: as `eigsh` and `FunctionOperator`.
        ValueError: as `eigsh`; also if a function comes without an example, or anything else with one.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> found = linalg.svds(jnp.array([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]]), 1)
        >>> print(found.values.round(4), found.left.shape, found.right.shape)
        [3.] (1, 2) (1, 3)
    """
    fn, structure = _map_of(linear, example)
    dtype_of(structure, "svds(linear)")
    seed = jax.random.key(0) if key is None else check_key("svds", key)
    unit = _size_of(fn, structure, seed)
    gram = _Gram(closure_to_pytree(fn), unit)
    operator = FunctionOperator(gram, structure, positive_semidefinite=True)
    found = eigsh(operator, k, rtol=rtol, max_matvecs=max_matvecs, rows=rows, key=key)
    # The squares of the singular values, in units.
    squares, distance = found.values / unit, found.errors / unit
    is_zero = squares <= 0
    in_units = jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 1, squares)))
    values = in_units * unit
    images = jax.vmap(fn)(found.vectors)

    def divided(image: Array) -> Array:
        length = jnp.where(is_zero, 1, values).reshape(-1, *[1] * (image.ndim - 1))
        return jnp.where(length == 0, 0, image / length.astype(image.dtype))

    distance = distance + jnp.finfo(values.dtype).eps * jnp.max(squares)
    near = distance / jnp.where(in_units > 0, in_units, 1e-30)
    return SingularTriplets(
        values=values,
        left=jax.tree.map(divided, images),
        right=found.vectors,
        errors=unit * jnp.minimum(jnp.sqrt(distance), near),
        matvecs=found.matvecs + 1,
        tolerance_met=found.tolerance_met,
        is_finite=found.is_finite,
    )


def _size_of(fn: Callable[[Any], Any], structure: Any, key: PRNGKeyArray) -> Array:
    """A power of two near the size of the singular values, whose squares might not be representable."""
    keys = jax.random.split(key, len(jax.tree.leaves(structure)))
    leaves, treedef = jax.tree.flatten(structure)
    drawn = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    images = jax.tree.leaves(lax.stop_gradient(fn(treedef.unflatten(drawn))))
    return power_of_two(jnp.concatenate([jnp.ravel(x) for x in images]))


class _Gram(Module):
    """`A^* A`, divided by a unit so that its elements are of the size of those of A."""

    fn: Callable[[Any], Any]
    unit: Array

    def __call__(self, vector: Any) -> Any:
        vector = varying_like_result(self.fn, vector)
        image = self.fn(vector)
        transposed = jax.linear_transpose(self.fn, vector)
        cotangent = jax.tree.map(lambda x: jnp.conj(x) / self.unit.astype(x.dtype), image)
        (back,) = transposed(cotangent)
        return jax.tree.map(jnp.conj, back)


def _map_of(linear: Any, example: Any) -> tuple[Callable[[Any], Any], Any]:
    """A linear function, and the structure of its argument."""
    if callable(linear) and not isinstance(linear, Operator) and example is not None:
        return linear, structure_of(example, "svds(example)")
    if example is None and isinstance(linear, Operator):
        return linear.mv, linear.in_structure()
    if example is None and is_array(linear) and linear.ndim == 2:
        structure = jax.ShapeDtypeStruct(linear.shape[1:], linear.dtype)
        return lambda v: jnp.matmul(linear, v, precision=jax.lax.Precision.HIGHEST), structure
    raise value_error(
        "svds needs an operator, a matrix, or a function with an example of its vectors",
        where="svds(linear, k, example=...)",
        expected="an operator or a matrix without `example`, or a function with it",
        got=f"{type(linear).__name__}, example={'None' if example is None else 'given'}",
        instead="`svds(fn, k, example=vector)`",
    )
