"""`eigsh`: some eigenvalues and eigenvectors of a symmetric operator."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..modules import Module
from ..show import value_error
from ..transforms import filter_jit
from ..trees import check_key
from ._arguments import positive_int, tolerance
from ._eigenpairs import differentiable
from ._lanczos import symmetric_operator
from ._lanczos_adjoint import multiply, norms
from ._operator import Operator
from ._thick_restart import Wanted, search
from ._vectors import lost_in_product, stop_gradient, to_flat, to_tree

Which = Literal["largest", "smallest", "both", "magnitude"]
# The least number of basis vectors, and the default number of products for each of them.
_ROWS, _CYCLES = 20, 100


class Eigenpairs(Module):
    """The result of `eigsh`.

    Args:
        values: the eigenvalues, of shape `(k,)`.
        vectors: the eigenvectors, of length 1: a tree like a vector of the operator, with a leading axis of length k.
        errors: the lengths of the residuals `A x - value x`, of shape `(k,)`, of the vectors as they are returned. If
            the operator is symmetric, there is an eigenvalue within this distance of each value.
        matvecs: the number of products with the operator that were made.
        tolerance_met: whether all errors meet the tolerance.
        tags_hold: False if the computation contradicted the operator's tags.
        is_finite: whether values and vectors are free of NaN and infinity.
    """

    values: Array
    vectors: Any
    errors: Array
    matvecs: Array
    tolerance_met: Array
    tags_hold: Array
    is_finite: Array


def eigsh(
    operator: Any,
    k: int,
    *,
    which: Which = "largest",
    rtol: Any = 1e-5,
    max_matvecs: int | None = None,
    rows: int | None = None,
    key: PRNGKeyArray | None = None,
) -> Eigenpairs:
    """Finds eigenvalues at the ends of the spectrum of a symmetric operator, with their eigenvectors.

    The method is the Lanczos recurrence with thick restarts. A Krylov space holds only one eigenvector of a repeated
    eigenvalue, so a last cycle, from a random vector orthogonal to the pairs found, looks for missed ones. Its
    products count in `matvecs`, and so does one product for each pair, which measures its error.

    Derivatives, of all orders, are with respect to the operator, and are those of exact pairs. If an eigenvalue is
    repeated, or almost equal to one that was not requested, the derivative of its eigenvector is undefined: it is NaN.
    First derivatives of repeated eigenvalues are right for their sum, and for any other function that does not depend
    on their order; second ones go through their eigenvectors, and are NaN. The sign of an eigenvector (its phase, if
    complex) is arbitrary, and does not change with the operator.
    In `jax.shard_map`, derivatives of the vectors of operators that differ between devices need all arrays of the
    operator to differ (`jax.lax.pcast(array, axes, to="varying")`).

    K. Wu and H. Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM Journal on Matrix
    Analysis and Applications 22 (2000), doi:10.1137/S0895479898334605.

    Args:
        operator: symmetric (Hermitian, if it is complex).
        k: the number of eigenvalues, from 1 to the size of the operator.
        which: "largest": in descending order; "smallest": in ascending order; "both": half of them from each end,
            ascending, the odd one from above; "magnitude": the largest in modulus, the largest first.
        rtol: the largest allowed residual of a pair, relative to the modulus of its eigenvalue. A residual of the size
            of rounding, 16 units in the last place of the largest eigenvalue, always suffices. Vectors in half
            precision are rounded more than that, and need a tolerance to match.
        max_matvecs: the largest number of products to make, a Python int. None takes 100 times `rows`.
        rows: the number of basis vectors to keep: more than `k`, unless `k` is the size of the operator. None takes
            `2 * k + 1`, but at least 20.
        key: a key of `jax.random` for the first vector. None always takes the same one.

    Returns:
        An `Eigenpairs`.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, or a number not a Python int where it must
            be one.
        ValueError: if the operator is not declared symmetric, or a number is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal import linalg
        >>> operator = linalg.MatrixOperator(jnp.diag(jnp.arange(1.0, 101.0)), symmetric=True)
        >>> found = linalg.eigsh(operator, 2)
        >>> bool(jnp.allclose(found.values, jnp.array([100.0, 99.0]))), bool(found.tolerance_met)
        (True, True)
    """
    where = "eigsh(operator, k)"
    operator = symmetric_operator(operator, where)
    seed = jax.random.key(0) if key is None else check_key("eigsh", key)
    k, size = positive_int(k, "k", where), operator.size
    if k > size:
        raise value_error(
            "more eigenvalues were asked for than there are",
            where=where,
            expected=f"at most {size} for vectors of that size",
            got=f"k={k}",
            instead="`min(k, operator.size)`",
        )
    if which not in ("largest", "smallest", "both", "magnitude"):
        raise value_error(
            "`which` must be an end of the spectrum",
            where="eigsh(which)",
            expected="'largest', 'smallest', 'both' or 'magnitude'",
            got=f"which={which!r}",
        )
    least = min(k + 1, size)
    rows = (
        max(2 * k + 1, _ROWS) if rows is None else positive_int(rows, "rows", where, minimum=least)
    )
    rows = min(rows, size)
    most = _CYCLES * rows if max_matvecs is None else max_matvecs
    most = positive_int(most, "max_matvecs", where, minimum=rows + k)
    rtol = tolerance(rtol, "rtol", "eigsh(rtol)", jnp.finfo(operator.dtype).dtype)
    return _found(operator, k, which, rtol, most, rows, seed)


@filter_jit
def _found(
    operator: Operator,
    k: int,
    which: Which,
    rtol: Array,
    most: int,
    rows: int,
    key: PRNGKeyArray,
) -> Eigenpairs:
    def order(values: Array) -> Array:
        return _order(values, which)

    still = stop_gradient(operator)
    wanted = Wanted(k, rows, order, lax.stop_gradient(rtol), jnp.asarray(most, jnp.int32))
    found = search(still, wanted, key)
    # Lengths drift by rounding over many restarts.
    lengths = norms(found.vectors)[:, None].astype(found.vectors.dtype)
    values, vectors = found.values, found.vectors / jnp.where(lengths == 0, 1, lengths)
    is_above = jnp.full(k, which == "largest")
    if which == "both":
        ascending = jnp.argsort(values)
        values, vectors = values[ascending], vectors[ascending]
        is_above = jnp.arange(k) >= k // 2
    elif which == "magnitude":
        is_above = values > 0
    # Of the vectors that are returned, which half precision has rounded.
    structure = operator.in_structure()
    known = jax.vmap(lambda row: to_flat(structure, to_tree(structure, row), "eigsh"))(vectors)
    residuals = multiply(still, known) - values[:, None].astype(known.dtype) * known
    lost = lost_in_product(found.scale, operator.size)
    errors = norms(residuals) + lost
    finite = jnp.all(jnp.isfinite(values)) & jnp.all(jnp.isfinite(vectors))
    met = found.is_done & jnp.all(errors <= wanted.tolerance(values, found.scale))
    # The square root, because an operator that computes in a lower precision does not count as asymmetric.
    rounding = jnp.sqrt(jnp.finfo(values.dtype).eps) * found.scale + 4 * lost
    hold = found.asymmetry <= rounding
    if operator.positive_semidefinite:
        hold &= jnp.min(values) >= -(errors.max() + rounding)
    values, vectors = differentiable(operator, values, vectors, found.scale, is_above)
    return Eigenpairs(
        values=values,
        vectors=jax.vmap(lambda row: to_tree(structure, row))(vectors),
        errors=errors,
        matvecs=found.matvecs + k,
        tolerance_met=met & finite,
        tags_hold=hold,
        is_finite=finite,
    )


def _order(values: Array, which: Which) -> Array:
    """The indices of ascending values in the order of interest."""
    count = len(values)
    if which == "magnitude":
        return jnp.argsort(-jnp.abs(values))
    if which == "smallest":
        return jnp.arange(count)
    if which == "largest":
        return jnp.arange(count)[::-1]
    # From the ends towards the middle, the upper end first.
    return jnp.asarray([count - 1 - i // 2 if i % 2 == 0 else i // 2 for i in np.arange(count)])
