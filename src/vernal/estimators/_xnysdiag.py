"""`XNysDiag`: diagonals of positive semidefinite operators by Nystrom approximations."""

import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, times
from ._gradient_pairs import StoredPairs
from ._hutchinson_diagonal import slopes
from ._leave_out import Sketch, near_hermitian, prepared, unit_duals
from ._leave_out_diagonal import Parts, averaged, lost_alone
from ._method import Budget, DiagonalMethod, Outcome, default_probes, products
from ._orthogonal import shifted_cholesky


class XNysDiag(DiagonalMethod):
    r"""The diagonal of a Nystrom approximation and of its remainder, for positive semidefinite operators.

    Every product is with a random probe and is used twice: each estimate leaves one probe w out of the approximation
    `X = Y (W^* Y)^{-1} Y^*`, with `Y = A W`, and adds `conj(w) * (A - X) w` to its diagonal; the result is their mean.
    It is unbiased, far better than `HutchinsonDiagonal` if the eigenvalues decay, and can be far worse if they do not.

    Probes are signs, complex ones for a complex operator. The paper's estimator is extended in two ways: the same
    estimate of the identity serves as a control variate, so multiples of the identity are exact, and the standard
    error is corrected for the probes that estimates share.

    If the products show that the operator is not positive semidefinite, the estimate is that of `HutchinsonDiagonal`
    from the same products, and `Estimate.tags_hold` is False.

    E. N. Epperly, "Make the most of what you have: Resource-efficient randomized algorithms for matrix computations"
    (2025), doi:10.48550/arXiv.2512.15929.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> x = jnp.linspace(0.0, 1.0, 50)
        >>> kernel = jnp.exp(-jnp.abs(x[:, None] - x[None, :]) ** 2)
        >>> operator = linalg.MatrixOperator(kernel, positive_semidefinite=True)
        >>> estimate = estimators.diagonal(operator, jax.random.key(0), matvecs=12, method=estimators.XNysDiag())
        >>> bool(jnp.max(jnp.abs(estimate.value - 1)) < 1e-4)
        True
    """

    minimum = 5
    needs_positive_semidefinite = True

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the diagonal from `budget.used` products; see `DiagonalMethod`."""
        drawn = budget.drawn(operator, default_probes(operator), key)
        sketch = prepared(operator, drawn, products(operator, drawn, budget.used), budget.used)
        probes, count = sketch.probes, jnp.asarray(budget.used, sketch.scale.dtype)
        parts, positive = _nystrom(operator, sketch)
        control, _ = _nystrom(operator, _of_identity(sketch))
        value, variance, freedom = averaged(parts, control, probes, budget.used, real=True)
        # Rounding of sums over the probes, and of the products, which all estimates largely share.
        elements = count * jnp.asarray(operator.size, count.dtype)
        typical = jnp.linalg.norm(sketch.products) / jnp.sqrt(elements)
        sizes = jnp.abs(parts.full) + jnp.abs(value) + 3 * typical
        variance = variance + (operator.eps * sizes) ** 2
        stored = StoredPairs(drawn / count.astype(drawn.dtype), drawn)
        # For zero, only rounding of the shift is left.
        scale = jnp.where(typical > 0, sketch.scale, 0)
        plain = slopes(probes, sketch.products, real=True).outcome(budget.used, positive, stored)
        return Outcome(
            value=jnp.where(positive, value, plain.value) * scale,
            variance=jnp.where(positive, variance, plain.variance) * scale**2,
            degrees_of_freedom=jnp.where(positive, freedom, count - 1),
            matvecs=jnp.asarray(budget.used, jnp.int32),
            consistent=positive,
            gradient_pairs=stored,
        )


def _of_identity(sketch: Sketch) -> Sketch:
    """The sketch of the identity with the same probes."""
    size = jnp.linalg.norm(sketch.probes) / float(sketch.probes.shape[0]) ** 0.5
    return sketch._replace(products=sketch.probes, shift=size * float(jnp.finfo(size.dtype).eps))


def _nystrom(operator: Operator, sketch: Sketch) -> tuple[Parts, Array]:
    """The Nystrom approximation from a sketch of M, and whether M looks positive semidefinite.

    A shift of M makes the Gram matrix positive definite in spite of rounding; it is subtracted from the diagonal again.
    """
    probes = sketch.probes
    columns = probes.shape[1]
    gram = times(probes.conj().T, sketch.products)
    of_probes = times(probes.conj().T, probes)
    size = jnp.linalg.norm(sketch.products) * float(columns) ** 0.5
    hermitian = near_hermitian(gram, size, operator)
    gram = (gram + gram.conj().T) / 2
    # The identity times the mean of the probes' squared lengths: the sum is never singular.
    never_singular = of_probes + probes.shape[0] * jnp.eye(columns, dtype=gram.dtype)
    lower, shift, positive = shifted_cholesky(
        gram, of_probes, sketch.shift, sketch.mask, raised=never_singular
    )
    factor, positive = lower.conj().T, positive & hermitian

    shifted = sketch.products + shift.astype(gram.dtype) * probes
    basis = solve_triangular(factor, shifted.T, trans="T").T
    duals = unit_duals(factor, sketch.mask)
    left = times(basis, duals)
    alone = lost_alone(duals, factor)
    full = jnp.sum(basis * basis.conj(), axis=1) - shift.astype(basis.dtype)
    return Parts(full, left, left, None, times(duals.conj().T, duals), alone, alone), positive
