"""`pipeline`: a `Stack` whose layers are spread over devices, each of which passes its results on to the next.

A device, here a *stage*, holds some consecutive layers. The batch is cut into micro-batches. At each *tick* every stage
runs its layers on one of them and passes the result on: stage s has micro-batch m at tick m + s. With M micro-batches
and S stages there are M + S - 1 ticks, in one `scan`. A stage is busy in M of them; the others are the *bubble*. The
transpose of the scan is the schedule of the gradient (Y. Huang et al., arXiv:1811.06965).

In the bubble, a stage computes too: devices that send each other data inside a layer must work in step. The results are
not used, but their derivatives could do harm: where a layer has an infinite derivative, zero times infinity is NaN. So
derivatives are stopped by `_only_if` where they enter the stage. That changes no primal value: a copy of the weights
that depends on the tick would be kept for every tick.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import Array, lax
from jaxtyping import PRNGKeyArray

from ..harvest import captures, sows
from ..modules import Module, field
from ..transforms import explicit_mesh, filter_custom_jvp, varying_axes, varying_over
from ..trees import check_key, combine, is_array, is_inexact_array, partition
from ._check_pipeline import check_axis, check_layers, check_rows, check_shared, keeps_something
from ._layer_arguments import check_size
from ._sequential import _takes_key
from ._stack import Stack


@jax.named_scope("vernal.nn.pipeline")
def pipeline(
    stack: Stack,
    x: Any,
    *,
    axis_name: str,
    microbatches: int,
    key: PRNGKeyArray | None = None,
) -> Any:
    """`stack(x)` inside `vernal.filter_shard_map`, where each device along an axis of the mesh has some of the layers.

    Pass the stack with `in_specs=jax.P(axis_name)`: each of S devices, the stages, then holds `num_layers / S`
    consecutive layers. They work at the same time, on different micro-batches. A device is idle for
    `(S - 1) / (M + S - 1)` of the time, where M is the number of micro-batches; so choose M several times S. What it
    computes then is not used, but a check in a layer (`vernal.runtime.error_if`) sees it.

    Values and derivatives are those of `stack(x)` on one device, if the layers compute each row by itself. A
    micro-batch is every M-th row. `Stack(checkpoint=...)` applies: with True, what a device keeps for the gradient are
    the inputs of its layers, of all micro-batches.

    Inside the mapped function, `filter_grad` gives each device the gradient of its own layers, and that of parameters
    outside of the stack, which all devices share, in full: sum nothing over the axis. End the loss with
    `jax.lax.pmean` over the axis of the data, if there is one. Results of the pipeline do not vary over its own axis.

    Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", arXiv:1811.06965.

    Args:
        stack: the part of a `Stack` on this device. Its layers may send data over other axes of the mesh.
        x: the input of the first layer, the same on all devices of the axis: any pytree of arrays of shape
            `(rows, ...)`. (What layers need besides, such as a mask for each row, is passed along: they return it as
            it is.)
        axis_name: the axis of the mesh.
        microbatches: M, the number of micro-batches. It must divide the number of rows.
        key: a JAX random key, if the layers take a `key`. Micro-batch m is
            `stack(x[m::M], key=jax.random.fold_in(key, m))`. None passes None on.

    Returns:
        What the last layer returns for the whole batch, on every device of the axis: the last one sends it to all.

    Raises:
        TypeError: if `stack` is not a `Stack`.
        ValueError: outside of such an axis, or with `check_vma=False`; if the layers are not cut over the axis into
            equal parts, or `x` or `key` differs along it; if `x` has no rows that `microbatches` divides; if a layer
            changes the structure, shape or dtype of its input.
        NotImplementedError: if a layer updates a state (a `BatchNorm` while training), takes its random key from
            `nn.keys` or `nn.apply`, or is captured.

    Example:
        >>> import functools
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal import nn
        >>> mesh = vernal.sharding.make_mesh(stage=-1)
        >>> stack = nn.Stack(lambda key: nn.Linear(4, 4, key=key), 8, key=jax.random.key(0))
        >>> x = jax.random.normal(jax.random.key(1), (16, 4))
        >>> run = functools.partial(nn.pipeline, axis_name="stage", microbatches=4)
        >>> specs = jax.P("stage"), jax.P()
        >>> mapped = vernal.filter_shard_map(run, mesh=mesh, in_specs=specs, out_specs=jax.P())
        >>> spread = vernal.sharding.place(stack, mesh, {"**": jax.P("stage")})
        >>> bool(jnp.allclose(vernal.filter_jit(mapped)(spread, x), stack(x), atol=1e-6))
        True
    """
    stages = check_axis(axis_name)
    check_layers(stack, axis_name, stages)
    parts = check_size("pipeline", "microbatches", microbatches)
    key = None if key is None else check_key("pipeline", key)
    check_shared({"x": x, "key": key}, axis_name)
    check_rows(x, parts)
    keys = None if key is None or not _takes_key(stack.layers) else key
    cut = jtu.tree_map(lambda a: _cut(jnp.asarray(a), parts), x)
    out = _Pipeline(stack, keys, axis_name, stages, parts).run(cut)
    return jtu.tree_map(_joined, out)


class _Pipeline(Module):
    """The settings of one call. `key` is None unless the layers take one."""

    stack: Stack
    key: Any
    axis_name: str = field(static=True)
    stages: int = field(static=True)
    parts: int = field(static=True)

    def run(self, x: Any) -> Any:
        """The results for micro-batches along a leading axis."""
        layers, rest = partition(self.stack.layers, is_array)

        def work(layers: Any, x: Any, part: Array) -> Any:
            own = self.stack._with(combine(layers, rest), self.stack.num_layers // self.stages)
            return own(x) if self.key is None else own(x, each={"key": self._keys(part)})

        first = jtu.tree_map(lambda a: a[0], x)
        axes = self._axes(work, layers, first)
        # The layers too, once for all ticks: the transpose is a sum over the other axes.
        layers, x, first = _varying((layers, x, first), axes)
        stage = lax.axis_index(self.axis_name)

        def tick(received: Any, given: Any) -> tuple[Any, Any]:
            number, fresh = given
            part = number - stage
            active = (part >= 0) & (part < self.parts)
            x = jtu.tree_map(lambda a, b: jnp.where(stage == 0, a, b), fresh, received)
            own, x = _only_if(active, (layers, x))
            y = _varying(work(own, x, jnp.clip(part, 0, self.parts - 1)), axes)
            return self._pass_on(y), y

        # In the bubble, stages run on the first micro-batch until they receive one, and on the last one afterwards.
        more = self.stages - 1
        xs = jtu.tree_map(lambda a: jnp.concatenate([a, jnp.repeat(a[-1:], more, 0)]), x)
        ticks = jnp.arange(self.parts + more, dtype=jnp.int32)
        _, ys = lax.scan(tick, first, (ticks, xs))
        return jtu.tree_map(lambda y: self._from_last(y[more:]), ys)

    def _keys(self, part: Array) -> Array:
        """The keys of the layers on this device, for one micro-batch."""
        layers = self.stack.num_layers
        keys = jax.random.split(jax.random.fold_in(self.key, part), layers)
        own = layers // self.stages
        return keys[lax.axis_index(self.axis_name) * own + jnp.arange(own, dtype=jnp.int32)]

    def _axes(self, work: Any, layers: Any, x: Any) -> frozenset[Any]:
        """The axes of `shard_map` over which what goes from stage to stage varies."""
        axes = varying_axes(lax.axis_index(self.axis_name), *jtu.tree_leaves(x))
        while True:
            part = _varying(jnp.zeros((), jnp.int32), axes)
            program = jax.make_jaxpr(work)(*_varying((layers, x), axes), part)
            if sows(program.jaxpr) or captures(program.jaxpr):
                raise keeps_something()
            more = varying_axes(*program.out_avals) - axes
            if not more:
                return axes
            axes |= more

    def _pass_on(self, tree: Any) -> Any:
        """What the stage before this one has; on the first stage zeros, which are not used."""
        steps = [(i, i + 1) for i in range(self.stages - 1)]
        if not steps:
            return tree
        return jtu.tree_map(lambda a: lax.ppermute(a, self.axis_name, steps), tree)

    def _from_last(self, y: Array) -> Array:
        here = lax.axis_index(self.axis_name) == self.stages - 1
        narrow = y.astype(jnp.int8) if y.dtype == bool else y
        sent = lax.psum(jnp.where(here, narrow, jnp.zeros((), narrow.dtype)), self.axis_name)
        return sent.astype(y.dtype)


def _only_if(active: Array, tree: Any) -> Any:
    """The tree, whose derivatives are zero unless `active`."""
    return jtu.tree_map(lambda a: _gate(a, active) if is_inexact_array(a) else a, tree)


@filter_custom_jvp
def _gate(a: Any, active: Array) -> Any:
    return a


@_gate.def_jvp
def _gate_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    (a, active), tangent = primals, tangents[0]
    return a, jnp.where(active, tangent, jnp.zeros((), tangent.dtype))


def _varying(tree: Any, axes: frozenset[Any]) -> Any:
    return jtu.tree_map(lambda a: varying_over(a, axes), tree)


def _cut(x: Array, parts: int) -> Array:
    """Micro-batches along a new first axis. They are every n-th row, so that no row moves where the rows are split over
    an axis that is not mapped over."""
    rows, rest = x.shape[0] // parts, x.shape[1:]
    return jnp.moveaxis(
        _reshaped(x, (rows, parts, *rest), lambda first, *s: (first, None, *s)), 1, 0
    )


def _joined(y: Array) -> Array:
    parts, rows, *rest = y.shape
    y = jnp.moveaxis(y, 0, 1)
    return _reshaped(y, (rows * parts, *rest), lambda first, _, *s: (first, *s))


def _reshaped(x: Array, shape: tuple[int, ...], entries: Any) -> Array:
    mesh = explicit_mesh(x)
    if mesh is None:
        return jnp.reshape(x, shape)
    spec = jax.P(*entries(*jax.typeof(x).sharding.spec))
    return jnp.reshape(x, shape, out_sharding=jax.NamedSharding(mesh, spec))
