"""`HutchinsonDiagonal`: each element on its own, as the slope of products over probes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, fori_loop
from ._gradient_pairs import GradientPairs
from ._hutchinson import Drawn
from ._method import FEWEST_PROBES, Budget, DiagonalMethod, Outcome, default_probes
from ._probes import Probes
from ._samples import is_real, tag_tolerance


class HutchinsonDiagonal(DiagonalMethod):
    r"""The mean of `conj(w) * A w` over random probes `w`, element by element. Works for every square operator.

    With `m` products, the error of element l is the norm of row l of `A` without its diagonal, over `sqrt(m)`. Memory
    does not grow with the number of products.

    For probes whose elements do not all have modulus one, the sum is divided by the sum of `|w|**2`. This is the slope
    of the regression of the elements of `A w` on those of `w`, with the textbook standard error. It is unbiased as long
    as the sign of each element is independent of everything else, as for all probes here.

    C. Bekas, E. Kokiopoulou, Y. Saad, "An estimator for the diagonal of a matrix", Applied Numerical Mathematics 57
    (2007), doi:10.1016/j.apnum.2007.01.003.

    Args:
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> matrix = jnp.ones((100, 100)) + 10 * jnp.eye(100)
        >>> method = estimators.HutchinsonDiagonal()
        >>> estimate = estimators.diagonal(matrix, jax.random.key(0), matvecs=50, method=method)
        >>> bool(jnp.all(jnp.abs(estimate.value - 11) < 5 * estimate.standard_error))
        True
    """

    probes: Probes | None = None

    minimum = FEWEST_PROBES

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the diagonal block by block; see `DiagonalMethod`."""
        distribution = self.probes or default_probes(operator)
        drawn = Drawn.of(operator, key, distribution, budget)
        real = is_real(operator)

        def add(index: int | Array, known: Slopes) -> Slopes:
            probes, _ = drawn.vectors(index)
            made = operator.matmul(probes)
            return known.joined(slopes(probes, made, real=real))

        blocks = drawn.blocks()
        one = isinstance(blocks, int) and blocks == 1
        nothing = no_slopes(operator.size, operator.dtype, real=real)
        found = add(0, nothing) if one else fori_loop(0, blocks, add, nothing)
        consistent = jnp.asarray(True)
        if operator.positive_semidefinite:
            consistent = found.form >= -tag_tolerance(operator) * found.size
        return found.outcome(budget.used, consistent, drawn)


class Slopes(NamedTuple):
    """For each element, the regression of products on probes through the origin.

    Args:
        weight: the sum of `|w|**2`.
        slope: the sum of `conj(w) * A w`, over `weight`.
        spread: the residual sum of squares.
        form: the sum of all `w^* A w`, a scalar.
        size: the sum of all `|w| * |A w|`, a scalar.
    """

    weight: Array
    slope: Array
    spread: Array
    form: Array
    size: Array

    def joined(self, other: "Slopes") -> "Slopes":
        """The regression with both blocks of probes."""
        weight = self.weight + other.weight
        share = other.weight / jnp.where(weight > 0, weight, 1)
        step = other.slope - self.slope
        return Slopes(
            weight,
            self.slope + step * share.astype(step.dtype),
            self.spread + other.spread + jnp.abs(step) ** 2 * self.weight * share,
            self.form + other.form,
            self.size + other.size,
        )

    def outcome(
        self, used: int | Array, consistent: Array, gradient_pairs: GradientPairs
    ) -> Outcome:
        """The outcome of a method that used `used` probes."""
        count = jnp.asarray(used, self.weight.dtype)
        free = (count - 1) * self.weight
        return Outcome(
            value=self.slope,
            variance=self.spread / jnp.where(free > 0, free, 1),
            degrees_of_freedom=count - 1,
            matvecs=jnp.asarray(used, jnp.int32),
            consistent=consistent,
            gradient_pairs=gradient_pairs,
        )


def slopes(probes: Array, products: Array, *, real: bool) -> Slopes:
    """The regression with one block of probes, the columns of a matrix; columns of zeros have no weight."""
    size = jnp.abs(probes)
    weight = jnp.sum(size**2, axis=1)
    forms = jnp.sum(probes.conj() * products, axis=1)
    forms = forms.real if real else forms
    slope = forms / jnp.where(weight > 0, weight, 1).astype(forms.dtype)
    # Rotated so that for a real diagonal only the real part is an error.
    turned = probes.conj() / jnp.where(size > 0, size, 1).astype(probes.dtype)
    seen = turned * products
    left = (seen.real if real else seen) - slope[:, None] * size.astype(slope.dtype)
    return Slopes(
        weight,
        slope,
        jnp.sum(jnp.abs(left) ** 2, axis=1),
        jnp.sum(forms.real),
        jnp.sum(size * jnp.abs(products)),
    )


def no_slopes(size: int, dtype: Any, *, real: bool) -> Slopes:
    """The regression without any probe."""
    real_dtype = jnp.finfo(dtype).dtype
    zeros = jnp.zeros(size, real_dtype)
    zero = jnp.zeros((), real_dtype)
    return Slopes(zeros, zeros if real else zeros.astype(dtype), zeros, zero, zero)
