"""Which derivatives of a Krylov basis are more than rounding errors.

Difficulty. The derivative of a basis divides by the residuals of its steps. In the derivatives of f(A) v the quotients
cancel, but for their rounding errors: next to f'' the second derivative is off by some eps f' / residual. So it depends
on f how small a residual may be: an exponential function of a matrix of size 1e-14 is nearly linear, and nothing of its
second derivative is left.

Plan. Where the error would be more than 1e-3, the derivative of the basis is NaN. Its second derivative always is: its
error grows with the square, and no residual is large enough for every f.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from ..transforms import filter_custom_jvp, is_zero, materialise

_T = TypeVar("_T")
# The largest relative error of a derivative.
_ERROR = 1e-3


def guarded(basis: _T, matrix: Array, is_sound: Array, scale: Array | float = 0.0) -> _T:
    """A basis, and what is known of it, with a derivative that is right or NaN, and no second one.

    Args:
        basis: a tree of arrays of shape `(..., *)`.
        matrix: the operator in the basis, of shape `(..., m, m)`.
        is_sound: False where the derivative is wrong whatever the matrix is, `(...,)`.
        scale: how far eigenvalues must move for the slope of f to change by its own size, `(...,)`; zero if unknown.
    """
    largest = jnp.max(jnp.abs(matrix), axis=(-2, -1), initial=0)
    residuals = jnp.abs(jnp.diagonal(matrix, -1, axis1=-2, axis2=-1))
    least = jnp.finfo(matrix.dtype).eps / _ERROR * jnp.maximum(largest, scale)
    is_apart = jnp.min(residuals, axis=-1, initial=jnp.inf) > least
    return _guarded(basis, matrix, is_sound & is_apart)


@filter_custom_jvp
def _guarded(basis: Any, matrix: Array, is_sound: Array) -> Any:
    del matrix, is_sound
    return basis


@_guarded.def_jvp(symbolic_zeros=True)
def _guarded_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    basis, matrix, is_sound = primals
    factor = _one_or_nan(matrix, is_sound)

    def marked(x: Array, dot: Any) -> Any:
        if is_zero(dot):
            return dot
        shape = (*factor.shape, *(1 for _ in x.shape[factor.ndim :]))
        return materialise(dot) * factor.reshape(shape).astype(x.dtype)

    return _guarded(*primals), jax.tree.map(marked, basis, tangents[0])


@filter_custom_jvp
def _one_or_nan(matrix: Array, is_sound: Array) -> Array:
    return jnp.where(is_sound, 1, jnp.nan).astype(jnp.finfo(matrix.dtype).dtype)


@_one_or_nan.def_jvp(symbolic_zeros=True)
def _one_or_nan_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    value, dot = _one_or_nan(*primals), tangents[0]
    if is_zero(dot):
        return value, None
    return value, jnp.nan * jnp.sum(materialise(dot), axis=(-2, -1)).real
