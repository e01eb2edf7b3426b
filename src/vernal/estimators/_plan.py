"""How many products to make: a fixed number, at most a number, or as many as a tolerance needs.

The difficulty of a tolerance: the number of products that it needs is known only afterwards, and checking an error
again and again until it is small enough stops too early too often, by chance (optional stopping).

The plan: attempts with 32, 64, 128, ... products, each with fresh probes, until the interval of one is within the
tolerance. The largest possible number of attempts, L, is known in advance, and their intervals have the level
1 - 0.05 / L. So with a probability of 95% all of them contain the truth (the union bound), including the one that ends
the search, however it was chosen. Geometric growth makes L small and the last attempt more than half of all products:

V. Mnih, C. Szepesvari, J.-Y. Audibert, "Empirical Bernstein stopping", International Conference on Machine Learning
(2008), doi:10.1145/1390156.1390241.

Fresh probes require nothing of a method, so every method supports a tolerance, and memory does not grow with the
number of attempts. The price: all attempts together make up to twice the products of the last one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, positive_int, tolerance, whole_number
from ..loops import filter_cond
from ..modules import Module
from ..primitives import unvmap_any
from ..show import value_error
from ..trees import tree_at
from ._estimate import student_quantile
from ._gradient_pairs import Chosen
from ._method import Budget, Method, Outcome

_M = TypeVar("_M", bound=Method)

# Products of the first attempt. Fewer would not measure their own error well enough.
_FIRST = 32
# The probability that any of the intervals misses the truth.
_RISK = 0.05
# The default of `max_matvecs`: up to the first size, enough for the exact answer and the attempts before it; above
# that size, the second number.
_SMALL, _MOST = 1000, 400


class Wanted(Module):
    """The numbers that the user gave; None for those not given."""

    matvecs: Any
    max_matvecs: Any
    rtol: Any = None
    atol: Any = None


class Plan(Module):
    """Attempts, which end with the first one whose error is small enough.

    Args:
        attempts: the number of products of each attempt.
        rtol: the tolerance relative to the largest value, of shape (); None if not given.
        atol: the absolute tolerance, likewise.
    """

    attempts: tuple[Budget, ...]
    rtol: Array | None = None
    atol: Array | None = None

    def is_met(self, outcome: Outcome) -> Array:
        """Whether all errors are within the tolerance; NaN never is."""
        if self.rtol is None or self.atol is None:
            return jnp.asarray(True)
        quantile = student_quantile(1 - _RISK / len(self.attempts), outcome.degrees_of_freedom)
        half = quantile.astype(outcome.variance.dtype) * jnp.sqrt(outcome.variance)
        largest = jnp.max(jnp.abs(outcome.value), initial=0)
        return jnp.all(half <= jnp.maximum(self.atol, self.rtol * largest))


def attempts_within(most: int, size: int, least: int) -> tuple[Budget, ...]:
    """The number of products of each attempt: together at most `most`, none more than `size`, which is exact, and none
    less than `least`."""
    made, left, step = [], most, max(_FIRST, least)
    while step < size and 2 * step <= left:
        made.append(step)
        left, step = left - step, 2 * step
    return tuple(Budget(count, count) for count in (*made, min(left, size)))


def planned(
    operator: Operator,
    method: _M | None,
    choose: Callable[[Operator, int], _M],
    wanted: Wanted,
    where: str,
    *,
    otherwise: str = "XTrace()",
    least: int | None = None,
) -> tuple[_M, Plan]:
    """A method that suits the operator, and the number of products to make.

    Args:
        operator: the user's operator.
        method: the user's method, or None.
        choose: the method for an operator and a number of products.
        wanted: the numbers that the user gave.
        where: the function, for messages.
        otherwise: a method for every operator, for messages.
        least: the fewest products; None for the method's minimum.

    Raises:
        TypeError: if a number is not whole, or is traced where it cannot be.
        ValueError: if a number is too small, arguments do not go together, or the operator lacks a tag that the method
            needs.
    """
    _check_way(where, wanted)
    size, given = operator.size, wanted.max_matvecs
    asked = wanted.matvecs is None
    if asked and given is None:
        given = 2 * size if size <= _SMALL else _MOST
    name = "matvecs" if given is None else "max_matvecs"
    most = positive_int(wanted.matvecs if given is None else given, name, where)
    if method is None:
        last = attempts_within(most, size, 1)[-1].most if asked else most
        method = choose(operator, last)
    check_tags(operator, method, where, otherwise=otherwise)
    # The number of rows is always enough.
    least = max(1, min(method.minimum if least is None else least, size))
    positive_int(most, name, where, minimum=least)
    if asked:
        real = jnp.finfo(operator.dtype).dtype
        tolerances = (
            tolerance(wanted.rtol, "rtol", where, real),
            tolerance(wanted.atol, "atol", where, real),
        )
        return method, Plan(attempts_within(most, size, least), *tolerances)
    if given is None:
        return method, Plan((Budget(most, most),))
    used = whole_number(wanted.matvecs, "matvecs", where, minimum=least, most=most)
    return method, Plan((Budget(most, used),))


def _check_way(where: str, wanted: Wanted) -> None:
    """Refuses both or neither of a number of products and a tolerance."""
    asked = wanted.rtol is not None or wanted.atol is not None
    if asked == (wanted.matvecs is not None):
        names = ("matvecs", "rtol", "atol", "max_matvecs")
        given = " and ".join(name for name in names if getattr(wanted, name) is not None)
        call = where.removesuffix(")")
        raise value_error(
            "both a number of products and a tolerance were given"
            if asked
            else "neither a number of products nor a tolerance was given",
            where=where,
            expected="`matvecs`, or a tolerance: `rtol`, `atol` or both; `max_matvecs` goes with either",
            got=given or "none of them",
            instead=f"`{call}, matvecs=100)`, or `{call}, rtol=1e-2, max_matvecs=200)`",
        )


def check_tags(
    operator: Operator, method: Method, where: str, *, otherwise: str = "XTrace()"
) -> None:
    """Refuses an operator that lacks a tag that the method needs; `otherwise` names a method for every operator."""
    if method.needs_positive_semidefinite and not operator.positive_semidefinite:
        raise value_error(
            f"{type(method).__name__} needs a positive semidefinite operator",
            where=where,
            expected="an operator that is declared positive semidefinite",
            got=f"{type(operator).__name__} with symmetric={operator.symmetric}, positive_semidefinite=False",
            instead="if it has no negative eigenvalues, declare it so: "
            "`MatrixOperator(matrix, positive_semidefinite=True)`, "
            "`FunctionOperator(fn, example, positive_semidefinite=True)`; "
            f"or a method that works for every operator: `{otherwise}`",
        )


def carried_out(
    operator: Operator,
    key: PRNGKeyArray,
    method: Method,
    plan: Plan,
    exact: Callable[[], Outcome],
) -> tuple[Outcome, Array]:
    """The outcome of a method, and whether it meets the tolerance.

    Args:
        operator: the operator.
        key: a random key.
        method: used where a budget does not reach the exact answer.
        plan: the numbers of products that may be made.
        exact: makes the exact answer.
    """

    def attempt(budget: Budget, key: PRNGKeyArray) -> Outcome:
        return _finite_or_nan(_found_or_exact(operator, key, method, budget, exact))

    outcomes = [attempt(plan.attempts[0], key)]
    last, is_met = jnp.zeros((), int), plan.is_met(outcomes[0])
    made = outcomes[0].matvecs
    for index, budget in enumerate(plan.attempts[1:], 1):
        fresh = jax.random.fold_in(key, index)
        found = _only_if(~is_met, partial(attempt, budget), fresh)
        outcomes.append(found)
        # In a batch, an element that had already met its tolerance may have been computed with the others.
        last = jnp.where(is_met, last, index)
        made = made + jnp.where(is_met, 0, found.matvecs)
        is_met = is_met | plan.is_met(found)
    if len(outcomes) == 1:
        return outcomes[0], is_met
    chosen = _selected(last, tuple(outcomes))
    return tree_at(lambda outcome: outcome.matvecs, chosen, made), is_met


def _found_or_exact(
    operator: Operator,
    key: PRNGKeyArray,
    method: Method,
    budget: Budget,
    exact: Callable[[], Outcome],
) -> Outcome:
    """The outcome of a method, or the exact answer if the budget reaches it."""
    size = operator.size
    if budget.most < size:
        return _honest(method.estimate(operator, key, budget), size)
    if not budget.is_shared or size <= method.minimum:
        return exact()
    reaches = jnp.asarray(budget.used) >= size
    # Where the answer is exact, the method makes the fewest products that it can.
    used = jnp.where(reaches, method.minimum, budget.used)
    found = _honest(method.estimate(operator, key, Budget(size - 1, used)), size)
    return _selected(reaches.astype(int), (found, _only_if(reaches, lambda key: exact(), key)))


def _honest(outcome: Outcome, size: int) -> Outcome:
    """An outcome whose variance is not less than what may be lost in it, as squares of small numbers are zero."""
    lost = size * float(jnp.finfo(outcome.variance.dtype).tiny)
    variance = jnp.where(
        jnp.any(outcome.value != 0), jnp.maximum(outcome.variance, lost), outcome.variance
    )
    return tree_at(lambda outcome: outcome.variance, outcome, variance)


def _finite_or_nan(outcome: Outcome) -> Outcome:
    """A diagonal that is NaN in all elements if it is not finite in one: their products are not finite either, and a
    method may take what it makes of them for exact."""
    if outcome.value.ndim == 0:
        return outcome
    is_lost = ~jnp.all(jnp.isfinite(outcome.value)) | jnp.any(jnp.isnan(outcome.variance))
    # Added, so that the value keeps its derivatives.
    lost = jnp.where(lax.stop_gradient(is_lost), jnp.nan, 0.0)
    return tree_at(
        lambda outcome: (outcome.value, outcome.variance),
        outcome,
        (outcome.value + lost, outcome.variance + lost),
    )


def _only_if(wanted: Array, fn: Callable[[PRNGKeyArray], Outcome], key: PRNGKeyArray) -> Outcome:
    """`fn(key)`, or zeros without work; in a batch, work is skipped only if no element wants it."""
    shapes = jax.eval_shape(fn, key)

    def nothing(key: PRNGKeyArray) -> Outcome:
        return jtu.tree_map(
            lambda x: (
                key if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.zeros(x.shape, x.dtype)
            ),
            shapes,
        )

    return filter_cond(unvmap_any(wanted), fn, nothing, key)


def _selected(which: Array, outcomes: tuple[Outcome, ...]) -> Outcome:
    """One of several outcomes of the same operator, in the dtypes of the first; `which` is an index of shape ()."""

    def pick(name: str) -> Array:
        arrays = [getattr(outcome, name) for outcome in outcomes]
        return jnp.stack([array.astype(arrays[0].dtype) for array in arrays])[which]

    return Outcome(
        value=pick("value"),
        variance=pick("variance"),
        degrees_of_freedom=pick("degrees_of_freedom"),
        matvecs=pick("matvecs"),
        consistent=pick("consistent"),
        gradient_pairs=Chosen(which, tuple(outcome.gradient_pairs for outcome in outcomes)),
    )
