"""Exact answers: products with all unit vectors, as many as the operator has rows."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from ..linalg import Operator, fori_loop
from ..modules import field
from ..trees import tree_at
from ._gradient_pairs import GradientPairs
from ._method import Outcome
from ._samples import is_real

# Bytes of unit vectors in memory at once.
_BYTES = 2**26


class UnitVectors(GradientPairs):
    """Pairs of equal unit vectors, made block by block: the exact derivative of a trace or a diagonal."""

    size: int
    dtype: Any = field(static=True)

    @property
    def columns(self) -> int:
        """The number of columns of a block."""
        row = max(1, self.size * jnp.dtype(self.dtype).itemsize)
        return max(1, min(self.size, _BYTES // row))

    def blocks(self) -> int:
        """The number of blocks."""
        return -(-max(1, self.size) // self.columns)

    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        """The same columns of the identity twice; zeros beyond its end."""
        del operator
        rows = jnp.arange(self.size)[:, None]
        here = index * self.columns + jnp.arange(self.columns)[None, :]
        units = (rows == here).astype(self.dtype)
        return units, units


def exact_diagonal(operator: Operator) -> Outcome:
    """The exact diagonal: variance 0 and infinitely many degrees of freedom."""
    units = UnitVectors(operator.size, operator.dtype)
    blocks = units.blocks()

    def add(index: int | Array, out: Array) -> Array:
        left, right = units.block(operator, index)
        here = jnp.sum(left * operator.matmul(right), axis=0)
        return lax.dynamic_update_slice_in_dim(out, here, index * units.columns, axis=0)

    out = jnp.zeros(blocks * units.columns, operator.dtype)
    out = add(0, out) if blocks == 1 else fori_loop(0, blocks, add, out)
    diagonal = out[: operator.size]
    value = diagonal.real if is_real(operator) else diagonal
    consistent = jnp.asarray(True)
    if operator.positive_semidefinite:
        rounding = jnp.finfo(value.dtype).eps * operator.size
        consistent = jnp.all(value >= -rounding * jnp.max(jnp.abs(value), initial=0))
    zeros = jnp.zeros_like(diagonal.real)
    return Outcome(
        value=value,
        variance=zeros,
        degrees_of_freedom=jnp.full((), jnp.inf, zeros.dtype),
        matvecs=jnp.asarray(operator.size, jnp.int32),
        consistent=consistent,
        gradient_pairs=units,
    )


def exact_trace(operator: Operator) -> Outcome:
    """The exact trace."""
    found = exact_diagonal(operator)
    sums = jnp.sum(found.value), jnp.sum(found.variance)
    return tree_at(lambda outcome: (outcome.value, outcome.variance), found, sums)
