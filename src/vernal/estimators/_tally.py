"""What the quadratures from all probes say together: the trace, and how far from it they are.

The probes' error comes from the slopes of the forms w^* f(A) w (see `_samples.py`), of which f(A) w is known as well.
"""

import jax.numpy as jnp
from jax import Array

from ..linalg import Operator
from ..modules import Module
from ._quadrature import Starts, Sums
from ._samples import Samples, samples_of, slopes_of


class Tally(Module):
    """What all probes say together.

    Args:
        samples: of the best values.
        values: the sum of those of `Sums`.
        rounding: likewise.
        consistent: whether nothing contradicted the operator's tags.
    """

    samples: Samples
    values: Array
    rounding: Array
    consistent: Array

    @staticmethod
    def of(
        operator: Operator, starts: Starts, found: Sums, index: int | Array, between: bool
    ) -> "Tally":
        """Of a block; `between` says whether values are bounds."""
        used, yes = starts.used(index), jnp.asarray(True)
        best = jnp.mean(found.values, axis=1) if between else found.values[:, 0]
        slopes = slopes_of(operator, starts.probes, starts.block(index).T, found.slopes.T)
        return Tally(
            samples_of(best, slopes, jnp.sum(used), yes),
            jnp.sum(jnp.where(used[:, None], found.values, 0), axis=0),
            jnp.sum(jnp.where(used, found.rounding, 0)),
            jnp.all(found.consistent | ~used),
        )

    def joined(self, other: "Tally") -> "Tally":
        """Of both together."""
        return Tally(
            self.samples.joined(other.samples),
            self.values + other.values,
            self.rounding + other.rounding,
            self.consistent & other.consistent,
        )

    def error(self, steps: int, between: bool) -> Array:
        """The standard error; the best rule has `steps` nodes."""
        count = self.samples.number
        means = self.values / count
        truncation = (means[0] - means[1]) / 2 if between else _truncation(means, steps)
        rounded = jnp.finfo(means.dtype).eps * self.samples.size + self.rounding / count
        return jnp.sqrt(self.samples.variance() + truncation**2 + rounded**2)


def _truncation(means: Array, steps: int) -> Array:
    """How far the rule of m nodes is from the limit.

    The sum of what further nodes would change, if each changed as much less as the last one did. Where convergence is
    slow the rate itself grows with every step, as that of a power of m does: hence 1 / m, which fades out
    where it is fast (the square was found by trial, on spectra of many kinds).
    """
    last = jnp.abs(means[0] - means[1])
    if means.shape[0] < 3:
        return last
    before = jnp.abs(means[1] - means[2])
    rate = jnp.where(before > 0, jnp.minimum(last / jnp.where(before > 0, before, 1), 0.99), 0)
    growth = rate**2 / steps
    return last * rate / jnp.maximum(1 - rate - growth, 0.5 / steps)
