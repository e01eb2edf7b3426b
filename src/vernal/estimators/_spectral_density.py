"""`spectral_density`: how the eigenvalues of a symmetric operator are distributed, as a curve."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, decompose, positive_int, symmetric_operator
from ..modules import Module
from ..primitives import nondifferentiable
from ..show import spec_text, value_error
from ..transforms import filter_jit
from ._quadrature import LanczosQuadrature, Starts, consistent
from ._rules import eigen, gauss

# The default width of a bump, as a part of the range of the spectrum.
_RANGE_PER_WIDTH = 50
# How many widths the default points go beyond the spectrum.
_MARGIN = 4


class SpectralDensity(Module):
    """A density of eigenvalues; its integral is 1.

    Args:
        points: where, of shape `(points,)`.
        density: there, of shape `(points,)`.
        standard_error: of the density, from the differences between probes, of shape `(points,)`.
        width: the standard deviation of the bumps that the density is made of.
        matvecs: how many products were made.
        tags_hold: whether the operator looks symmetric (and without negative eigenvalues, if it is declared so).
    """

    points: Array
    density: Array
    standard_error: Array
    width: Array
    matvecs: Array
    tags_hold: Array


def spectral_density(
    operator: Any,
    key: PRNGKeyArray,
    *,
    matvecs: int,
    points: Any = 200,
    width: float | int | None = None,
    method: LanczosQuadrature | None = None,
) -> SpectralDensity:
    """Estimates the density of the eigenvalues of a symmetric operator.

    Every eigenvalue is replaced by a bump of Gauss's shape; the mean of the bumps is the trace of a function of the
    operator for every point, and all of them come from the same Lanczos quadrature. The density times the size of the
    operator, integrated over an interval, is about the number of eigenvalues there. It has no derivatives.

    L. Lin, Y. Saad, C. Yang, "Approximating spectral densities of large matrices", SIAM Review 58 (2016),
    doi:10.1137/130934283.

    Args:
        operator: symmetric (Hermitian, if it is complex), and declared so.
        key: a key of `jax.random`.
        matvecs: how many products to make at most, a Python int.
        points: where; an array of real numbers, or how many points to take over the whole range of the spectrum.
        width: the standard deviation of a bump. None takes a 50th of the range that the eigenvalues are seen to have.
        method: how to use the products. None takes as many steps as probes: resolution needs steps.

    Returns:
        A `SpectralDensity`.

    Raises:
        TypeError: if `operator` is none, or `matvecs` is traced or no int.
        ValueError: if the operator is not declared symmetric, `matvecs` is too small, `points` is not an array of one
            dimension, or `width` is not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> operator = linalg.MatrixOperator(jnp.diag(jnp.linspace(0.0, 1.0, 100)), symmetric=True)
        >>> found = estimators.spectral_density(operator, jax.random.key(0), matvecs=80)
        >>> print(jnp.trapezoid(found.density, found.points).round(3))
        1.0
    """
    operator = symmetric_operator(operator, "spectral_density(operator)")
    if jnp.ndim(points) == 0:
        points = positive_int(points, "points", "spectral_density(points)", minimum=2)
    elif jnp.ndim(points) != 1:
        raise value_error(
            "the points are not a line of numbers",
            where="spectral_density(points)",
            expected="an array of shape (k,), or a Python int",
            got=spec_text(points),
        )
    if isinstance(width, int | float) and not width > 0:
        raise value_error(
            "`width` must be positive",
            where="spectral_density(width)",
            expected="a positive number, or None",
            got=f"width={width}",
        )
    method = LanczosQuadrature() if method is None else method
    matvecs = positive_int(matvecs, "matvecs", "spectral_density(matvecs)", minimum=method.minimum)
    count, steps = method.split(matvecs)
    return _estimated(operator, key, method, count, min(steps, operator.size), points, width)


@filter_jit
def _estimated(
    operator: Operator,
    key: PRNGKeyArray,
    method: LanczosQuadrature,
    count: int,
    steps: int,
    points: Any,
    width: Any,
) -> SpectralDensity:
    operator = nondifferentiable(operator, name="the operator of a spectral density")
    floor = 0.0 if operator.positive_semidefinite else None

    def rules(block: Array) -> tuple[Array, Array, Array]:
        found = decompose(operator, block, steps)
        nodes, vectors = eigen(gauss(found))
        return nodes, vectors[:, 0] ** 2, consistent(found.asymmetry, nodes, operator.size, floor)

    nodes, weights, agrees = Starts.of(operator, key, method.probes, count, steps).over(rules)
    low, high = jnp.min(nodes), jnp.max(nodes)
    if width is None:
        span = high - low
        # All eigenvalues equal: still a bump, of a width in proportion to where it is.
        one = jnp.where(jnp.abs(high) > 0, jnp.abs(high), 1)
        width = jnp.where(span > 0, span, one) / _RANGE_PER_WIDTH
    width = jnp.asarray(width, nodes.dtype)
    if isinstance(points, int):
        points = jnp.linspace(low - _MARGIN * width, high + _MARGIN * width, points)
    points = jnp.asarray(points, nodes.dtype)

    def at(point: Array) -> tuple[Array, Array]:
        bumps = jnp.exp(-(((point - nodes) / width) ** 2) / 2) / (
            width * jnp.sqrt(2 * jnp.pi).astype(width.dtype)
        )
        densities = jnp.sum(weights * bumps, axis=1)
        return jnp.mean(densities), jnp.std(densities, ddof=1) / jnp.sqrt(count).astype(width.dtype)

    density, error = lax.map(at, points)
    return SpectralDensity(
        points=points,
        density=density,
        standard_error=error,
        width=width,
        matvecs=jnp.asarray(count * steps, jnp.int32),
        tags_hold=jnp.all(agrees),
    )
