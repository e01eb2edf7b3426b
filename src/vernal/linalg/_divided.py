"""Divided differences of a function at nodes that may be close, or equal.

Difficulty. `(f(x) - f(y)) / (x - y)` loses what rounding takes from the values, divided by the gap; the derivative in
between has no such error, but another one if f is not nearly linear there. How close is close depends on f.

Plan. Take both, with an estimate of the error of each, and return the better one. A difference of k + 1 nodes is the
quotient over the two that are farthest apart, or the mean of the k-th derivative over k!: the nodes, with random
weights that sum to 1, have a mean and a variance, and a rule of two points has the same. The mean must agree with the
quotient as well, up to the rounding of that: functions with steps fool its own estimate.

The choice does not depend on tangents: a function that is linear in one takes that of the function it came from.

C. de Boor, "Divided differences", Surveys in Approximation Theory 1 (2005), sections 7 and 9.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ._elementwise import Derivative, Elementwise, source

# Nodes are known up to this many eps of the largest.
_STEPS = 64
# Values and derivatives are known up to this many roundings.
_ROUNDINGS = 4
# The mean and the quotient differ by no more than this many times the error of the quotient, or the mean is wrong.
_AGREES = 64


def divided_differences(f: Elementwise, nodes: Sequence[Array]) -> Array:
    """f[x, y, ...] for each combination of nodes.

    Args:
        f: acts element by element; its values may be complex.
        nodes: real, each of shape `(..., m)` with its own m.

    Returns:
        An array of shape `(..., m, l, ...)`, with one dimension for the nodes of each. One array of nodes gives f.
    """
    if len(nodes) == 1:
        # Without the errors, which only differences need, and all the derivatives that they are estimated from.
        return f(nodes[0])
    return _Table(f, nodes).of(tuple(range(len(nodes)))).values[-1]


class _Entry(NamedTuple):
    """The differences of several functions, and the estimated error of the first."""

    values: list[Array]
    error: Array


class _Table:
    def __init__(self, f: Elementwise, nodes: Sequence[Array]):
        known, count = source(f), len(nodes)
        self.derivatives = [[known] if known is f else [known, f]]
        for _ in nodes[1:]:
            self.derivatives.append([Derivative(g) for g in self.derivatives[-1]])
        self.order = 0
        while isinstance(known, Derivative):
            known, self.order = known.f, self.order + 1
        # What f is a derivative of, and its derivatives.
        self.chain = [known]
        for _ in range(max(3, self.order + count)):
            self.chain.append(Derivative(self.chain[-1]))
        self.nodes = [
            x.reshape(*x.shape[:-1], *(x.shape[-1] if i == at else 1 for i in range(count)))
            for at, x in enumerate(nodes)
        ]
        largest = [jnp.max(jnp.abs(x), axis=-1, initial=0) for x in nodes]
        self.eps = float(jnp.finfo(nodes[0].dtype).eps)
        unit = self.eps * jnp.max(jnp.stack(largest), axis=0)
        self.step = unit.reshape(*unit.shape, *(1 for _ in nodes))
        self.known: dict[tuple[int, ...], _Entry] = {}
        self.sizes: dict[int, list[Array]] = {}

    def of(self, which: tuple[int, ...]) -> _Entry:
        """The differences at some of the nodes."""
        if which not in self.known:
            self.known[which] = self._values(which) if len(which) == 1 else self._better(which)
        return self.known[which]

    def _values(self, which: tuple[int, ...]) -> _Entry:
        x = self.nodes[which[0]]
        values = [g(x) for g in self.derivatives[0]]
        by_slope = jnp.abs(Derivative(self.derivatives[0][0])(x)) * self.step
        # The smaller one: a slope may be infinite at the end of the domain, and f undefined beyond it. Over many steps,
        # because the values of log(1 + x) do not change in one.
        moved = jnp.abs(self.derivatives[0][0](x + _STEPS * self.step) - values[0])
        # Values may also be too small for the dtype.
        tiny = float(jnp.finfo(x.dtype).tiny)
        size = jnp.abs(values[0]) + self._noise(which[0], 0)
        return _Entry(values, _ROUNDINGS * (jnp.fmin(by_slope, moved) + self.eps * size + tiny))

    def _better(self, which: tuple[int, ...]) -> _Entry:
        (gap, quotient), mean = self._quotient(which), self._mean(which)
        apart = jnp.abs(mean.values[0] - quotient.values[0])
        # Less, not equal: where an error is infinite, the other way may be fine.
        better = (apart < _AGREES * quotient.error) & (mean.error < quotient.error)
        # Nodes that are equal up to what is known of them.
        better |= jnp.abs(gap) <= _STEPS * self.step
        pairs = zip(mean.values, quotient.values, strict=True)
        return _Entry(
            [jnp.where(better, one, other) for one, other in pairs],
            jnp.where(better, mean.error, quotient.error),
        )

    def _quotient(self, which: tuple[int, ...]) -> tuple[Array, _Entry]:
        """The largest gap, and the quotient over it."""
        pairs = itertools.combinations(which, 2)
        gap, found = self._over(which, *next(pairs))
        for u, v in pairs:
            other_gap, other = self._over(which, u, v)
            wider = jnp.abs(other_gap) > jnp.abs(gap)
            gap = jnp.where(wider, other_gap, gap)
            numerators = zip(other.values, found.values, strict=True)
            found = _Entry(
                [jnp.where(wider, one, another) for one, another in numerators],
                jnp.where(wider, other.error, found.error),
            )
        safe = jnp.where(gap == 0, 1, gap)
        values = [x / safe.astype(x.dtype) for x in found.values]
        return gap, _Entry(values, found.error / jnp.abs(safe))

    def _over(self, which: tuple[int, ...], u: int, v: int) -> tuple[Array, _Entry]:
        """A gap, and what the differences change by over it."""
        with_u, with_v = (self.of(tuple(i for i in which if i != left)) for left in (v, u))
        changes = [a - b for a, b in zip(with_u.values, with_v.values, strict=True)]
        return self.nodes[u] - self.nodes[v], _Entry(changes, with_u.error + with_v.error)

    def _mean(self, which: tuple[int, ...]) -> _Entry:
        """The mean of the derivative between the nodes."""
        count = len(which)
        nodes = jnp.stack(jnp.broadcast_arrays(*(self.nodes[i] for i in which)))
        center = jnp.mean(nodes, axis=0)
        square = jnp.sum((nodes - center[None]) ** 2, axis=0)
        spread = jnp.sqrt(square / (count * (count + 1)))
        factor = math.factorial(count - 1)
        slopes = self.derivatives[count - 1]
        values = [(g(center + spread) + g(center - spread)) / (2 * factor) for g in slopes]
        middle = slopes[0](center) / factor
        # The rule is of a higher order than its distance from the rule of one point.
        apart = jnp.abs(values[0] - middle)
        size = jnp.maximum(jnp.abs(values[0]), jnp.abs(middle))
        noise = functools.reduce(jnp.maximum, (self._noise(i, count - 1) for i in which)) / factor
        error = apart * jnp.sqrt(_ratio(apart, size)) + _ROUNDINGS * self.eps * (size + noise)
        return _Entry(values, error)

    def _noise(self, at: int, order: int) -> Array:
        """The rounding errors of a derivative of f at a node, in eps, that are more than its own size.

        The slope of tanh, as JAX computes it, is `(1 + y) * (1 - y)`. Next to y = 1 it is wrong by eps, however small
        it is, and so is its second derivative next to 0. Such errors are of the size that neighbours suggest: that of
        the function itself, which is as steep as its derivatives are next to each other, and that of the derivatives
        before and after this one.
        """
        order += self.order
        if at not in self.sizes:
            self.sizes[at] = [jnp.abs(g(self.nodes[at])) for g in self.chain]
        sizes = self.sizes[at]
        if order == 0:
            return jnp.zeros_like(sizes[0])
        steepness = jnp.minimum(_ratio(sizes[2], sizes[1]), _ratio(sizes[3], sizes[2]))
        return sizes[0] * steepness**order + jnp.sqrt(sizes[order - 1] * sizes[order + 1])


def _ratio(a: Array, b: Array) -> Array:
    return jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
