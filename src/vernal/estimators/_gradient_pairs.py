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
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._ground import is_none
from ..linalg import Operator, fori_loop
from ..modules import Module
from ..primitives import local_linear_call
from ..show import message
from ..transforms import filter_custom_jvp, is_zero
from ..trees import combine, is_array, is_inexact_array, partition

_T = TypeVar("_T")


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


def stop_gradient(tree: _T) -> _T:
    """A tree, such as an operator or an outcome, without derivatives."""
    return jax.tree.map(lambda x: lax.stop_gradient(x) if is_inexact_array(x) else x, tree)


@filter_custom_jvp
def attach(value: Array, operator: Operator, gradient_pairs: GradientPairs) -> Array:
    """`value`, with the derivative with respect to the operator that `gradient_pairs` defines."""
    del operator, gradient_pairs
    return value


@attach.def_jvp(symbolic_zeros=True)
def _attach_jvp(primals: Any, tangents: Any) -> tuple[Array, Any]:
    value, operator, gradient_pairs = primals
    value_dot, operator_dot, _ = tangents
    dots = _without_zeros(operator_dot)
    # This function again, not `value`: derivatives of the next order need its rule.
    value = attach(value, operator, gradient_pairs)
    if not jax.tree.leaves(dots):
        return value, value_dot
    arrays, rest = partition((operator, gradient_pairs), is_array)
    marks = jax.tree.map(lambda _: True, dots)

    def forward(residuals: Any, dots: Any) -> Array:
        return _push(_Given(residuals[0], residuals[1], rest, marks), dots)

    def transposed(residuals: Any, cotangent: Any) -> Any:
        return _pull(_Given(residuals[0], residuals[1], rest, marks), cotangent)

    change = local_linear_call(forward, transposed, (arrays, jnp.zeros_like(value)), dots)
    return value, change if value_dot is None or is_zero(value_dot) else value_dot + change


@filter_custom_jvp
def mixed(left: Array, operator: Operator, right: Array) -> Array:
    """Zeros, whose derivative by `left` is zero as well, and by `left` and then the operator `conj(left) * A right`.

    A value with derivatives by the operator from `attach`, and by everything else from itself, lacks just those.

    Args:
        left: without derivatives by the operator, of shape `(size, k)`.
        operator: A.
        right: of the same shape.
    """
    del operator, right
    return jnp.zeros_like(left)


@mixed.def_jvp
def _mixed_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    _, operator, right = primals
    return mixed(*primals), tangents[0].conj() * _from_zero(operator, right)


@filter_custom_jvp
def operator_first(left: Array, operator: Operator) -> Array:
    """`left`, whose derivative has a derivative of nan by the operator.

    No error, because a Hessian by both differentiates what it does not use.
    """
    del operator
    return left


@operator_first.def_jvp
def _operator_first_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return operator_first(*primals), tangents[0] * _one(primals[1]).astype(primals[0].dtype)


@filter_custom_jvp
def _one(operator: Operator) -> Array:
    """One, with a derivative of nan."""
    return jnp.ones((), jnp.finfo(operator.dtype).dtype)


@_one.def_jvp(symbolic_zeros=True)
def _one_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    one = _one(*primals)
    moved = [
        jnp.sum(dot.real).astype(one.dtype) for dot in jax.tree.leaves(_without_zeros(tangents[0]))
    ]
    return one, jnp.asarray(jnp.nan, one.dtype) * sum(moved, jnp.zeros_like(one))


@filter_custom_jvp
def _from_zero(operator: Operator, block: Array) -> Array:
    """Zeros, with the derivative of `A block` by the operator."""
    del operator
    return jnp.zeros_like(block)


@_from_zero.def_jvp(symbolic_zeros=True)
def _from_zero_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    operator, block = primals
    zero, dots = _from_zero(operator, block), _without_zeros(tangents[0])
    if not jax.tree.leaves(dots):
        return zero, jnp.zeros_like(zero)
    moving = jax.tree.map(
        lambda dot, x: None if dot is None else x, dots, operator, is_leaf=is_none
    )
    change = jax.jvp(lambda x: combine(x, operator).matmul(block), (moving,), (dots,))[1]
    return zero, change + _once(operator).astype(change.dtype)


@filter_custom_jvp
def _once(operator: Operator) -> Array:
    """Zero; refuses to be differentiated."""
    return jnp.zeros((), operator.dtype)


@_once.def_jvp(symbolic_zeros=True)
def _once_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    if jax.tree.leaves(_without_zeros(tangents[0])):
        raise NotImplementedError(
            message(
                "third derivatives cannot mix the operator and what the function closes over in this order",
                where="trace_of_function(f, operator, key)",
                expected="derivatives by the operator first, then by what `f` closes over",
                got="a derivative by what `f` closes over, and then two by the operator",
                instead="take the derivatives by the operator first",
            )
        )
    return _once(*primals), jnp.zeros((), primals[0].dtype)


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
