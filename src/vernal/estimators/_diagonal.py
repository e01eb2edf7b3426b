"""`diagonal`: estimates diagonals."""

from functools import partial
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, as_operator, stop_gradient, to_tree
from ..transforms import filter_jit
from ..trees import check_key
from ._estimate import Estimate
from ._exact import exact_diagonal
from ._gradient_pairs import attach
from ._hutchinson_diagonal import HutchinsonDiagonal
from ._method import DiagonalMethod
from ._plan import Plan, Wanted, carried_out, planned
from ._xdiag import XDiag
from ._xnysdiag import XNysDiag

# With fewer, a basis costs more than it gains.
_LEAST = 20
# Bytes of a block of vectors. A method with a basis keeps about ten such blocks.
_MOST_BYTES = 2**28


def diagonal(
    operator: Any,
    key: PRNGKeyArray,
    *,
    matvecs: SupportsIndex | None = None,
    max_matvecs: SupportsIndex | None = None,
    method: DiagonalMethod | None = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
) -> Estimate:
    """Estimates the diagonal of a linear operator from its products with random vectors.

    `matvecs`, `max_matvecs` and the tolerances are as for `trace`. A tolerance applies to every element: its error is
    at most `max(atol, rtol * largest)`, with a probability of 95% for each, where `largest` is the largest modulus of
    all elements.

    Products with the unit vectors give the exact diagonal, so no method makes more than `n` products with an operator
    of size `n`: when the budget reaches `n`, the answer is exact and its error is 0.

    Without a `method`, one is chosen from this table:

    | operator | products | method |
    | --- | --- | --- |
    | any | at least `n` | exact |
    | positive semidefinite | at least 5 | `XNysDiag`: one product for each vector of its basis |
    | any other | at least 20 | `XDiag`: two products for each, one of them with the adjoint |
    | any | fewer, or a basis of more than 256 MiB | `HutchinsonDiagonal`: no basis |

    For an operator that is not symmetric, products with the adjoint are derived from its function by
    `jax.linear_transpose`. If the function cannot be transposed, use `HutchinsonDiagonal`.

    The derivative of the value with respect to the operator is an unbiased estimate of the derivative of the diagonal.
    In forward and in reverse mode it takes as many products again (half as many for `XDiag`).

    Args:
        operator: a square matrix, an `Operator`, or an object with `mv` and `in_structure()`.
        key: a random key.
        matvecs: the number of products: a Python int, or, with `max_matvecs`, an integer array. More than `n` means
            `n`. An array is clamped between the method's minimum and `max_matvecs`.
        max_matvecs: the number of products that shapes are made for, a Python int. All `matvecs` up to it share one
            compilation, and may be traced. Without it, each different `matvecs` compiles again.
        method: how to estimate. None chooses from the table above.
        rtol: the tolerance relative to the largest element: a number, which may be traced.
        atol: the absolute tolerance, likewise.

    Returns:
        The diagonal as a tree of arrays like the operator's vectors, with an error for each element; real if the
        operator is symmetric or real.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, or an argument not a number;
            `TracedShapeError` if one is traced where it cannot be.
        ValueError: if a number is too small, if arguments do not go together, or if the method needs an operator that
            is declared positive semidefinite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> x = jnp.linspace(0.0, 1.0, 200)
        >>> kernel = jnp.exp(-10 * (x[:, None] - x[None, :]) ** 2) * (1 + x[:, None]) * (1 + x[None, :])
        >>> operator = linalg.MatrixOperator(kernel, positive_semidefinite=True)
        >>> estimate = estimators.diagonal(operator, jax.random.key(0), matvecs=20)
        >>> estimate.value.shape, bool(jnp.max(jnp.abs(estimate.value - (1 + x) ** 2)) < 1e-3)
        ((200,), True)
    """
    where = "diagonal(operator, key)"
    operator = as_operator(operator, where)
    check_key("diagonal", key)
    wanted = Wanted(matvecs, max_matvecs, rtol, atol)
    method, plan = planned(operator, method, _choose, wanted, where, otherwise="XDiag()")
    return _estimated(operator, key, method, plan)


def _choose(operator: Operator, matvecs: int) -> DiagonalMethod:
    """The method for `matvecs` products; the table is in the docstring of `diagonal`."""
    free = operator.positive_semidefinite
    row = operator.size * jnp.dtype(operator.dtype).itemsize
    if matvecs < (XNysDiag.minimum if free else _LEAST) or matvecs * row > _MOST_BYTES:
        return HutchinsonDiagonal()
    return XNysDiag() if free else XDiag()


@filter_jit
def _estimated(
    operator: Operator, key: PRNGKeyArray, method: DiagonalMethod, plan: Plan
) -> Estimate:
    quiet = stop_gradient(operator)
    outcome, met = carried_out(quiet, key, method, plan, partial(exact_diagonal, quiet))
    outcome = stop_gradient(outcome)
    return Estimate.of(
        _tree(operator, attach(outcome.value, operator, outcome.gradient_pairs)),
        _tree(operator, jnp.sqrt(outcome.variance)),
        matvecs=outcome.matvecs,
        degrees_of_freedom=outcome.degrees_of_freedom,
        tags_hold=outcome.consistent,
        tolerance_met=met,
    )


def _tree(operator: Operator, flat: Array) -> Any:
    """A tree like the operator's vectors, in at least single precision, and real where the flat array is."""

    def like(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # Half precision would lose a small error entirely.
        real = jnp.finfo(leaf.dtype).dtype
        real = jnp.float32 if real.itemsize < 4 else real
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if jnp.iscomplexobj(flat) else real)

    return to_tree(jtu.tree_map(like, operator.in_structure()), flat)
