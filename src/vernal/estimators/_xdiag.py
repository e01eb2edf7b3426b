"""`XDiag`: diagonals by a low-rank approximation that uses every probe twice."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, times
from ._gradient_pairs import StoredPairs
from ._leave_out import prepared, unit_duals
from ._leave_out_diagonal import Parts, averaged, lost_alone
from ._method import Budget, DiagonalMethod, Outcome, default_probes, products
from ._orthogonal import orthonormal
from ._samples import is_real, rounding


class XDiag(DiagonalMethod):
    r"""The diagonal of a low-rank approximation and of its remainder, for every square operator.

    Half of the products find a basis Q of the dominant part of the range of the operator A, and the other half
    multiply that basis by the adjoint of A. Each estimate leaves one probe w out of the basis, and adds
    `conj(w) * (I - Q Q^*) A w` to the diagonal of `Q Q^* A`; the result is their mean. It is unbiased. It is far better
    than `HutchinsonDiagonal` if the singular values decay, and about `sqrt(2)` times worse if they do not, because it
    has half as many probes.

    It needs products with the adjoint: for a `FunctionOperator` that is not symmetric, `jax.linear_transpose` derives
    them. A budget of `m` makes `2 * (m // 2)` products. Probes are signs, complex ones for a complex operator. The
    paper's estimator is extended in two ways: the same estimate of the identity serves as a control variate, so
    multiples of the identity are exact, and the standard error is corrected for the probes that estimates share.

    E. N. Epperly, J. A. Tropp, R. J. Webber, "XTrace: Making the most of every sample in stochastic trace estimation",
    SIAM Journal on Matrix Analysis and Applications 45 (2024), doi:10.1137/23M1548323.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> x = jnp.linspace(0.0, 1.0, 50)
        >>> matrix = jnp.exp(-jnp.abs(x[:, None] - x[None, :]) ** 2) * (1 + x[:, None])  # of low rank
        >>> estimate = estimators.diagonal(matrix, jax.random.key(0), matvecs=24, method=estimators.XDiag())
        >>> bool(jnp.max(jnp.abs(estimate.value - (1 + x))) < 1e-4)
        True
    """

    minimum = 10

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the diagonal from `budget.used` products; see `DiagonalMethod`."""
        half = budget.part(2)
        drawn = half.drawn(operator, default_probes(operator), key)
        sketch = prepared(operator, drawn, products(operator, drawn, half.used), half.used)
        probes, scale = sketch.probes, sketch.scale.astype(sketch.probes.dtype)
        basis, factor = orthonormal(sketch.products, sketch.mask)
        # For zero, any basis is right, and its results are discarded.
        is_zero = jnp.all(sketch.products == 0)
        factor = jnp.where(is_zero, jnp.eye(half.most, dtype=factor.dtype), factor)
        final = jnp.where(is_zero, 0, sketch.scale)
        images = products(operator, basis, half.used, adjoint=True)
        images = images / scale
        parts, control = _parts(probes, basis, factor, images, sketch.mask)
        value, variance, freedom = averaged(
            parts, control, probes, half.used, real=is_real(operator)
        )
        # Rounding of the sum over the basis, and of its products.
        sizes = jnp.sum(jnp.abs(basis) ** 2, axis=1) * jnp.sum(jnp.abs(images) ** 2, axis=1)
        rounded = rounding(operator, jnp.sqrt(sizes + jnp.abs(value) ** 2))
        count = jnp.asarray(half.used, variance.dtype)
        return Outcome(
            value=value * final.astype(value.dtype),
            variance=(variance + rounded) * final**2,
            degrees_of_freedom=freedom,
            matvecs=2 * jnp.asarray(half.used, jnp.int32),
            consistent=jnp.asarray(True),
            gradient_pairs=StoredPairs(drawn / count.astype(drawn.dtype), drawn),
        )


def _parts(
    probes: Array, basis: Array, factor: Array, images: Array, mask: Array | None
) -> tuple[Parts, Parts]:
    """The parts of `Q Q^* A`, from the basis Q and its images `A^* Q`, and those of `Q Q^*`."""
    duals = unit_duals(factor, mask)
    left = times(basis, duals)
    inside = times(basis.conj().T, probes)
    along = times(duals.conj().T, inside)
    gram = times(duals.conj().T, duals)
    parts = Parts(
        full=jnp.sum(basis * images.conj(), axis=1),
        left=left,
        right=times(images, duals),
        rest=None,
        gram=gram,
        seen=lost_alone(duals, factor),
        along=along,
    )
    control = Parts(
        full=jnp.sum(basis * basis.conj(), axis=1),
        left=left,
        right=left,
        rest=probes - times(basis, inside),
        gram=gram,
        seen=along,
        along=along,
    )
    return parts, control
