"""What a method of trace estimation is, to those who write one: what it is given and what it hands back."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator, positive_int, whole_number
from ..modules import Module
from ..show import value_error
from ._probes import ComplexSigns, Probes, Signs
from ._sensitivity import Chosen, Sensitivity

# Products with a block that is only partly used are made in pieces of so many columns.
PIECE = 16


class Budget(Module):
    """How many products may be made.

    Args:
        most: what shapes are made for.
        used: how many to make, from the method's minimum to `most`; an array where several budgets share a
            compilation.
    """

    most: int
    used: int | Array

    @property
    def is_shared(self) -> bool:
        """Whether `used` is known only when the program runs."""
        return not isinstance(self.used, int)

    def part(self, divisor: int) -> "Budget":
        """The whole number of times that `divisor` fits."""
        return Budget(self.most // divisor, self.used // divisor)

    def mask(self) -> Array | None:
        """Which of `most` columns are used, of shape `(most,)`; None for all of them."""
        return jnp.arange(self.most) < self.used if self.is_shared else None


class Outcome(Module):
    """What a method found.

    Args:
        value: a scalar; real if the operator is symmetric or real.
        variance: an unbiased estimate, if possible, of the mean of `|value - truth|**2`; real.
        degrees_of_freedom: of Student's distribution of the error in units of its standard error.
        matvecs: how many products were made.
        consistent: False if a tag that the method uses was seen to be false.
        sensitivity: the pairs of vectors of which the derivative is made.
    """

    value: Array
    variance: Array
    degrees_of_freedom: Array
    matvecs: Array
    consistent: Array
    sensitivity: Sensitivity


class Method(Module):
    """A way to estimate something from products with random vectors."""

    minimum: ClassVar[int]
    """The fewest products with which it can do anything, including an error estimate."""
    needs_positive_semidefinite: ClassVar[bool] = False
    """Whether it refuses operators that do not promise to be positive semidefinite."""


_M = TypeVar("_M", bound=Method)


class TraceMethod(Method):
    """A way to estimate a trace from products with random vectors."""

    @abc.abstractmethod
    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace. `operator` carries no derivatives."""


def check_tags(
    operator: Operator, method: Method, where: str, *, otherwise: str = "XTrace()"
) -> None:
    """Refuses an operator that is not declared to be what the method needs; `otherwise` is a method for every
    operator."""
    if method.needs_positive_semidefinite and not operator.positive_semidefinite:
        raise value_error(
            f"{type(method).__name__} needs a positive semidefinite operator",
            where=where,
            expected="an operator that is declared positive semidefinite",
            got=f"{type(operator).__name__} with symmetric={operator.symmetric}, positive_semidefinite=False",
            instead="if it has no negative eigenvalues, say so: "
            "`MatrixOperator(matrix, positive_semidefinite=True)`, "
            "`FunctionOperator(fn, example, positive_semidefinite=True)`; "
            f"or a method for every operator: `{otherwise}`",
        )


def planned(
    operator: Operator,
    method: _M | None,
    choose: Callable[[Operator, int], _M],
    budget: tuple[Any, Any],
    where: str,
    *,
    otherwise: str = "XTrace()",
) -> tuple[_M, Budget]:
    """What a user asks for: a method that is one for the operator, and a number of products.

    Args:
        operator: what the user gave.
        method: likewise, or None.
        choose: the method for an operator and a number of products.
        budget: `matvecs` and `max_matvecs`, or None for the latter; what the user gave.
        where: the function, for the message.
        otherwise: a method for every operator.

    Raises:
        TypeError: if a number is not whole, or traced where it cannot be.
        ValueError: if a number is too small, or the operator is not declared to be what the method needs.
    """
    matvecs, given = budget
    name = "matvecs" if given is None else "max_matvecs"
    most = positive_int(matvecs if given is None else given, name, where)
    if method is None:
        method = choose(operator, most)
    check_tags(operator, method, where, otherwise=otherwise)
    # As many as there are rows are always enough.
    least = max(1, min(method.minimum, operator.size))
    positive_int(most, name, where, minimum=least)
    if given is None:
        return method, Budget(most, most)
    number = whole_number(matvecs, "matvecs", where, minimum=least, most=most)
    return method, Budget(most, number)


def found_or_exact(
    operator: Operator,
    key: PRNGKeyArray,
    method: Any,
    budget: Budget,
    exact: Callable[[Array | None], Outcome],
) -> Outcome:
    """What a method finds, or the exact answer if the budget reaches that.

    Args:
        operator: without derivatives.
        key: a random key.
        method: a `TraceMethod`, or a `DiagonalMethod`.
        budget: how many products may be made.
        exact: makes the exact answer if its argument is True, or None.
    """
    size = operator.size
    if budget.most < size:
        return method.estimate(operator, key, budget)
    if not budget.is_shared or size <= method.minimum:
        return exact(None)
    wanted = jnp.asarray(budget.used) >= size
    # Where the answer is exact, the method makes the fewest products that it can.
    used = jnp.where(wanted, method.minimum, budget.used)
    found = method.estimate(operator, key, Budget(size - 1, used))
    return selected(wanted.astype(int), (found, exact(wanted)))


def selected(which: Array, outcomes: tuple[Outcome, ...]) -> Outcome:
    """One of several outcomes of the same operator, of which the first says the dtypes; `which` is an index of
    shape ()."""

    def pick(name: str) -> Array:
        arrays = [getattr(outcome, name) for outcome in outcomes]
        return jnp.stack([array.astype(arrays[0].dtype) for array in arrays])[which]

    return Outcome(
        value=pick("value"),
        variance=pick("variance"),
        degrees_of_freedom=pick("degrees_of_freedom"),
        matvecs=pick("matvecs"),
        consistent=pick("consistent"),
        sensitivity=Chosen(which, tuple(outcome.sensitivity for outcome in outcomes)),
    )


def products(
    operator: Operator, block: Array, used: int | Array, *, adjoint: bool = False
) -> Array:
    """Products with the first `used` columns of a matrix; the others are zero, and cost nothing.

    Columns from `used` on must be zero. `adjoint` multiplies by the conjugate transpose of the operator.
    """
    multiply = operator.adjoint_matmul if adjoint else operator.matmul
    columns = block.shape[1]
    if isinstance(used, int) or columns <= PIECE:
        return multiply(block)
    padded = jnp.pad(block, ((0, 0), (0, -columns % PIECE)))

    def add(piece: Array, out: Array) -> Array:
        start = piece * PIECE
        vectors = lax.dynamic_slice_in_dim(padded, start, PIECE, axis=1)
        return lax.dynamic_update_slice_in_dim(out, multiply(vectors), start, axis=1)

    pieces = -(-used // PIECE)
    return lax.fori_loop(0, pieces, add, jnp.zeros_like(padded))[:, :columns]


def masked(block: Array, mask: Array | None) -> Array:
    """A matrix with zeros in the columns that are not used."""
    return block if mask is None else jnp.where(mask[None, :], block, 0)


def default_probes(operator: Operator) -> Probes:
    """Signs, of complex numbers for a complex operator: the least variance."""
    return ComplexSigns() if jnp.issubdtype(operator.dtype, jnp.complexfloating) else Signs()
