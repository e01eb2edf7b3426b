"""Stochastic Lanczos quadrature: the trace of a function of a symmetric operator.

Difficulty. tr f(A) is the mean of w^* f(A) w over random w. Each of these is an integral of f over the spectrum, and m
products give its Gauss rule. There are two errors, that of m nodes and that of the probes, and the reported error must
cover both.

Plan. The rule of m nodes comes from the Lanczos recurrence (the eigenvalues of T are the nodes, the squares of the
first elements of its eigenvectors the weights). A second rule from the same T estimates its error (`_rules.py`). The
probes' error comes from the slopes of the forms w^* f(A) w (`_samples.py`), because f(A) w is known as well. The
derivative is that of the trace, not of the computation: d tr f(A) = tr(f'(A) dA), estimated by pairs (f'(A) w, w)
whose first vector comes from the same basis. Probes come in blocks, sized by the memory of their bases. The pairs of a
single block take less memory than its bases did, and are kept. Those of several blocks are not: the derivative draws
the probes and makes the bases again, block by block, so memory does not grow with the number of probes.

Invariants. Nodes of steps that were not made (after a breakdown) have no weight and lie where f is evaluated anyway.
Multiplying A by a power of two multiplies the nodes by it and changes nothing else.

Glossary: b probes at a time; m steps; n size; theta nodes, S eigenvectors of T.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import (
    Elementwise,
    Nodes,
    Operator,
    carried,
    combined,
    decompose,
    derivative,
    divided_differences,
    fori_loop,
)
from ..modules import Module, field
from ..show import value_error
from ..trees import is_inexact_array
from ._gradient_pairs import GradientPairs, StoredPairs, mixed, operator_first
from ._method import Budget, Outcome, TraceMethod, default_probes
from ._probes import Probes
from ._rules import averaged, eigen, gauss, lower_end, radau
from ._samples import Samples, Scatter, samples_of, slopes_of

# Bytes of basis vectors in memory at once.
_BYTES = 2**27
# Defaults: few probes, for many steps, which cost little where the condition number is small.
_PROBES, _LEAST_STEPS, _FEWEST, _MOST = 5, 3, 10, 60


class LanczosQuadrature(Module):
    """Stochastic Lanczos quadrature: some random vectors, and some Lanczos steps from each.

    `matvecs` products are spent on `matvecs // steps` probes with `steps` products each. The error of the probes falls
    like the inverse square root of their number, that of the steps exponentially: like `exp(-4 steps / sqrt(c))`, for a
    logarithm and a condition number `c`. By default there are five probes, with at least 10 and at most 60 steps each,
    and at least four probes if that leaves three steps. The standard error of the result includes both errors.

    S. Ubaru, J. Chen, Y. Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM Journal on
    Matrix Analysis and Applications 38 (2017), doi:10.1137/16M1104974.

    Args:
        steps: the number of products to make from each probe, at least 2. None chooses, as above.
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Raises:
        ValueError: if `steps` is less than 2.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import estimators, linalg
        >>> matrix = jnp.diag(jnp.linspace(1.0, 3.0, 500)) + 0.001
        >>> operator = linalg.MatrixOperator(matrix, positive_semidefinite=True)
        >>> method = estimators.LanczosQuadrature(steps=8)
        >>> estimate = estimators.logdet(operator, jax.random.key(0), matvecs=160, method=method)
        >>> bool(abs(estimate.value - jnp.linalg.slogdet(matrix)[1]) < 4 * estimate.standard_error)
        True
    """

    steps: int | None = None
    probes: Probes | None = None

    def __check_init__(self):
        if self.steps is not None and self.steps < 2:
            raise value_error(
                "the quadrature needs at least two steps to estimate its error",
                where="LanczosQuadrature(steps)",
                expected="steps >= 2, or None",
                got=f"steps={self.steps}",
            )

    @property
    def minimum(self) -> int:
        """The fewest products: those of two probes, which an error estimate needs."""
        return 2 * (self.steps or _LEAST_STEPS)

    def split(self, matvecs: int) -> tuple[int, int]:
        """Splits a number of products into probes and steps for each.

        Args:
            matvecs: a Python int of at least `minimum`.

        Returns:
            `(probes, steps)`; `probes * steps` is at most `matvecs`.
        """
        steps = self.steps
        if steps is None:
            steps = min(max(_FEWEST, matvecs // _PROBES), _MOST)
            steps = min(steps, max(_LEAST_STEPS, matvecs // 4))
        return matvecs // steps, steps


class Starts(Module):
    """The probes of a quadrature, drawn when they are needed, in blocks whose bases fit into memory.

    Args:
        key: a random key.
        probes: the distribution.
        size: of a probe.
        dtype: of a probe.
        count: the number of probes.
        columns: the number of probes in a block; the last block is padded with zero vectors.
    """

    key: PRNGKeyArray
    probes: Probes
    size: int
    dtype: Any = field(static=True)
    count: int
    columns: int

    @staticmethod
    def of(
        operator: Operator, key: PRNGKeyArray, probes: Probes | None, count: int, steps: int
    ) -> "Starts":
        """`count` probes, for `steps` steps from each."""
        basis = operator.size * steps * jnp.dtype(operator.dtype).itemsize
        blocks = -(-count // max(1, min(count, _BYTES // max(basis, 1))))
        probes = probes or default_probes(operator)
        return Starts(key, probes, operator.size, operator.dtype, count, -(-count // blocks))

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return -(-self.count // self.columns)

    def used(self, index: int | Array) -> Array:
        """Which vectors of a block are probes, of shape `(columns,)`."""
        return index * self.columns + jnp.arange(self.columns) < self.count

    def block(self, index: int | Array) -> Array:
        """The probes of a block, of shape `(columns, size)`."""
        key = self.key if self.blocks == 1 else jax.random.fold_in(self.key, index)
        vectors = self.probes.draw(key, self.size, self.columns, self.dtype).T
        return jnp.where(self.used(index)[:, None], vectors, 0)

    def over(self, fn: Callable[[Array], Any]) -> Any:
        """Applies `fn`, which returns arrays of shape `(columns, ...)`, block by block; returns the rows of probes."""
        if self.blocks == 1:
            return fn(self.block(0))
        found = lax.map(lambda index: fn(self.block(index)), jnp.arange(self.blocks))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: self.count], found)


def consistent(asymmetry: Array, nodes: Array, size: int, floor: float | None) -> Array:
    """Whether an operator appears to satisfy its tags.

    Args:
        asymmetry: the largest element that should not be there.
        nodes: eigenvalues, or Ritz values, in the last dimension.
        size: of the operator.
        floor: as for `limited`.
    """
    scale = jnp.max(jnp.abs(nodes), axis=-1)
    eps = jnp.finfo(nodes.dtype).eps
    # The square root, because an operator that computes in a lower precision does not count as asymmetric.
    symmetric = asymmetry <= jnp.sqrt(eps) * scale
    if floor is None:
        return symmetric
    least = jnp.min(nodes, axis=-1)
    if floor:
        return symmetric & (least >= floor * scale) & (least > 0)
    return symmetric & (least >= -16 * math.sqrt(size) * eps * scale)


def is_above(least: Array, nodes: Array, size: int) -> Array:
    """Whether no eigenvalue is below `least`, up to rounding. Other arguments are as for `consistent`."""
    scale = jnp.max(jnp.abs(nodes), axis=-1)
    rounding = 16 * math.sqrt(size) * jnp.finfo(nodes.dtype).eps * scale
    return jnp.min(nodes, axis=-1) >= least - rounding


def limited(nodes: Array, floor: Any) -> Array:
    """Nodes clipped from below at `floor` times the largest modulus; None does not clip."""
    if floor is None:
        return nodes
    scale = jnp.max(jnp.abs(nodes), axis=-1, keepdims=True)
    lowest = jnp.maximum(scale * floor, jnp.finfo(nodes.dtype).tiny if floor else 0)
    return jnp.maximum(nodes, lowest)


class Sums(Module):
    """The contribution of a block of probes.

    Args:
        values: w^* f(A) w, of shape `(b,)`.
        gaps: their estimated distance from the limit of infinitely many steps, `(b,)`.
        rounding: how far rounding errors may move them, `(b,)`.
        slopes: f(A) w, which gives the variance, `(b, n)`.
        products: f'(A) w, `(b, n)`, differentiable with respect to the operator.
        consistent: False if a product contradicted the operator's tags, `(b,)`.
    """

    values: Array
    gaps: Array
    rounding: Array
    slopes: Array
    products: Array
    consistent: Array


def sums(
    operator: Operator, starts: Array, steps: int, f: Elementwise, floor: Any, least: Any = None
) -> Sums:
    """The quadrature of f from each probe of a block. `least` is a lower bound of the eigenvalues; None if unknown."""
    found = decompose(operator, starts, steps)
    still, matrix = jax.tree.map(lax.stop_gradient, found), gauss(found)
    raw, vectors = eigen(lax.stop_gradient(matrix))
    agrees = consistent(still.asymmetry, raw, operator.size, floor)
    nodes, g = limited(raw, floor), derivative(f)

    def integral(f: Elementwise, nodes: Array, vectors: Array) -> Array:
        return still.norm**2 * jnp.sum(vectors[:, 0] ** 2 * f(nodes), axis=-1)

    values = integral(f, nodes, vectors)
    if least is None:
        gaps = values - integral(f, *eigen(averaged(still)))
    else:
        agrees &= is_above(least, raw, operator.size)
        ends = lower_end(nodes, lax.stop_gradient(least), operator.eps)
        more_nodes, more_vectors = eigen(radau(ends, still))
        # With negative eigenvalues there is no such rule, and its nodes may be anywhere.
        exists = is_above(jnp.zeros_like(ends), raw, operator.size)
        more_nodes = jnp.where(exists[:, None], more_nodes, ends[:, None])
        # The first node is known; the computed one would carry rounding errors of the size of the largest.
        more_nodes = jnp.maximum(more_nodes.at[:, 0].set(ends), ends[:, None])
        gaps = (values - integral(f, more_nodes, more_vectors)) / 2
        values = values - gaps

    def applied(f: Elementwise) -> Array:
        """f(A) w."""
        at = still.norm[:, None] * f(nodes) * vectors[:, 0]
        along = jnp.einsum("bki,bi->bk", vectors, at, precision=lax.Precision.HIGHEST)
        return combined(along.astype(starts.dtype), still.basis)

    products = applied(g)
    if closes_over_numbers(f):
        values = values + jnp.sum(mixed(products.T, operator, starts.T).real, axis=0)
        products = operator_first(products, operator)
    moving_nodes, moving_vectors = eigen(matrix)
    small = Nodes(limited(moving_nodes, floor), moving_vectors)
    return Sums(
        values,
        gaps,
        integral(lambda x: rounding_of(f, x, floor, operator.eps), nodes, vectors),
        applied(f),
        carried(products, operator, found, small, divided_differences(g, small.nodes)),
        agrees,
    )


def closes_over_numbers(f: Elementwise) -> bool:
    """Whether the function may have derivatives by what it closes over."""
    return any(map(is_inexact_array, jax.tree.leaves(f)))


def rounding_of(f: Elementwise, nodes: Array, floor: float | None, eps: float) -> Array:
    """How far errors of the nodes, of eps times the largest, move the values of a function."""
    step = eps * jnp.max(jnp.abs(nodes), axis=-1, keepdims=True)
    below, here = nodes - step, f(nodes)
    if floor is not None:
        below = jnp.maximum(below, nodes / 2)
    return jnp.maximum(jnp.abs(f(nodes + step) - here), jnp.abs(f(below) - here))


class FunctionTrace(TraceMethod):
    """The trace of a function as a trace method, for an operator with its derivatives.

    Args:
        f: the function, checked.
        quadrature: the user's choice.
        floor: eigenvalues below `floor` times the largest are replaced by that; None replaces none.
        least: a lower bound of the eigenvalues; None if unknown, so that they may be negative.
        is_logarithm: whether f is the logarithm, so that a Cholesky factorisation gives the exact answer.
    """

    f: Elementwise
    quadrature: LanczosQuadrature
    floor: float | None
    least: Any
    is_logarithm: bool = False

    minimum = 6

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace of the function; see `TraceMethod`."""
        count, steps = self.quadrature.split(budget.most)
        starts = Starts.of(operator, key, self.quadrature.probes, count, steps)

        def of_block(index: int | Array) -> tuple[_Tally, Array]:
            vectors = starts.block(index)
            found = sums(operator, vectors, steps, self.f, self.floor, self.least)
            return _Tally.of(starts, vectors, found, starts.used(index)), found.products

        tally, products = of_block(0)
        if starts.blocks == 1:
            left = products.T / jnp.asarray(count, products.dtype)
            pairs = StoredPairs.of(operator, left, starts.block(0).T)
        else:
            pairs = MadeAgain(starts, steps, self.f, self.floor)
            tally = fori_loop(
                1, starts.blocks, lambda i, known: known.joined(of_block(i)[0]), tally
            )
        value = tally.samples.mean
        return Outcome(
            value=value,
            variance=tally.variance(),
            degrees_of_freedom=tally.scatter.freedom(tally.samples.number),
            matvecs=jnp.asarray(count * steps, jnp.int32),
            consistent=tally.consistent,
            gradient_pairs=pairs,
        )


class _Tally(Module):
    """Sums over all probes, and whether they agree with the tags."""

    samples: Samples
    scatter: Scatter
    gaps: Array
    rounding: Array
    consistent: Array

    @staticmethod
    def of(starts: Starts, vectors: Array, found: Sums, used: Array) -> "_Tally":
        slopes = slopes_of(starts.probes, vectors.T, found.slopes.T)
        return _Tally(
            samples_of(found.values, slopes, jnp.sum(used), jnp.asarray(True)),
            Scatter.of(slopes, used),
            jnp.sum(jnp.where(used, found.gaps, 0)),
            jnp.sum(jnp.where(used, found.rounding, 0)),
            jnp.all(found.consistent | ~used),
        )

    def joined(self, other: "_Tally") -> "_Tally":
        return _Tally(
            self.samples.joined(other.samples),
            self.scatter.joined(other.scatter),
            self.gaps + other.gaps,
            self.rounding + other.rounding,
            self.consistent & other.consistent,
        )

    def variance(self) -> Array:
        count = self.samples.number
        rounded = jnp.finfo(count.dtype).eps * self.samples.size + self.rounding / count
        return self.samples.variance() + (self.gaps / count) ** 2 + rounded**2


class MadeAgain(GradientPairs):
    """The pairs f'(A) w and w of several blocks, made again block by block with new products.

    Args:
        starts: the probes w.
        steps: as for `sums`.
        f: likewise.
        floor: likewise.
    """

    starts: Starts
    steps: int
    f: Elementwise
    floor: float | None

    def blocks(self) -> int:
        """The number of blocks."""
        return self.starts.blocks

    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        """The pairs of a block."""
        vectors = self.starts.block(index)
        products = sums(operator, vectors, self.steps, self.f, self.floor).products
        left = jnp.where(self.starts.used(index)[:, None], products, 0)
        return left.T / jnp.asarray(self.starts.count, left.dtype), vectors.T
