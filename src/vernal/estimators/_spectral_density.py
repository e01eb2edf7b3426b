"""`spectral_density`: the distribution of the eigenvalues of a symmetric operator, as a curve."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, decompose, positive_int, refuse_empty, symmetric_operator
from ..modules import Module
from ..primitives import nondifferentiable
from ..show import spec_text, value_error
from ..transforms import filter_jit
from ..trees import check_key
from ._quadrature import LanczosQuadrature, Starts
from ._rules import consistent, eigen, gauss

# The range of the spectrum, in default widths of a bump.
_RANGE_PER_WIDTH = 50
# The default points extend this many widths beyond the spectrum.
_MARGIN = 4


class SpectralDensity(Module):
    """A density of eigenvalues; its integral is 1.

    Args:
        points: the points at which the density is given, of shape `(points,)`.
        density: the density at these points, of shape `(points,)`.
        standard_error: of the density, from the differences between probes, of shape `(points,)`.
        width: the standard deviation of the Gaussian bumps that make up the density.
        matvecs: the number of products that were made.
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

    Every eigenvalue is replaced by a Gaussian bump. At each point, the mean of the bumps is the trace of a function of
    the operator, and all these traces come from the same Lanczos quadrature. The density times the size of the
    operator, integrated over an interval, is about the number of eigenvalues there. It has no derivatives.

    L. Lin, Y. Saad, C. Yang, "Approximating spectral densities of large matrices", SIAM Review 58 (2016),
    doi:10.1137/130934283.

    Args:
        operator: symmetric (Hermitian, if it is complex), and declared so.
        key: a key of `jax.random`.
        matvecs: the largest number of products to make, a Python int.
        points: an array of real numbers, or the number of points to spread over the whole range of the spectrum.
        width: the standard deviation of a bump. None takes a 50th of the observed range of the eigenvalues.
        method: how to use the products. None takes `LanczosQuadrature()`.

    Returns:
        A `SpectralDensity`.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, or `matvecs` is traced or not an int.
        ValueError: if the operator is empty or not declared symmetric, `matvecs` is too small, `points` is neither an
            int nor one-dimensional, or `width` is not positive.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> operator = linalg.MatrixOperator(jnp.diag(jnp.linspace(0.0, 1.0, 100)), symmetric=True)
        >>> found = estimators.spectral_density(operator, jax.random.key(0), matvecs=80)
        >>> print(jnp.trapezoid(found.density, found.points).round(3))
        1.0
    """
    operator = symmetric_operator(operator, "spectral_density(operator)")
    check_key("spectral_density", key)
    refuse_empty(operator, "spectral_density(operator)")
    if jnp.ndim(points) == 0:
        points = positive_int(points, "points", "spectral_density(points)", minimum=2)
    elif jnp.ndim(points) != 1:
        raise value_error(
            "the points must be a one-dimensional array",
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
        # If all eigenvalues are equal, the width is proportional to them.
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
