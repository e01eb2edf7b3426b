"""`HutchPlusPlus`: the trace of a low-rank approximation, and Hutchinson for the remainder."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, times
from ._gradient_pairs import StoredPairs
from ._method import FEWEST_PROBES, Budget, Outcome, TraceMethod, default_probes, products
from ._orthogonal import orthonormal
from ._probes import Probes
from ._samples import is_real, pairs_agree, remainder, rounding


class HutchPlusPlus(TraceMethod):
    r"""The trace on a random part of the range, and Hutchinson for its complement. Works for every square operator.

    `Q` is an orthonormal basis of the products of a third of the budget. The trace is `tr(Q^* A Q)`, which another
    third gives exactly, plus the trace of `(I - Q Q^*) A (I - Q Q^*)`, which the last third estimates. For a positive
    semidefinite operator the error is of order `1 / m` times the trace, instead of `1 / sqrt(m)`. It is no better than
    `Hutchinson` if the eigenvalues do not decay. The estimate is unbiased; so is its variance if the operator is
    declared symmetric, and otherwise it is too large rather than too small.

    `XTrace` is more accurate with the same number of products; the samples here are independent.

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

    minimum = FEWEST_PROBES + 2

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace from `budget.used` products; see `TraceMethod`."""
        distribution = self.probes or default_probes(operator)
        third = Budget(_third(budget.most), _third(budget.used))
        # With a shared budget it may be more than a third of the largest.
        count = budget.used - 2 * third.used
        most = third.most + FEWEST_PROBES if budget.is_shared else budget.most - 2 * third.most
        others = Budget(most, count)
        of_sketch, of_rest = jax.random.split(key)
        sketch = products(operator, third.drawn(operator, distribution, of_sketch), third.used)
        basis, _ = orthonormal(sketch, third.mask())
        probes = others.drawn(operator, distribution, of_rest)
        rest = _outside(basis, probes)
        if budget.is_shared:
            along, across = (
                products(operator, basis, third.used),
                products(operator, rest, count),
            )
        else:
            # As one block, so that a matrix is read once.
            made = operator.matmul(jnp.concatenate([basis, rest], axis=1))
            along, across = made[:, : third.most], made[:, third.most :]

        inside = jnp.sum(basis.conj() * along, axis=0)
        agrees = pairs_agree(operator, basis, along)
        dimension = jnp.asarray(operator.size - third.used, jnp.finfo(operator.dtype).dtype)
        block = probes, _outside(basis, across)
        samples = remainder(operator, distribution, block, (rest, dimension), count, agrees)
        plain = jnp.sum(rest.conj() * across, axis=0).real
        samples = samples._replace(lowest=jnp.minimum(jnp.min(plain), jnp.min(inside.real)))
        known = jnp.sum(inside)
        size = jnp.sum(jnp.abs(inside)) + samples.size
        number = jnp.asarray(count, dimension.dtype)
        return Outcome(
            value=(known.real if is_real(operator) else known) + samples.mean,
            variance=samples.variance() + rounding(operator, size),
            degrees_of_freedom=number - 1,
            matvecs=jnp.asarray(budget.used, jnp.int32),
            consistent=samples.consistent(operator, size),
            # tr(Q^* dA Q), and the mean of r^* dA r for the remainders r of the probes, which are independent of Q.
            gradient_pairs=StoredPairs(
                jnp.concatenate([basis, rest / number.astype(rest.dtype)], axis=1),
                jnp.concatenate([basis, rest], axis=1),
            ),
        )


def _third(matvecs: int | Array) -> Any:
    """The nearest third that leaves enough for probes: a better basis gains more than another probe."""
    nearest, most = (matvecs + 1) // 3, (matvecs - FEWEST_PROBES) // 2
    return min(nearest, most) if isinstance(matvecs, int) else jnp.minimum(nearest, most)


def _outside(basis: Array, block: Array) -> Array:
    """The part of the columns of a block that is orthogonal to a basis."""
    return block - times(basis, times(basis.conj().T, block))
