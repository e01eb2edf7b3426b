"""`trace`: estimates traces."""

from functools import partial
from typing import Any, SupportsIndex

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, as_operator, stop_gradient
from ..transforms import filter_jit
from ..trees import check_key
from ._estimate import Estimate
from ._exact import exact_trace
from ._gradient_pairs import attach
from ._hutchinson import Hutchinson
from ._method import TraceMethod
from ._plan import Plan, Wanted, carried_out, planned
from ._xnystrace import XNysTrace
from ._xtrace import XTrace

# With fewer, a basis costs more than it gains.
_LEAST = 20
# Bytes of a basis.
_MOST_BYTES = 2**30


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

    There are three ways to set the number of products:

    - `matvecs=100`: this many products. Each different number compiles again.
    - `matvecs=k, max_matvecs=200`: `k` products, with shapes made for `max_matvecs`. All `k` up to that share one
      compilation, and `k` may be traced.
    - `rtol=` or `atol=`, or both, and `max_matvecs=200`: products are made until the error is at most
      `max(atol, rtol * abs(value))` with a probability of 95%. `Estimate.tolerance_met` says whether `max_matvecs`
      were enough.

    Products with the unit vectors give the exact trace, so no method makes more than `n` products with an operator of
    size `n`: when the budget reaches `n`, the answer is exact and its error is 0.

    Without a `method`, one is chosen from this table:

    | operator | products | method |
    | --- | --- | --- |
    | any | at least `n` | exact |
    | positive semidefinite | at least 8 | `XNysTrace`: one product for each vector of its basis |
    | any other | at least 20 | `XTrace`: two products for each vector of its basis |
    | any | fewer, or a basis of more than 1 GiB | `Hutchinson`: no basis |

    With a tolerance, `trace` makes attempts with 32, 64, 128, ... products, each with fresh probes, and returns the
    first whose error is small enough. `max_matvecs` limits all attempts together. The level of their intervals is
    such that all of them contain the truth with a probability of 95%, so repeated checks do not bias the result.

    The derivative of the value with respect to the operator is an unbiased estimate of the derivative of the trace.
    In forward and in reverse mode it takes as many products again.

    Args:
        operator: a square matrix, an `Operator`, or an object with `mv` and `in_structure()`.
        key: a random key.
        matvecs: the number of products: a Python int, or, with `max_matvecs`, an integer array. More than `n` means
            `n`. An array is clamped between the method's minimum and `max_matvecs`.
        method: how to estimate. None chooses from the table above.
        rtol: the tolerance relative to the value: a number, which may be traced.
        atol: the absolute tolerance, likewise.
        max_matvecs: the number of products that shapes are made for, a Python int. With a tolerance the default is
            400, or `2 * n` if `n` is at most 1000, which is enough to end with the exact answer.

    Returns:
        The trace with its error. Real if the operator is symmetric or real. Under `vmap`, if budgets or tolerances
        differ between the elements of the batch, all take as long as the longest.

    Raises:
        TypeError: if `operator` is not an operator, `key` not a random key, or an argument not a number;
            `TracedShapeError` if one is traced where it cannot be.
        ValueError: if a number is too small, if arguments do not go together, or if the method needs an operator that
            is declared positive semidefinite.

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
    check_key("trace", key)
    wanted = Wanted(matvecs, max_matvecs, rtol, atol)
    return _estimated(operator, key, *planned(operator, method, _choose, wanted, where))


def _choose(operator: Operator, matvecs: int) -> TraceMethod:
    """The method for `matvecs` products; the table is in the docstring of `trace`."""
    free = operator.positive_semidefinite
    columns = matvecs if free else matvecs // 2
    row = operator.size * jnp.dtype(operator.dtype).itemsize
    if matvecs < (XNysTrace.minimum if free else _LEAST) or columns * row > _MOST_BYTES:
        return Hutchinson()
    return XNysTrace() if free else XTrace()


@filter_jit
def _estimated(operator: Operator, key: PRNGKeyArray, method: TraceMethod, plan: Plan) -> Estimate:
    quiet = stop_gradient(operator)
    outcome, met = carried_out(quiet, key, method, plan, partial(exact_trace, quiet))
    outcome = stop_gradient(outcome)
    return Estimate.of(
        attach(outcome.value, operator, outcome.gradient_pairs),
        jnp.sqrt(outcome.variance),
        matvecs=outcome.matvecs,
        degrees_of_freedom=outcome.degrees_of_freedom,
        tags_hold=outcome.consistent,
        tolerance_met=met,
    )
