"""Derivatives of f(A) v.

Difficulty. Differentiating the recurrence gives the derivative of what it computed: after an early end (A a multiple of
the identity, v an eigenvector) the part that leaves the exhausted space is lost.

Plan. Derivatives are approximated afresh, with E = dA and the Fréchet derivative L:

    d f(A) v = L(A, E) v + f(A) dv        <c, L(A, E) v> = tr(E L(A, v c^*))
    L(A, v c^*) ~ |v| |c| V X W^*         X = the upper right block of f([[H_v, e_1 e_1^T], [0, H_c^*]])

with a basis V of the Krylov space of A from v, and W of that of A^* from c (Kandolf, Koskela, Relton, Schweitzer). So
reverse mode makes one more basis, from the cotangent c, which also gives that of v: f(A)^* c. In forward mode,
`[d f(A) v; f(A) v] = f([[A, E], [0, A]]) [dv; v]` for a general operator, with twice the steps. The eigenvalues of this
operator say too little if f is only known on real numbers: for a symmetric operator, a basis W from each E V_k gives
L(A, E) v as the sum of `|v| |E V_k| W X e_1`, with e_1 e_k^T in the corner of the small matrix.

Invariants. Each of these is exact once its spaces are exhausted, whatever eigenvalues coincide. Forward and reverse are
transposes of each other up to the error of the steps. Higher derivatives differentiate these formulas.

P. Kandolf, A. Koskela, S. D. Relton, M. Schweitzer, "Computing low-rank approximations of the Fréchet derivative of a
matrix function using Krylov subspace methods", Numerical Linear Algebra with Applications 28 (2021),
doi:10.1002/nla.2401.

Glossary: as in `_krylov`; E the tangent of A; c the cotangent, with d loss = Re <c, d x>, the conjugate of JAX's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..primitives import local_linear_call
from ..transforms import filter_custom_jvp, is_zero, materialise
from ..trees import combine
from ._krylov import Krylov, krylov
from ._lanczos_adjoint import Moving, moving, multiply, norms, pulled
from ._operator import Composite, Operator
from ._small_functions import SmallFunction
from ._sound import guarded
from ._vectors import Structure, times


def product(function: SmallFunction, operator: Operator, start: Array, steps: int) -> Array:
    """f(A) v with its derivatives.

    Args:
        function: f.
        operator: A.
        start: v, of shape `(n,)`.
        steps: the number of products.
    """
    return attached(krylov(operator, start, steps)[0], operator, start, function, steps)


def attached(
    found: Krylov, operator: Operator, start: Array, function: SmallFunction, steps: int
) -> Array:
    """f(A) v from a basis that is known, with its derivatives. Other arguments are as for `product`."""
    return _attached(found, operator, start, function, steps)


@filter_custom_jvp
def _attached(
    found: Krylov, operator: Operator, start: Array, function: SmallFunction, steps: int
) -> Array:
    del operator, steps
    return _expanded(function.column(found.matrix), found, start)


def _expanded(coefficients: Array, found: Krylov, start: Array) -> Array:
    # A zero vector has no space, and f may not be defined where its small matrix stands in.
    coefficients = jnp.where(found.norm > 0, coefficients, 0).astype(start.dtype)
    return found.norm.astype(start.dtype) * times(coefficients, found.basis)


@_attached.def_jvp(symbolic_zeros=True)
def _attached_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    found, operator, start, function, steps = primals
    value = attached(*primals)
    parts, dots = moving(operator, tangents[1])
    of_f, f_dots = moving(function, tangents[3])
    start_dot = None if is_zero(tangents[2]) else materialise(tangents[2])
    total = None
    if jax.tree.leaves(f_dots):

        def at(given: Any, arrays: Any) -> Array:
            still, found, start = given
            return _expanded(combine(arrays, still, of_f.rest).column(found.matrix), found, start)

        # The scale of f is not used: f may be linear in a tangent, which its transpose does not know.
        known = guarded(found, found.matrix, jnp.asarray(True))
        total = _derivative_along(at, (of_f.still, known, start), of_f.arrays, f_dots)
    linear = jax.tree.map(materialise, (dots, start_dot))
    if not jax.tree.leaves(linear):
        return value, total
    if jax.tree.leaves(dots):
        scale = function.scale(lax.stop_gradient(found.matrix))
        found = guarded(found, found.matrix, jnp.asarray(True), scale)

    def forward(given: Any, linear: Any) -> Array:
        arrays, still, fs, f_still, found, start = given
        known = combine(fs, f_still, of_f.rest)
        return _push(known, Moving(arrays, still, parts.rest), found, start, linear, steps)

    def transposed(given: Any, cotangent: Any) -> Any:
        arrays, still, fs, f_still, found, _ = given
        known = combine(fs, f_still, of_f.rest)
        moved = Moving(arrays, still, parts.rest)
        c = materialise(cotangent).conj()
        return _pull(known, moved, found, c, steps, with_start=start_dot is not None)

    given = parts.arrays, parts.still, of_f.arrays, of_f.still, found, start
    change = local_linear_call(forward, transposed, given, linear)
    return value, change if total is None else total + change


def _derivative_along(fn: Any, given: Any, arrays: Any, dots: Any) -> Array:
    """The derivative of `fn(given, arrays)` along tangents. JAX cannot transpose a function with `lax.cond`, such as
    the exponential, that was differentiated before it was mapped; so the transpose is made afresh."""

    def forward(known: Any, dots: Any) -> Array:
        given, arrays = known
        return jax.jvp(lambda arrays: fn(given, arrays), (arrays,), (dots,))[1]

    def transposed(known: Any, cotangent: Any) -> Any:
        given, arrays = known
        return jax.vjp(lambda arrays: fn(given, arrays), arrays)[1](materialise(cotangent))[0]

    return local_linear_call(forward, transposed, (given, arrays), jax.tree.map(materialise, dots))


def _pull(
    function: SmallFunction, parts: Moving, found: Krylov, c: Array, steps: int, *, with_start: bool
) -> Any:
    """The cotangents of the operator's arrays and of the vector, in JAX's convention."""
    operator = parts.whole(parts.arrays)
    other = krylov(operator.H, c, steps)[0]
    of_start = None
    if with_start:
        of_start = attached(other, operator.H, c, function.adjoint(), steps).conj()
    corner = jnp.zeros((steps, steps), found.matrix.dtype).at[0, 0].set(1)
    block = function.block(found.matrix, corner, other.matrix.conj().T).astype(c.dtype)
    weights = block * (found.norm * other.norm).astype(c.dtype)
    nothing = (found.norm == 0) | (other.norm == 0)
    rows = times(jnp.where(nothing, 0, weights).conj(), other.basis)
    if not jax.tree.leaves(parts.arrays):
        return parts.arrays, of_start
    return pulled(parts, rows, found.basis), of_start


def _push(
    function: SmallFunction, parts: Moving, found: Krylov, start: Array, linear: Any, steps: int
) -> Array:
    """The tangent of f(A) v."""
    dots, start_dot = linear
    operator = parts.whole(parts.arrays)
    if not jax.tree.leaves(dots):
        return product(function, operator, start_dot, steps)
    if not operator.symmetric:
        return _pushed_together(function, parts, start, linear, steps)

    def changed(arrays: Any) -> Array:
        return multiply(parts.whole(arrays), found.basis)

    def of_row(at: Any) -> Array:
        k, row = at
        other = krylov(operator, row, steps)[0]
        corner = jnp.zeros_like(found.matrix).at[0, k].set(1)
        along = function.block(other.matrix, corner, found.matrix)[:, 0]
        return _expanded(along, other, start)

    rows = jax.jvp(changed, (parts.arrays,), (dots,))[1]
    terms = lax.map(of_row, (jnp.arange(steps), rows))
    change = found.norm.astype(start.dtype) * jnp.sum(terms, axis=0)
    return change if start_dot is None else change + product(function, operator, start_dot, steps)


def _pushed_together(
    function: SmallFunction, parts: Moving, start: Array, linear: Any, steps: int
) -> Array:
    dots, start_dot = linear
    start_dot = jnp.zeros_like(start) if start_dot is None else start_dot
    unit = jnp.ones((), jnp.finfo(start.dtype).dtype)
    whole = _Augmented(False, False, parts, dots, unit)
    n = len(start)
    # The two halves alike in size, or rounding errors of the larger one would cover the other.
    images = whole.matmul(jnp.concatenate([jnp.zeros_like(start), start])[:, None])[:, 0]
    sizes = norms(jnp.stack([start_dot, start, images[:n], images[n:]]))
    by_operator = sizes[2] * jnp.where(
        sizes[3] > 0, sizes[1] / jnp.where(sizes[3] > 0, sizes[3], 1), 1
    )
    scale = jnp.maximum(sizes[0], by_operator) / jnp.where(sizes[1] > 0, sizes[1], 1)
    scale = lax.stop_gradient(jnp.where((scale > 0) & jnp.isfinite(scale), scale, 1))
    whole = _Augmented(False, False, parts, dots, scale)
    both = jnp.concatenate([start_dot / scale.astype(start.dtype), start])
    return scale.astype(start.dtype) * product(function, whole, both, 2 * steps)[:n]


class _Augmented(Composite):
    """`[[A, E / scale], [0, A]]`."""

    symmetric: bool
    positive_semidefinite: bool
    parts: Moving
    dots: Any
    scale: Array

    def in_structure(self) -> Structure:
        operator = self.parts.whole(self.parts.arrays)
        return jax.ShapeDtypeStruct((2 * operator.size,), operator.dtype)

    def matmul(self, block: Array) -> Array:
        above, below = jnp.split(block, 2)
        return self._joined(above, below, adjoint=False)

    def adjoint_matmul(self, block: Array) -> Array:
        above, below = jnp.split(block, 2)
        return jnp.roll(self._joined(below, above, adjoint=True), len(above), axis=0)

    def _joined(self, kept: Array, mixed: Array, *, adjoint: bool) -> Array:
        def multiplied(arrays: Any) -> Array:
            operator = self.parts.whole(arrays)
            return operator.adjoint_matmul(mixed) if adjoint else operator.matmul(mixed)

        operator = self.parts.whole(self.parts.arrays)
        first = operator.adjoint_matmul(kept) if adjoint else operator.matmul(kept)
        second, change = jax.jvp(multiplied, (self.parts.arrays,), (self.dots,))
        return jnp.concatenate([first + change / self.scale.astype(change.dtype), second])
