"""Derivatives of eigenpairs, and the linear equations behind them.

With E = dA, an eigenvalue moves by `x_i^* E x_i`, and its vector by

    dx_i = sum_j x_j (x_j^* E x_i) / (theta_i - theta_j) + y_i,     (theta_i - A) y_i = E x_i    outside of all x_j

for the other vectors x_j that were found. All eigenvalues that were not found lie on one side of theta_i, so outside
of the x_j the equations are definite, and conjugate gradients solve them.

Invariants. Undefined derivatives are NaN: those of the vectors of equal eigenvalues, and those whose equations cannot
be solved because an eigenvalue that was not found is almost equal to one that was. Eigenvalues always have derivatives.
The rule is in terms of pairs that have the same rule, so all orders are right.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.sparse.linalg import cg

from ..transforms import filter_custom_jvp, varying_axes
from ._lanczos_adjoint import moving, multiply, norms
from ._operator import Operator
from ._per_device import refuse_shared, varying_like
from ._vectors import power_below, times

# Roundings by which equal eigenvalues may differ, and to which the equations are solved.
_EQUAL, _SOLVED = 32, 32
# Steps of conjugate gradients.
_STEPS = 2000


@filter_custom_jvp
def differentiable(
    operator: Operator, values: Array, vectors: Array, scale: Array, is_above: Array
) -> tuple[Array, Array]:
    """Attaches to eigenvalues of shape `(k,)` and vectors of shape `(k, n)` their derivatives with respect to the
    operator. `scale` is its norm; `is_above` marks the values above all eigenvalues that are not given."""
    del operator, scale, is_above
    return values, vectors


@differentiable.def_jvp(symbolic_zeros=True)
def _differentiable_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    operator, _, _, scale, is_above = primals
    values, vectors = differentiable(*primals)
    parts, dots = moving(operator, tangents[0])
    if not jax.tree.leaves(dots):
        return (values, vectors), (jnp.zeros_like(values), jnp.zeros_like(vectors))
    _, changed = jax.jvp(
        lambda arrays: multiply(parts.whole(arrays), vectors), (parts.arrays,), (dots,)
    )
    inside = times(changed, vectors.conj().T)
    gaps = values[:, None] - values[None, :]
    apart = jnp.abs(gaps) > _EQUAL * jnp.finfo(values.dtype).eps * scale
    inverse = jnp.where(apart, 1 / jnp.where(apart, gaps, 1), jnp.nan)
    inverse = jnp.where(jnp.eye(len(values), dtype=bool), 0, inverse).astype(vectors.dtype)
    moved = times(inside * inverse, vectors)
    if len(values) < operator.size:
        right = changed - times(inside, vectors)
        moved = moved + _outside(operator, values, vectors, scale, is_above, right)
    return (values, vectors), (jnp.diagonal(inside).real, moved)


def _outside(
    operator: Operator, values: Array, vectors: Array, scale: Array, is_above: Array, right: Array
) -> Array:
    """The solutions y_i, of shape `(k, n)`."""
    # In `shard_map`, JAX's solver needs all that it reads to vary alike.
    refuse_shared(operator, varying_axes(right), "a derivative of vectors of `eigsh` or `svds`")
    scale, is_above = varying_like(scale, right), varying_like(is_above, right)
    sign = jnp.where(is_above, 1, -1).astype(vectors.dtype)[:, None]
    shift = values.astype(vectors.dtype)[:, None]

    def project(rows: Array) -> Array:
        return rows - times(times(rows, vectors.conj().T), vectors)

    def definite(rows: Array) -> Array:
        inner = project(rows)
        outer = project(sign * (shift * inner - multiply(operator, inner)))
        return outer + scale.astype(rows.dtype) * (rows - inner)

    def solve(matvec: Any, rows: Array) -> Array:
        eps = jnp.finfo(values.dtype).eps
        # JAX's solver looks at all rows together. Each must be accurate for its own length, and cotangents may differ
        # in length by orders of magnitude.
        unit = power_below(norms(rows))[:, None].astype(rows.dtype)
        found, _ = cg(matvec, rows / unit, tol=0.0, atol=_SOLVED * float(eps), maxiter=_STEPS)
        found = found * unit
        left = norms(rows - matvec(found))
        allowed = _SOLVED * eps * (4 * norms(rows) + scale * norms(found))
        # A solution that is much longer lies along an almost equal eigenvalue, and is meaningless.
        apart = scale * norms(found) * jnp.sqrt(eps) <= norms(rows)
        return jnp.where((apart & (left <= allowed))[:, None], found, jnp.nan)

    symmetric = not jnp.iscomplexobj(right)
    return sign * lax.custom_linear_solve(
        definite, right, solve, transpose_solve=solve, symmetric=symmetric
    )
