"""Orthonormal bases of sketches.

The difficulty: Householder QR of a tall block is exact to rounding for any block, but slow: it takes three to five
times as long as the products that made the block. Cholesky QR (factor the Gram matrix, divide by the factor) is as
fast as matrix products, but the Gram matrix squares the condition number, and sketches of operators with decaying
eigenvalues are as ill-conditioned as floating point allows.

The plan: repeat Cholesky QR. Where the Gram matrix is not safely positive definite, a small multiple of the identity
is added to it; the division then makes the block not orthonormal, but much better conditioned (Fukaya et al. 2020).
Two passes are enough for a well-conditioned block (Yamamoto et al. 2015), three or four for any other.

The invariant: before and after every pass `block == q @ r` to rounding, with a triangular `r`. The passes end after
the first one whose input `q` had a Gram matrix near the identity; that pass is then exact to rounding. So the check
of orthogonality costs nothing. If that does not happen soon (a column that is exactly zero), Householder QR of the
block is used.

- Y. Yamamoto, Y. Nakatsukasa, Y. Yanagisawa, T. Fukaya, "Roundoff error analysis of the CholeskyQR2 algorithm",
  Electronic Transactions on Numerical Analysis 44 (2015).
- T. Fukaya, R. Kannan, Y. Nakatsukasa, Y. Yamamoto, Y. Yanagisawa, "Shifted Cholesky QR for computing the QR
  factorization of ill-conditioned matrices", SIAM Journal on Scientific Computing 42 (2020), doi:10.1137/18M1218212.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from ..linalg import power_of_two, settled, times

# Blocks of random sketches need at most four.
_PASSES = 6
# A shift is raised at most this many times, by this factor: 16**4 roundings are still few.
_RAISES, _FACTOR = 4, 16


def orthonormal(block: Array, mask: Array | None = None) -> tuple[Array, Array]:
    """An orthonormal basis of the columns of a block, whatever its condition and scale.

    Args:
        block: of shape `(n, k)` with `k <= n`, real or complex. Unused columns are zero.
        mask: which columns are used, of shape `(k,)`; the first ones. None for all of them.

    Returns:
        `(q, r)` with `block == q @ r` to rounding: `q` of shape `(n, k)` with orthonormal columns, and an upper
        triangular `r` of shape `(k, k)`. Where a column depends on those before it, `q` has an arbitrary vector
        orthogonal to the others, and `r` a diagonal element of the size of rounding, or zero. Unused columns are zero
        in `q`, and those of the identity in `r`.
    """
    scale = power_of_two(block)
    x = block / scale.astype(block.dtype)
    q, r, near = _pass(x, mask)

    def unfinished(state: tuple[Array, Array, Array, Array]) -> Array:
        _, _, near, passes = state
        return ~near & (passes < _PASSES)

    def again(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        q, r, _, passes = state
        q, factor, near = _pass(q, mask)
        return q, times(factor, r), near, passes + 1

    state = settled(again, (q, r, near, jnp.asarray(1, jnp.int32)))
    q, r, near, _ = lax.while_loop(unfinished, again, state)
    q, r = lax.cond(near, lambda: (q, r), lambda: _householder(x))
    # The Gram matrix adds up as many numbers as a column has. Where one of them is much larger than the others, these
    # are rounded away, each time in the same direction; a sum over each column alone loses less.
    lengths = jnp.sqrt(jnp.sum(jnp.abs(q) ** 2, axis=0))
    lengths = jnp.where(lengths > 0, lengths, 1).astype(q.dtype)
    q, r = q / lengths[None, :], r * lengths[:, None] * scale.astype(r.dtype)
    if mask is None:
        return q, r
    both = mask[:, None] & mask[None, :]
    return jnp.where(mask[None, :], q, 0), jnp.where(both, r, jnp.eye(r.shape[0], dtype=r.dtype))


def _pass(x: Array, mask: Array | None) -> tuple[Array, Array, Array]:
    """`(q, r, near)`: one division by a Cholesky factor, and whether the result is orthonormal."""
    gram = filled(times(x.conj().T, x), mask)
    eye = jnp.eye(gram.shape[0], dtype=gram.dtype)
    near = jnp.sum(jnp.abs(gram - eye) ** 2) < 0.25
    # Twice the rounding error of the Gram matrix, at most.
    shift = 2 * jnp.finfo(gram.dtype).eps * jnp.trace(gram).real
    lower = jnp.linalg.cholesky(gram)
    # The comparison is false for NaN.
    safe = jnp.min(jnp.abs(jnp.diagonal(lower)) ** 2) > shift
    lower = lax.cond(
        safe, lambda: lower, lambda: jnp.linalg.cholesky(gram + shift.astype(gram.dtype) * eye)
    )
    q = solve_triangular(lower, x.conj().T, lower=True).conj().T
    return q, lower.conj().T, near


def shifted_cholesky(
    core: Array, gram: Array, shift: Array, mask: Array | None, raised: Array | None = None
) -> tuple[Array, Array, Array]:
    """A Cholesky factor of a matrix that is positive definite up to rounding.

    Args:
        core: Hermitian, of shape `(k, k)`.
        gram: positive definite, of the same shape.
        shift: the multiple of `gram` to add; of the size of rounding, real. It is raised until there is a factor.
        mask: which rows and columns are used; None for all of them.
        raised: the matrix to add instead of `gram`, once that was not enough.

    Returns:
        `(lower, shift, positive)`: the factor of `core + shift * gram`, the final shift, and whether there is such a
        factor. Without one `lower` is the identity.
    """

    def factor(shift: Array, gram: Array) -> Array:
        return jnp.linalg.cholesky(filled(core + shift.astype(core.dtype) * gram, mask))

    def fails(state: tuple[Array, Array, Array]) -> Array:
        lower, _, raises = state
        return ~jnp.all(jnp.isfinite(lower)) & (raises < _RAISES)

    def again(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        _, shift, raises = state
        more = _FACTOR * shift
        return factor(more, gram if raised is None else raised), more, raises + 1

    first = factor(shift, gram), shift, jnp.zeros((), jnp.int32)
    lower, shift, _ = lax.while_loop(fails, again, settled(again, first))
    positive = jnp.all(jnp.isfinite(lower))
    return jnp.where(positive, lower, jnp.eye(core.shape[0], dtype=core.dtype)), shift, positive


def _householder(x: Array) -> tuple[Array, Array]:
    q, r = jnp.linalg.qr(x)
    return q, r


def filled(gram: Array, mask: Array | None) -> Array:
    """A Gram matrix with the rows and columns of the identity in place of unused columns."""
    return gram if mask is None else gram + jnp.diag((~mask).astype(gram.dtype))
