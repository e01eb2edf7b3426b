"""Means of quadratic forms with random probes, and how far from the trace they are.

The plan: forms are merged block by block (Chan, Golub, LeVeque 1979). The variance comes from the slopes of the forms,
if the probes know them (see `_probes.py`), otherwise it is the sample variance. The slopes of w^* A w are those of a
symmetric operator. For any other the form is that of its symmetric part S, and the slopes are of A, which is not less:
|A|^2 = |S|^2 + |A - S|^2 in Frobenius norms. So the variance is then too large rather than too small.

How noisy this variance is depends on how many directions the slopes vary in. With the covariance S of the slopes, it
has (k - 1) (tr S)^2 / tr(S^2) degrees of freedom from k probes (F. E. Satterthwaite, "An approximate distribution of
estimates of variance components", Biometrics Bulletin 2 (1946), doi:10.2307/3002019). S is that of the sample: k slopes
show at most k - 1 directions, so that these are rather too few than too many.

Measured with 4000 seeds: of the 95% intervals from 20 probes, slopes let 95% to 97% hold the truth, for every spectrum;
the sample variance 89% to 95%, and 90% for a single large eigenvalue.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..linalg import Operator
from ._probes import Probes

# The error of rounding of a sum, in units of eps times its size, is covered by the error that is reported.
_ROUNDING = 4


class Samples(NamedTuple):
    """What is known of the forms of some probes.

    Attributes:
        number: how many there are; real.
        mean: of the forms.
        spread: the sum of their squared distances from the mean.
        slope: the mean of the slopes, of shape `(size,)`; of shape `(0,)` if they are not known.
        slope_spread: the sum of their squared distances from the mean, over all elements.
        slope_size: not less than the Frobenius norm of the sum of the outer products of these distances, of which
            `slope_spread` is the trace.
        lowest: the least real part of a form.
        agrees: whether pairs of probes do not show that the operator is not symmetric, if it is declared to be.
    """

    number: Array
    mean: Array
    spread: Array
    slope: Array
    slope_spread: Array
    slope_size: Array
    lowest: Array
    agrees: Array

    def joined(self, other: "Samples") -> "Samples":
        """Of both together."""
        count = self.number + other.number
        share = other.number / jnp.where(count > 0, count, 1)
        step, turn = other.mean - self.mean, other.slope - self.slope
        between = self.number * share
        moved = jnp.sum(jnp.abs(turn) ** 2) * between
        return Samples(
            count,
            self.mean + step * share.astype(step.dtype),
            self.spread + other.spread + jnp.abs(step) ** 2 * between,
            self.slope + turn * share.astype(turn.dtype),
            self.slope_spread + other.slope_spread + moved,
            self.slope_size + other.slope_size + moved,
            jnp.minimum(self.lowest, other.lowest),
            self.agrees & other.agrees,
        )

    @property
    def size(self) -> Array:
        """Of a form, in the root mean square."""
        return jnp.sqrt(jnp.abs(self.mean) ** 2 + self.spread / self.number)

    def variance(self) -> Array:
        """An estimate of the variance of the mean: unbiased if the operator is symmetric, and else not too small."""
        spread = self.slope_spread if self.slope.size else self.spread
        return spread / (self.number * (self.number - 1))

    def freedom(self) -> Array:
        """The degrees of freedom of the variance, at least one fewer than there are probes."""
        directions = (self.slope_spread / self.slope_size) ** 2 if self.slope.size else 1.0
        # Slopes that are all alike vary in none.
        return (self.number - 1) * jnp.where(directions > 1, directions, 1)

    def consistent(self, operator: Operator, size: Array | None = None) -> Array:
        """Whether the forms do not contradict the tags of the operator; `size` is that of the numbers that the
        forms are made of, or None for that of the forms."""
        if not operator.positive_semidefinite:
            return self.agrees
        size = self.size if size is None else size
        return self.agrees & (self.lowest >= -tag_tolerance(operator) * size)


def tag_tolerance(operator: Operator) -> float:
    """What rounding can do to a promise, relative."""
    return 10 * operator.eps**0.5


def is_real(operator: Operator) -> bool:
    """Whether the trace is a real number."""
    return operator.symmetric or not jnp.issubdtype(operator.dtype, jnp.complexfloating)


def forms_of(operator: Operator, probes: Array, products: Array) -> Array:
    """The forms `w^* A w` of the columns of two matrices; real if the trace is."""
    forms = jnp.sum(probes.conj() * products, axis=0)
    return forms.real if is_real(operator) else forms


def slopes_of(distribution: Probes, probes: Array, products: Array) -> Array:
    """The slopes of the forms, of shape `(size, k)`; of shape `(0, k)` if they are not known."""
    slopes = distribution.slopes(probes, products)
    return probes[:0] if slopes is None else slopes


def samples_of(forms: Array, slopes: Array, used: int | Array, agrees: Array) -> Samples:
    """Of one block.

    Args:
        forms: of shape `(k,)`; those from `used` on do not count.
        slopes: of shape `(size, k)` or `(0, k)`, likewise.
        used: how many there are.
        agrees: what `pairs_agree` says. Not looked at here, because the products of a remainder may be nothing but
            errors of rounding, which are not symmetric.
    """
    mask = jnp.arange(len(forms)) < used
    number = jnp.asarray(used, jnp.finfo(forms.dtype).dtype)
    mean = jnp.sum(jnp.where(mask, forms, 0)) / number.astype(forms.dtype)
    slope = jnp.sum(jnp.where(mask[None, :], slopes, 0), axis=1) / number.astype(slopes.dtype)
    apart = jnp.where(mask[None, :], slopes - slope[:, None], 0)
    gram = jnp.matmul(apart.conj().T, apart, precision=lax.Precision.HIGHEST)
    return Samples(
        number=number,
        mean=mean,
        spread=jnp.sum(jnp.where(mask, jnp.abs(forms - mean) ** 2, 0)),
        slope=slope,
        slope_spread=jnp.sum(jnp.abs(apart) ** 2),
        slope_size=jnp.linalg.norm(gram),
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
    """Of what a low-rank approximation leaves, with what is known of a projection C on as many dimensions as it has.

    A remainder with equal eigenvalues is a multiple b of C. Its forms vary only as those of C do, of which the trace is
    known: so b (w^* C w - tr C) is taken from each, with the b that all the others have in the mean. That is unbiased,
    because b does not depend on the form that it corrects, and exact for a multiple of the identity.

    Args:
        operator: says the tags; the remainder has the same.
        distribution: that of the probes.
        block: probes, of shape `(size, k)`, and products of the remainder with them; columns from `used` on are zero.
        control: products of C, of the same shape, and the trace of C; real.
        used: how many probes there are, at least 2.
        agrees: what `pairs_agree` says.
    """
    probes, products = block
    forms = forms_of(operator, probes, products)
    known = jnp.sum(probes.conj() * control[0], axis=0).real

    def share(total: Array, of_control: Array, number: Array) -> Array:
        # C may be an oblique projection. Its forms are not positive then, and may add up to next to nothing.
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


def no_samples(operator: Operator, distribution: Probes) -> Samples:
    """Of no block yet."""
    like, yes = jax.ShapeDtypeStruct((operator.size, 1), operator.dtype), jnp.asarray(True)

    def one(w: Array, aw: Array) -> Samples:
        return samples_of(forms_of(operator, w, aw), slopes_of(distribution, w, aw), 1, yes)

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, like, like))
    return nothing._replace(lowest=jnp.full_like(nothing.lowest, jnp.inf), agrees=yes)


def pairs_agree(operator: Operator, probes: Array, products: Array) -> Array:
    """False if the first probe and another one show that the operator is not symmetric, although it is declared so."""
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
    """The variance of what rounding adds to a sum of this size."""
    return (_ROUNDING * operator.eps * size) ** 2
