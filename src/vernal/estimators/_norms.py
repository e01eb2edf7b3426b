"""Norms of operators: Schatten norms and the Frobenius norm."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import (
    Operator,
    as_operator,
    decompose,
    positive_int,
    power_below,
    refuse_empty,
    stop_gradient,
    times,
)
from ..modules import Module
from ..show import value_error
from ..transforms import filter_custom_jvp, filter_jit
from ..trees import check_key
from ._estimate import Estimate
from ._functions import function_estimate, lower_bound
from ._gradient_pairs import StoredPairs, attach
from ._gram import Gram, InUnits
from ._method import FEWEST_PROBES, default_probes
from ._plan import Wanted
from ._probes import Normal, Probes
from ._quadrature import FunctionTrace, LanczosQuadrature
from ._rules import gauss

# An eigenvalue of at most this many eps, next to 1, may be zero.
_ROUNDINGS = 64
# Up to this order, powers are representable if the scale of the operator is known roughly.
_MODEST = 8


def schatten_norm(
    operator: Any,
    key: PRNGKeyArray,
    p: float | int,
    *,
    matvecs: int,
    method: LanczosQuadrature | None = None,
) -> Estimate:
    """Estimates a Schatten norm: the p-norm of the vector of singular values.

    `p=1` is the nuclear norm and `p=2` the Frobenius norm, for which `frobenius_norm` is cheaper. The larger p, the
    closer to the spectral norm. The method is stochastic Lanczos quadrature with `|A|^p`; see `LanczosQuadrature` for
    the paper. For an operator that is not declared symmetric the quadrature is that of `A^* A`, where each step takes
    two products. One product is spent on measuring the scale of the operator. For `p > 8`, `sqrt(p)` steps more
    (`sqrt(p / 2)` if it is not symmetric) find its largest singular value, next to which powers are taken. If the few
    steps of the quadrature come nowhere near it, all their powers vanish, and the value is NaN.

    Derivatives are those of `trace_of_function`, times that of the p-th root. Where a singular value is zero and the
    norm has no derivative, only the other singular values contribute; second derivatives are NaN there if p is less
    than 2.

    Args:
        operator: any square operator.
        key: a key of `jax.random`.
        p: a Python number, 1 or more.
        matvecs: the largest number of products to make, a Python int. Besides those for the scale, the answer is exact
            with `n` of them for an operator with `n` rows, or with `2 * n` if it is not symmetric.
        method: how to use them.

    Returns:
        An `Estimate`, real.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, or `matvecs` is traced or not an int.
        ValueError: if the operator is empty, `p` is not a finite number of at least 1, or `matvecs` is too small.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> matrix = jax.random.normal(jax.random.key(0), (100, 100))
        >>> estimate = estimators.schatten_norm(matrix, jax.random.key(1), 3, matvecs=150)
        >>> exact = jnp.sum(jnp.linalg.svdvals(matrix) ** 3) ** (1 / 3)
        >>> bool(abs(estimate.value - exact) < 4 * estimate.standard_error)
        True
    """
    operator = as_operator(operator, "schatten_norm(operator)")
    check_key("schatten_norm", key)
    refuse_empty(operator, "schatten_norm(operator)")
    if isinstance(p, bool) or not isinstance(p, int | float) or not 1 <= p < math.inf:
        raise value_error(
            "`p` is not a valid order of a norm",
            where="schatten_norm(p)",
            expected="a finite Python number of at least 1",
            got=f"p={p!r}",
        )
    quadrature = method or LanczosQuadrature()
    cost = 1 if operator.symmetric else 2
    least = cost * (min(quadrature.minimum, operator.size) + _steps(operator, float(p))) + 1
    matvecs = positive_int(matvecs, "matvecs", "schatten_norm(matvecs)", minimum=least)
    return _schatten(operator, key, float(p), matvecs, quadrature)


@filter_jit
def _schatten(
    operator: Operator, key: PRNGKeyArray, p: float, matvecs: int, quadrature: LanczosQuadrature
) -> Estimate:
    measured = _size_of(operator, key)
    unit = power_below(measured)
    if operator.symmetric:
        cost, floor = 1, 0.0 if operator.positive_semidefinite else None
        target = InUnits(True, operator.positive_semidefinite, operator, unit)
    else:
        cost, floor = 2, 0.0
        target = Gram(True, True, operator, unit)
    where, steps = "schatten_norm(matvecs)", _steps(operator, p)
    largest = _largest(target, key, steps) if steps else jnp.ones_like(unit)
    power = _Power(p / cost, p >= 2, floor is not None, largest)
    way = FunctionTrace(power, quadrature, floor, lower_bound(target, None, where))
    wanted = Wanted((matvecs - 1) // cost - steps, None)
    found = function_estimate(way, target, key, wanted, where)
    # NaN is not zero.
    is_zero = measured == 0
    some = ~(lax.stop_gradient(found.value) <= 0) & ~is_zero
    root = jnp.where(some, found.value, 1) ** (1 / p) * largest ** (1 / cost)
    # Only a zero operator has the norm zero, though the nodes of some rules are never quite zero.
    value = jnp.where(some, root * unit, jnp.where(is_zero, 0, jnp.nan))
    slope = lax.stop_gradient(value) / (p * jnp.where(some, lax.stop_gradient(found.value), 1))
    return Estimate.of(
        value,
        found.standard_error * slope,
        matvecs=(found.matvecs + steps) * cost + 1,
        degrees_of_freedom=found.degrees_of_freedom,
        tags_hold=found.tags_hold,
    )


def _size_of(operator: Operator, key: PRNGKeyArray) -> Array:
    """An element of a product: near the root mean square of the singular values, and zero for a zero operator."""
    # A vector of signs may be one that a nonzero operator takes to zero.
    probe = Normal().draw(key, operator.size, 1, operator.dtype)
    return jnp.max(jnp.abs(lax.stop_gradient(operator.matmul(probe))), initial=0)


def _steps(operator: Operator, p: float) -> int:
    """How many steps find the largest eigenvalue up to some 1 / p, so that its power is right up to some factor.

    From a random vector, the error of Lanczos is of the order of 1 / steps**2 (J. Kuczyński, H. Woźniakowski,
    "Estimating the largest eigenvalue by the power and Lanczos algorithms with a random start", SIAM Journal on Matrix
    Analysis and Applications 13 (1992), doi:10.1137/0613066).
    """
    exponent = p if operator.symmetric else p / 2
    return 0 if p <= _MODEST else math.ceil(min(math.sqrt(exponent), operator.size))


def _largest(operator: Operator, key: PRNGKeyArray, steps: int) -> Array:
    """The largest modulus of an eigenvalue, from below; 1 if all are zero."""
    start = Normal().draw(key, operator.size, 1, operator.dtype).T
    found = decompose(stop_gradient(operator), start, steps)
    nodes = jnp.linalg.eigvalsh(gauss(lax.stop_gradient(found))[0])
    largest = jnp.max(jnp.abs(nodes))
    return jnp.where(largest > 0, largest, 1)


class _Power(Module):
    """`|x|**exponent`, with derivative 0 where x is zero up to rounding, next to 1.

    Args:
        exponent: its exponent.
        is_smooth: whether the norm has second derivatives where singular values are zero; otherwise these are NaN.
        is_positive: whether x is never negative.
        unit: what x is divided by.
    """

    exponent: float
    is_smooth: bool
    is_positive: bool
    unit: Array

    def __call__(self, x: Array) -> Array:
        x = x / self.unit
        if self.exponent.is_integer() and (self.is_positive or self.exponent % 2 == 0):
            return x ** int(self.exponent)
        ratio = jnp.abs(x)
        # An eigenvalue that is a rounding error must have no slope. Those of A^* A have some that cancel.
        roundings = 1 if self.is_positive else _ROUNDINGS
        # NaN is not zero.
        some = ~(ratio <= roundings * jnp.finfo(x.dtype).eps)
        power = jnp.where(some, ratio, 1) ** self.exponent
        power = jnp.where(some, power, lax.stop_gradient(ratio) ** self.exponent)
        return power if self.is_smooth else power + _without_curvature(x)


@filter_custom_jvp
def _without_curvature(x: Array) -> Array:
    """Zero, with derivative zero, and with second derivative NaN where x is zero up to rounding, next to 1."""
    return jnp.zeros_like(x)


@_without_curvature.def_jvp
def _without_curvature_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _without_curvature(*primals), _slope_of_zero(*primals) * tangents[0]


@filter_custom_jvp
def _slope_of_zero(x: Array) -> Array:
    return jnp.zeros_like(x)


@_slope_of_zero.def_jvp
def _slope_of_zero_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    is_zero = jnp.abs(primals[0]) <= _ROUNDINGS * jnp.finfo(primals[0].dtype).eps
    return _slope_of_zero(*primals), jnp.where(is_zero, jnp.nan, 0) * tangents[0]


# Up to this many directions alike make the sample variance too rough.
_DIRECTIONS = 4


def frobenius_norm(
    operator: Any, key: PRNGKeyArray, *, matvecs: int, probes: Probes | None = None
) -> Estimate:
    """Estimates the Frobenius norm: the square root of the sum of the squared moduli of the elements.

    The estimate is the square root of the mean of `|A w|^2` over random probes `w`: the Hutchinson estimate of the
    trace of `A^* A`, with one product for each probe. With as many products as the operator has rows it is exact.

    The variance of `|A w|^2` is at most `c |A^* A|^2`, with c = 2 for real probes and 1 for complex ones. Products with
    two probes show it: `|A^* A|^2` is the expectation of `|<A w, A v>|^2`. Where few singular values dominate, the
    larger of this and the sample variance is reported. Both are rough there, so they count as half as many probes.

    M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines",
    Communications in Statistics - Simulation and Computation 18 (1989), doi:10.1080/03610918908812806.

    Args:
        operator: any square operator.
        key: a key of `jax.random`.
        matvecs: the largest number of products to make, a Python int of at least 5, or the number of rows if that is
            less.
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Returns:
        An `Estimate`, real.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, or `matvecs` is traced or not an int.
        ValueError: if `matvecs` is too small.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> matrix = jax.random.normal(jax.random.key(0), (200, 200))
        >>> estimate = estimators.frobenius_norm(matrix, jax.random.key(1), matvecs=50)
        >>> bool(abs(estimate.value - jnp.linalg.norm(matrix)) < 4 * estimate.standard_error)
        True
    """
    operator = as_operator(operator, "frobenius_norm(operator)")
    check_key("frobenius_norm", key)
    least = max(1, min(FEWEST_PROBES, operator.size))
    matvecs = positive_int(matvecs, "matvecs", "frobenius_norm(matvecs)", minimum=least)
    return _frobenius(operator, key, min(matvecs, operator.size), probes)


@filter_jit
def _frobenius(
    operator: Operator, key: PRNGKeyArray, count: int, probes: Probes | None
) -> Estimate:
    size, dtype = operator.size, operator.dtype
    exact = count == size
    if exact:
        vectors = jnp.eye(size, dtype=operator.dtype)
    else:
        vectors = (probes or default_probes(operator)).draw(key, size, count, operator.dtype)
    products = operator.matmul(vectors)
    still = lax.stop_gradient(products)
    largest = jnp.max(jnp.abs(still), initial=0)
    unit = power_below(largest)
    still = still / unit.astype(dtype)
    squares = jnp.sum(jnp.abs(still) ** 2, axis=0)
    total = jnp.sum(squares) if exact else jnp.mean(squares)
    # d |A w|^2 = 2 Re <A w, dA w> depends on A itself, so second derivatives are right.
    weight = jnp.asarray(2 / (1 if exact else count), total.dtype) / unit**2
    total = attach(
        total, operator, StoredPairs.of(operator, products * weight.astype(dtype), vectors)
    )
    # NaN is not zero.
    some = ~(lax.stop_gradient(total) <= 0)
    root = jnp.where(some, jnp.sqrt(jnp.where(some, total, 1)), 0)
    still_root = jnp.where(some, lax.stop_gradient(root), 1)
    spread = jnp.zeros_like(still_root) if exact else jnp.sqrt(_variance(still, squares) / count)
    return Estimate.of(
        root * unit,
        spread / (2 * still_root) * unit,
        matvecs=jnp.asarray(count, jnp.int32),
        degrees_of_freedom=jnp.asarray(jnp.inf if exact else (count - 1) / 2, root.dtype),
        tags_hold=jnp.asarray(True),
    )


def _variance(products: Array, squares: Array) -> Array:
    """The variance of the squared length of a product, from k products; rather too large than too small."""
    count, mean = len(squares), jnp.mean(squares)
    gram = jnp.abs(times(products.conj().T, products)) ** 2
    pairs = (jnp.sum(gram) - jnp.sum(jnp.diagonal(gram))) / (count * (count - 1))
    factor = 1 if jnp.iscomplexobj(products) else 2
    # It is divided by the square of the mean, whose expectation is larger than that of the mean by its variance.
    most, sample = factor * pairs * (1 + factor / count), jnp.var(squares, ddof=1)
    # Of many directions alike the squared length is nearly normal, and the sample knows its own variance.
    share = jnp.minimum(_DIRECTIONS * pairs / jnp.where(mean > 0, mean, 1) ** 2, 1)
    return sample + share * jnp.maximum(most - sample, 0)
