"""Exact answers: as many products as the operator has rows, with the unit vectors."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import PRNGKeyArray

from ..linalg import Operator
from ..modules import field
from ._method import Outcome
from ._sensitivity import Sensitivity

# Bytes of unit vectors that are in memory at once.
_BYTES = 2**26


class UnitVectors(Sensitivity):
    """Pairs of equal unit vectors, made block by block: the exact derivative of a trace or a diagonal."""

    size: int
    dtype: Any = field(static=True)

    @property
    def columns(self) -> int:
        """Of a block."""
        row = max(1, self.size * jnp.dtype(self.dtype).itemsize)
        return max(1, min(self.size, _BYTES // row))

    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-max(1, self.size) // self.columns)

    def block(self, index: int | Array) -> tuple[Array, Array]:
        """The same columns of the identity twice; zeros after its end."""
        rows = jnp.arange(self.size)[:, None]
        here = index * self.columns + jnp.arange(self.columns)[None, :]
        units = (rows == here).astype(self.dtype)
        return units, units


def exact_diagonal(operator: Operator, *, wanted: Array | None = None) -> Array:
    """The diagonal, of shape `(size,)`, from `size` products. No products are made, and zeros returned, where
    `wanted` is False; under `vmap` that saves the work only if it is False everywhere."""
    units = UnitVectors(operator.size, operator.dtype)
    blocks = units.blocks()

    def add(index: int | Array, out: Array) -> Array:
        left, right = units.block(index)
        here = jnp.sum(left * operator.matmul(right), axis=0)
        return lax.dynamic_update_slice_in_dim(out, here, index * units.columns, axis=0)

    out = jnp.zeros(blocks * units.columns, operator.dtype)
    if wanted is not None:
        out = lax.fori_loop(0, jnp.where(wanted, blocks, 0), add, out)
    else:
        out = add(0, out) if blocks == 1 else lax.fori_loop(0, blocks, add, out)
    return out[: operator.size]


def exact_trace(operator: Operator, wanted: Array | None = None) -> Outcome:
    """The trace without an error: variance 0 and infinitely many degrees of freedom. `wanted` is as for
    `exact_diagonal`."""
    diagonal = exact_diagonal(operator, wanted=wanted)
    real = operator.symmetric or not jnp.issubdtype(operator.dtype, jnp.complexfloating)
    value = jnp.sum(diagonal.real if real else diagonal)
    zero = jnp.zeros((), jnp.finfo(operator.dtype).dtype)
    return Outcome(
        value=value,
        variance=zero,
        degrees_of_freedom=jnp.full_like(zero, jnp.inf),
        matvecs=jnp.asarray(operator.size, jnp.int32),
        consistent=looks_semidefinite(diagonal)
        if operator.positive_semidefinite
        else jnp.asarray(True),
        sensitivity=UnitVectors(operator.size, operator.dtype),
    )


def looks_semidefinite(diagonal: Array) -> Array:
    """Whether no element of the diagonal is negative, but for rounding."""
    rounding = jnp.finfo(diagonal.dtype).eps * diagonal.size
    return jnp.all(diagonal.real >= -rounding * jnp.max(jnp.abs(diagonal), initial=0))


def completed_trace(
    operator: Operator, key: PRNGKeyArray, sketch: tuple[Array, Array, Array], wanted: Array
) -> Outcome:
    """The trace without an error, from a sketch and products with a basis of what is orthogonal to its probes.

    The probes V have the products A V, and a basis Q of their span with V = Q R has tr(Q^* A Q) = tr(R^-1 Q^* A V).

    Args:
        operator: any square operator.
        key: a random key.
        sketch: probes and products, of shape `(size, k)`, and how many there are; the other columns are zero. There
            must be clearly fewer than `size`.
        wanted: False for no work; see `exact_diagonal`.

    Returns:
        As `exact_trace`; `matvecs` counts the products of the sketch, too.
    """
    used = sketch[2]
    size, dtype = operator.size, operator.dtype
    real = operator.symmetric or not jnp.issubdtype(dtype, jnp.complexfloating)
    columns = UnitVectors(size, dtype).columns
    blocks = -(-size // columns)

    def complete(step: int | Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        del state
        # Without the barrier nothing here depends on the loop, and XLA would do the work in front of it, wanted or not.
        (probes, made, _), again, _ = lax.optimization_barrier((sketch, key, step))
        k = min(probes.shape[1], size)
        here = (jnp.arange(size) < used)[None, :]
        known = jnp.zeros((size, size), dtype).at[:, :k].set(probes[:, :k])
        basis, r = jnp.linalg.qr(
            jnp.where(here, known, jax.random.normal(again, (size, size), dtype))
        )
        # Probes that are linearly dependent, which only very few can be: all products are made anew.
        lengths = jnp.where(here[0], jnp.abs(jnp.diagonal(r)), jnp.inf)
        start = jnp.where(jnp.min(lengths) > jnp.finfo(dtype).eps ** 0.5 * size**0.5, used, 0)
        mask = (jnp.arange(k) < start)[None, :]
        seen = jnp.where(
            mask, jnp.matmul(basis[:, :k].conj().T, made[:, :k], precision=lax.Precision.HIGHEST), 0
        )
        inner = jnp.where(mask & mask.T, r[:k, :k], jnp.eye(k, dtype=dtype))
        total = jnp.trace(solve_triangular(inner, jnp.where(mask.T, seen, 0)))
        padded = jnp.pad(
            jnp.where(jnp.arange(size)[None, :] >= start, basis, 0), ((0, 0), (0, -size % columns))
        )

        def add(index: Array, total: Array) -> Array:
            block = lax.dynamic_slice_in_dim(padded, index * columns, columns, axis=1)
            return total + jnp.sum(block.conj() * operator.matmul(block))

        return lax.fori_loop(start // columns, blocks, add, total), (used - start).astype(jnp.int32)

    zero = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    # A loop of one step, or none: under `vmap`, `cond` would always do the work.
    value, wasted = lax.fori_loop(0, jnp.where(wanted, 1, 0), complete, zero)
    none = jnp.zeros((), jnp.finfo(dtype).dtype)
    return Outcome(
        value=value.real if real else value,
        variance=none,
        degrees_of_freedom=jnp.full_like(none, jnp.inf),
        matvecs=jnp.asarray(size, jnp.int32) + wasted,
        consistent=jnp.asarray(True),
        sensitivity=UnitVectors(size, dtype),
    )
