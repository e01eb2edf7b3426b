"""`HutchPlusPlus` and `NAHutchPlusPlus`: the trace of a low-rank approximation, and Hutchinson for what it leaves."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ._method import Budget, Outcome, TraceMethod, default_probes, products
from ._orthogonal import orthonormal, product
from ._parts import deflated_pairs, divided, drawn, outside, together
from ._probes import Probes
from ._samples import Samples, is_real, pairs_agree, remainder, rounding
from ._sensitivity import Sensitivity


def _thirds(matvecs: int) -> tuple[int, int, int]:
    """Sketch, basis, probes: a third each, with at least two probes. Everything is used."""
    basis = min((matvecs + 1) // 3, (matvecs - 2) // 2)
    return basis, basis, matvecs - 2 * basis


def _quarters(matvecs: int) -> tuple[int, int, int]:
    """Left and right sketch, and probes: a quarter, a half, and a quarter, with at least two probes."""
    probes = max(2, matvecs // 4)
    left = max(1, (matvecs - probes) // 3)
    return left, matvecs - probes - left, probes


class HutchPlusPlus(TraceMethod):
    r"""The trace on a random part of the range, and Hutchinson for what is orthogonal to it. For every square operator.

    With `Q` an orthonormal basis of the products of a third of the budget, the trace is `tr(Q^* A Q)`, exactly known
    after another third, and the trace of `(I - Q Q^*) A (I - Q Q^*)`, which is estimated with the last one. For a
    positive semidefinite operator the error is of order `1 / m` times the trace, instead of `1 / sqrt(m)`. No better
    than `Hutchinson` where eigenvalues do not decay. Unbiased, with an unbiased variance.

    `XTrace` makes more of as many products.

    R. A. Meyer, C. Musco, C. Musco, D. P. Woodruff, "Hutch++: optimal stochastic trace estimation", Symposium on
    Simplicity in Algorithms (2021), doi:10.1137/1.9781611976496.16.

    Args:
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> matrix = jnp.diag(1 / jnp.arange(1.0, 301) ** 2) + jnp.ones((300, 300)) / 300
        >>> method = estimators.HutchPlusPlus()
        >>> estimate = estimators.trace(matrix, jax.random.key(0), matvecs=60, method=method)
        >>> bool(abs(estimate.value - jnp.trace(matrix)) < 4 * estimate.standard_error)
        True
    """

    probes: Probes | None = None

    minimum = 4

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace from `budget.used` products; see `TraceMethod`."""
        distribution = self.probes or default_probes(operator)
        first, second, third = divided(budget, _thirds, self.minimum)
        of_sketch, of_rest = jax.random.split(key)
        sketch = products(operator, drawn(operator, distribution, of_sketch, first), first.used)
        basis, _ = orthonormal(sketch, first.mask())
        probes = drawn(operator, distribution, of_rest, third)
        rest = outside(basis, probes)
        along, across = together(operator, [basis, rest], [second, third])

        inside = jnp.sum(basis.conj() * along, axis=0)
        agrees = pairs_agree(operator, basis, along)
        dimension = jnp.asarray(operator.size - first.used, jnp.finfo(operator.dtype).dtype)
        # Both have the same forms; only slopes need more.
        block = (probes, outside(basis, across)) if operator.symmetric else (rest, across)
        samples = remainder(operator, distribution, block, (rest, dimension), third.used, agrees)
        plain = jnp.sum(rest.conj() * across, axis=0).real
        samples = samples._replace(lowest=jnp.minimum(jnp.min(plain), jnp.min(inside.real)))
        return outcome_of(
            operator,
            samples,
            known=(jnp.sum(inside), jnp.sum(jnp.abs(inside))),
            correlated=correlations(operator, distribution, samples.number),
            matvecs=budget.used,
            sensitivity=deflated_pairs(basis, rest, third.used),
        )


class NAHutchPlusPlus(TraceMethod):
    r"""Non-adaptive Hutch++: all vectors are drawn before the first product is made. For every square operator.

    For products that come from outside in one batch, or from data that can be read only once. With random `S` (a
    quarter of the budget), `R` (a half) and `G` (a quarter), the approximation is `L = A R (S^* A R)^+ S^* A`, and the
    trace is that of `L` plus the mean of `g^* (A - L) g` over the columns of `G`. Unbiased, with an unbiased variance;
    its error is several times that of `HutchPlusPlus`. If the operator is not symmetric, `S^* A` is made with its
    conjugate transpose.

    R. A. Meyer, C. Musco, C. Musco, D. P. Woodruff, "Hutch++: optimal stochastic trace estimation", Symposium on
    Simplicity in Algorithms (2021), doi:10.1137/1.9781611976496.16. The pseudo-inverse is cut at rounding, which makes
    it stable: Y. Nakatsukasa, "Fast and stable randomized low-rank matrix approximation" (2020), arXiv:2009.11392.

    Args:
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> matrix = jnp.diag(1 / jnp.arange(1.0, 301) ** 2) + jnp.ones((300, 300)) / 300
        >>> method = estimators.NAHutchPlusPlus()
        >>> estimate = estimators.trace(matrix, jax.random.key(0), matvecs=60, method=method)
        >>> bool(abs(estimate.value - jnp.trace(matrix)) < 4 * estimate.standard_error)
        True
    """

    probes: Probes | None = None

    minimum = 4

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace from `budget.used` products; see `TraceMethod`."""
        distribution = self.probes or default_probes(operator)
        parts = divided(budget, _quarters, self.minimum)
        blocks = [
            drawn(operator, distribution, one, part)
            for one, part in zip(jax.random.split(key, 3), parts, strict=True)
        ]
        if operator.symmetric:
            below, above, across = together(operator, blocks, list(parts))
        else:
            above, across = together(operator, blocks[1:], list(parts[1:]))
            below = products(operator, blocks[0], parts[0].used, adjoint=True)
        left, right, probes = blocks

        agrees = pairs_agree(operator, right, above)
        approximation = _oblique(above, below, product(left.conj().T, above))
        # Likewise of the identity instead of A: a projection.
        projection = _oblique(right, left, product(left.conj().T, right))
        rest = across - approximation.products(operator, probes)
        dimension = operator.size - projection.trace.real
        control = probes - projection.symmetric_products(probes), dimension
        samples = remainder(operator, distribution, (probes, rest), control, parts[2].used, agrees)
        # L may be above a positive semidefinite operator: that one's own forms are looked at.
        samples = samples._replace(lowest=jnp.min(jnp.sum(probes.conj() * across, axis=0).real))
        basis, _ = orthonormal(above, parts[1].mask())
        return outcome_of(
            operator,
            samples,
            known=(approximation.trace, approximation.size),
            correlated=correlations(operator, distribution, samples.number),
            matvecs=budget.used,
            sensitivity=deflated_pairs(basis, outside(basis, probes), parts[2].used),
        )


class _Oblique(NamedTuple):
    """The matrix `right @ left^*`, of low rank."""

    right: Array
    left: Array

    @property
    def terms(self) -> Array:
        """The traces of its terms of rank one."""
        return jnp.sum(self.left.conj() * self.right, axis=0)

    @property
    def trace(self) -> Array:
        return jnp.sum(self.terms)

    @property
    def size(self) -> Array:
        """Of the numbers of which the trace is the sum."""
        return jnp.sum(jnp.abs(self.terms))

    def products(self, operator: Operator, block: Array) -> Array:
        """Products with it, or with its symmetric part if the operator is symmetric: as good, and slopes need it."""
        if operator.symmetric:
            return self.symmetric_products(block)
        return product(self.right, product(self.left.conj().T, block))

    def symmetric_products(self, block: Array) -> Array:
        there = product(self.right, product(self.left.conj().T, block))
        return (there + product(self.left, product(self.right.conj().T, block))) / 2


def _oblique(right: Array, left: Array, core: Array) -> _Oblique:
    """`right @ pinv(core) @ left^*`, in which singular values that are nothing but rounding are taken as zero."""
    u, s, vh = jnp.linalg.svd(core, full_matrices=False)
    kept = s > sum(core.shape) * jnp.finfo(core.dtype).eps * jnp.max(s)
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0).astype(core.dtype)
    return _Oblique(product(right, vh.conj().T) * inverse[None, :], product(left, u))


def correlations(operator: Operator, distribution: Probes, number: Array) -> Array:
    """The sum of the correlations of all ordered pairs of so many forms from one draw."""
    return distribution.correlation(operator.size) * number * (number - 1)


def outcome_of(
    operator: Operator,
    samples: Samples,
    *,
    known: tuple[Array, Array],
    correlated: Array,
    matvecs: int | Array,
    sensitivity: Sensitivity,
) -> Outcome:
    """What a method found that knows the trace of a part of the operator, and has samples of the rest.

    Args:
        operator: says the tags.
        samples: of the rest.
        known: the trace of the known part, and the size of the numbers of which that is the sum.
        correlated: the sum of the correlations of all ordered pairs of samples.
        matvecs: how many products were made.
        sensitivity: the pairs of the derivative.
    """
    value = known[0].real if is_real(operator) else known[0]
    size = known[1] + samples.size
    return Outcome(
        value=value + samples.mean,
        variance=samples.variance(correlated) + rounding(operator, size),
        degrees_of_freedom=samples.number - 1,
        matvecs=jnp.asarray(matvecs, jnp.int32),
        consistent=samples.consistent(operator, size),
        sensitivity=sensitivity,
    )
