"""The machines that `_schedule.py` runs under JAX: states are lists of arrays, slots are the same arrays with one
more leading axis.

Every machine holds a `Loop`, which says what the loop does, and the arrays of one run of it. Arrays that are
written once (`buffers`) are not kept: the forward pass writes them, and steps that are computed again use their
final contents.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..primitives import unvmap_any
from ..transforms import varying_over, zeros_like
from ._perturbation import chosen, replaced
from ._plan import Plan
from ._schedule import Filled


class Loop(NamedTuple):
    """What a loop does, without arrays.

    `cond` is None for a scan, which takes `max_steps` steps. `one_way` means that a step has a derivative in
    reverse mode only, `once_only` that it has effects and must not be computed again.
    """

    cond: Callable[..., Any] | None
    step: Callable[..., tuple[list[Any], list[Any], list[Any]]]
    max_steps: int | None
    plan: Plan
    one_way: bool = False
    once_only: bool = False


class Inputs(NamedTuple):
    """What a loop starts from: lists of arrays, or one mark for each of them."""

    consts: list[Any]
    carry: list[Any]
    buffers: list[Any]
    xs: list[Any]

    @property
    def flat(self) -> list[Any]:
        """All in one list."""
        return [*self.consts, *self.carry, *self.buffers, *self.xs]

    def like(self, flat: Sequence[Any]) -> "Inputs":
        """A flat list as `Inputs` of these lengths."""
        rest = iter(flat)
        return Inputs(*[[next(rest) for _ in part] for part in self])

    def put(self, which: "Inputs", new: Sequence[Any]) -> "Inputs":
        """The inputs with other values where `which` is marked."""
        return self.like(replaced(self.flat, which.flat, new))


class Outputs(NamedTuple):
    """What a loop ends with: lists of arrays, or one mark for each of them."""

    carry: list[Any]
    buffers: list[Any]
    ys: list[Any]

    @property
    def flat(self) -> list[Any]:
        """All in one list."""
        return [*self.carry, *self.buffers, *self.ys]

    def like(self, flat: Sequence[Any]) -> "Outputs":
        """A flat list as `Outputs` of these lengths."""
        rest = iter(flat)
        return Outputs(*[[next(rest) for _ in part] for part in self])


def at(arrays: Sequence[Any], index: Any) -> list[Any]:
    """Entry `index` of each array."""
    return [
        lax.dynamic_index_in_dim(x, index, keepdims=False, allow_negative_indices=False)
        for x in arrays
    ]


def with_entry(arrays: Sequence[Any], index: Any, values: Sequence[Any]) -> list[Any]:
    """The arrays with other entries at `index`."""
    return [
        lax.dynamic_update_index_in_dim(x, value, index, 0, allow_negative_indices=False)
        for x, value in zip(arrays, values, strict=True)
    ]


def stacked_space(loop: Loop, z: Inputs) -> list[Any]:
    """Zeros for the stacked results of a scan, sharded like the results of a step."""
    if loop.cond is not None:
        return []
    assert loop.max_steps is not None
    ys: list[Any] = []

    def look(z: Inputs) -> None:
        # One entry, even if the scan has no steps.
        x = at([_zeros((1, *x.shape[1:]), jax.typeof(x), 0) for x in z.xs], 0)
        out = loop.step(z.consts, z.carry, z.buffers, jnp.int32(0), x, False)[2]
        ys.extend(map(jax.typeof, out))

    jax.eval_shape(look, z)
    return [_zeros((loop.max_steps, *y.shape), y, 1) for y in ys]


def _zeros(shape: tuple[int, ...], aval: Any, new_axes: int) -> Any:
    """Zeros with the sharding and the varying axes of a type that has fewer axes."""
    sharding = None
    if any(axis is not None for axis in aval.sharding.spec):
        spec = jax.sharding.PartitionSpec(*[None] * new_axes, *aval.sharding.spec)
        sharding = jax.NamedSharding(aval.sharding.mesh, spec)
    zeros = lax.full(shape, 0, aval.dtype, sharding=sharding)
    return varying_over(zeros, aval.manual_axis_type.varying)


class _Machine:
    """Integers, tables and slots as arrays."""

    def __init__(self, loop: Loop, z: Inputs):
        self.loop = loop
        self.z = z

    while_loop = staticmethod(lax.while_loop)
    where = staticmethod(lambda pred, yes, no: lax.select(pred, *_int32(yes, no)))
    div = staticmethod(lambda a, b: lax.div(*_int32(a, b)))
    rem = staticmethod(lambda a, b: lax.rem(*_int32(a, b)))
    # Zeros are on the current mesh; a constant made of numbers is on none.
    table = staticmethod(
        lambda values: jnp.zeros(len(values), jnp.int32) + np.array(values, np.int32)
    )
    table_of = staticmethod(lambda entry, length: entry(jnp.arange(length, dtype=jnp.int32)))

    @staticmethod
    def last_below(rows: Any, row: Any, bound: Any) -> tuple[Any, Any]:
        # Two zeros in front, so that there are two entries below any bound.
        table = jnp.zeros((len(rows), len(rows[0]) + 2), jnp.int32)
        entries = at([table + np.pad(np.array(rows, np.int32), ((0, 0), (2, 0)))], row)[0]
        below = jnp.sum(entries < bound, dtype=jnp.int32)
        return tuple(at([entries], jnp.maximum(below - k, 0))[0] for k in (2, 1))

    @staticmethod
    def load(table: Any, index: Any) -> Any:
        return at([table], index)[0]

    @staticmethod
    def store(table: Any, index: Any, value: Any) -> Any:
        return with_entry([table], index, [value])[0]


def _int32(*values: Any) -> list[Any]:
    """As integers of one shape."""
    return list(jnp.broadcast_arrays(*[jnp.asarray(value, jnp.int32) for value in values]))


class Forward(_Machine):
    """Takes the steps of the loop. A state is a pair: what is kept (the carry), and what is written
    only once (the buffers and the stacked results of a scan)."""

    def going(self, index: Any, state: Any) -> Any:
        loop = self.loop
        if loop.cond is None:
            return index < loop.max_steps
        go = unvmap_any(loop.cond(self.z.consts, state[0], state[1], index))
        return go if loop.max_steps is None else go & (index < loop.max_steps)

    def step(self, index: Any, state: Any) -> Any:
        carry, buffers, ys = state
        x = at(self.z.xs, index)
        carry, buffers, y = self.loop.step(self.z.consts, carry, buffers, index, x, False)
        return carry, buffers, with_entry(ys, index, y)

    @staticmethod
    def put(slots: Any, place: Any, state: Any) -> Any:
        return with_entry(slots, place, state[0])


class Backward(_Machine):
    """Takes steps again, and differentiates them.

    The cotangents are those of `consts`, `carry`, `buffers` and `xs` where `which` is marked. Those
    of the carry and the buffers belong to the current step; the others are accumulated.
    """

    def __init__(
        self,
        loop: Loop,
        z: Inputs,
        which: tuple[Inputs, Outputs],
        buffers: list[Any],
        cts_ys: list[Any],
    ):
        super().__init__(loop, z)
        self.which, self.which_out = which
        self.buffers = buffers
        self.cts_ys = cts_ys

    put = staticmethod(with_entry)
    take = staticmethod(at)

    def step(self, index: Any, state: Any) -> Any:
        x = at(self.z.xs, index)
        return self.loop.step(self.z.consts, state, self.buffers, index, x, True)[0]

    def back(self, index: Any, state: Any, cotangents: Inputs) -> Inputs:
        point = Inputs(self.z.consts, state, self.buffers, at(self.z.xs, index))

        def of_chosen(*new: Any) -> list[Any]:
            consts, carry, buffers, x = point.put(self.which, new)
            out = self.loop.step(consts, carry, buffers, index, x, True)
            return chosen(Outputs(*out).flat, self.which_out.flat)

        out, pull = jax.vjp(of_chosen, *chosen(point.flat, self.which.flat))
        consts, carry, buffers, xs = cotangents
        ys = [None if ct is None else at([ct], index)[0] for ct in self.cts_ys]
        given = [*carry, *buffers, *ys]
        given = [zeros_like(y) if ct is None else ct for y, ct in zip(out, given, strict=True)]
        new = cotangents.like(pull(given))
        consts = [a + b for a, b in zip(consts, new.consts, strict=True)]
        return Inputs(consts, new.carry, new.buffers, with_entry(xs, index, new.xs))


class Saved(NamedTuple):
    """What the backward pass starts from."""

    filled: Filled
    buffers: list[Any]


def space_for_states(plan: Plan, carry: Sequence[Any]) -> list[Any]:
    """The slots: copies of the initial state, so that they have its sharding."""
    return [jnp.broadcast_to(x, (plan.slots, *x.shape)) for x in carry]
