"""The entry to adaptive estimation: what may run until a tolerance is met, and the best of what was found.

How it runs is in `_adaptive_run.py`.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, positive_int
from ..show import type_error
from ._adaptive_run import Run
from ._choose import Deflation
from ._exact import exact_trace
from ._growing import CHUNK
from ._hutchinson import Hutchinson
from ._method import Outcome, TraceMethod, check_tags, selected
from ._xnystrace import XNysTrace
from ._xtrace import XTrace


def adaptive_method(
    operator: Operator, method: TraceMethod | None, most: int, where: str
) -> Hutchinson | Deflation | None:
    """The method. Refuses one that cannot run until a tolerance is met, and too few products.

    Raises:
        TypeError: if the method cannot go on from a sketch.
        ValueError: if the operator is not declared to be what the method needs, or `most` is too small.
    """
    if method is not None:
        check_tags(operator, method, where)
    if method is None or isinstance(method, (Hutchinson, XNysTrace, XTrace)):
        least = Hutchinson.minimum if method is None else method.minimum
        positive_int(most, "max_matvecs", where, minimum=max(1, min(least, operator.size)))
        return method
    raise type_error(
        f"{type(method).__name__} cannot run until a tolerance is met",
        where=where,
        expected="a method that can go on from the products that it has made: Hutchinson, XTrace, XNysTrace",
        got=type(method).__name__,
        instead="leave `method` out; or give `matvecs`, and look at `standard_error`",
    )


def adaptive_trace(
    operator: Operator,
    key: PRNGKeyArray,
    method: Hutchinson | Deflation | None,
    tolerances: tuple[Array, Array],
    most: int,
) -> tuple[Outcome, Array]:
    """The trace to a tolerance.

    Args:
        operator: without derivatives.
        key: a random key.
        method: `Hutchinson` alone, or a method with `from_sketch` alone; None watches both.
        tolerances: relative and absolute, of shape (), in the real dtype of the operator.
        most: how many products may be made.

    Returns:
        The outcome, and whether it meets the tolerance.
    """
    if most >= operator.size and operator.size <= 2 * CHUNK:
        outcome = exact_trace(operator)
        return outcome, jnp.asarray(True)
    run = Run(operator, key, method, *tolerances, min(most, operator.size))
    state = lax.while_loop(lambda state: ~state.stop, run.advance, run.start())
    ratios = run.ratio(run.plain(state)), run.ratio(state.found)
    met = jnp.minimum(*ratios) <= 1
    which = (ratios[1] < ratios[0]).astype(int)
    if method is not None:
        which = jnp.full_like(which, 0 if isinstance(method, Hutchinson) else 1)
        met = jnp.stack(ratios)[which] <= 1
    outcomes = run.outcomes(state)
    if run.can_complete:
        outcomes = (*outcomes, run.completed(state, ~met))
        which = jnp.where(met, which, len(outcomes) - 1)
        met = jnp.asarray(True)
    outcome = selected(which, outcomes)
    return outcome, met
