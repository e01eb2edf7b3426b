"""Stochastic Lanczos quadrature: the trace of a function of a symmetric operator.

Difficulty. tr f(A) is the mean of w^* f(A) w over random w. Each of these is an integral of f over the spectrum, and m
products give its Gauss rule. There are two errors, that of m nodes and that of the probes, and the reported error must
cover both.

Plan. The rule of m nodes comes from the Lanczos recurrence (the eigenvalues of T are the nodes, the squares of the
first elements of its eigenvectors the weights). A second rule from the same T estimates its error (`_rules.py`). The
probes' error comes from the slopes of the forms w^* f(A) w (`_samples.py`), because f(A) w is known as well. The
derivative is that of the trace, not of the computation: d tr f(A) = tr(f'(A) dA), estimated by pairs (f'(A) w, w)
whose first vector comes from the same basis (`by_operator`). Probes come in blocks, sized by the memory of their
bases. The pairs of a single block take less memory than its bases did, and are kept. Those of several blocks are not:
the derivative draws the probes and makes the bases again, block by block, so memory does not grow with the number of
probes.

Invariants. Nodes of steps that were not made (after a breakdown) have no weight and lie where f is evaluated anyway.
Multiplying A by a power of two multiplies the nodes by it and changes nothing else.

Glossary: b probes at a time; m steps; n size; theta nodes, S eigenvectors of T.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..linalg import Derivative, Elementwise, Operator, fori_loop, stop_gradient
from ..modules import Module, field
from ..show import value_error
from ._gradient_pairs import FunctionPairs, GradientPairs, StoredPairs, by_operator
from ._method import FEWEST_PROBES, Budget, Outcome, TraceMethod, default_probes
from ._probes import Probes
from ._rules import Sums, rounding_of, sums
from ._samples import Samples, Scatter, samples_of, slopes_of

# Bytes of basis vectors in memory at once.
_BYTES = 2**27
# Defaults: few probes, for many steps, which cost little where the condition number is small.
_LEAST_STEPS, _MOST = 3, 60


class LanczosQuadrature(Module):
    """Stochastic Lanczos quadrature: some random vectors, and some Lanczos steps from each.

    `matvecs` products are spent on `matvecs // steps` probes with `steps` products each. The error of the probes falls
    like the inverse square root of their number, that of the steps exponentially: like `exp(-4 steps / sqrt(c))`, for a
    logarithm and a condition number `c`. By default there are five probes, with 3 to 60 steps each, and more probes
    if that leaves products. The standard error of the result includes both errors.

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
        """The fewest products: those of the probes that an error estimate needs."""
        return FEWEST_PROBES * (self.steps or _LEAST_STEPS)

    def split(self, matvecs: int) -> tuple[int, int]:
        """Splits a number of products into probes and steps for each.

        Args:
            matvecs: a Python int of at least `minimum`.

        Returns:
            `(probes, steps)`; `probes * steps` is at most `matvecs`.
        """
        steps = self.steps
        if steps is None:
            steps = min(max(_LEAST_STEPS, matvecs // FEWEST_PROBES), _MOST)
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

    minimum = FEWEST_PROBES * _LEAST_STEPS

    def estimate(self, operator: Operator, key: PRNGKeyArray, budget: Budget) -> Outcome:
        """Estimates the trace of the function; see `TraceMethod`."""
        count, steps = self.quadrature.split(budget.most)
        starts = Starts.of(operator, key, self.quadrature.probes, count, steps)
        again = _MadeAgain(starts, steps, self.floor, self.least)
        made = again.sums(operator, 0)
        still, still_operator = stop_gradient((again, operator))

        def tally_of(index: int | Array, made: Sums) -> _Tally:
            return _Tally.of(self, still_operator, starts, index, made)

        def add(index: Array, known: _Tally) -> _Tally:
            return known.joined(tally_of(index, still.sums(still_operator, index)))

        tally, known = tally_of(0, stop_gradient(made)), _Kept(starts.block(0), made)
        if starts.blocks > 1:
            tally, known = fori_loop(1, starts.blocks, add, tally), again
        value = tally.samples.mean
        return Outcome(
            value=value + by_operator(value, self.f, operator, known),
            variance=tally.variance(),
            degrees_of_freedom=tally.scatter.freedom(tally.samples.number),
            matvecs=jnp.asarray(count * steps, jnp.int32),
            consistent=tally.consistent,
            gradient_pairs=StoredPairs.none(operator),
        )


class _Tally(Module):
    """Sums over all probes, and whether they agree with the tags."""

    samples: Samples
    scatter: Scatter
    gaps: Array
    rounding: Array
    consistent: Array

    @staticmethod
    def of(
        way: FunctionTrace, operator: Operator, starts: Starts, index: int | Array, made: Sums
    ) -> "_Tally":
        f, used, (one, other) = stop_gradient(way.f), starts.used(index), made.gaps
        products = made.products(f, operator)
        slopes = slopes_of(starts.probes, starts.block(index).T, products.T)
        rounding = one(lambda x: rounding_of(f, x, way.floor, operator.eps))
        return _Tally(
            samples_of(made.rule(way.f), slopes, jnp.sum(used), jnp.asarray(True)),
            Scatter.of(slopes, used),
            jnp.sum(jnp.where(used, one(f) - other(f), 0)),
            jnp.sum(jnp.where(used, rounding, 0)),
            jnp.all(made.consistent | ~used),
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


class _Kept(FunctionPairs):
    """The only block of probes, whose basis is in memory."""

    vectors: Array
    made: Sums

    def pairs(self, f: Elementwise, operator: Operator) -> GradientPairs:
        left = self.made.products(Derivative(f), operator).T
        return StoredPairs.of(operator, left / len(self.vectors), self.vectors.T)


class _MadeAgain(FunctionPairs):
    """Several blocks, made again one by one with new products."""

    starts: Starts
    steps: int
    floor: float | None
    least: Any

    def sums(self, operator: Operator, index: int | Array) -> Sums:
        """Those of a block."""
        return sums(operator, self.starts.block(index), self.steps, self.floor, self.least)

    def pairs(self, f: Elementwise, operator: Operator) -> GradientPairs:
        del operator
        return _PairsMadeAgain(self, Derivative(f))


class _PairsMadeAgain(GradientPairs):
    again: _MadeAgain
    g: Elementwise

    def blocks(self) -> int:
        return self.again.starts.blocks

    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        starts = self.again.starts
        products = self.again.sums(operator, index).products(self.g, operator)
        left = jnp.where(starts.used(index)[:, None], products, 0)
        return left.T / jnp.asarray(starts.count, left.dtype), starts.block(index).T
