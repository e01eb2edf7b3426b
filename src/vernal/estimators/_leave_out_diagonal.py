r"""Leave-one-out estimates of diagonals, their mean, and its error.

The difficulty: XDiag and XNysDiag average k estimates d_i. Each takes the diagonal of a low-rank approximation made
without probe i, and adds that probe's estimate of the rest. None of the k approximations may be formed. And any two of
the d_i share k - 2 probes, so they are correlated, and their sample variance is too small for the variance of their
mean: by a factor of 2 where they deflate well.

The plan. Let P_i be the approximation of M without probe i, and P_ij without two. Both methods have vectors with

    P_i = P - s_i t_i^*    and    P_ij = P_j - c w u^*,

    w = s_i - g s_j,    u = t_i - g t_j,    g = s_j^* s_i,    c = 1 / (1 - |g|^2)

where the product s_j^* s_i is that of the method's own metric, in which all s_i have length one. So once the s_i and
t_i are known, everything is elementwise in vectors of length n, with k by k matrices of numbers.

The identity as a control variate. The same estimates of the identity, from the same probes and bases, have a known
expectation, 1. Their error is that of d_i for the part of the rest that is a multiple of the identity:

    d_i - b_i (e_i - 1)    with b_i an estimate, without probe i, of the mean eigenvalue of the rest.

As b_i does not depend on probe i, this stays unbiased. It is exact for multiples of the identity, and halves the error
where the spectrum has a flat tail.

The error. Write d_j^(-i) for d_j made without probe i too. Given all other probes, the expectation of d_i is the
truth, and so is that of d_j^(-i), which does not use probe i. Hence all cross terms vanish in

    cov(d_i, d_j) = E[ (d_i - d_i^(-j)) (d_j - d_j^(-i)) ]        for i != j,

and with the sample variance s^2, whose expectation is var - cov, var(mean) = E[s^2] / k + cov. The covariance is
measured on a few pairs for each probe. In a single element it would be smaller than its noise, so it is summed over
elements of similar size: those whose changes have squares that differ by less than a factor of 16, which is more than
chance makes between equal elements. In narrower groups, both covariance and variance would be small for the same
elements, those with the least of what the approximation misses, and these would be corrected least. Where few elements
are similar, the mean square of the changes stands in for the covariance, which it bounds (Cauchy and Schwarz).

Signs can agree by chance, so that all k estimates of an element are equal and wrong. The changes d_i - d_i^(-j) do not
vanish then. So half of each element's variance is the sum of their squares instead, scaled to have the same total over
elements of similar size.

Invariant: unused columns of probes are zero, and their estimates, quotients and pairs have no weight.

Glossary: "probe" - a random vector of modulus-one elements; "rest" - M minus its approximation.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

# The number of others that each probe is paired with to measure the covariance. More made no difference.
_PAIRS = 4
# Elements share a correction if their squares differ by fewer powers of two than the first number. The second is the
# number of groups; the last group has all smaller elements. Groups of fewer elements than the third take a bound of the
# covariance.
_OCTAVES, _GROUPS, _FEW = 4, 8, 8


class Parts(NamedTuple):
    """An approximation of a matrix M from all probes, and what leaving one out changes.

    Args:
        full: the diagonal of the approximation, of shape `(n,)`.
        left: the vectors s_i as columns, of shape `(n, k)`.
        right: the vectors t_i, of shape `(n, k)`.
        rest: the part of the products of M with the probes that the approximation misses, of shape `(n, k)`; None for
            zero.
        gram: inner products of the s_i in the method's metric, of shape `(k, k)`, with a diagonal of ones.
        seen: `right^* probes`, of shape `(k, k)`: the part of the products with probes that the approximation loses
            with s_i.
        along: `left^* probes`, of shape `(k, k)`.
    """

    full: Array
    left: Array
    right: Array
    rest: Array | None
    gram: Array
    seen: Array
    along: Array

    def of_each(self, probes: Array) -> Array:
        """The estimates d_i, each without its probe, as columns of shape `(n, k)`."""
        missed = self.left * jnp.diagonal(self.seen)[None, :]
        if self.rest is not None:
            missed = missed + self.rest
        return self.full[:, None] - self.left * self.right.conj() + probes.conj() * missed

    def changes(self, rolled: "Parts", probes: Array, i: Array, j: Array) -> Array:
        """How the estimates without j change when i is left out too, `d_j - d_j^(-i)`.

        Args:
            rolled: these parts with the columns `j` of `left` and `right` in place of `i`.
            probes: likewise, probes `j`.
            i: the indices of all columns, in order.
            j: the indices of other columns.
        """
        gram = self.gram[i, j]
        without = self.left - gram.conj()[None, :] * rolled.left
        other = self.right - gram.conj()[None, :] * rolled.right
        seen = self.seen[i, j] - gram * self.seen[j, j]
        lost = other.conj() - probes.conj() * seen[None, :]
        return _inverse_square(gram)[None, :] * without * lost

    def rolled(self, step: int | Array) -> "Parts":
        """These parts with `left` and `right` moved by `step` columns."""
        left = jnp.roll(self.left, -step, axis=1)
        right = left if self.right is self.left else jnp.roll(self.right, -step, axis=1)
        return self._replace(left=left, right=right)

    def quotients(self, probes: Array) -> Array:
        """The rest without probes i and j between probe j and itself, as an element (i, j)."""
        gram, alone = self.gram, jnp.diagonal(self.seen)
        own = jnp.diagonal(self.along)
        of_all = own.conj() * alone
        if self.rest is not None:
            of_all = of_all + jnp.sum(probes.conj() * self.rest, axis=0)
        along = self.along - gram * own[None, :]
        seen = self.seen - gram * alone[None, :]
        return of_all[None, :] + _inverse_square(gram) * along.conj() * seen


def averaged(
    parts: Parts, control: Parts, probes: Array, used: int | Array, *, real: bool
) -> tuple[Array, Array, Array]:
    """The mean of the leave-one-out estimates of a diagonal, and its variance.

    Args:
        parts: of the operator.
        control: of the identity, from the same probes.
        probes: of shape `(n, k)`, elements of modulus one, zero in unused columns.
        used: the number of used columns.
        real: whether the diagonal is known to be real.

    Returns:
        `(value, variance, degrees_of_freedom)`, the first two of shape `(n,)`. The variance is that of sampling,
        without rounding. The degrees of freedom, too, count correlated estimates as fewer independent ones.
    """
    columns = probes.shape[1]
    dtype = jnp.finfo(probes.dtype).dtype
    is_used = jnp.arange(columns) < used
    count = jnp.asarray(used, dtype)

    def only_real(x: Array) -> Array:
        return x.real if real else x

    others = is_used[:, None] & is_used[None, :] & ~jnp.eye(columns, dtype=bool)
    above = jnp.sum(jnp.where(others, parts.quotients(probes), 0), axis=1)
    below = jnp.sum(jnp.where(others, control.quotients(probes), 0), axis=1).real
    # The rest is unknown if every probe depends on the others, as a few signs in a small space may.
    known = below > float(jnp.finfo(dtype).eps) ** 0.5 * probes.shape[0] * count
    share = jnp.where(known, only_real(above), 0) / jnp.where(known, below, 1).astype(
        only_real(above).dtype
    )

    def controlled(of_operator: Array, of_identity: Array, share: Array) -> Array:
        return only_real(of_operator) - share[None, :] * only_real(of_identity)

    each = controlled(parts.of_each(probes), control.of_each(probes) - 1, share)
    value = jnp.sum(jnp.where(is_used[None, :], each, 0), axis=1) / count.astype(each.dtype)
    deviations = jnp.where(is_used[None, :], each - value[:, None], 0)
    variance = jnp.sum(jnp.abs(deviations) ** 2, axis=1) / (count * (count - 1))

    def add(step: int | Array, total: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        i = jnp.arange(columns)
        j = (i + step) % columns
        moved, moved_control = parts.rolled(step), control.rolled(step)
        others = jnp.roll(probes, -step, axis=1)
        of_j = controlled(
            parts.changes(moved, others, i, j),
            control.changes(moved_control, others, i, j),
            share[j],
        )
        of_i = controlled(
            moved.changes(parts, probes, j, i), moved_control.changes(control, probes, j, i), share
        )
        is_pair = is_used & is_used[j]
        both = jnp.where(is_pair[None, :], jnp.real(of_i * of_j.conj()), 0)
        squares = jnp.where(is_pair[None, :], jnp.abs(of_i) ** 2 + jnp.abs(of_j) ** 2, 0)
        found = jnp.sum(both, axis=1), jnp.sum(squares, axis=1), jnp.sum(is_pair.astype(dtype))
        return total[0] + found[0], total[1] + found[1], total[2] + found[2]

    zeros = jnp.zeros_like(variance), jnp.zeros_like(variance), jnp.zeros((), dtype)
    total, squares, pairs = lax.fori_loop(1, min(_PAIRS, columns // 2) + 1, add, zeros)
    group = _groups(squares)
    scaled = jnp.where(squares > 0, squares * _ratio(variance, squares, group), variance)
    variance = (variance + scaled) / 2
    is_alone = jnp.zeros(_GROUPS, int).at[group].add(1)[group] < _FEW
    covariance = jnp.where(is_alone, squares / 2, total) / pairs
    factor = 1 + jnp.clip(_ratio(covariance, variance, group), 0, count - 1)
    return value, variance * factor, jnp.maximum((count - 1) / jnp.mean(factor), 1)


def _groups(sizes: Array) -> Array:
    """The group of each element: of those with similar sizes."""
    largest = jnp.max(sizes, initial=0)
    octaves = jnp.log2(largest / jnp.where(sizes > 0, sizes, largest))
    # NaN may go to any group.
    return jnp.nan_to_num(jnp.clip(octaves // _OCTAVES, 0, _GROUPS - 1)).astype(int)


def _ratio(of: Array, to: Array, group: Array) -> Array:
    """The sum of one over that of the other, in the group of each element; 0 where the other is."""
    above, below = (jnp.zeros(_GROUPS, x.dtype).at[group].add(x) for x in (of, to))
    return (jnp.where(below > 0, above, 0) / jnp.where(below > 0, below, 1))[group]


def lost_alone(duals: Array, factor: Array) -> Array:
    """`seen` of a sketch `basis @ factor`: the part of product j along dual i, of shape `(k, k)` and diagonal.
    `duals` are `unit_duals(factor, mask)`, lower triangular; `factor` is upper triangular."""
    return jnp.diag(jnp.diagonal(duals).conj() * jnp.diagonal(factor))


def _inverse_square(gram: Array) -> Array:
    """One over the squared length of the part of s_i orthogonal to s_j; 0 if that part is zero."""
    left = 1 - jnp.abs(gram) ** 2
    is_left = left > 4 * jnp.finfo(left.dtype).eps
    return jnp.where(is_left, 1 / jnp.where(is_left, left, 1), 0).astype(gram.dtype)
