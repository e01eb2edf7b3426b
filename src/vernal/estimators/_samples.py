"""Means of quadratic forms with random probes, and their distance from the trace.

The plan: forms are merged block by block (Chan, Golub, LeVeque 1979). The variance comes from the slopes of the forms
if the probes know them (see `_probes.py`); otherwise it is the sample variance. The slopes of w^* A w are those of a
symmetric operator. For any other the form is that of its symmetric part S, but the slopes are those of A, which are
not smaller: |A|^2 = |S|^2 + |A - S|^2 in Frobenius norms. So the variance is then too large rather than too small.

Measured with 4000 seeds: 95% intervals from 20 probes contain the truth in 95% to 97% of cases with slopes, for every
spectrum; with the sample variance in 89% to 95%, and in 90% for a single large eigenvalue.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..linalg import Operator, times
from ._probes import Probes

# The rounding error of a sum, in units of eps times its size; the reported error includes it.
_ROUNDING = 4


class Samples(NamedTuple):
    """Statistics of the forms of some probes.

    Attributes:
        number: the number of forms; real.
        mean: of the forms.
        spread: the sum of their squared distances from the mean.
        slope: the mean of the slopes, of shape `(size,)`; of shape `(0,)` if they are unknown.
        slope_spread: the sum of their squared distances from the mean, over all elements.
        lowest: the least real part of a form.
        agrees: False if pairs of probes show that an operator declared symmetric is not.
    """

    number: Array
    mean: Array
    spread: Array
    slope: Array
    slope_spread: Array
    lowest: Array
    agrees: Array

    def joined(self, other: "Samples") -> "Samples":
        """The statistics of both together."""
        count = self.number + other.number
        share = other.number / jnp.where(count > 0, count, 1)
        step, turn = other.mean - self.mean, other.slope - self.slope
        between = self.number * share
        return Samples(
            count,
            self.mean + step * share.astype(step.dtype),
            self.spread + other.spread + jnp.abs(step) ** 2 * between,
            self.slope + turn * share.astype(turn.dtype),
            self.slope_spread + other.slope_spread + jnp.sum(jnp.abs(turn) ** 2) * between,
            jnp.minimum(self.lowest, other.lowest),
            self.agrees & other.agrees,
        )

    @property
    def size(self) -> Array:
        """The root mean square of the forms."""
        return jnp.sqrt(jnp.abs(self.mean) ** 2 + self.spread / self.number)

    def variance(self) -> Array:
        """An estimate of the variance of the mean: unbiased if the operator is symmetric, otherwise not too small."""
        spread = self.slope_spread if self.slope.size else self.spread
        return spread / (self.number * (self.number - 1))

    def consistent(self, operator: Operator, size: Array | None = None) -> Array:
        """Whether the forms agree with the tags of the operator. `size` is the size of the terms of the forms; None
        takes that of the forms."""
        if not operator.positive_semidefinite:
            return self.agrees
        size = self.size if size is None else size
        return self.agrees & (self.lowest >= -tag_tolerance(operator) * size)


def tag_tolerance(operator: Operator) -> float:
    """The relative amount by which rounding may violate a tag."""
    return 10 * operator.eps**0.5


def is_real(operator: Operator) -> bool:
    """Whether the trace is a real number."""
    return operator.symmetric or not jnp.issubdtype(operator.dtype, jnp.complexfloating)


def forms_of(operator: Operator, probes: Array, products: Array) -> Array:
    """The forms `w^* A w` of the columns of two matrices; real if the trace is."""
    forms = jnp.sum(probes.conj() * products, axis=0)
    return forms.real if is_real(operator) else forms


def slopes_of(distribution: Probes, probes: Array, products: Array) -> Array:
    """The slopes of the forms, of shape `(size, k)`; of shape `(0, k)` if they are unknown."""
    slopes = distribution.slopes(probes, products)
    return probes[:0] if slopes is None else slopes


def samples_of(forms: Array, slopes: Array, used: int | Array, agrees: Array) -> Samples:
    """The statistics of one block.

    Args:
        forms: of shape `(k,)`; those from `used` on are ignored.
        slopes: of shape `(size, k)` or `(0, k)`, likewise.
        used: the number of forms.
        agrees: the result of `pairs_agree`. Not computed here, because the products of a remainder may be pure rounding
            errors, which are not symmetric.
    """
    mask = jnp.arange(len(forms)) < used
    number = jnp.asarray(used, jnp.finfo(forms.dtype).dtype)
    mean = jnp.sum(jnp.where(mask, forms, 0)) / number.astype(forms.dtype)
    slope = jnp.sum(jnp.where(mask[None, :], slopes, 0), axis=1) / number.astype(slopes.dtype)
    apart = jnp.where(mask[None, :], slopes - slope[:, None], 0)
    return Samples(
        number=number,
        mean=mean,
        spread=jnp.sum(jnp.where(mask, jnp.abs(forms - mean) ** 2, 0)),
        slope=slope,
        slope_spread=jnp.sum(jnp.abs(apart) ** 2),
        lowest=jnp.min(jnp.where(mask, forms.real, jnp.inf)),
        agrees=agrees,
    )


def remainder(
    operator: Operator,
    distribution: Probes,
    block: tuple[Array, Array],
    control: tuple[Array, Array],
    used: int | Array,
    agrees: Array,
) -> Samples:
    """The statistics of the remainder of a low-rank approximation, with a projection C of its rank as control variate.

    A remainder with equal eigenvalues is a multiple b of C. Its forms vary only as those of C do, whose trace is
    known: so b (w^* C w - tr C) is subtracted from each, with b the mean over all other forms. This is unbiased,
    because b does not depend on the form that it corrects, and exact for a multiple of the identity.

    Args:
        operator: gives the tags; the remainder has the same.
        distribution: that of the probes.
        block: probes, of shape `(size, k)`, and products of the remainder with them; columns from `used` on are zero.
        control: products of C, of the same shape, and the trace of C; real.
        used: the number of probes, at least 2.
        agrees: the result of `pairs_agree`.
    """
    probes, products = block
    forms = forms_of(operator, probes, products)
    known = jnp.sum(probes.conj() * control[0], axis=0).real

    def share(total: Array, of_control: Array, number: Array) -> Array:
        # C may be an oblique projection. Its forms are then not all positive, and their sum may be close to zero.
        least = number * control[1] / 10
        return total / jnp.where(of_control > least, of_control, number * control[1]).astype(
            total.dtype
        )

    number = jnp.asarray(used, known.dtype)
    others = share(jnp.sum(forms) - forms, jnp.sum(known) - known, number - 1)
    multiple = share(jnp.sum(forms), jnp.sum(known), number)
    corrected = forms - others * (known - control[1]).astype(forms.dtype)
    rest = products - multiple.astype(products.dtype) * control[0]
    return samples_of(corrected, slopes_of(distribution, probes, rest), used, agrees)


class Scatter(NamedTuple):
    """The noise of the variance from the slopes of k probes.

    The variance is the mean of k numbers q, the squared distances of the slopes from their mean. It is noisy because
    these distances vary, and because a few directions may be long by chance: if the slopes, with covariance S, were
    normal, the variance would have (k - 1) (tr S)^2 / tr(S^2) degrees of freedom. Both kinds of noise are added,
    because neither measure sees all of it: the lengths of a few slopes say little if they are skewed, as for a single
    large eigenvalue, and directions say nothing of lengths that all elements have in common. S is that of the sample:
    k slopes show at most k - 1 directions, which is rather too few.

    F. E. Satterthwaite, "An approximate distribution of estimates of variance components", Biometrics Bulletin 2
    (1946), doi:10.2307/3002019.

    Attributes:
        trace: of the sum of the outer products of the distances: the sum of the q.
        norm: of that matrix, by Frobenius.
        length: the root of the sum of the squares of the q.
    """

    trace: Array
    norm: Array
    length: Array

    @staticmethod
    def of(slopes: Array, used: Array) -> "Scatter":
        """The noise of slopes of shape `(size, k)`; `used`, of shape `(k,)`, marks those that count."""
        count = jnp.maximum(jnp.sum(used), 1).astype(slopes.dtype)
        mean = jnp.sum(jnp.where(used[None, :], slopes, 0), axis=1) / count
        apart = jnp.where(used[None, :], slopes - mean[:, None], 0)
        # Scaled to one, because it is squared twice.
        unit = jnp.sqrt(jnp.sum(jnp.abs(apart) ** 2))
        unit = jnp.where(unit > 0, unit, 1)
        apart = apart / unit.astype(apart.dtype)
        gram = times(apart.conj().T, apart)
        each = jnp.diagonal(gram).real
        sizes = jnp.sum(each), jnp.linalg.norm(gram), jnp.linalg.norm(each)
        return Scatter(*(size * unit**2 for size in sizes))

    def joined(self, other: "Scatter") -> "Scatter":
        """The noise of two blocks, each about its own mean."""
        return Scatter(
            self.trace + other.trace, self.norm + other.norm, jnp.hypot(self.length, other.length)
        )

    def freedom(self, number: Array) -> Array:
        """The degrees of freedom of the variance from `number` probes; at least `number - 1`."""
        trace = jnp.where(self.trace > 0, self.trace, 1)
        of_directions = 2 * (self.norm / trace) ** 2
        of_lengths = jnp.maximum(number * (self.length / trace) ** 2 - 1, 0)
        noise = of_directions + of_lengths
        return (number - 1) * jnp.maximum(2 / jnp.where(noise > 0, noise, 2), 1)


def no_samples(operator: Operator, distribution: Probes) -> Samples:
    """The statistics of no form."""
    like, yes = jax.ShapeDtypeStruct((operator.size, 1), operator.dtype), jnp.asarray(True)

    def one(w: Array, aw: Array) -> Samples:
        return samples_of(forms_of(operator, w, aw), slopes_of(distribution, w, aw), 1, yes)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, like, like))
    return nothing._replace(lowest=jnp.full_like(nothing.lowest, jnp.inf), agrees=yes)


def pairs_agree(operator: Operator, probes: Array, products: Array) -> Array:
    """False if the first probe and another one show that an operator declared symmetric is not."""
    if not operator.symmetric:
        return jnp.asarray(True)
    there = jnp.sum(probes[:, :1].conj() * products, axis=0)
    back = jnp.sum(products[:, :1].conj() * probes, axis=0)
    sizes = [
        jnp.sqrt(jnp.sum(jnp.abs(x) ** 2)) for x in (probes[:, 0], products, products[:, 0], probes)
    ]
    size = (sizes[0] * sizes[1] + sizes[2] * sizes[3]) / jnp.asarray(
        probes.shape[0], sizes[0].dtype
    ) ** 0.5
    return jnp.sqrt(jnp.sum(jnp.abs(there - back) ** 2)) <= tag_tolerance(operator) * size


def rounding(operator: Operator, size: Array) -> Array:
    """The variance of the rounding error of a sum of this size."""
    return (_ROUNDING * operator.eps * size) ** 2
