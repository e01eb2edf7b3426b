"""`Hutchinson`: the mean of quadratic forms."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, fori_loop
from ..modules import field
from ._gradient_pairs import GradientPairs
from ._method import FEWEST_PROBES, Budget, Outcome, TraceMethod, default_probes, products
from ._probes import Probes
from ._samples import (
    Samples,
    forms_of,
    no_samples,
    pairs_agree,
    rounding,
    samples_of,
    slopes_of,
)

# Bytes of probes in memory at once.
_BYTES = 2**26


class Hutchinson(TraceMethod):
    r"""The mean of `w^* A w` over random probes `w`. Works for every square operator.

    The error of `m` products is about `sqrt(2 / m)` times the Frobenius norm of the off-diagonal part of `A`. The
    estimate is unbiased. Its variance comes from the slopes of the forms (see `Probes.slopes`): it is unbiased if the
    operator is symmetric, and otherwise too large rather than too small. Memory does not grow with the number of
    products.

    M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines",
    Communications in Statistics - Simulation and Computation 18 (1989), doi:10.1080/03610918908812806.

    Args:
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> matrix = jnp.ones((100, 100)) + 10 * jnp.eye(100)
        >>> method = estimators.Hutchinson()
        >>> estimate = estimators.trace(matrix, jax.random.key(0), matvecs=50, method=method)
        >>> bool(abs(estimate.value - 1100) < 4 * estimate.standard_error)
        True
    """

    probes: Probes | None = None

    minimum = FEWEST_PROBES

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace block by block; see `TraceMethod`."""
        distribution = self.probes or default_probes(operator)
        drawn = Drawn.of(operator, key, distribution, budget)

        def add(index: int | Array, known: Samples | None) -> Samples:
            probes, used = drawn.vectors(index)
            block = probes, products(operator, probes, used)
            forms, slopes = forms_of(operator, *block), slopes_of(distribution, *block)
            here = samples_of(forms, slopes, used, pairs_agree(operator, *block))
            return here if known is None else known.joined(here)

        blocks = drawn.blocks()
        if isinstance(blocks, int) and blocks == 1:
            samples = add(0, None)
        else:
            samples = fori_loop(0, blocks, add, no_samples(operator, distribution))
        return Outcome(
            value=samples.mean,
            variance=samples.variance() + rounding(operator, samples.size),
            degrees_of_freedom=samples.number - 1,
            matvecs=jnp.asarray(budget.used, jnp.int32),
            consistent=samples.consistent(operator),
            gradient_pairs=drawn,
        )


class Drawn(GradientPairs):
    """Probes that are drawn again, block by block, whenever they are needed."""

    key: PRNGKeyArray
    probes: Probes
    budget: Budget
    size: int
    dtype: Any = field(static=True)

    @staticmethod
    def of(operator: Operator, key: PRNGKeyArray, probes: Probes, budget: Budget) -> "Drawn":
        """Probes for an operator."""
        return Drawn(key, probes, budget, operator.size, operator.dtype)

    @property
    def columns(self) -> int:
        """The number of columns of a block."""
        row = self.size * jnp.dtype(self.dtype).itemsize
        return max(1, min(self.budget.most, _BYTES // max(row, 1)))

    def blocks(self) -> int | Array:
        """The number of blocks."""
        return -(-self.budget.used // self.columns)

    def vectors(self, index: int | Array) -> tuple[Array, int | Array]:
        """The probes of a block, and the number of used ones; the others are zero."""
        columns = self.columns
        key = jax.random.fold_in(self.key, index)
        probes = self.probes.draw(key, self.size, columns, self.dtype)
        if not self.budget.is_shared and self.budget.most % columns == 0:
            return probes, columns
        used = jnp.minimum(self.budget.used - index * columns, columns)
        return jnp.where((jnp.arange(columns) < used)[None, :], probes, 0), used

    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        """The probes divided by their number, and the probes."""
        del operator
        probes, _ = self.vectors(index)
        count = jnp.asarray(self.budget.used, jnp.finfo(probes.dtype).dtype)
        return probes / count.astype(probes.dtype), probes
