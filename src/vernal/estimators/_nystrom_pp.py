"""`NystromPlusPlus`: the trace of a Nystrom approximation, and Hutchinson for what it leaves."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ._hutch_pp import correlations, outcome_of
from ._method import Budget, Outcome, TraceMethod, default_probes
from ._orthogonal import orthonormal, product, shifted_cholesky
from ._parts import deflated_pairs, divided, drawn, outside, together
from ._probes import Probes
from ._samples import forms_of, pairs_agree, remainder, samples_of, slopes_of


def _halves(matvecs: int) -> tuple[int, int]:
    """Sketch and probes, with at least two probes."""
    sketch = min((matvecs + 1) // 2, matvecs - 2)
    return sketch, matvecs - sketch


class NystromPlusPlus(TraceMethod):
    r"""The trace of a Nystrom approximation, and Hutchinson for the rest. Needs a positive semidefinite operator.

    With random `S`, a half of the budget, the approximation is `L = A S (S^* A S)^+ S^* A`, and the trace is that of
    `L` plus the mean of `g^* (A - L) g` over the other half. All products are made at once. Unbiased, with an unbiased
    variance. Better than `HutchPlusPlus` where eigenvalues decay fast; `XNysTrace` makes more of as many products.

    D. Persson, A. Cortinovis, D. Kressner, "Improved variants of the Hutch++ algorithm for trace estimation", SIAM
    Journal on Matrix Analysis and Applications 43 (2022), doi:10.1137/21M1447623.

    Args:
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> matrix = jnp.diag(1 / jnp.arange(1.0, 301) ** 2) + jnp.ones((300, 300)) / 300
        >>> operator = linalg.MatrixOperator(matrix, positive_semidefinite=True)
        >>> method = estimators.NystromPlusPlus()
        >>> estimate = estimators.trace(operator, jax.random.key(0), matvecs=60, method=method)
        >>> bool(abs(estimate.value - jnp.trace(matrix)) < 4 * estimate.standard_error)
        True
    """

    probes: Probes | None = None

    minimum = 3
    needs_positive_semidefinite: ClassVar[bool] = True

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace from `budget.used` products; see `TraceMethod`."""
        distribution = self.probes or default_probes(operator)
        parts = divided(budget, _halves, self.minimum)
        blocks = [
            drawn(operator, distribution, one, part)
            for one, part in zip(jax.random.split(key), parts, strict=True)
        ]
        sketch, across = together(operator, blocks, list(parts))
        left, probes = blocks

        factor, positive = _factor(left, sketch, parts[0].mask())
        basis, _ = orthonormal(sketch, parts[0].mask())
        outer = outside(basis, probes)
        agrees = pairs_agree(operator, left, sketch)
        plain = samples_of(
            forms_of(operator, left, sketch),
            slopes_of(operator, distribution, left, sketch),
            parts[0].used,
            agrees,
        ).joined(
            samples_of(
                forms_of(operator, probes, across),
                slopes_of(operator, distribution, probes, across),
                parts[1].used,
                agrees,
            )
        )
        block = probes, across - product(factor, product(factor.conj().T, probes))
        control = outer, jnp.asarray(operator.size - parts[0].used, plain.number.dtype)
        rest = remainder(operator, distribution, block, control, parts[1].used, agrees)

        # Otherwise nothing but the forms of all probes.
        consistent = positive & plain.consistent(operator)
        samples = jax.tree.map(lambda a, b: jnp.where(consistent, a, b), rest, plain)
        known = jnp.where(consistent, jnp.sum(jnp.abs(factor) ** 2), 0)
        of_sketch = correlations(operator, distribution, plain.number - rest.number)
        correlated = correlations(operator, distribution, rest.number)
        return outcome_of(
            operator,
            samples._replace(lowest=jnp.where(consistent, plain.lowest, -jnp.inf)),
            known=(known, known + plain.size),
            correlated=correlated + jnp.where(consistent, 0, of_sketch),
            matvecs=budget.used,
            sensitivity=deflated_pairs(basis, outer, parts[1].used),
        )


def _factor(probes: Array, sketch: Array, mask: Array | None) -> tuple[Array, Array]:
    """`F` with `F F^*` the Nystrom approximation, and whether the core is positive definite but for rounding."""
    n = probes.shape[0]
    gram = product(probes.conj().T, probes)
    core = product(probes.conj().T, sketch)
    core = (core + core.conj().T) / 2
    # The probes' products have errors of this size in the direction of the probes. For zero, anything will do.
    size = jnp.linalg.norm(sketch)
    shift = jnp.where(size > 0, size * (jnp.finfo(sketch.dtype).eps / n**0.5), 1)
    found, _, positive = shifted_cholesky(core, gram, shift, mask)
    # The sketch itself is not shifted: so that zero gives zero. What the shift hides is in the remainder.
    return solve_triangular(found, sketch.conj().T, lower=True).conj().T, positive
