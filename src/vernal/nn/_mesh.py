"""Parameters that are split over a mesh with explicit axes: **results are split as the data is**.

On explicit axes, the axes of the mesh that an array is split over are part of its type, and JAX requires a decision
where arrays that are split differently are combined. Models are not written for a particular mesh, so the layers
decide, all by the same rules:

* The product with a matrix keeps the axes of the batch as they are, and sums over the features however they are split.
  The new features are split as the rows of the matrix are, except over axes that the batch is split over: `product`.
* A parameter that is combined with the data element by element, such as a bias, is split as the data is: `beside`.
* Other parameters, such as the kernel of a convolution, are gathered where they are used: `whole`.

So a model that is split over the axis of the batch itself is gathered layer by layer, and its gradient is scattered;
with two matrices, the first split by rows and the second by columns, each device computes a share, with one sum after
the second. Nothing changes outside of meshes, or on axes that are not explicit.
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
    # One matrix product for the whole batch, without a transposition.
    return jnp.tensordot(x, matrix, (-1, 1), out_sharding=out)


def following(x: Array, batch: int, parameter: Array, axis: int) -> NamedSharding | None:
    """The sharding of a result that has the first `batch` axes of `x`, followed by one axis of a parameter."""
    mesh = explicit_mesh(x, parameter)
    if mesh is None:
        return None
    front = jax.typeof(x).sharding.spec[:batch]
    taken = mapped_mesh_axes().union(*map(axis_names, front))
    rest = entries_without(jax.typeof(parameter).sharding.spec[axis : axis + 1], taken)
    return NamedSharding(mesh, PartitionSpec(*front, *rest))


def beside(a: Array, x: Array) -> Array:
    """`a` prepared to be combined with `x` element by element: with leading axes of size 1, and each axis split as that
    of `x` or not at all. Its shape must be that of the last axes of `x`, where any axis may be 1."""
    if a.ndim < x.ndim:
        a = lax.expand_dims(a, range(x.ndim - a.ndim))
    mesh = explicit_mesh(a)
    if mesh is None:
        return a
    entries = zip(jax.typeof(a).sharding.spec, jax.typeof(x).sharding.spec, strict=True)
    return split_over(a, mesh, [of_a if of_a == of_x else None for of_a, of_x in entries])


def like(y: Array, x: Array) -> Array:
    """`y` split as `x` is: the carry of a loop must keep its type."""
    mesh = explicit_mesh(y, x)
    return y if mesh is None else split_over(y, mesh, jax.typeof(x).sharding.spec)


def along(a: Array, x: Array) -> Array:
    """`a` with its first axis split as that of `x`, and the others not split: to map over both."""
    mesh = explicit_mesh(a, x)
    if mesh is None:
        return a
    return split_over(a, mesh, [jax.typeof(x).sharding.spec[0], *[None] * (a.ndim - 1)])


def in_step(arrays: Sequence[Array], ndim: int) -> list[Array]:
    """Arrays with `ndim` leading batch axes, with these split alike: as in the first array that splits any of them."""
    mesh = explicit_mesh(*arrays)
    if mesh is None:
        return list(arrays)
    specs = [jax.typeof(a).sharding.spec for a in arrays]
    batch = next((s[:ndim] for s in specs if any(s[:ndim])), (None,) * ndim)
    taken = {name for entry in batch for name in axis_names(entry)}
    pairs = zip(arrays, specs, strict=True)
    return [split_over(a, mesh, [*batch, *entries_without(s[ndim:], taken)]) for a, s in pairs]


def stacked(tree: _T) -> _T:
    """The tree with no array split along its first axis: to loop over it."""

    def gather(a: Array) -> Array:
        mesh = explicit_mesh(a)
        if mesh is None:
            return a
        return split_over(a, mesh, [None, *jax.typeof(a).sharding.spec[1:]])

    return jax.tree.map(gather, tree)


def in_heads(arrays: Sequence[Array], heads: int) -> list[Array]:
    """Arrays whose last axes consist of `heads` heads or a multiple, so that each device has whole heads, the same of
    all arrays. Last axes that are split in another way are gathered."""
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
    """The sharding of random numbers for the elements of `x`: each device draws those for its own share. (Only in
    compiled programs: elsewhere JAX draws them where the key is.) The last `together` axes share one number."""
    mesh = explicit_mesh(x)
    if mesh is None or concrete_value(x) is not None:
        return None
    spec = jax.typeof(x).sharding.spec
    return NamedSharding(mesh, PartitionSpec(*spec[: x.ndim - together], *[None] * together))


def key_for(x: Array, key: Array) -> Array:
    """The key to draw random numbers for every element of `x` with. Inside `shard_map`, devices that share a key but
    hold different parts of `x` each get their own key, as if the whole were drawn at once."""
    for name in sorted(varying_axes(x) - varying_axes(key)):
        key = jax.random.fold_in(key, lax.axis_index(name))
    return key


def whole(tree: _T) -> _T:
    """The tree with no array split."""
    return jax.tree.map(gathered, tree)
