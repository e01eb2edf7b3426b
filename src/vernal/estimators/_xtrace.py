"""`XTrace`: every probe is used for a low-rank approximation and for its remainder."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..linalg import Operator, times
from ._leave_out import (
    Estimates,
    LeaveOneOut,
    Sketch,
    near_hermitian,
    unit_duals,
    usable_pairs,
)
from ._method import FEWEST_PROBES, products
from ._orthogonal import orthonormal


class XTrace(LeaveOneOut):
    """The mean of leave-one-out estimates with low-rank approximations. Works for every square operator.

    It takes `k = m // 2` probes and `m` products: half of them with the probes, half with an orthonormal basis of the
    first half. Every probe in turn is the test vector for the remainder of the approximation from the others. The
    estimate is unbiased, best where a few eigenvalues are much larger than the rest, and exact for a rank below `k`.
    For a positive semidefinite operator, `XNysTrace` is more accurate with `m` products.

    E. N. Epperly, J. A. Tropp, R. J. Webber, "XTrace: Making the most of every sample in stochastic trace estimation",
    SIAM Journal on Matrix Analysis and Applications 45 (2024), doi:10.1137/23M1548323. The error estimate is not the
    paper's: it accounts for the correlation of the leave-one-out estimates, by leaving out two.

    Args:
        probes: the distribution of the probes. None takes `Normal()`.
        resphered: whether the part of a test vector outside of the span of the others is scaled to its mean length
            ("improved" in the paper). This lowers the variance, and is exact for multiples of the identity. It needs
            probes that are uniform in direction.

    Raises:
        ValueError: if `resphered` is True with probes that are signs.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> matrix = jnp.diag(0.7 ** jnp.arange(200.0))
        >>> method = estimators.XTrace()
        >>> estimate = estimators.trace(matrix, jax.random.key(0), matvecs=60, method=method)
        >>> bool(abs(estimate.value - 1 / 0.3) < 1e-3)
        True
    """

    minimum: ClassVar[int] = 2 * FEWEST_PROBES
    per_probe: ClassVar[int] = 2

    def left_out(self, operator: Operator, sketch: Sketch, used: int | Array) -> Estimates:
        """As in `LeaveOneOut`; makes one more product for each probe."""
        parts = _parts(operator, sketch, used)
        estimates = _left_out(parts, operator.size, used, self.resphered)
        rounding = 2.3 * operator.eps
        return Estimates(*estimates, sketch.shift, parts.size, rounding, parts.consistent)


class _Compressed(NamedTuple):
    """The operator A inside and outside of the span of the products, as matrices of shape `(k, k)`.

    Q is a basis of the products, w_j = Q^* probe_j and u_j = probe_j - Q w_j. The s_i are the unit vectors for which
    Q (I - s_i s_i^*) Q^* projects on all products but i.

    Attributes:
        trace: of Q^* A Q.
        size: the sum of the moduli of the terms of `trace`.
        duals: [i, j] = s_i^* s_j.
        inside: [i, j] = s_i^* Q^* A Q s_j.
        along: [i, j] = s_i^* w_j.
        below: [i, j] = s_i^* Q^* A u_j.
        above: [i, j] = u_j^* A Q s_i.
        rest_forms: u_j^* A u_j.
        rest_norms: of u_j, squared.
        consistent: whether Q^* A Q is Hermitian, if it should be.
    """

    trace: Array
    size: Array
    duals: Array
    inside: Array
    along: Array
    below: Array
    above: Array
    rest_forms: Array
    rest_norms: Array
    consistent: Array


def _parts(operator: Operator, sketch: Sketch, used: int | Array) -> _Compressed:
    """Makes the second half of the products."""
    probes, shift = sketch.probes, sketch.shift.astype(sketch.probes.dtype)
    shifted = sketch.shifted()
    q, r = orthonormal(shifted, sketch.mask)
    more = products(operator, q, used)
    more = more / sketch.scale.astype(q.dtype) + shift * q
    q_star = q.conj().T
    w, h = times(q_star, probes), times(q_star, more)
    # u_j^* A Q + w_j^* H, row by row.
    left = r.conj().T if operator.symmetric else times(probes.conj().T, more)
    consistent = jnp.asarray(True)
    if operator.symmetric:
        consistent = near_hermitian(h, jnp.linalg.norm(h), operator)
        h = (h + h.conj().T) / 2
    hw = times(h, w)
    s = unit_duals(r, sketch.mask)
    below = times(s.conj().T, r - hw)
    forms = jnp.sum(probes.conj() * shifted, axis=0)
    return _Compressed(
        trace=jnp.trace(h),
        size=jnp.sum(jnp.abs(jnp.diagonal(h))),
        duals=times(s.conj().T, s),
        inside=times(s.conj().T, times(h, s)),
        along=times(s.conj().T, w),
        below=below,
        above=below.conj() if operator.symmetric else times(left - times(w.conj().T, h), s).T,
        rest_forms=forms - jnp.sum(w.conj() * (r - hw), axis=0) - jnp.sum(left.T * w, axis=0),
        rest_norms=jnp.sum(jnp.abs(probes) ** 2, axis=0) - jnp.sum(jnp.abs(w) ** 2, axis=0),
        consistent=consistent,
    )


def _left_out(
    parts: _Compressed, n: int, used: int | Array, resphered: bool
) -> tuple[Array, Array, Array]:
    """`(single, double, usable)` for `mean_of_singles`."""
    real = parts.rest_norms.dtype
    count = jnp.asarray(used, real)
    h, c, g = parts.inside, parts.along, parts.duals

    def estimates(trace: Array, forms: Array, norms: Array, dimension: Array) -> Array:
        weight = dimension / jnp.where(norms > 0, norms, 1) if resphered else jnp.ones_like(norms)
        return trace + weight.astype(forms.dtype) * forms

    h_j, c_j = jnp.diagonal(h), jnp.diagonal(c)
    b_j = jnp.diagonal(parts.below) + h_j * c_j
    a_j = jnp.diagonal(parts.above) + h_j * c_j.conj()
    forms = parts.rest_forms + c_j.conj() * b_j + c_j * (a_j - h_j * c_j.conj())
    norms = parts.rest_norms + jnp.abs(c_j) ** 2
    single = estimates(parts.trace - h_j, forms, norms, n - count + 1)

    # Without probe i too: one more direction (s_i - s_j s_j^* s_i), of length `sine`, goes to the remainder.
    sine = 1 - jnp.abs(g) ** 2
    usable = usable_pairs(sine, used)
    sine = jnp.where(usable, sine, 1)
    complex_sine = sine.astype(h.dtype)
    x = c - g * c_j[None, :]
    b = parts.below + h * c_j[None, :] - g * b_j[None, :]
    a = parts.above + h.T * c_j.conj()[None, :] - g.conj() * a_j[None, :]
    cross = g * h.T + g.conj() * h
    new = (h_j[:, None] - cross + (jnp.abs(g) ** 2).astype(h.dtype) * h_j[None, :]) / complex_sine
    size = jnp.abs(x) ** 2
    forms = forms[None, :] + (x.conj() * b + x * a + size.astype(h.dtype) * new) / complex_sine
    norms = norms[None, :] + size / sine
    double = estimates((parts.trace - h_j)[None, :] - new, forms, norms, n - count + 2)
    return single, double, usable
