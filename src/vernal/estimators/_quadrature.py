"""Stochastic Lanczos quadrature: the trace of a function of a symmetric operator.

Difficulty. tr f(A) is the mean of w^* f(A) w over random w. Each of these is an integral of f over the spectrum, of
which m products give the Gauss rule. Two errors come together, that of m nodes and that of the probes, and the
reported one must be about both.

Plan. The rule of m nodes is made from Lanczos' recurrence (the eigenvalues of T are the nodes, the squares of the
first elements of its eigenvectors the weights). For the logarithm it is a bound from above, another one is a bound from
below, and what lies between them is the error (`_brackets.py`). For other functions the rules of m - 1 and m - 2 nodes
come from the leading parts of the same T, and what the last two nodes changed says how much the next ones would.
The probes' error is their sample variance. The
derivative is that of the trace, not of the computation: d tr f(A) = tr(f'(A) dA), estimated by pairs (f'(A) w, w), of
which the first vector comes from the same basis. Probes come in blocks, by the memory of their bases. The pairs of a
single block take less than its bases did, and are kept. Those of several blocks are not: the derivative draws the
probes and makes the bases again, block by block, so that no memory grows with the number of probes.

Invariants. Nodes of steps that were not made (after a breakdown) have no weight and lie where f is evaluated anyway.
Multiplying A by a power of two multiplies the nodes by it, and changes nothing else.

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
    Decomposition,
    Elementwise,
    Nodes,
    Operator,
    carried,
    combined,
    decompose,
    derivative,
    divided_differences,
)
from ..modules import Module, field
from ..show import value_error
from ._brackets import dense, lower_end, with_node_at
from ._method import default_probes
from ._orthogonal import power_below
from ._probes import Probes
from ._sensitivity import Sensitivity

# Bytes of basis vectors that are in memory at once.
_BYTES = 2**27
# What is chosen by default: few probes, which cost little where the condition number is small, for many steps.
_PROBES, _FEWEST, _MOST = 5, 10, 60


class LanczosQuadrature(Module):
    """Stochastic Lanczos quadrature: some random vectors, and some Lanczos steps from each.

    `matvecs` products are `matvecs // steps` probes with `steps` products each. The error of the probes falls like
    the square root of their number, that of the steps exponentially: like `exp(-4 steps / sqrt(c))`, for a logarithm
    and a condition number `c`. By default there are five probes, but 10 steps at least and 60 at most, and at least
    four probes where that leaves three steps. Both errors are in the standard error of the result.

    S. Ubaru, J. Chen, Y. Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature", SIAM Journal on
    Matrix Analysis and Applications 38 (2017), doi:10.1137/16M1104974.

    Args:
        steps: how many products to make from each probe, at least 2. None chooses.
        probes: the distribution of the probes. None takes signs, complex ones for a complex operator.

    Raises:
        ValueError: if there are fewer than 2 steps.

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
                "one step says nothing about its own error",
                where="LanczosQuadrature(steps)",
                expected="steps >= 2, or None",
                got=f"steps={self.steps}",
            )

    def split(self, matvecs: int) -> tuple[int, int]:
        """How many probes there are and how many steps each, for a number of products.

        Args:
            matvecs: a Python int.

        Returns:
            `(probes, steps)`; `probes * steps` is at most `matvecs`.

        Raises:
            ValueError: if the products do not suffice for two probes, without which there is no error estimate.
        """
        steps = self.steps
        if steps is None:
            steps = min(max(_FEWEST, matvecs // _PROBES), _MOST)
            steps = min(steps, max(3, matvecs // 4))
        if matvecs < 2 * steps:
            raise value_error(
                "there are too few products for two probes, and without two there is no error estimate",
                where="LanczosQuadrature, `matvecs`",
                expected=f"matvecs >= {2 * steps} with {steps} steps from each probe",
                got=f"matvecs={matvecs}",
            )
        return matvecs // steps, steps


class Starts(Module):
    """The probes of a quadrature, in blocks such that the bases of one fit into memory; drawn where they are needed.

    Args:
        key: a random key.
        probes: the distribution.
        size: of a probe.
        dtype: of a probe.
        count: how many there are.
        columns: of a block; the last one is filled up with zero vectors.
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
        """So many probes, for so many steps from each."""
        basis = operator.size * steps * jnp.dtype(operator.dtype).itemsize
        blocks = -(-count // max(1, min(count, _BYTES // max(basis, 1))))
        probes = probes or default_probes(operator)
        return Starts(key, probes, operator.size, operator.dtype, count, -(-count // blocks))

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
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
        """`fn` of each block, one after the other, for arrays of shape `(columns, ...)`; all rows that are probes."""
        if self.blocks == 1:
            return fn(self.block(0))
        found = lax.map(lambda index: fn(self.block(index)), jnp.arange(self.blocks))
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[: self.count], found)


def tridiagonals(found: Decomposition, levels: int) -> Array:
    """T and its leading parts, of shape `(levels, b, m, m)`: level j is without the last j rows.

    Rows that are not there have the first diagonal element instead, which lies among the eigenvalues and gets no
    weight.
    """
    steps = found.diagonal.shape[1]
    kept = jnp.arange(steps)[None, :] < steps - jnp.arange(levels)[:, None]
    there = found.active()[None] & kept[:, None, :]
    diagonal = jnp.where(there, found.diagonal[None], found.diagonal[None, :, :1])
    off = jnp.where(there[:, :, 1:], found.offdiagonal[None], 0)
    return dense(diagonal, off)


def eigen(matrices: Array) -> tuple[Array, Array]:
    """Eigenvalues and vectors, scaled by a power of two before, so that nothing under- or overflows."""
    largest = jnp.max(jnp.abs(matrices), axis=(-2, -1), keepdims=True)
    scale = power_below(largest)
    nodes, vectors = jnp.linalg.eigh(matrices / scale, symmetrize_input=False)
    return nodes * scale[..., 0], vectors


def consistent(asymmetry: Array, nodes: Array, size: int, floor: float | None) -> Array:
    """Whether an operator looks like what it is declared to be.

    Args:
        asymmetry: the largest element that should not be there.
        nodes: eigenvalues, or Ritz values, in the last dimension.
        size: of the operator.
        floor: as for `limited`.
    """
    scale = jnp.max(jnp.abs(nodes), axis=-1)
    eps = jnp.finfo(nodes.dtype).eps
    # An operator that calculates in a lower precision is not asymmetric, hence the square root.
    symmetric = asymmetry <= jnp.sqrt(eps) * scale
    if floor is None:
        return symmetric
    least = jnp.min(nodes, axis=-1)
    if floor:
        return symmetric & (least >= floor * scale) & (least > 0)
    return symmetric & (least >= -16 * math.sqrt(size) * eps * scale)


def is_above(least: Array, nodes: Array, size: int) -> Array:
    """Whether no eigenvalue is below what was said, but for rounding. Arguments are as for `consistent`."""
    scale = jnp.max(jnp.abs(nodes), axis=-1)
    rounding = 16 * math.sqrt(size) * jnp.finfo(nodes.dtype).eps * scale
    return jnp.min(nodes, axis=-1) >= least - rounding


def limited(nodes: Array, floor: Any) -> Array:
    """Nodes not below `floor` times the largest of them in modulus; None does not limit them."""
    if floor is None:
        return nodes
    scale = jnp.max(jnp.abs(nodes), axis=-1, keepdims=True)
    lowest = jnp.maximum(scale * floor, jnp.finfo(nodes.dtype).tiny if floor else 0)
    return jnp.maximum(nodes, lowest)


class Sums(Module):
    """What a block of probes contributes.

    Args:
        values: w^* f(A) w by the rules of m, m - 1 and m - 2 nodes (as many as there are), `(b, levels)`; for a
            logarithm its bounds from above and below.
        rounding: how far rounding errors may move the first of them, `(b,)`.
        slopes: f(A) w, of which the variance is made, `(b, n)`.
        products: f'(A) w, `(b, n)`, differentiable with respect to the operator.
        consistent: whether nothing contradicted the operator's tags, `(b,)`.
    """

    values: Array
    rounding: Array
    slopes: Array
    products: Array
    consistent: Array


def sums(
    operator: Operator, starts: Array, steps: int, f: Elementwise, floor: Any, least: Any = None
) -> Sums:
    """The quadrature of f from each probe of a block. `least`: of a logarithm, what no eigenvalue is below."""
    found = decompose(operator, starts, steps)
    still = jax.tree.map(lax.stop_gradient, found)
    matrices = tridiagonals(found, 1 if least is not None else min(3, steps))
    all_nodes, all_vectors = eigen(lax.stop_gradient(matrices))
    agrees = consistent(still.asymmetry, all_nodes[0], operator.size, floor)
    rounding = jnp.zeros_like(still.norm)
    nodes, g = limited(all_nodes, floor), derivative(f)

    def integral(f: Elementwise, nodes: Array, vectors: Array) -> Array:
        for_unit_vectors = jnp.sum(vectors[..., 0, :] ** 2 * f(nodes), axis=-1)
        return for_unit_vectors * jnp.broadcast_to(still.norm, for_unit_vectors.shape) ** 2

    values = integral(f, nodes, all_vectors)
    if least is not None:
        agrees &= is_above(least, all_nodes[0], operator.size)
        ends = lower_end(nodes[0], lax.stop_gradient(least), floor)
        more_nodes, more_vectors = eigen(with_node_at(ends, still))
        # The first node is known; found again, it would carry rounding errors of the size of the largest.
        more_nodes = jnp.maximum(more_nodes.at[:, 0].set(ends), ends[:, None])
        below = integral(f, more_nodes, more_vectors)
        values = jnp.concatenate([values, below[None]])
        rounding = integral(lambda x: rounding_of(g, x), nodes[0], all_vectors[0])

    def applied(f: Elementwise) -> Array:
        """f(A) w."""
        at = still.norm[:, None] * f(nodes[0]) * all_vectors[0, :, 0]
        along = jnp.einsum("bki,bi->bk", all_vectors[0], at, precision=lax.Precision.HIGHEST)
        return combined(along.astype(starts.dtype), still.basis)

    moving_nodes, vectors = eigen(matrices[0])
    small = Nodes(limited(moving_nodes, floor), vectors)
    products = carried(applied(g), operator, found, small, divided_differences(g, small.nodes))
    return Sums(values.T, rounding, applied(f), products, agrees)


def rounding_of(g: Elementwise, nodes: Array) -> Array:
    """How far rounding errors, which are relative to the largest eigenvalue, move a function with derivative g."""
    scale = jnp.max(jnp.abs(nodes), axis=-1, keepdims=True)
    return jnp.finfo(nodes.dtype).eps * jnp.abs(scale * g(nodes))


class Kept(Sensitivity):
    """Pairs that are kept, in blocks of as many products as the operator makes at once.

    Args:
        left: of shape `(size, k)`, with the weights.
        right: of shape `(size, k)`.
        columns: of a block.
    """

    left: Array
    right: Array
    columns: int

    @staticmethod
    def of(operator: Operator, left: Array, right: Array) -> "Kept":
        """Pairs in blocks that suit an operator."""
        columns = max(1, min(left.shape[1], operator.products_at_once(left.shape[1])))
        width = ((0, 0), (0, -left.shape[1] % columns))
        return Kept(jnp.pad(left, width), jnp.pad(right, width), columns)

    def blocks(self) -> int:
        """How many there are."""
        return self.left.shape[1] // self.columns

    def block(self, index: int | Array) -> tuple[Array, Array]:
        """The pairs of a block."""
        start = index * self.columns
        return (
            lax.dynamic_slice_in_dim(self.left, start, self.columns, axis=1),
            lax.dynamic_slice_in_dim(self.right, start, self.columns, axis=1),
        )


class MadeAgain(Sensitivity):
    """The pairs f'(A) w and w of several blocks: one block of them after the other, with products of its own.

    Args:
        operator: A.
        starts: the probes w.
        steps: as for `sums`.
        f: likewise.
        floor: likewise.
    """

    operator: Operator
    starts: Starts
    steps: int
    f: Elementwise
    floor: float | None

    def blocks(self) -> int:
        """How many there are."""
        return self.starts.blocks

    def block(self, index: int | Array) -> tuple[Array, Array]:
        """The pairs of a block."""
        vectors = self.starts.block(index)
        products = sums(self.operator, vectors, self.steps, self.f, self.floor).products
        left = jnp.where(self.starts.used(index)[:, None], products, 0)
        return left.T / jnp.asarray(self.starts.count, left.dtype), vectors.T
