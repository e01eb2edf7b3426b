"""Functions of symmetric matrices, with all their derivatives.

Difficulty. A derivative of f(A) by way of the eigenvectors of A divides by the gaps between eigenvalues. The quotients
cancel, but for their rounding errors, which grow with each order of the derivative and with each close pair.

Plan. No eigenvector is differentiated. With A_i = S_i diag(theta_i) S_i^*, all derivatives of f(A) are sums of

    F(A_0, M_1, A_1, ..., M_k, A_k) = S_0 Z S_k^*
    Z_aj = sum over b, c, ... of f[theta_0a, theta_1b, ...] (S_0^* M_1 S_1)_ab (S_1^* M_2 S_2)_bc ...

with divided differences f[...] (Daleckii and Krein for k = 1). F is the upper right block of f of the block matrix with
A_i on the diagonal and M_i next to it. It is linear in f and in each M, so their derivatives are F again. The
derivative by A_i along E is F with `A_i, E, A_i` in place of A_i. The transpose by M_i is F from A_i on, around to
A_{i-1}, with the transposed cotangent between A_k and A_0.

N. J. Higham and S. D. Relton, "Higher order Fréchet derivatives of matrix functions and the level-2 condition number",
SIAM Journal on Matrix Analysis and Applications 35 (2014), doi:10.1137/130945259.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..modules import Module
from ..primitives import local_linear_call
from ..transforms import filter_custom_jvp, is_zero, materialise
from ..trees import combine, is_array, partition
from ._divided import divided_differences
from ._elementwise import Elementwise, along
from ._vectors import times


class Hermitian(Module):
    """Symmetric or Hermitian matrices, with eigenvalues and eigenvectors that have no derivatives.

    Args:
        matrix: of shape `(..., m, m)`.
        nodes: the eigenvalues, `(..., m)`.
        vectors: the eigenvectors, as columns, `(..., m, m)`.
    """

    matrix: Array
    nodes: Array
    vectors: Array

    @staticmethod
    def of(matrix: Array) -> "Hermitian":
        """Finds the eigenvalues; the lower triangle counts."""
        nodes, vectors = jnp.linalg.eigh(lax.stop_gradient(matrix), symmetrize_input=False)
        return Hermitian(matrix, nodes, vectors)


def function_of(f: Elementwise, a: Hermitian) -> Array:
    """f(A), of shape `(..., m, m)`, differentiable by A and by what f closes over.

    Args:
        f: acts element by element, a module.
        a: A.
    """
    return _blocks(f, (a,), ())


def column_of(f: Elementwise, a: Hermitian) -> Array:
    """The first column of f(A), `(..., m)`, likewise. An eigenvalue without a share counts for nothing, whatever f
    is there."""
    return _column(f, a)


def difference(f: Elementwise, left: Hermitian, middle: Array, right: Hermitian) -> Array:
    """F(A, M, B): the upper right block of f of `[[A, M], [0, B]]`; linear in M, and differentiable by all.

    Args:
        f: acts element by element, a module.
        left: A.
        middle: M, `(..., m, l)`.
        right: B.
    """
    return _linear(f, (left, right), (None,), 0, middle)


@filter_custom_jvp
def _column(f: Elementwise, a: Hermitian) -> Array:
    weights = a.vectors[..., 0, :].conj()
    values = jnp.where(weights == 0, 0, f(a.nodes))
    dtype = _common(values, weights)
    return times(a.vectors.astype(dtype), (values * weights.astype(dtype))[..., None])[..., 0]


@_column.def_jvp(symbolic_zeros=True)
def _column_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    f, a = primals
    f_dot, dot = along(f, tangents[0]), tangents[1].matrix
    change = None if f_dot is None else _column(f_dot, a)
    if not is_zero(dot):
        change = _add(change, _linear(f, (a, a), (None,), 0, materialise(dot))[..., 0])
    return _column(f, a), change


@filter_custom_jvp
def _blocks(f: Elementwise, matrices: tuple[Hermitian, ...], middles: tuple[Array, ...]) -> Array:
    """F."""
    count, differences = len(matrices), divided_differences(f, [a.nodes for a in matrices])
    dtype = _common(differences, *middles, *(a.vectors for a in matrices))
    differences = differences.astype(dtype)
    first, last = (a.vectors.astype(dtype) for a in (matrices[0], matrices[-1]))
    if not middles:
        return times(first * differences[..., None, :], last.conj().mT)
    factors = [
        times(times(a.vectors.conj().mT.astype(dtype), m.astype(dtype)), b.vectors.astype(dtype))
        for a, m, b in zip(matrices[:-1], middles, matrices[1:], strict=True)
    ]
    terms = functools.reduce(jnp.multiply, (_spread(x, at, count) for at, x in enumerate(factors)))
    terms = jnp.sum(terms * differences, axis=tuple(range(1 - count, -1)))
    return times(times(first, terms), last.conj().mT)


@_blocks.def_jvp(symbolic_zeros=True)
def _blocks_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    f, matrices, middles = primals
    f_dot = along(f, tangents[0])
    change = None if f_dot is None else _blocks(f_dot, matrices, middles)
    for at, dot in enumerate(tangents[2]):
        if not is_zero(dot):
            change = _add(change, _linear(f, matrices, middles, at, materialise(dot)))
    for at, a in enumerate(tangents[1]):
        if not is_zero(a.matrix):
            longer = (*matrices[: at + 1], *matrices[at:])
            others = (*middles[:at], None, *middles[at:])
            change = _add(change, _linear(f, longer, others, at, materialise(a.matrix)))
    return _blocks(*primals), change


def _linear(f: Any, matrices: Any, middles: Any, at: int, middle: Array) -> Array:
    """F, as a linear function of the middle in one place."""
    arrays, rest = partition(f, is_array)

    def forward(given: Any, middle: Array) -> Array:
        arrays, matrices, middles = given
        placed = (*middles[:at], middle, *middles[at + 1 :])
        return _blocks(combine(arrays, rest), matrices, placed)

    def transposed(given: Any, cotangent: Any) -> Array:
        arrays, matrices, middles = given
        cotangent = materialise(cotangent).mT
        around = (*matrices[at + 1 :], *matrices[: at + 1])
        between = (*middles[at + 1 :], cotangent, *middles[:at])
        out = _blocks(combine(arrays, rest), around, between).mT
        return (
            out.astype(middle.dtype) if jnp.iscomplexobj(middle) else out.real.astype(middle.dtype)
        )

    return local_linear_call(forward, transposed, (arrays, matrices, middles), middle)


def _spread(factor: Array, at: int, count: int) -> Array:
    """A matrix with its dimensions in the places `at` and `at + 1` of `count`."""
    places = range(count)
    shape = [factor.shape[i - at - 2] if i in (at, at + 1) else 1 for i in places]
    return factor.reshape(*factor.shape[:-2], *shape)


def _common(*arrays: Array) -> Any:
    """The dtype of a product, real or complex."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*arrays)


def _add(one: Array | None, other: Array) -> Array:
    return other if one is None else one + other
