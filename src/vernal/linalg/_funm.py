"""`funm`: a function of an operator, times a vector."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from .._ground import callable_name
from ..modules import Module
from ..show import short, spec_text, type_error, value_error
from ..transforms import closure_to_pytree, filter_jit
from ._arguments import positive_int
from ._funm_adjoint import attached
from ._krylov import krylov, shortened
from ._lanczos_adjoint import norms
from ._operator import Operator
from ._operators import as_operator, refuse_empty
from ._per_device import varying_like_result
from ._small_functions import OfEigenvalues, OfMatrix, SmallFunction, commutes
from ._vectors import flat_vector, lost_in_product, stop_gradient, to_tree

_STEPS = 30
_WHERE = "funm(f, operator, vector)"
# The slowest convergence that the error estimate extrapolates.
_SLOWEST = 0.9
# Two by two, not normal, with eigenvalues near 0.9 and 2.1.
_TRIAL = ((1.0, 0.5), (0.25, 2.0))


class FunctionProduct(Module):
    """The result of `funm`.

    Args:
        value: f(A) v, a tree like a vector of the operator.
        error: an estimate of the length of `value - f(A) v`, of shape (); not a bound. It has no derivative.
        matvecs: the number of products with the operator that were made.
        tags_hold: False if the computation contradicted the operator's tags; then `value` means nothing.
        is_finite: whether `value` and `error` are free of NaN and infinity.
    """

    value: Any
    error: Array
    matvecs: Array
    tags_hold: Array
    is_finite: Array


def funm(
    f: Callable[[Array], Array], operator: Any, vector: Any, *, steps: int | None = None
) -> FunctionProduct:
    """Computes `f(A) v`, such as the exponential of an operator times a vector, from products with A alone.

    For an operator that is declared symmetric, the method is Lanczos, and `f` is a function of its eigenvalues, such as
    `jnp.exp`. For any other it is Arnoldi, and `f` is a function of a small square matrix, such as
    `jax.scipy.linalg.expm` or `jnp.linalg.inv`. With basis Q, small matrix H and first unit vector e, the value is
    `|v| Q f(H) e`. It is exact up to rounding with as many steps as the operator has rows, and when the space that v
    and its products span is exhausted before.

    The error is extrapolated from the values after fewer steps, twice: as if each doubling of the steps reduced it by
    the same factor (right for an algebraic rate of convergence), and as if each quarter of them did (right for a
    geometric one). The larger counts, and rounding is added. Convergence usually becomes faster (Hochbruck and Lubich),
    and then the estimate is too large. It is too small where f is dominated by eigenvalues that no step has seen, as
    `1 / x` and `exp(-x)` are by the smallest: compare with twice the steps where that is possible.

    Derivatives are with respect to the operator, the vector, and arrays that `f` closes over, as accurate as the steps
    allow; `error` does not cover them. Reverse mode makes `steps` products from the cotangent, and `steps` with the
    derivative of A. Forward mode with respect to a symmetric operator makes `steps**2` products, to any other
    `2 * steps`. First derivatives are right for repeated eigenvalues and exhausted spaces. Second ones by the operator
    differentiate the basis of the space. They are NaN where rounding would spoil them: where the space is exhausted, up
    to rounding, before the last step (that of a zero vector always is), and where f is so nearly linear on the
    spectrum, as on that of a tiny operator, that the error would be more than about one part in a thousand. Third ones
    are NaN, but for forward mode with a general operator. `trace_of_function` has one order more.

    Y. Saad, "Analysis of some Krylov subspace approximations to the matrix exponential operator", SIAM Journal on
    Numerical Analysis 29 (1992), doi:10.1137/0729014.
    M. Hochbruck and C. Lubich, "On Krylov subspace approximations to the matrix exponential operator", SIAM Journal on
    Numerical Analysis 34 (1997), doi:10.1137/S0036142995280572.

    Args:
        f: for a symmetric operator, acts element by element on real arrays of any shape; its values may be complex if
            the operator is. It must be defined on the interval that the eigenvalues span, and those of a positive
            semidefinite operator are never taken to be negative. For any other operator, takes a square matrix of any
            size, and commutes with it; it must be defined on the field of values of A.
        operator: A.
        vector: v, a tree of arrays like the operator's vectors.
        steps: the number of products, at least 1. More than the operator has rows are never made. None takes 30.

    Returns:
        A `FunctionProduct`.

    Raises:
        TypeError: if `operator` is not an operator, the vector does not fit it, `steps` is not a Python int, or `f` is
            not a function of the kind that the operator needs.
        ValueError: if `steps` is less than 1, the operator is empty, or `f` acts on a matrix element by element.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import linalg
        >>> operator = linalg.MatrixOperator(jnp.diag(jnp.array([1.0, 4.0, 9.0])), symmetric=True)
        >>> root = linalg.funm(jnp.sqrt, operator, jnp.ones(3))
        >>> bool(jnp.allclose(root.value, jnp.array([1.0, 2.0, 3.0]), atol=1e-5))
        True
        >>> turn = jnp.array([[0.0, -jnp.pi], [jnp.pi, 0.0]])
        >>> found = linalg.funm(jax.scipy.linalg.expm, turn, jnp.array([1.0, 2.0]))
        >>> bool(jnp.allclose(found.value, jnp.array([-1.0, -2.0]), atol=1e-5)), bool(found.error < 1e-3)
        (True, True)
    """
    operator = as_operator(operator, _WHERE)
    flat = flat_vector(operator.in_structure(), vector, "funm(vector)")
    steps = positive_int(_STEPS if steps is None else steps, "steps", "funm(steps)")
    refuse_empty(operator, _WHERE)
    check = _check_elementwise if operator.symmetric else _check_of_matrix
    check(f, operator)
    known = closure_to_pytree(f)
    positive = operator.positive_semidefinite
    function = OfEigenvalues(known, positive) if operator.symmetric else OfMatrix(known)
    return _found(function, operator, flat, min(steps, operator.size))


@filter_jit
def _found(function: SmallFunction, operator: Operator, flat: Array, steps: int) -> FunctionProduct:
    flat = varying_like_result(lambda x: operator.matmul(x[:, None])[:, 0], flat)
    found, rank, asymmetry = krylov(operator, flat, steps)
    structure = operator.in_structure()
    flat_value = attached(found, operator, flat, function, steps)
    value = to_tree(structure, flat_value)
    known, still, matrix = stop_gradient((function, operator, found.matrix))
    norm = lax.stop_gradient(found.norm)
    error = norm * _error(known, matrix, rank, operator.size, operator.eps)
    # What is stored in a lower precision than it was computed in is rounded once more.
    stored = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(structure))
    error = error + stored * lax.stop_gradient(_length(flat_value))
    error = jnp.where(norm == 0, 0, error)
    leaves = jax.tree.leaves(value)
    finite = [jnp.all(jnp.isfinite(lax.stop_gradient(leaf))) for leaf in leaves]
    return FunctionProduct(
        value=value,
        error=error,
        matvecs=jnp.asarray(steps, jnp.int32),
        tags_hold=_tags_hold(still, matrix, asymmetry),
        is_finite=jnp.isfinite(error) & jnp.all(jnp.stack(finite)),
    )


def _error(function: SmallFunction, matrix: Array, rank: Array, size: int, eps: float) -> Array:
    """The estimated error of the column of f, for a start vector of length 1."""
    steps = len(matrix)

    def after(count: int) -> Array:
        column = function.column(shortened(matrix, count))
        return jnp.where(jnp.arange(steps) < count, column, 0)

    last, part = function.column(matrix), max(1, steps // 4)
    half, quarter = after(steps // 2), after(steps // 4)
    by_doubling, rate = _change_and_rate(last, half, quarter)
    before, earlier = after(steps - part), after(max(0, steps - 2 * part))
    by_part, rate_of_part = _change_and_rate(last, before, earlier)
    ahead = jnp.maximum(by_doubling * rate / (1 - rate), by_part / (1 - rate_of_part))
    # The space is exhausted, and only rounding is left.
    complete = (rank < steps) | (steps == size)
    largest = jnp.max(jnp.abs(matrix))
    step = eps * largest + lost_in_product(largest, size)
    rounding = function.rounding(matrix, step) + eps * _length(last)
    return rounding + jnp.where(complete, 0, ahead)


def _change_and_rate(last: Array, late: Array, early: Array) -> tuple[Array, Array]:
    """How far the last steps moved the column, and that over how far the steps before them did, at most `_SLOWEST`."""
    change, before = _length(last - late), _length(late - early)
    rate = jnp.where(before > 0, change / jnp.where(before > 0, before, 1), _SLOWEST)
    return change, jnp.clip(rate, 0, _SLOWEST)


def _tags_hold(operator: Operator, matrix: Array, asymmetry: Array) -> Array:
    """Whether an operator appears to satisfy its tags."""
    if not operator.symmetric:
        return jnp.asarray(True)
    nodes = jnp.linalg.eigvalsh(matrix)
    scale, eps = jnp.max(jnp.abs(nodes)), float(jnp.finfo(nodes.dtype).eps)
    # Of several products.
    lost = 4 * lost_in_product(scale, operator.size)
    # The square root, because an operator that computes in a lower precision does not count as asymmetric.
    hold = asymmetry <= max(eps**0.5, 16 * operator.eps) * scale + lost
    if operator.positive_semidefinite:
        hold &= jnp.min(nodes) >= -16 * operator.size**0.5 * operator.eps * scale - lost
    return hold


def _check_elementwise(f: Any, operator: Operator) -> None:
    """Refuses what is not a function of an array of real numbers, element by element."""
    spec = jax.ShapeDtypeStruct((3,), jnp.finfo(operator.dtype).dtype)
    real = not jnp.issubdtype(operator.dtype, jnp.complexfloating)
    expected = "a function that acts on real arrays element by element, such as `jnp.exp`"
    expected += ", with real values" if real else ""
    got = _shape_of(f, spec, expected)
    kind = jnp.floating if real else jnp.inexact
    if got.shape != spec.shape or not jnp.issubdtype(got.dtype, kind):
        raise type_error(
            "`f` is not a function of the eigenvalues of a symmetric operator",
            where=_WHERE,
            expected=expected,
            got=f"{callable_name(f)}, which maps {spec_text(spec)} to {spec_text(got)}",
            instead="an operator that is not declared symmetric, for a function of a matrix",
        )


def _check_of_matrix(f: Any, operator: Operator) -> None:
    """Refuses what is not a function of a square matrix."""
    spec = jax.ShapeDtypeStruct((2, 2), operator.dtype)
    expected = "a function of a square matrix of any size, such as `jax.scipy.linalg.expm`"
    got = _shape_of(f, spec, expected)
    if got.shape != spec.shape or not jnp.issubdtype(got.dtype, jnp.inexact):
        raise type_error(
            "`f` is not a function of a square matrix",
            where=_WHERE,
            expected=expected,
            got=f"{callable_name(f)}, which maps {spec_text(spec)} to {spec_text(got)}",
        )
    with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
        trial = jnp.asarray(_TRIAL, operator.dtype)
        fits = commutes(trial.astype(got.dtype), jnp.asarray(f(trial)))
    # Unknown if it closes over traced arrays; then what does not commute gives NaN.
    if not isinstance(fits, Tracer) and not fits:
        raise value_error(
            "`f` acts element by element, but the operator is not declared symmetric",
            where=_WHERE,
            expected=expected,
            got=f"{callable_name(f)}, for which f(M) M differs from M f(M)",
            instead="`jax.scipy.linalg.expm` for `jnp.exp`; or `symmetric=True`, if the operator is symmetric",
        )


def _shape_of(f: Any, spec: jax.ShapeDtypeStruct, expected: str) -> Any:
    """Shape and dtype of `f(spec)`."""
    try:
        got = jax.eval_shape(f, spec)
        if isinstance(got, jax.ShapeDtypeStruct):
            return got
        text, cause = f"{callable_name(f)}, which returns {short(got)}", None
    except Exception as error:
        text, cause = f"{type(error).__name__} from f({spec_text(spec)})", error
    raise type_error("`f` cannot be applied", where=_WHERE, expected=expected, got=text) from cause


def _length(vector: Array) -> Array:
    return norms(vector[None, :])[0]
