"""`trace`: the one entry to the estimation of traces."""

from functools import partial
from typing import Any, SupportsIndex

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, as_operator, positive_int, tolerance
from ..modules import Module
from ..show import value_error
from ..transforms import filter_jit
from ._adaptive import adaptive_method, adaptive_trace
from ._choose import Deflation, choose
from ._estimate import Estimate
from ._exact import exact_trace
from ._hutchinson import Hutchinson
from ._method import Budget, Outcome, TraceMethod, found_or_exact, planned
from ._sensitivity import attach, still

# Up to this size an operator is known exactly after as many products as anybody would make without being asked.
_SMALL = 1000
_DEFAULT_MOST = 200


def trace(
    operator: Any,
    key: PRNGKeyArray,
    *,
    matvecs: SupportsIndex | None = None,
    method: TraceMethod | None = None,
    rtol: ArrayLike | None = None,
    atol: ArrayLike | None = None,
    max_matvecs: SupportsIndex | None = None,
) -> Estimate:
    """Estimates the trace of a linear operator from its products with random vectors.

    There are three ways to say how much work it may be:

    - `matvecs=100`: so many products. Another number is another compilation.
    - `matvecs=k, max_matvecs=200`: so many products, with shapes that are made for `max_matvecs`. All `k` up to that
      share one compilation, and `k` may be traced.
    - `rtol=` or `atol=`, or both, and `max_matvecs=200`: as many products as it takes until the error, at a level of
      99%, is at most `max(atol, rtol * abs(value))`. `Estimate.tolerance_met` says whether `max_matvecs` were enough.

    Products with the unit vectors give the exact trace, so no method makes more than `n` products with an operator of
    size `n`: when the budget reaches `n`, the answer is exact and its error 0.

    Without a `method`, this one is taken:

    | operator | products | method |
    | --- | --- | --- |
    | any | at least `n` | exact |
    | positive semidefinite | at least 6 | `XNysTrace`: one product for each vector of its basis |
    | any other | at least 20 | `XTrace`: two products for each vector of its basis |
    | any | fewer, or a basis of more than 1 GiB | `Hutchinson`: no basis |

    With a tolerance, `Hutchinson` and the one of the table watch the same products, and the first to meet the tolerance
    is taken. Unless the operator is positive semidefinite, a basis costs products of its own: one trial says whether it
    pays. So it never makes many more products than `Hutchinson` alone: at most as many as its first block has, 16.

    The derivative of the value with respect to the operator is an unbiased estimate of the derivative of the trace,
    from as many products again, forward and in reverse.

    Args:
        operator: a square matrix, an `Operator`, or an object with `mv` and `in_structure()`.
        key: a random key.
        matvecs: how many products to make: a Python int, or an integer array with `max_matvecs`. More than `n` are
            `n`. An array is clamped between the method's minimum and `max_matvecs`.
        method: how to estimate. With a tolerance: `Hutchinson`, `XTrace` or `XNysTrace`.
        rtol: the tolerance relative to the value: a number, which may be traced.
        atol: the absolute tolerance, likewise.
        max_matvecs: what shapes are made for: a Python int. With a tolerance and without this it is 200, and `n` if
            that is at most 1000. Memory for a basis grows with it.

    Returns:
        The trace, with its error. Real if the operator is symmetric or real. Under `vmap`, budgets and tolerances that
        differ between the elements of the batch take as long as the longest.

    Raises:
        TypeError: if something is not an operator, or not a number; `TracedShapeError`, if a number is traced where it
            cannot be.
        ValueError: if a number is too small, if arguments do not go together, or if the method needs an operator that
            is declared to be positive semidefinite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> matrix = jnp.diag(1 / jnp.arange(1.0, 301) ** 2) + jnp.ones((300, 300)) / 300
        >>> operator = linalg.MatrixOperator(matrix, positive_semidefinite=True)
        >>> estimate = estimators.trace(operator, jax.random.key(0), rtol=1e-2, max_matvecs=200)
        >>> bool(estimate.tolerance_met), bool(abs(estimate.value - jnp.trace(matrix)) < 0.03)
        (True, True)
    """
    where = "trace(operator, key)"
    operator = as_operator(operator, where)
    _check_way(where, matvecs, (rtol, atol), max_matvecs)
    most = None if max_matvecs is None else positive_int(max_matvecs, "max_matvecs", where)
    if matvecs is None:
        if most is None:
            most = operator.size if operator.size <= _SMALL else _DEFAULT_MOST
        adapted = adaptive_method(operator, method, most, where)
        real = jnp.finfo(operator.dtype).dtype
        wanted = _Tolerance(
            tolerance(rtol, "rtol", where, real), tolerance(atol, "atol", where, real), most
        )
        return _within(operator, key, adapted, wanted)
    return _estimated(operator, key, *planned(operator, method, choose, (matvecs, most), where))


def _check_way(where: str, matvecs: Any, tolerances: tuple[Any, Any], most: Any) -> None:
    """Exactly one of the three ways."""
    asked = any(x is not None for x in tolerances)
    if asked == (matvecs is not None):
        given = " and ".join(
            name
            for name, value in zip(
                ("matvecs", "rtol", "atol", "max_matvecs"),
                (matvecs, *tolerances, most),
                strict=True,
            )
            if value is not None
        )
        raise value_error(
            "both a number of products and a tolerance"
            if asked
            else "neither a number of products nor a tolerance",
            where=where,
            expected="`matvecs`, or `rtol` and `atol` or one of them; `max_matvecs` goes with both",
            got=given or "none of them",
            instead="`trace(operator, key, matvecs=100)`, or `trace(operator, key, rtol=1e-2, max_matvecs=200)`",
        )


class _Tolerance(Module):
    """When to stop."""

    rtol: Array
    atol: Array
    most: int


@filter_jit
def _estimated(
    operator: Operator, key: PRNGKeyArray, method: TraceMethod, budget: Budget
) -> Estimate:
    quiet = still(operator)
    outcome = found_or_exact(quiet, key, method, budget, partial(exact_trace, quiet))
    return _finished(operator, outcome, None)


@filter_jit
def _within(
    operator: Operator,
    key: PRNGKeyArray,
    method: Hutchinson | Deflation | None,
    wanted: _Tolerance,
) -> Estimate:
    outcome, met = adaptive_trace(
        still(operator), key, method, (wanted.rtol, wanted.atol), wanted.most
    )
    return _finished(operator, outcome, met)


def _finished(operator: Operator, outcome: Outcome, tolerance_met: Array | None) -> Estimate:
    outcome = still(outcome)
    return Estimate.of(
        attach(outcome.value, operator, outcome.sensitivity),
        jnp.sqrt(outcome.variance),
        matvecs=outcome.matvecs,
        degrees_of_freedom=outcome.degrees_of_freedom,
        tags_hold=outcome.consistent,
        tolerance_met=tolerance_met,
    )
