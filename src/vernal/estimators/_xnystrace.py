"""`XNysTrace`: leave-one-out estimates with the best low-rank approximation of a positive semidefinite operator."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from ..linalg import Operator, times
from ._leave_out import (
    Estimates,
    LeaveOneOut,
    Sketch,
    near_hermitian,
    usable_pairs,
)
from ._orthogonal import filled, orthonormal, shifted_cholesky


class XNysTrace(LeaveOneOut):
    """The mean of leave-one-out estimates with Nystrom approximations, for positive semidefinite operators.

    It takes `m` probes and one product with each. Every probe in turn is the test vector for the remainder of the
    approximation from the others. The estimate is unbiased, and orders of magnitude better than `Hutchinson` with the
    same number of products if the eigenvalues decay; if one diagonal element stands out from a flat spectrum, it can be
    far worse. It is exact for a rank below `m`.

    If the products show that the operator is not positive semidefinite, or not symmetric, the result is that of
    `Hutchinson` with the same products, and `Estimate.tags_hold` is False. Small negative eigenvalues go unnoticed,
    and do no harm.

    E. N. Epperly, J. A. Tropp, R. J. Webber, "XTrace: Making the most of every sample in stochastic trace estimation",
    SIAM Journal on Matrix Analysis and Applications 45 (2024), doi:10.1137/23M1548323. The error estimate is not the
    paper's, which is 0.25 to 0.7 of the error: it accounts for the correlation of the leave-one-out estimates, by
    leaving out two.

    Args:
        probes: the distribution of the probes. None takes `Normal()`.
        resphered: whether the part of a test vector outside of the span of the others is scaled to its mean length
            ("improved" in the paper). This lowers the variance, and is exact for multiples of the identity. It needs
            probes that are uniform in direction.

    Raises:
        ValueError: if `resphered` is True with probes that are signs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> operator = linalg.MatrixOperator(jnp.diag(0.7 ** jnp.arange(200.0)), positive_semidefinite=True)
        >>> method = estimators.XNysTrace()
        >>> estimate = estimators.trace(operator, jax.random.key(0), matvecs=40, method=method)
        >>> bool(abs(estimate.value - 1 / 0.3) < 1e-4)
        True
    """

    minimum: ClassVar[int] = 8
    per_probe: ClassVar[int] = 1
    needs_positive_semidefinite: ClassVar[bool] = True

    def left_out(self, operator: Operator, sketch: Sketch, used: int | Array) -> Estimates:
        """As in `LeaveOneOut`."""
        parts = _parts(operator, sketch)
        lengths = _inverse_gram(sketch) if self.resphered else None
        estimates = _left_out(parts, lengths, operator.size, used)
        return Estimates(*estimates, parts.shift, parts.trace, operator.eps, parts.consistent)


class _Nystrom(NamedTuple):
    """The Nystrom approximation, as matrices of shape `(k, k)`.

    Attributes:
        trace: of the approximation.
        weights: W = (probes^* A probes)^-1.
        inside: W probes^* A^2 probes W.
        shift: the multiple of the identity that was added to the operator.
        consistent: whether probes^* A probes is Hermitian and positive definite.
    """

    trace: Array
    weights: Array
    inside: Array
    shift: Array
    consistent: Array


def _parts(operator: Operator, sketch: Sketch) -> _Nystrom:
    probes, mask = sketch.probes, sketch.mask
    k = probes.shape[1]
    eye = jnp.eye(k, dtype=probes.dtype)
    gram = times(probes.conj().T, probes)
    core = times(probes.conj().T, sketch.products)
    hermitian = near_hermitian(core, jnp.linalg.norm(sketch.products) * k**0.5, operator)
    core = (core + core.conj().T) / 2
    lower, shift, positive = shifted_cholesky(core, gram, sketch.shift, mask)
    shifted = sketch.products + shift.astype(probes.dtype) * probes
    half = solve_triangular(lower, shifted.conj().T, lower=True)
    square = times(half, half.conj().T)
    inverse = solve_triangular(lower, eye, lower=True).conj().T
    return _Nystrom(
        trace=jnp.trace(square).real,
        weights=times(inverse, inverse.conj().T),
        inside=times(inverse, times(square, inverse.conj().T)),
        shift=shift,
        consistent=hermitian & positive,
    )


def _inverse_gram(sketch: Sketch) -> Array:
    """The inverse of the Gram matrix of the probes."""
    probes, mask = sketch.probes, sketch.mask
    n, k = probes.shape
    eye = jnp.eye(k, dtype=probes.dtype)
    if 2 * k > n:
        _, upper = orthonormal(probes, mask)
        lower = upper.conj().T
    else:
        lower = jnp.linalg.cholesky(filled(times(probes.conj().T, probes), mask))
    inverse = solve_triangular(lower, eye, lower=True)
    return times(inverse.conj().T, inverse)


def _left_out(
    parts: _Nystrom, lengths: Array | None, n: int, used: int | Array
) -> tuple[Array, Array, Array]:
    """`(single, double, usable)` for `mean_of_singles`."""
    w_j = jnp.diagonal(parts.weights).real
    root = jnp.sqrt(w_j)
    outer = (root[:, None] * root[None, :]).astype(parts.weights.dtype)
    w, g = parts.weights / outer, parts.inside / outer
    g_j = jnp.diagonal(g).real
    count = jnp.asarray(used, w_j.dtype)
    sine = 1 - jnp.abs(w) ** 2
    usable = usable_pairs(sine, used)
    sine = jnp.where(usable, sine, 1)
    one, two = jnp.ones_like(w_j), jnp.ones_like(sine)
    if lengths is not None:
        m_j = jnp.diagonal(lengths).real
        outside = jnp.abs(lengths) ** 2 / (m_j[:, None] * m_j[None, :])
        one = (n - count + 1) * m_j
        two = (n - count + 2) * m_j[None, :] * jnp.where(usable, 1 - outside, 1)
    single = parts.trace - g_j + one / w_j
    gone = (g_j[:, None] + g_j[None, :] - 2 * (w * g.T).real) / sine
    double = parts.trace - gone + two / (w_j[None, :] * sine)
    return single, double, usable
