"""`Estimate`, which every estimator returns, and Student's distribution for its intervals."""

import math
import statistics
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array, lax
from jax.scipy.special import betainc

from ..modules import Module
from ..show import listed, message, spec_text, type_error, value_error
from ..transforms import varying_axes

# Above this, the asymptotic series is accurate to float32 at every level in use.
_MANY = 50
# Bounds of Student's quantile, for one degree of freedom and levels from 1e-6 to 1 - 1e-6.
_LOWEST, _HIGHEST = 1e-7, 1e7
_HALVINGS = 50


class Estimate(Module):
    """An estimate with its error.

    Args:
        value: the estimate.
        standard_error: an estimate of the root mean square of `value - truth`, of the shape of `value`, real.
        matvecs: the number of products with the operator that were made.
        tolerance_met: whether the error meets the requested tolerance; True if none was requested.
        tags_hold: False if the computation contradicted a tag of the operator. If a tag that the method needs is false
            (a negative Rayleigh quotient of an operator declared positive semidefinite), `value` is the plain
            Hutchinson estimate from the same products.
        is_finite: whether `value` and `standard_error` are free of NaN and infinity.
        degrees_of_freedom: of the Student distribution that `(value - truth) / standard_error` approximately follows;
            infinite for an exact value.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> estimate = estimators.trace(jnp.ones((50, 50)), jax.random.key(0), matvecs=50)
        >>> print(estimate.value, estimate.standard_error, estimate.matvecs, estimate.is_finite)
        50.0 0.0 50 True
    """

    value: Any
    standard_error: Any
    matvecs: Array
    tolerance_met: Array
    tags_hold: Array
    is_finite: Array
    degrees_of_freedom: Array

    @staticmethod
    def of(
        value: Any,
        standard_error: Any,
        *,
        matvecs: Array,
        degrees_of_freedom: Array,
        tags_hold: Array,
        tolerance_met: Array | None = None,
    ) -> "Estimate":
        """Makes an estimate: only its value has derivatives, and `is_finite` is computed.

        Args:
            value: as in the class.
            standard_error: likewise.
            matvecs: likewise.
            degrees_of_freedom: likewise.
            tags_hold: likewise.
            tolerance_met: likewise; None if no tolerance was requested.

        Returns:
            The `Estimate`.
        """
        standard_error, tags_hold = lax.stop_gradient((standard_error, tags_hold))
        numbers = jtu.tree_leaves(lax.stop_gradient((value, standard_error)))
        fine = [jnp.all(jnp.isfinite(x)) for x in numbers]
        is_finite = jnp.all(jnp.stack(fine)) if fine else jnp.asarray(True)
        return Estimate(
            value=value,
            standard_error=standard_error,
            matvecs=matvecs,
            # NaN meets no tolerance.
            tolerance_met=jnp.asarray(True) if tolerance_met is None else tolerance_met & is_finite,
            tags_hold=tags_hold,
            is_finite=is_finite,
            degrees_of_freedom=degrees_of_freedom,
        )

    def interval(self, level: float = 0.95) -> tuple[Any, Any]:
        """Returns the interval that contains the truth with a probability of about `level`.

        It is `value` plus or minus `standard_error` times the quantile of Student's distribution.

        Args:
            level: a Python number between 0 and 1.

        Returns:
            `(low, high)`, each like `value`.

        Raises:
            TypeError: if the value is complex.
            ValueError: if `level` is not between 0 and 1.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from vernal import estimators
            >>> matrix = 10 * jnp.eye(100) + jnp.ones((100, 100)) / 10
            >>> low, high = estimators.trace(matrix, jax.random.key(0), matvecs=40).interval()
            >>> bool(low < 1010) and bool(1010 < high)
            True
        """
        for leaf in jtu.tree_leaves(self.value):
            if jnp.iscomplexobj(leaf):
                raise type_error(
                    "a complex estimate has no interval",
                    where="Estimate.interval()",
                    expected="a real value",
                    got=spec_text(leaf),
                    instead="`standard_error`, which is that of the modulus of the error; if the operator equals its "
                    "conjugate transpose, declare `symmetric=True`, and its trace is real",
                )
        quantile = student_quantile(level, self.degrees_of_freedom)

        def moved(sign: int) -> Any:
            def end(x: Array, s: Array) -> Array:
                # A batch of estimates has one quantile for each, and the axes of the batch come first.
                of_each = jnp.expand_dims(quantile, tuple(range(quantile.ndim, s.ndim)))
                return x + sign * of_each.astype(s.dtype) * s

            return jtu.tree_map(end, self.value, self.standard_error)

        return moved(-1), moved(1)


def student_quantile(level: float, degrees_of_freedom: Array) -> Array:
    """The t with P(-t < T < t) = level, where T has Student's distribution.

    Args:
        level: a Python number between 0 and 1.
        degrees_of_freedom: positive, of any shape; infinity is the normal distribution.

    Returns:
        An array of the shape and dtype of `degrees_of_freedom`, with a relative error of a few 1e-5 in float32.

    Raises:
        ValueError: if `level` is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise value_error(
            "`level` is not a probability",
            where="Estimate.interval(level)",
            expected="0 < level < 1",
            got=f"level={level}",
            instead="0.95 for 95%",
        )
    axes = varying_axes(degrees_of_freedom)
    if axes:
        raise NotImplementedError(
            message(
                "JAX's `betainc` cannot compute intervals that differ between the devices of `shard_map`",
                where="Estimate.interval(), or a run to a tolerance",
                expected="degrees of freedom that are the same on all devices",
                got=f"some that vary over {listed(sorted(map(repr, axes)))}",
                instead="a number of products, `matvecs=`, in place of a tolerance; `interval()` of what "
                "`shard_map` returned",
            )
        )
    few = jnp.clip(degrees_of_freedom, 0.01, _MANY)
    # P(|T| > t) = I_x(v / 2, 1 / 2) with x = v / (v + t^2): in this form the tail keeps its digits.
    tail = jnp.full_like(few, 1 - level)

    def halve(_: int | Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        too_small = (
            betainc(few / 2, jnp.full_like(few, 0.5), few / (few + jnp.exp(2 * middle))) > tail
        )
        return jnp.where(too_small, middle, low), jnp.where(too_small, high, middle)

    bounds = jnp.full_like(few, math.log(_LOWEST)), jnp.full_like(few, math.log(_HIGHEST))
    low, high = lax.fori_loop(0, _HALVINGS, halve, bounds)
    return jnp.where(
        degrees_of_freedom > _MANY,
        quantile_of_many(level, degrees_of_freedom),
        jnp.exp((low + high) / 2),
    )


def quantile_of_many(level: float, degrees_of_freedom: Array) -> Array:
    """Student's quantile by its asymptotic series; within 1% from 4 degrees of freedom on at usual levels.

    E. A. Cornish and R. A. Fisher, "Moments and cumulants in the specification of distributions", Revue de l'Institut
    International de Statistique 5 (1938), doi:10.2307/1400905.

    Args:
        level: a Python number between 0 and 1.
        degrees_of_freedom: positive, of any shape; may be infinite.

    Returns:
        An array of the shape and dtype of `degrees_of_freedom`.
    """
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    inverse = 1 / degrees_of_freedom
    total = jnp.zeros_like(inverse)
    for term in reversed(terms):
        total = total * inverse + term
    return total
