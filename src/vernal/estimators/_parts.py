"""A budget that a method divides between several kinds of products, all of them made together.

Invariant: the parts of a budget always add up to all of it.
"""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ._method import Budget, masked, products
from ._orthogonal import product
from ._probes import Probes
from ._sensitivity import Stored


def divided(
    budget: Budget, rule: Callable[[int], tuple[int, ...]], minimum: int
) -> tuple[Budget, ...]:
    """The parts of a budget of at least `minimum`, the fewest that `rule` takes: it gives their sizes for a number
    of products."""
    if isinstance(budget.used, int):
        return tuple(Budget(part, part) for part in rule(budget.used))
    # The rule is for Python ints: so it becomes a table.
    table = np.array([rule(max(number, minimum)) for number in range(budget.most + 1)], np.int32)
    used = jnp.asarray(table)[jnp.asarray(budget.used)]
    return tuple(Budget(int(column.max()), used[i]) for i, column in enumerate(table.T))


def drawn(operator: Operator, probes: Probes, key: PRNGKeyArray, part: Budget) -> Array:
    """Probes for a part; columns that are not used are zero."""
    return masked(probes.draw(key, operator.size, part.most, operator.dtype), part.mask())


def together(operator: Operator, blocks: list[Array], parts: list[Budget]) -> list[Array]:
    """The products of an operator with several blocks, made as those with one. There is a part for each block, of
    shape `(size, part.most)`, of which the columns that are not used are zero."""
    starts: list[int | Array] = [0]
    for part in parts:
        starts.append(starts[-1] + part.used)
    joined = jnp.concatenate(blocks, axis=1)
    if parts[0].is_shared:
        # Each begins where the used columns of the last one end. What it covers there are zeros.
        joined = jnp.zeros_like(joined)
        for block, start in zip(blocks, starts, strict=False):
            joined = lax.dynamic_update_slice_in_dim(joined, block, start, axis=1)
    made = products(operator, joined, starts[-1])
    return [
        masked(lax.dynamic_slice_in_dim(made, start, part.most, axis=1), part.mask())
        for start, part in zip(starts, parts, strict=False)
    ]


def outside(basis: Array, block: Array) -> Array:
    """What of the columns of a block is orthogonal to a basis."""
    return block - product(basis, product(basis.conj().T, block))


def deflated_pairs(basis: Array, rest: Array, count: int | Array) -> Stored:
    """The derivative as tr(Q^* dA Q), for a basis Q of a sketch, and the mean of r^* dA r for what Q leaves of probes.

    Unbiased if the probes are independent of the sketch.

    Args:
        basis: Q, of shape `(size, k)`.
        rest: all r, of shape `(size, l)`.
        count: how many probes there are; the others are zero.
    """
    number = jnp.asarray(count, jnp.finfo(rest.dtype).dtype).astype(rest.dtype)
    left = jnp.concatenate([basis, rest / number], axis=1)
    return Stored(left, jnp.concatenate([basis, rest], axis=1))
