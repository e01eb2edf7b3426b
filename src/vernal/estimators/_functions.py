"""Traces of functions of symmetric operators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from .._ground import callable_name
from ..linalg import (
    Derivative,
    Elementwise,
    Hermitian,
    Operator,
    along,
    function_of,
    power_below,
    real_number,
    refuse_empty,
    stop_gradient,
    symmetric_operator,
    varying_like,
)
from ..modules import Module
from ..show import spec_text, type_error, value_error
from ..transforms import closure_to_pytree, filter_custom_jvp, filter_jit, is_zero, materialise
from ..trees import check_key, tree_at
from ._estimate import Estimate
from ._gradient_pairs import StoredPairs
from ._gram import Gram, InUnits
from ._method import Outcome
from ._plan import Plan, Wanted, carried_out, planned
from ._quadrature import FunctionTrace, LanczosQuadrature
from ._rules import consistent, is_above, limited, rounding_of

# The relative error of an element of a factorised matrix, in eps.
_ROUNDINGS = 1.0


def trace_of_function(
    f: Callable[[Array], Array],
    operator: Any,
    key: PRNGKeyArray,
    *,
    matvecs: int | None = None,
    method: LanczosQuadrature | None = None,
    least_eigenvalue: Any = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_matvecs: int | None = None,
) -> Estimate:
    """Estimates the trace of `f(A)`, the sum of `f` over the eigenvalues of a symmetric operator.

    The method is stochastic Lanczos quadrature; see `LanczosQuadrature` for the paper and the use of the products.
    With as many products as the operator has rows, or more, the answer is exact up to rounding, and takes that many
    products. Tolerances and `max_matvecs` are as for `trace`.

    For a positive semidefinite operator, the value is halfway between the Gauss rule and the Gauss-Radau rule with a
    node at the least possible eigenvalue; the standard error includes half of their distance. For a logarithm, roots
    and other powers, inverses and `exp(-x)` these rules are bounds, however slowly the steps converge. Where the
    function is steep at zero, `least_eigenvalue` makes them much tighter. For any other operator a generalised averaged
    rule (Reichel, Spalevic, Tang) estimates the error of the steps: accurate once they converge, but not a bound.

    G. H. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", Princeton University Press
    (2010), chapter 6.
    L. Reichel, M. M. Spalevic, T. Tang, "Generalized averaged Gauss quadrature rules for the approximation of matrix
    functionals", BIT Numerical Mathematics 56 (2016), doi:10.1007/s10543-015-0592-7.

    Derivatives with respect to the operator and to arrays that `f` closes over are those of the trace: estimates of
    `tr(f'(A) dA)` and of the trace of the derivative of `f`, unbiased up to the error of the quadrature. They make
    only the products with `dA`, in blocks; if all Lanczos vectors together would take more than 128 MiB, they also
    make all other products again, block by block. Second derivatives are right in the same sense. Third derivatives by
    the operator are NaN: those of the steps differ from those of the trace without limit where eigenvalues are close.
    With as many products as the operator has rows there are no steps, and derivatives of all orders are right, whatever
    eigenvalues coincide; each order after the second takes the size to one more power in memory.

    Args:
        f: acts on an array of real numbers element by element, such as `jnp.exp`; may close over arrays. It must be
            defined from the least possible eigenvalue on, and twice as often differentiable as the order of the
            derivatives that are taken.
        operator: symmetric (Hermitian, if it is complex), and declared so.
        key: a key of `jax.random`.
        matvecs: the largest number of products to make, a Python int.
        method: how to use them.
        least_eigenvalue: a lower bound of the eigenvalues of a positive semidefinite operator: a real number, which
            may be traced. None takes the bound that the operator knows (for a `kernel_operator`, its noise), or zero.
        rtol: the tolerance relative to the value: a number, which may be traced.
        atol: the absolute tolerance, likewise.
        max_matvecs: the number of products that all attempts to meet a tolerance may make together, a Python int.

    Returns:
        An `Estimate`, real. `standard_error` covers the errors of the probes, of the quadrature and of rounding.
        `tags_hold` is False if the operator visibly contradicts its tags (asymmetric; clearly negative on some vector,
        if it is declared positive semidefinite). The eigenvalues of an operator declared positive semidefinite are
        never taken to be negative.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, `matvecs` is traced or not an int, or `f`
            does not map real arrays to real arrays of the same shape.
        ValueError: if the operator is empty or not declared symmetric, a number is too small, or arguments do not go
            together, such as `least_eigenvalue` with an operator that is not declared positive semidefinite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> matrix = jnp.diag(jnp.linspace(0.0, 1.0, 200)) + 0.001
        >>> operator = linalg.MatrixOperator(matrix, symmetric=True)
        >>> estimate = estimators.trace_of_function(jnp.exp, operator, jax.random.key(0), matvecs=100)
        >>> exact = jnp.exp(jnp.linalg.eigvalsh(matrix)).sum()
        >>> bool(abs(estimate.value - exact) < 4 * estimate.standard_error)
        True
    """
    where = "trace_of_function(f, operator, key)"
    operator = symmetric_operator(operator, where)
    check_key("trace_of_function", key)
    refuse_empty(operator, where)
    floor = 0.0 if operator.positive_semidefinite else None
    least = lower_bound(operator, least_eigenvalue, where)
    wanted = Wanted(matvecs, max_matvecs, rtol, atol)
    way = FunctionTrace(closure_to_pytree(f), method or LanczosQuadrature(), floor, least)
    return function_estimate(way, operator, key, wanted, where)


def lower_bound(operator: Operator, given: Any, where: str) -> Array | None:
    """The lower bound of the eigenvalues, given or known to the operator; None if there is none."""
    if operator.positive_semidefinite:
        least = operator.least_eigenvalue() if given is None else given
        return real_number(least, "least_eigenvalue", where, jnp.finfo(operator.dtype).dtype)
    if given is not None:
        raise value_error(
            "`least_eigenvalue` would be ignored: the operator may have negative eigenvalues",
            where=where,
            expected="an operator that is declared positive semidefinite, or no `least_eigenvalue`",
            got=f"least_eigenvalue={given}, positive_semidefinite=False",
        )
    return None


def function_estimate(
    way: FunctionTrace, operator: Operator, key: PRNGKeyArray, wanted: Wanted, where: str
) -> Estimate:
    """The trace of a function that has not been checked."""
    if wanted.matvecs is not None and wanted.max_matvecs is not None:
        raise value_error(
            "`max_matvecs` goes with a tolerance only: each value of `matvecs` is compiled separately",
            where=where,
            expected="`matvecs`; or `rtol` or `atol`, with `max_matvecs`",
            got="matvecs and max_matvecs",
        )
    least = way.quadrature.minimum
    _, plan = planned(operator, way, lambda *_: way, wanted, where, least=least)
    way = tree_at(lambda way: way.f, way, Checked(way.f))
    return _estimated(way, operator, key, plan)


@filter_jit
def _estimated(way: FunctionTrace, operator: Operator, key: PRNGKeyArray, plan: Plan) -> Estimate:
    outcome, met = carried_out(operator, key, way, plan, lambda: _exact(way, operator))
    return Estimate.of(
        outcome.value,
        jnp.sqrt(lax.stop_gradient(outcome.variance)),
        matvecs=outcome.matvecs,
        degrees_of_freedom=outcome.degrees_of_freedom,
        tags_hold=outcome.consistent,
        tolerance_met=met,
    )


class _Dense(NamedTuple):
    """The trace of a function of a matrix, its rounding error, and whether the tags may be true."""

    value: Array
    error: Array
    agrees: Array


def _exact(way: FunctionTrace, operator: Operator) -> Outcome:
    """The exact trace, from the whole matrix, which is made with unit vectors."""
    size, dtype = operator.size, operator.dtype
    eye = jnp.eye(size, dtype=dtype)
    if isinstance(operator, Gram):
        half = operator.half(eye)
        given = operator.back(half)
    else:
        half, given = None, operator.matmul(eye)
    matrix = (given + given.conj().T) / 2
    unit = power_below(jnp.max(jnp.abs(lax.stop_gradient(matrix)), initial=0))
    asymmetry = jnp.max(jnp.abs(given - given.conj().T), initial=0)
    if not way.is_logarithm:
        # The modulus of a zero eigenvalue can only be too large.
        one_way = isinstance(operator, InUnits)
        found = _by_eigenvalues(way, matrix, unit, asymmetry, operator.eps, one_way=one_way)
        if half is not None:
            found = _by_singular_values(way, half, found, operator.eps)
    else:
        scaled = matrix / unit.astype(dtype)
        lower = jnp.linalg.cholesky(scaled)
        eps, largest = operator.eps, jnp.max(jnp.abs(jnp.diagonal(scaled)), initial=0)
        bound = jnp.maximum(way.least / unit - 16 * size**0.5 * eps * largest, eps * largest)
        # There is such a factor if no eigenvalue is below the bound.
        above = jnp.linalg.cholesky(scaled - bound.astype(dtype) * eye)
        is_fine = jnp.all(jnp.isfinite(lower)) & jnp.all(jnp.isfinite(above)) & (largest > 0)
        found = lax.cond(
            lax.stop_gradient(is_fine),
            lambda: _logdet_by_cholesky(lower, matrix, unit, asymmetry, eps),
            lambda: _by_eigenvalues(way, matrix, unit, asymmetry, eps),
        )
    return Outcome(
        value=found.value,
        variance=found.error**2,
        degrees_of_freedom=jnp.asarray(jnp.inf, found.value.dtype),
        matvecs=jnp.asarray(size, jnp.int32),
        consistent=found.agrees,
        gradient_pairs=StoredPairs.none(operator),
    )


def _by_eigenvalues(
    way: FunctionTrace,
    matrix: Array,
    unit: Array,
    asymmetry: Array,
    eps: float,
    *,
    one_way: bool = False,
) -> _Dense:
    """From all eigenvalues; `one_way` if their errors may all move the values of f in the same direction."""
    scaled = Hermitian.of(matrix / unit.astype(matrix.dtype))
    raw = scaled.nodes * unit
    nodes = limited(raw[None], way.floor)[0]
    agrees = consistent(asymmetry, raw, len(matrix), way.floor)
    if way.least is not None:
        agrees &= is_above(way.least, raw, len(matrix))
    f = stop_gradient(way.f)
    # A function that is constant in pieces is finite even at NaN.
    lost = jnp.where(jnp.all(jnp.isfinite(nodes)), 0.0, jnp.nan)
    return _Dense(
        jnp.sum(way.f(nodes)) + lost + _by_matrix(way.f, Hermitian(matrix, nodes, scaled.vectors)),
        # Otherwise the errors of the eigenvalues are independent.
        _added(f, nodes, way.floor, eps)
        if one_way
        else jnp.linalg.norm(rounding_of(f, nodes, way.floor, eps)),
        agrees,
    )


def _by_singular_values(way: FunctionTrace, half: Array, found: _Dense, eps: float) -> _Dense:
    """The trace of f(A^* A) from the singular values of A, which are the roots of what `found` is made from.

    Rounding A^* A moves a zero eigenvalue by eps times the largest, and so its root by the root of that: always upward,
    and for all of them together by more than the error of each. The singular values themselves are wrong by eps only.
    """
    f, still = stop_gradient((way.f, half))
    values = jnp.linalg.svd(still, compute_uv=False)
    # Derivatives stay those by the matrix.
    moved = found.value - lax.stop_gradient(found.value)
    error = _added(lambda x: f(x**2), values, 0.0, eps)
    return _Dense(jnp.sum(f(values**2)) + moved, error, found.agrees)


def _added(f: Elementwise, nodes: Array, floor: float | None, eps: float) -> Array:
    """The rounding error of a sum where the errors of all values may have one sign, so that they add up.

    A node is moved by the rounding of sums over n elements: by some `sqrt(n) eps` next to the largest, if those are
    independent.
    """
    return jnp.sum(rounding_of(f, nodes, floor, len(nodes) ** 0.5 * eps))


@filter_custom_jvp
def _by_matrix(f: Elementwise, a: Hermitian) -> Array:
    """Zero, with all derivatives of the trace of f(A) that are by the matrix A, as `by_operator`."""
    del f
    return varying_like(jnp.zeros((), a.nodes.dtype), a.nodes)


@_by_matrix.def_jvp(symbolic_zeros=True)
def _by_matrix_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    f, a = primals
    f_dot = along(f, tangents[0])
    change = None if f_dot is None else _by_matrix(f_dot, a)
    # Nothing but a zero may be multiplied by a zero: slopes may be infinite.
    if not is_zero(tangents[1].matrix):
        moved = _along_slope(function_of(Derivative(f), a), tangents[1].matrix)
        change = moved if change is None else moved + change
    return _by_matrix(*primals), change


@filter_custom_jvp
def _with_slope(value: Array, matrix: Array, slope: Array) -> Array:
    """A value that is known to change with a matrix A by the trace of `slope^* dA`."""
    del matrix, slope
    return value


@_with_slope.def_jvp(symbolic_zeros=True)
def _with_slope_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    return _with_slope(*primals), _along_slope(primals[2], tangents[1])


def _along_slope(slope: Array, matrix_dot: Any) -> Array:
    return jnp.sum(slope.conj() * materialise(matrix_dot)).real


def _logdet_by_cholesky(
    lower: Array, matrix: Array, unit: Array, asymmetry: Array, eps: float
) -> _Dense:
    """The log-determinant of a matrix that is `unit` times one with the factor L.

    Rounding makes L the factor of another matrix, whose element (i, j) is wrong by some eps sqrt(a_ii a_jj)
    (N. J. Higham, "Accuracy and Stability of Numerical Algorithms", SIAM (2002), theorem 10.3). If these errors are
    independent, the logarithm is wrong by eps times the Frobenius norm of the inverse of the matrix scaled to a unit
    diagonal.
    """
    size, eye = len(lower), jnp.eye(len(lower), dtype=lower.dtype)
    half = solve_triangular(lower, eye, lower=True)
    inverse = jnp.matmul(half.conj().T, half, precision=lax.Precision.HIGHEST)
    roots = jnp.linalg.norm(lax.stop_gradient(lower), axis=1)
    value = 2 * jnp.sum(jnp.log(jnp.diagonal(lower).real)) + size * jnp.log(unit)
    wrong = jnp.abs(lax.stop_gradient(inverse)) * roots[:, None] * roots[None, :]
    return _Dense(
        _with_slope(lax.stop_gradient(value), matrix, inverse / unit.astype(lower.dtype)),
        _ROUNDINGS * eps * jnp.linalg.norm(wrong),
        consistent(asymmetry / unit, roots**2, size, None),
    )


class Checked(Module):
    """A function that must map real arrays to real arrays of the same shape, and returns the dtype of its argument."""

    f: Elementwise

    def __call__(self, x: Array) -> Array:
        """Its values; `TypeError` if it is not such a function."""
        out = self.f(x)
        if jnp.shape(out) != x.shape or not jnp.issubdtype(jnp.result_type(out), jnp.floating):
            raise type_error(
                "the function must act on real numbers element by element",
                where=f"`{callable_name(self.f)}`",
                expected=spec_text(x),
                got=spec_text(out),
                instead="a function such as `jnp.exp` or `lambda x: jnp.log1p(scale * x)`",
            )
        return out.astype(x.dtype)
