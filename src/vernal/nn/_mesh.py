"""Parameters that are split over a mesh with explicit axes: **results lie where the data lies**.

There, along which axes of the mesh an array is split is part of its type, and JAX asks what to do where two arrays meet
that are split differently. A model is written for no mesh in particular, so the layers answer, all alike:

* The product with a matrix keeps the axes of the batch as they are and sums over the features wherever they lie. Its
  new features are split as the rows of the matrix are, except over what the batch is split over: `product`.
* What is combined with the data element by element, such as a bias, is brought to where the data lies: `beside`.
* Other parameters, such as the kernel of a convolution, are gathered where they are used: `whole`.

So a model that is split over the axis of the batch itself is gathered layer by layer, and its gradient is scattered;
and of two matrices, the first split by rows and the second by columns, each device computes a share, with one sum after
the second. Nothing happens outside of meshes, nor on axes that are not explicit.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from .._ground import concrete_value, mapped_mesh_axes
from ..transforms import (
    axis_names,
    entries_without,
    explicit_mesh,
    gathered,
    split_over,
    varying_axes,
)

_T = TypeVar("_T")


def product(x: Array, matrix: Array) -> Array:
    """`matrix @ x`, of shape `(..., m)`, for each vector of a batch: `x` has the shape `(..., n)`."""
    out = following(x, x.ndim - 1, matrix, 0)
    if x.ndim == 1:
        return jnp.matmul(matrix, x, out_sharding=out)
    # One matrix product for a whole batch, without a transposition.
    return jnp.tensordot(x, matrix, (-1, 1), out_sharding=out)


def following(x: Array, batch: int, parameter: Array, axis: int) -> NamedSharding | None:
    """How a result lies that has the batch axes of `x`, so many, and behind them one axis of a parameter."""
    mesh = explicit_mesh(x, parameter)
    if mesh is None:
        return None
    front = jax.typeof(x).sharding.spec[:batch]
    taken = mapped_mesh_axes().union(*map(axis_names, front))
    rest = entries_without(jax.typeof(parameter).sharding.spec[axis : axis + 1], taken)
    return NamedSharding(mesh, PartitionSpec(*front, *rest))


def beside(a: Array, x: Array) -> Array:
    """`a` as it can be combined with `x` element by element: with axes of size 1 in front, and split over nothing
    that `x` is not split over there. Its shape is that of the last axes of `x`, where any axis may be 1."""
    if a.ndim < x.ndim:
        a = lax.expand_dims(a, range(x.ndim - a.ndim))
    mesh = explicit_mesh(a)
    if mesh is None:
        return a
    entries = zip(jax.typeof(a).sharding.spec, jax.typeof(x).sharding.spec, strict=True)
    return split_over(a, mesh, [of_a if of_a == of_x else None for of_a, of_x in entries])


def like(y: Array, x: Array) -> Array:
    """`y` split as `x` is: what a loop carries must stay as it was."""
    mesh = explicit_mesh(y, x)
    return y if mesh is None else split_over(y, mesh, jax.typeof(x).sharding.spec)


def along(a: Array, x: Array) -> Array:
    """`a` with its first axis split as that of `x` is, and the others not at all: to map over both."""
    mesh = explicit_mesh(a, x)
    if mesh is None:
        return a
    return split_over(a, mesh, [jax.typeof(x).sharding.spec[0], *[None] * (a.ndim - 1)])


def in_step(arrays: Sequence[Array], ndim: int) -> list[Array]:
    """Arrays that begin with so many batch axes, with these split alike: as the first is that is split at all."""
    mesh = explicit_mesh(*arrays)
    if mesh is None:
        return list(arrays)
    specs = [jax.typeof(a).sharding.spec for a in arrays]
    batch = next((s[:ndim] for s in specs if any(s[:ndim])), (None,) * ndim)
    taken = {name for entry in batch for name in axis_names(entry)}
    pairs = zip(arrays, specs, strict=True)
    return [split_over(a, mesh, [*batch, *entries_without(s[ndim:], taken)]) for a, s in pairs]


def stacked(tree: _T) -> _T:
    """A tree of arrays, none of which is split along its first axis: to loop over it."""

    def gather(a: Array) -> Array:
        mesh = explicit_mesh(a)
        if mesh is None:
            return a
        return split_over(a, mesh, [None, *jax.typeof(a).sharding.spec[1:]])

    return jax.tree.map(gather, tree)


def in_heads(arrays: Sequence[Array], heads: int) -> list[Array]:
    """Arrays whose last axes are made of so many heads, or of a multiple: with whole heads, and the same ones, on each
    device. Where they are split in another way they are gathered."""
    mesh = explicit_mesh(*arrays)
    if mesh is None:
        return list(arrays)
    specs = [jax.typeof(a).sharding.spec for a in arrays]
    last = {axis_names(spec[-1]) for spec in specs}
    parts = math.prod(mesh.shape[name] for name in next(iter(last)))
    if len(last) == 1 and heads % parts == 0:
        return list(arrays)
    return [split_over(a, mesh, [*s[:-1], None]) for a, s in zip(arrays, specs, strict=True)]


def drawn_like(x: Array, together: int = 0) -> NamedSharding | None:
    """How random numbers for every element of `x` are drawn: by each device those for its own share. (Only in compiled
    programs: elsewhere JAX draws them where the key is.) For the last axes, so many, there is one number together."""
    mesh = explicit_mesh(x)
    if mesh is None or concrete_value(x) is not None:
        return None
    spec = jax.typeof(x).sharding.spec
    return NamedSharding(mesh, PartitionSpec(*spec[: x.ndim - together], *[None] * together))


def key_for(x: Array, key: Array) -> Array:
    """The key to draw random numbers with for every element of `x`. Inside `shard_map`, where devices that share a key
    hold different parts of `x`, each of them has a key of its own, as if the whole were drawn at once."""
    for name in sorted(varying_axes(x) - varying_axes(key)):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


def whole(tree: _T) -> _T:
    """A tree of arrays, none of which is split."""
    return jax.tree.map(gathered, tree)
