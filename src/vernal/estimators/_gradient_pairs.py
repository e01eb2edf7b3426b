"""Derivatives of estimates, independent of how the estimates are made.

The difficulty: an estimate of tr(A) is computed from factorisations and random sketches, and the derivative of that
computation is a poor, or useless, estimate of the derivative of the trace. But tr is linear: d tr(A) = tr(dA), which
is again a trace to estimate.

The plan: besides the value, a method returns pairs of vectors with

    d value = sum_j <left_j, dA right_j>       (a sum over all elements; for a diagonal, element by element)

whose expectation is the derivative of the truth. `attach` makes that the derivative of the value. Products are made
block by block: forward by `jax.jvp` of a block's products, in reverse by `jax.vjp`. Nothing of a block is kept, so
memory does not grow with the number of blocks. Both are functions of the operator and of the pairs, and may be
differentiated again: a method whose pairs depend on the operator (f'(A) w) gets right second derivatives if it does
not stop their gradient.
"""

import abc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._ground import is_none
from ..linalg import Elementwise, Operator, along, fori_loop, varying_like
from ..modules import Module
from ..primitives import local_linear_call
from ..transforms import filter_custom_jvp, is_zero
from ..trees import combine, is_array, is_inexact_array, partition


class GradientPairs(Module):
    """The pairs of vectors that define the derivative of an estimate, in blocks."""

    @abc.abstractmethod
    def blocks(self) -> int | Array:
        """The number of blocks; may be traced."""

    @abc.abstractmethod
    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        """`(left, right)`, each of shape `(size, b)`, with all weights in `left`."""


class StoredPairs(GradientPairs):
    """Pairs that are stored in memory.

    Args:
        left: of shape `(size, k)`, with the weights.
        right: of shape `(size, k)`.
        columns: the number of columns of a block, a divisor of k; None for one block.
    """

    left: Array
    right: Array
    columns: int | None = None

    @staticmethod
    def of(operator: Operator, left: Array, right: Array) -> "StoredPairs":
        """Pairs in blocks of as many as the operator multiplies at once, padded with zeros."""
        columns = max(1, min(left.shape[1], operator.products_at_once(left.shape[1])))
        width = ((0, 0), (0, -left.shape[1] % columns))
        return StoredPairs(jnp.pad(left, width), jnp.pad(right, width), columns)

    @staticmethod
    def none(operator: Operator) -> "StoredPairs":
        """No pairs, for a value that has its derivatives by itself."""
        nothing = jnp.zeros((operator.size, 0), operator.dtype)
        return StoredPairs(nothing, nothing)

    def blocks(self) -> int:
        """The number of blocks."""
        return 1 if self.columns is None else self.left.shape[1] // self.columns

    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        """The pairs of a block."""
        del operator
        if self.columns is None:
            return self.left, self.right
        start = index * self.columns
        return (
            lax.dynamic_slice_in_dim(self.left, start, self.columns, axis=1),
            lax.dynamic_slice_in_dim(self.right, start, self.columns, axis=1),
        )


class Chosen(GradientPairs):
    """One of several sets of pairs, chosen when the program runs.

    Args:
        which: the index of the chosen one; an integer array of shape ().
        choices: all of them, for vectors of the same size and dtype.
    """

    which: Array
    choices: tuple[GradientPairs, ...]

    def blocks(self) -> Array:
        """The number of blocks of the chosen one."""
        return jnp.stack([jnp.asarray(choice.blocks(), int) for choice in self.choices])[self.which]

    def block(self, operator: Operator, index: int | Array) -> tuple[Array, Array]:
        """A block of the chosen one, with columns of zeros up to the widest."""
        index = jnp.asarray(index, int)

        def shape(choice: GradientPairs) -> tuple[int, ...]:
            return jax.eval_shape(partial(choice.block, operator), index)[0].shape

        widest = max(shape(choice)[1] for choice in self.choices)

        def padded(choice: GradientPairs, index: Array) -> tuple[Array, Array]:
            left, right = choice.block(operator, index)
            missing = ((0, 0), (0, widest - left.shape[1]))
            return jnp.pad(left, missing), jnp.pad(right, missing)

        return lax.switch(self.which, [partial(padded, choice) for choice in self.choices], index)


@filter_custom_jvp
def attach(value: Array, operator: Operator, gradient_pairs: GradientPairs) -> Array:
    """`value`, with the derivative with respect to the operator that `gradient_pairs` defines."""
    del operator, gradient_pairs
    return value


@attach.def_jvp(symbolic_zeros=True)
def _attach_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    value, operator, gradient_pairs = primals
    value_dot, operator_dot, _ = tangents
    # This function again, not `value`: derivatives of the next order need its rule.
    value = attach(value, operator, gradient_pairs)
    change = _changed(value, operator, operator_dot, gradient_pairs)
    if change is None or value_dot is None or is_zero(value_dot):
        return value, value_dot if change is None else change
    return value, value_dot + change


def _changed(like: Array, operator: Operator, operator_dot: Any, pairs: GradientPairs) -> Any:
    """What a value like this changes by with the operator; None for no tangent."""
    dots = _without_zeros(operator_dot)
    if not jax.tree.leaves(dots):
        return None
    arrays, rest = partition((operator, pairs), is_array)
    marks = jax.tree.map(lambda _: True, dots)

    def forward(residuals: Any, dots: Any) -> Array:
        return _push(_Given(residuals[0], residuals[1], rest, marks), dots)

    def transposed(residuals: Any, cotangent: Any) -> Any:
        return _pull(_Given(residuals[0], residuals[1], rest, marks), cotangent)

    return local_linear_call(forward, transposed, (arrays, jnp.zeros_like(like)), dots)


class FunctionPairs(Module):
    """What the trace of a function of an operator was made from."""

    @abc.abstractmethod
    def pairs(self, f: Elementwise, operator: Operator) -> GradientPairs:
        """The pairs that define the derivative of the trace of f by the operator."""


def by_operator(value: Array, f: Elementwise, operator: Operator, made: FunctionPairs) -> Array:
    """Zero, with all derivatives of the trace of f that are by the operator, and perhaps by what f closes over as well.

    The trace is linear in f: it changes with what f closes over by the trace of another function (`along`).

    Args:
        value: the trace of f; in `shard_map`, it tells what differs between devices.
        f: a module.
        operator: A.
        made: what the trace was made from.
    """
    zero = varying_like(jnp.zeros((), value.dtype), value)
    return _by_operator(zero, f, operator, made)


@filter_custom_jvp
def _by_operator(zero: Array, f: Elementwise, operator: Operator, made: FunctionPairs) -> Array:
    del f, operator, made
    return zero


@_by_operator.def_jvp(symbolic_zeros=True)
def _by_operator_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    zero, f, operator, made = primals
    f_dot = along(f, tangents[1])
    change = _changed(zero, operator, tangents[2], made.pairs(f, operator))
    if f_dot is None:
        return _by_operator(*primals), change
    by_f = _by_operator(zero, f_dot, operator, made)
    return _by_operator(*primals), by_f if change is None else by_f + change


def _without_zeros(tangents: Any) -> Any:
    """Tangents of an operator, with None in place of what has none."""
    return jax.tree.map(
        lambda dot: None if dot is None or is_zero(dot) or not is_inexact_array(dot) else dot,
        tangents,
        is_leaf=is_zero,
    )


class _Pairs(NamedTuple):
    """Pairs, and the operator that they may need for products."""

    operator: Operator
    of: GradientPairs


class _Given(NamedTuple):
    """What both directions need: operator and pairs (arrays and the rest), an array like the result, and marks of the
    arrays that have a tangent."""

    arrays: Any
    like: Array
    rest: Any
    marks: Any

    def parts(self) -> tuple[Any, _Pairs, Callable[[Any, Array, Array], Array]]:
        """The differentiated arrays, the pairs, and a block's share of the value as a function of them."""
        operator, gradient_pairs = combine(self.arrays, self.rest)
        # None, which is not a leaf by default, stands for an array without a tangent.
        moving = jax.tree.map(
            lambda mark, x: None if mark is None else x,
            self.marks,
            self.arrays[0],
            is_leaf=is_none,
        )

        def share(moving: Any, left: Array, right: Array) -> Array:
            terms = left.conj() * combine(moving, operator).matmul(right)
            out = jnp.sum(terms, axis=tuple(range(self.like.ndim, 2)))
            return (out if jnp.iscomplexobj(self.like) else out.real).astype(self.like.dtype)

        return moving, _Pairs(operator, gradient_pairs), share


def _push(given: _Given, dots: Any) -> Array:
    moving, pairs, share = given.parts()

    def add(index: Any, total: Array) -> Array:
        left, right = pairs.of.block(pairs.operator, index)
        return total + jax.jvp(lambda x: share(x, left, right), (moving,), (dots,))[1]

    return _summed(pairs.of, add, given.like)


def _pull(given: _Given, cotangent: Array) -> Any:
    moving, pairs, share = given.parts()

    def add(index: Any, total: Any) -> Any:
        left, right = pairs.of.block(pairs.operator, index)
        (change,) = jax.vjp(lambda x: share(x, left, right), moving)[1](cotangent)
        return jax.tree.map(jnp.add, total, change)

    return _summed(pairs.of, add, jax.tree.map(jnp.zeros_like, moving))


def _summed(gradient_pairs: GradientPairs, add: Callable[[Any, Any], Any], zero: Any) -> Any:
    blocks = gradient_pairs.blocks()
    if isinstance(blocks, int) and blocks == 1:
        return add(0, zero)
    return fori_loop(0, blocks, add, zero)
