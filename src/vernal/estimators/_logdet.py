"""`logdet`: the logarithm of the determinant of a positive definite operator."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from ..show import short, value_error
from ._estimate import Estimate
from ._functions import quadrature_estimate
from ._operators import as_operator
from ._quadrature import LanczosQuadrature


def logdet(
    operator: Any, key: PRNGKeyArray, *, matvecs: int, method: LanczosQuadrature | None = None
) -> Estimate:
    """Estimates the logarithm of the determinant of a positive definite operator.

    The trace of the logarithm, by stochastic Lanczos quadrature; see `LanczosQuadrature` for the paper and for what
    the products are used for, and `trace_of_function` for the derivatives. With as many products as the operator has
    rows, or more, the answer is exact, and made with that many products.

    Multiplying the operator by `c` adds `n log c` to the value, and changes nothing else.

    Args:
        operator: positive definite, and declared positive semidefinite.
        key: a key of `jax.random`.
        matvecs: how many products to make at most, a Python int.
        method: how to use them.

    Returns:
        An `Estimate`, real. The value is finite in any case: an eigenvalue that is not above the rounding errors of
        the largest, or negative, is replaced by their size. `converged` is then False; so it is if the operator is
        visibly asymmetric.

    Raises:
        TypeError: if `operator` is none, or `matvecs` is traced or no int.
        ValueError: if the operator is not declared positive semidefinite, or `matvecs` is too small.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators
        >>> x = jnp.linspace(0, 1, 200)
        >>> kernel = jnp.exp(-50 * (x[:, None] - x[None, :]) ** 2) + 0.1 * jnp.eye(200)
        >>> operator = estimators.MatrixOperator(kernel, positive_semidefinite=True)
        >>> estimate = estimators.logdet(operator, jax.random.key(0), matvecs=150)
        >>> bool(abs(estimate.value - jnp.linalg.slogdet(kernel)[1]) < 4 * estimate.standard_error)
        True
    """
    operator = as_operator(operator, "logdet(operator)")
    if not operator.positive_semidefinite:
        raise value_error(
            "the operator is not declared positive semidefinite, and the logarithm needs positive eigenvalues",
            where="logdet(operator)",
            expected="an operator with `positive_semidefinite=True`",
            got=short(operator),
            instead="`MatrixOperator(matrix, positive_semidefinite=True)` or `FunctionOperator(fn, example, "
            "positive_semidefinite=True)`, if that is true of it",
        )
    rounding = float(jnp.finfo(operator.dtype).eps)
    return quadrature_estimate(jnp.log, operator, key, matvecs, method, rounding, "logdet(matvecs)")
