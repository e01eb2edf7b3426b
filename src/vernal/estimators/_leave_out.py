"""Shared by the leave-one-out methods: errors of correlated estimates, and derivatives.

The difficulty: the k leave-one-out estimates t_1, ..., t_k of such a method are made from the same probes. Their
spread, divided by sqrt(k), is not the error of their mean: it was 0.25 to 0.7 of it, because they are correlated.

The plan: measure the correlation. t_i uses probe i only as a test vector, and all others for a low-rank
approximation; so its expectation given the others is the truth, tr. Let t_i(-j) be the same estimate without probe j
altogether. It does not depend on probe j, so the expectation of t_i(-j) t_j is tr**2. Given the probes other than i
and j, t_i(-j) and t_j(-i) are independent, so the expectation of t_i(-j) t_j(-i) is tr**2 too. Let d_ij =
t_j - t_j(-i) be how much probe i moves the estimate j. Then, exactly, for every k and i != j,

    cov(t_i, t_j) = E[d_ji d_ij] = E[(t_i - tr) d_ij].

The variance of the mean is then s**2 / k + cov, where s**2 is the sample variance, whose expectation is var - cov.
Both expressions are averaged over all pairs. The second one, with the mean of all t_i in place of tr, is slightly
biased, but less noisy where leaving out two is much worse than leaving out one (eigenvalues that decay fast). The
covariance is the mean of both, each clipped at zero: with 400 to 1000 seeds on four spectra of 1000 eigenvalues, the
root mean square of the error estimate was 1.0 to 1.3 times that of the error.

All pairs cost O(k**2) after matrices of shape (k, k): leaving out two is a rank-two downdate.

Glossary: "single" the estimates t_i, of shape (k,); "double" the estimates without two, [i, j] = t_j(-i); "dual" the
unit vector in the span of all products that is orthogonal to all of them but one.
"""

import abc
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, power_of_two, times
from ..show import value_error
from ._gradient_pairs import GradientPairs
from ._method import Budget, Outcome, TraceMethod, products
from ._orthogonal import orthonormal
from ._probes import Normal, Probes, Rademacher, Steinhaus
from ._samples import tag_tolerance

# The fewest degrees of freedom of the variance. Its noise is estimated from the same few probes, so it is not trusted
# below this.
_LEAST_FREEDOM = 2


class LeaveOneOut(TraceMethod):
    """A method in which every probe in turn is the test vector for a low-rank approximation from the others."""

    probes: Probes | None = None
    resphered: bool = True

    per_probe: ClassVar[int]
    """How many products there are for each probe."""

    def __check_init__(self) -> None:
        name, probes = type(self).__name__, type(self.probes).__name__
        if self.resphered and isinstance(self.probes, Rademacher | Steinhaus):
            raise value_error(
                "signs cannot be resphered: all directions of a probe must be equally likely",
                where=name,
                expected="resphered=False, or probes such as Normal() or Sphere()",
                got=f"probes={probes}(), resphered=True",
                instead=f"{name}(probes={probes}(), resphered=False)",
            )

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace from as many probes as the budget allows; see `TraceMethod`."""
        part = budget.part(self.per_probe)
        drawn = part.drawn(operator, self.probes or Normal(), key)
        return self.from_sketch(operator, drawn, products(operator, drawn, part.used), part.used)

    def from_sketch(
        self, operator: Operator, probes: Array, products: Array, used: int | Array
    ) -> Outcome:
        """Estimates the trace from probes and their products.

        Args:
            operator: the operator, without derivatives.
            probes: of shape `(n, k)`; columns from `used` on are zero.
            products: of the operator with the probes, of shape `(n, k)`.
            used: the number of probes, at least 2.
        """
        sketch = prepared(operator, probes, products, used)
        made = self.left_out(operator, sketch, used)
        best = mean_of_singles(made.single, made.double, made.usable, used)
        plain = _hutchinson(jnp.sum(sketch.probes.conj() * sketch.products, axis=0), used)
        if operator.symmetric:
            best, plain = (mean._replace(value=mean.value.real) for mean in (best, plain))
        # Subtracts the shift that made products independent, and adds the rounding of the sums.
        value = best.value - (made.shift * operator.size).astype(best.value.dtype)
        rounding = made.rounding * jnp.maximum(made.size, jnp.abs(value))
        best = Mean(value, best.variance + rounding**2, best.degrees_of_freedom)
        value, variance, freedom = (
            jnp.where(made.consistent, x, y) for x, y in zip(best, plain, strict=True)
        )
        return Outcome(
            value=value * sketch.undo.astype(value.dtype),
            variance=variance * sketch.undo**2,
            degrees_of_freedom=freedom,
            matvecs=self.per_probe * jnp.asarray(used, jnp.int32),
            consistent=made.consistent,
            gradient_pairs=LeftOut(sketch.probes, sketch.shifted(), used, self.resphered),
        )

    @abc.abstractmethod
    def left_out(self, operator: Operator, sketch: "Sketch", used: int | Array) -> "Estimates":
        """The estimates from the first `used` probes of a sketch of the operator."""


class Estimates(NamedTuple):
    """The leave-one-out estimates that a method makes from a sketch.

    Attributes:
        single: the leave-one-out estimates, of shape `(k,)`; see `mean_of_singles`.
        double: without another probe, of shape `(k, k)`; likewise.
        usable: the pairs to look at, likewise.
        shift: the multiple of the identity that was added to the operator.
        size: the size of the terms of an estimate.
        rounding: the rounding error, relative to `size`.
        consistent: whether the tags may be true.
    """

    single: Array
    double: Array
    usable: Array
    shift: Array
    size: Array
    rounding: float
    consistent: Array


class Mean(NamedTuple):
    """The mean of some estimates, an estimate of its variance, and the degrees of freedom of the variance."""

    value: Array
    variance: Array
    degrees_of_freedom: Array


def mean_of_singles(single: Array, double: Array, usable: Array, count: int | Array) -> Mean:
    """The mean of leave-one-out estimates, with its error as explained at the top of this file.

    Args:
        single: the estimates, of shape `(k,)`; those from `count` on are ignored.
        double: [i, j] is the estimate of `single[j]` without the probe i, of shape `(k, k)`.
        usable: the pairs to use, of shape `(k, k)` and symmetric. The estimates of any other pair must deflate the
            same space; they are uncorrelated given that space.
        count: the number of estimates.
    """
    dtype = jnp.finfo(single.dtype).dtype
    number = jnp.asarray(count, dtype)
    used = jnp.arange(single.shape[0]) < count
    mean = jnp.where(used, single, 0).sum() / number.astype(single.dtype)
    deviation = jnp.where(used, single - mean, 0)
    square = jnp.abs(deviation) ** 2
    moves = jnp.where(usable, single[None, :] - double, 0)
    mutual = jnp.sum((moves * moves.conj().T).real, axis=1) / (number - 1)
    plain = (deviation.conj() * jnp.sum(moves, axis=1)).real / (number - 1)
    covariance = (jnp.maximum(mutual.sum(), 0) + jnp.maximum(plain.sum(), 0)) / (2 * number)
    variance = square.sum() / (number * (number - 1)) + covariance

    # The mean over all pairs of a function of two samples varies by four times the variance of its means over j.
    shares = square / (2 * number) + (mutual + plain) / 2
    shares = jnp.where(used, shares - shares.sum() / number, 0)
    uncertainty = 4 * jnp.sum(shares**2) / (number * (number - 1))
    freedom = 2 * variance**2 / jnp.where(uncertainty > 0, uncertainty, 1)
    freedom = jnp.where(uncertainty > 0, jnp.maximum(freedom, _LEAST_FREEDOM), number)
    return Mean(mean, variance, jnp.minimum(freedom, number - 1))


def usable_pairs(sine_squared: Array, count: int | Array) -> Array:
    """Pairs of different used columns that are not parallel up to rounding."""
    k = sine_squared.shape[0]
    used = jnp.arange(k) < count
    apart = sine_squared > 100 * jnp.finfo(sine_squared.dtype).eps
    return used[:, None] & used[None, :] & ~jnp.eye(k, dtype=bool) & apart


def _hutchinson(forms: Array, count: int | Array) -> Mean:
    """The mean of the first `count` quadratic forms, the others being zero; for an operator with a false tag."""
    number = jnp.asarray(count, jnp.finfo(forms.dtype).dtype)
    mean = forms.sum() / number.astype(forms.dtype)
    used = jnp.arange(forms.shape[0]) < count
    spread = jnp.where(used, jnp.abs(forms - mean) ** 2, 0).sum()
    return Mean(mean, spread / (number * (number - 1)), number - 1)


class LeftOut(GradientPairs):
    """Derivatives as the mean over i of tr(Q_i^* dA Q_i) + r_i^* dA r_i, with the error of all samples together.

    Q_i is a basis of the products with all probes but i, and r_i the part of probe i orthogonal to it. With the unit
    vector s_i that is orthogonal to Q_i in the space of all products, the mean of Q_i Q_i^* is
    Q (I - mean s_i s_i^*) Q^*, so there are 2k pairs rather than k**2.

    Args:
        probes: of shape `(n, k)`; those from `count` on are zero.
        products: of the operator with the probes, of shape `(n, k)`.
        count: the number of probes.
        resphered: whether the remainders are scaled to their mean length.
    """

    probes: Array
    products: Array
    count: int | Array
    resphered: bool

    def blocks(self) -> int:
        """The number of blocks: one."""
        return 1

    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        """Basis and remainders; made here because the value does not need them."""
        del operator, index
        n, k = self.probes.shape
        mask = (
            None if isinstance(self.count, int) and self.count == k else jnp.arange(k) < self.count
        )
        q, r = orthonormal(self.products, mask)
        duals = unit_duals(r, mask)
        inside = times(q.conj().T, self.probes)
        along = jnp.sum(duals.conj() * inside, axis=0)
        rest = self.probes - times(q, inside - duals * along[None, :])
        number = jnp.asarray(self.count, jnp.finfo(rest.dtype).dtype)
        weight = 1 / number
        if self.resphered:
            norms = jnp.sum(jnp.abs(rest) ** 2, axis=0)
            weight = weight * (n - number + 1) / jnp.where(norms > 0, norms, 1)
        weight = jnp.broadcast_to(weight, (k,))
        eye = jnp.eye(k, dtype=q.dtype)
        kept = eye - times(duals, duals.conj().T) / number.astype(q.dtype)
        left = jnp.concatenate([times(q, kept), rest * weight.astype(q.dtype)[None, :]], axis=1)
        return left, jnp.concatenate([q, rest], axis=1)


def unit_duals(r: Array, mask: Array | None) -> Array:
    """Column i is the unit vector that is orthogonal to all columns of `r` but i; zero where not used."""
    diagonal = jnp.diagonal(r)
    # Zero only for a product that depends exactly on others; any number of the size of rounding serves as well.
    least = 0.1 * jnp.finfo(r.dtype).eps * jnp.max(jnp.abs(r))
    small = jnp.abs(diagonal) < least
    r = r + jnp.diag(jnp.where(small, least.astype(r.dtype) - diagonal, 0))
    duals = solve_triangular(r, jnp.eye(r.shape[0], dtype=r.dtype)).conj().T
    duals = duals / jnp.linalg.norm(duals, axis=0, keepdims=True).astype(r.dtype)
    return duals if mask is None else jnp.where(mask[None, :], duals, 0)


class Sketch(NamedTuple):
    """Probes and their products, scaled.

    Attributes:
        probes: of shape `(n, k)`.
        products: of the operator with the probes, divided by `scale`.
        scale: a power of two, real.
        shift: the multiple of the identity to add to the (divided) operator so that products are linearly independent;
            of the size of rounding, real.
        mask: which probes are used; None for all.
        undo: the factor for the estimates: `scale`, or zero if all products are zero.
    """

    probes: Array
    products: Array
    scale: Array
    shift: Array
    mask: Array | None
    undo: Array

    def shifted(self) -> Array:
        """Products of the operator with `shift` added to it."""
        return self.products + self.shift.astype(self.products.dtype) * self.probes


def prepared(operator: Operator, probes: Array, products: Array, used: int | Array) -> Sketch:
    """A sketch with numbers of the size of one, of an operator of any scale, zero included."""
    n, k = probes.shape
    scale = power_of_two(products)
    products = products / scale.astype(products.dtype)
    size = jnp.linalg.norm(products)
    shift = jnp.where(size > 0, size * (operator.eps / n**0.5), 1)
    mask = None if isinstance(used, int) and used == k else jnp.arange(k) < used
    undo = jnp.where(size > 0, scale, 0)
    return Sketch(probes, products, scale, shift, mask, undo)


def near_hermitian(matrix: Array, size: Array, operator: Operator) -> Array:
    """Whether a matrix made from products of a Hermitian operator is Hermitian up to rounding. `size` is the size of
    the terms that were summed; the operator gives the precision."""
    return jnp.linalg.norm(matrix - matrix.conj().T) <= tag_tolerance(operator) * size
