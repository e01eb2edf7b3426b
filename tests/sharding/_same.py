"""What a table of computations is checked for: on a mesh they give the results of one device.

A computation is a function of a model and a batch. Values, and gradients with respect to both, are computed on one
device, and then on a mesh by one program for all the ways to place a model:

* split over the axis that the batch is not over, as in tensor parallelism;
* split over the very axis of the batch, as in fully sharded training; for some also mapped by `jax.vmap`.

`check_apart` runs it by `filter_shard_map`, where every device has a part of the batch and the whole model.

What cannot be split evenly is replicated. The batch is over the first axis of the mesh, and replicated over the other.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import AxisType, NamedSharding

import vernal
from vernal.transforms import varying_axes

BATCH = 12
SHAPES = (4, 2), (2, 3), (3, 2)
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@dataclasses.dataclass(frozen=True)
class Computation:
    """A row.

    Attributes:
        run: the function, of a model and a batch.
        model: any pytree; of its arrays those of floating-point numbers are differentiated.
        xs: arrays with the batch along the first axis.
        mapped: the same as `run`, by `jax.vmap`; None if it is no map over the batch.
        apart: the function inside `filter_shard_map`; `run` if there is nothing else to write there.
        axes: over which axes of the mesh the model is split, one at a time. It is replicated if none of them fits.
    """

    run: Callable[[Any, Any], Any]
    model: Any
    xs: Any
    mapped: Callable[[Any, Any], Any] | None = None
    apart: Callable[[Any, Any], Any] | None = None
    axes: tuple[str, ...] = ("model", "data")


def split(a: Any, size: int, axis: str) -> P:
    """An array with its largest axis that can be split over an axis of the mesh, of this size and name."""
    fitting = [(n, -i) for i, n in enumerate(a.shape) if n and n % size == 0]
    return P(*[None] * -max(fitting)[1], axis) if fitting else P()


def mesh_for(model: Any, kind: AxisType) -> jax.sharding.Mesh:
    """The mesh over which most arrays of the model can be split, in both ways."""

    def splits(shape):
        return sum(split(a, n, "") != P() for a in jax.tree.leaves(model) for n in shape)

    shape = max(SHAPES, key=splits)
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, ("data", "model"), (kind, kind), devices=devices)


def ways(row: Computation, mesh: jax.sharding.Mesh) -> Iterator[tuple[str, Any, Any]]:
    """The names of the ways, the functions, and the placed models."""

    def fits(axis):
        return any(split(a, mesh.shape[axis], axis) != P() for a in jax.tree.leaves(row.model))

    def placed(axis):
        def place(a):
            spec = P() if axis is None else split(a, mesh.shape[axis], axis)
            return jax.device_put(a, NamedSharding(mesh, spec))

        return jax.tree.map(place, row.model)

    for axis in [axis for axis in row.axes if fits(axis)] or [None]:
        yield f"split over {axis!r}", row.run, placed(axis)
        if axis == "data" and row.mapped is not None and EXPLICIT in mesh.axis_types:
            yield f"split over {axis!r}, and mapped", row.mapped, placed(axis)


def derivatives(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The function that returns the results, and the gradients of a weighted sum of them."""

    def both(model, xs):
        point, rest = vernal.partition((model, xs), vernal.is_inexact_array)

        def loss(point):
            results = run(*vernal.combine(point, rest))
            total = jnp.zeros(())
            for y in jax.tree.leaves(results):
                weights = 1.5 + np.cos(np.arange(y.size)).reshape(y.shape)
                total += jnp.sum(y * weights.astype(y.dtype))
            return total, results

        return jax.grad(loss, has_aux=True)(point)

    return both


def weights_of(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (1.5 + np.cos(np.arange(math.prod(shape)))).reshape(shape).astype(dtype)


def apart(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`derivatives` inside `filter_shard_map`: what varies over the devices is part of a result for the whole batch."""

    def both(model, xs):
        point, rest = vernal.partition((model, xs), vernal.is_inexact_array)

        def loss(point):
            results = run(*vernal.combine(point, rest))
            total = jnp.zeros(())
            for y in jax.tree.leaves(results):
                if varying_axes(y):
                    rows = y.shape[0] * lax.axis_size("data")
                    weights = jnp.asarray(weights_of((rows, *y.shape[1:]), y.dtype))
                    first = lax.axis_index("data") * y.shape[0]
                    weights = lax.dynamic_slice_in_dim(weights, first, y.shape[0])
                    total += lax.psum(jnp.sum(y * weights), "data")
                else:
                    total += jnp.sum(y * weights_of(y.shape, y.dtype))
            return total, jax.tree.leaves(results)

        return jax.grad(loss, has_aux=True)(point)

    return both


def check_apart(row: Computation, tolerance: float = 1e-5) -> None:
    """Refuses a computation that is not the same where `filter_shard_map` gives each device a part of the batch."""
    run = row.apart or row.run
    want = jax.device_get(jax.jit(derivatives(row.run))(row.model, row.xs))
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    leaves = jax.tree.leaves(want[1])
    of_results = [P("data") if y.shape[:1] == (BATCH,) else P() for y in leaves]
    mapped = vernal.filter_shard_map(
        apart(run),
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=((P(), P("data")), of_results),
    )
    xs = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P("data"))), row.xs)
    compare("filter_shard_map", vernal.filter_jit(mapped)(row.model, xs), want, tolerance)


def compare(name: str, got: Any, want: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = max(1, np.abs(b).max(initial=0))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * size, err_msg=name)


def check_same(row: Computation, kind: AxisType, tolerance: float = 1e-5) -> None:
    """Refuses a computation that is not the same on a mesh with axes of this kind."""
    want = jax.device_get(jax.jit(derivatives(row.run))(row.model, row.xs))
    mesh = mesh_for(row.model, kind)
    names, functions, models = zip(*ways(row, mesh), strict=True)
    xs = jax.tree.map(lambda a: jax.device_put(a, NamedSharding(mesh, P("data"))), row.xs)

    @jax.jit
    def program(models, xs):
        return [derivatives(f)(model, xs) for f, model in zip(functions, models, strict=True)]

    with jax.set_mesh(mesh):
        got = program(models, xs)
    for name, (gradients, results) in zip(names, got, strict=True):
        for y in jax.tree.leaves(results):
            if kind is EXPLICIT and y.shape[:1] == (BATCH,):
                assert y.sharding.spec[0] == "data", f"{name}: the batch was gathered"
        compare(name, (gradients, results), want, tolerance)
