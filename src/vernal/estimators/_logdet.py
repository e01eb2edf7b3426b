"""`logdet`: the logarithm of the determinant of a positive definite operator."""

from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..linalg import Preconditioner, as_operator, refuse_empty
from ..show import short, value_error
from ..trees import check_key, tree_at
from ._estimate import Estimate
from ._functions import function_estimate, lower_bound
from ._plan import Wanted
from ._quadrature import FunctionTrace, LanczosQuadrature


def logdet(
    operator: Any,
    key: PRNGKeyArray,
    *,
    matvecs: int | None = None,
    method: LanczosQuadrature | None = None,
    least_eigenvalue: Any = None,
    preconditioner: Preconditioner | None = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_matvecs: int | None = None,
) -> Estimate:
    """Estimates the logarithm of the determinant of a positive definite operator.

    It is the trace of the logarithm, by stochastic Lanczos quadrature; see `LanczosQuadrature` for the paper and the
    use of the products, and `trace_of_function` for the derivatives. With as many products as the operator has rows,
    or more, the answer is that of a Cholesky factorisation, and its error is that of rounding. Tolerances and
    `max_matvecs` are as for `trace`.

    Each probe gives an upper bound (the Gauss rule) and a lower bound (the Gauss-Radau rule). The value is their
    midpoint; the standard error includes half of their distance, besides the error of the probes and rounding. So the
    interval is valid however slowly the steps converge. The lower bound is much better if a lower bound of the
    eigenvalues is known, as for a kernel with noise.

    With a preconditioner, derivatives go through it, and the error of their estimates is smaller as well
    (Wenger et al.).

    J. Wenger, G. Pleiss, P. Hennig, J. P. Cunningham, J. R. Gardner, "Preconditioning for scalable Gaussian process
    hyperparameter optimization", Proceedings of the 39th International Conference on Machine Learning (2022),
    arXiv:2107.00243.
    G. H. Golub and G. Meurant, "Matrices, Moments and Quadrature with Applications", Princeton University Press
    (2010), chapter 6.

    Multiplying the operator by `c` adds `n log c` to the value and changes nothing else.

    Args:
        operator: positive definite, and declared positive semidefinite.
        key: a key of `jax.random`.
        matvecs: the largest number of products to make, a Python int.
        method: how to use them.
        rtol: the tolerance relative to the value: a number, which may be traced.
        atol: the absolute tolerance, likewise.
        max_matvecs: the number of products that all attempts to meet a tolerance may make together, a Python int.
        least_eigenvalue: a lower bound of the eigenvalues, such as the noise variance of a kernel or a damping: a real
            number, which may be traced. None takes the noise of a `kernel_operator`, and for any other operator the
            size of rounding errors.
        preconditioner: P, close to the operator, as `vernal.linalg.pivoted_cholesky(operator, rank)` makes it. Only
            `log det(P^{-1} A)` is then estimated, which is smaller the closer P is; `log det(P)` is added to it.

    Returns:
        An `Estimate`, real. The value is always finite: an eigenvalue that is negative, or not above the rounding
        errors of the largest, is replaced by their size. `tags_hold` is then False; it is also False if the operator
        is visibly asymmetric, or has an eigenvalue clearly below `least_eigenvalue`.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, `matvecs` is traced or not an int, or
            `least_eigenvalue` is not a real number.
        ValueError: if the operator is empty or not declared positive semidefinite, a number is too small, the
            preconditioner was made for another size, or arguments do not go together.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> x = jnp.linspace(0, 1, 200)
        >>> kernel = jnp.exp(-50 * (x[:, None] - x[None, :]) ** 2) + 0.1 * jnp.eye(200)
        >>> operator = linalg.MatrixOperator(kernel, positive_semidefinite=True)
        >>> estimate = estimators.logdet(operator, jax.random.key(0), matvecs=150)
        >>> bool(abs(estimate.value - jnp.linalg.slogdet(kernel)[1]) < 4 * estimate.standard_error)
        True
    """
    where = "logdet(operator, key)"
    operator = as_operator(operator, where)
    check_key("logdet", key)
    refuse_empty(operator, where)
    if not operator.positive_semidefinite:
        raise value_error(
            "the operator is not declared positive semidefinite, but the logarithm needs positive eigenvalues",
            where=where,
            expected="an operator with `positive_semidefinite=True`",
            got=short(operator),
            instead="`MatrixOperator(matrix, positive_semidefinite=True)` or `FunctionOperator(fn, example, "
            "positive_semidefinite=True)`, if it has no negative eigenvalues",
        )
    if preconditioner is not None:
        _check_preconditioner(preconditioner, operator, least_eigenvalue, rtol)
        operator = preconditioner.whitened(operator)
    least = lower_bound(operator, least_eigenvalue, where)
    way = FunctionTrace(jnp.log, method or LanczosQuadrature(), operator.eps, least, True)
    found = function_estimate(way, operator, key, Wanted(matvecs, max_matvecs, rtol, atol), where)
    if preconditioner is None:
        return found
    return tree_at(lambda found: found.value, found, found.value + preconditioner.logdet())


def _check_preconditioner(
    preconditioner: Preconditioner, operator: Any, least: Any, rtol: Any
) -> None:
    if rtol is not None:
        raise value_error(
            "`rtol` would be relative to what the preconditioner leaves, not to the value",
            where="logdet(rtol, preconditioner)",
            expected="an absolute tolerance",
            got="rtol",
            instead="logdet(..., preconditioner=P, atol=1e-2)",
        )
    if least is not None:
        raise value_error(
            "`least_eigenvalue` would be ignored: the preconditioner determines how small eigenvalues may be",
            where="logdet(least_eigenvalue, preconditioner)",
            expected="at most one of the two",
            got="both",
        )
    if preconditioner.operator.in_structure() != operator.in_structure():
        raise value_error(
            "the preconditioner was made for another operator",
            where="logdet(preconditioner)",
            expected=f"one for vectors like {operator.in_structure()}",
            got=f"one for vectors like {preconditioner.operator.in_structure()}",
            instead="`linalg.pivoted_cholesky(operator, rank)` of this operator",
        )
