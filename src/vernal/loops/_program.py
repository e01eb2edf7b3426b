"""A loop as pure functions of lists of arrays: what every kind of loop runs.

The user's functions may be any callables, on any tree, and may close over any array. Each is traced
here, once, to a jaxpr whose constants are the arrays that it closes over. So JAX never hashes or
compares a user's function, everything that a step depends on is an argument of it (and gets its
gradient), and a loop that runs a step in several places runs the same one.

`body` is traced again only if

* a part of the initial carry is the same on all devices of `jax.shard_map`, and differs after a step;
* the condition differs between those devices;
* a weakly typed part of the initial carry must take the dtype that a step returns, as in
  `jax.lax.while_loop`;
* the loop replays steps (`kind="checkpointed"`) and has buffers, which a replay uses differently (see
  `_buffers.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.lax import stop_gradient

from .._ground import (
    callable_name,
    convert_constvars_jaxpr,
    mapped_aval,
    may_run_again,
    strong,
    weak_like,
)
from ..harvest import checks, sow_if, sows
from ..primitives import borrow_if_vmap, select_if_vmap
from ..show import message, short, type_error
from ..transforms import keep_rules, one_way, varying_axes, varying_over
from ..trees import is_array
from ._buffers import Active
from ._carry import same_type
from ._per_device import refuse_collectives, vary_inside, without_gradient

_INT32 = int(jnp.iinfo(jnp.int32).max)
Arrays = list[Any]
Body = Callable[[Any, Arrays], tuple[Any, Any]]


@runtime_checkable
class Layout(Protocol):
    """The structure of a carry (see `Carry`): converts between what a loop's functions see and lists of arrays."""

    def start(self, tree: Any) -> tuple[Arrays, Arrays]:
        """The arrays and the buffers of the carry."""
        ...

    def fill(self, arrays: Arrays, buffers: Arrays, active: Active | None, replay: bool) -> Any:
        """The carry as the functions see it."""
        ...

    def take(self, tree: Any, of: str) -> tuple[Arrays, Arrays]:
        """The arrays and the buffers of what a step returned."""
        ...

    def check_types(self, before: Sequence[Any], after: Sequence[Any], of: str) -> None:
        """Refuses a step that changes the type of an array."""
        ...

    def finish(self, arrays: Arrays, buffers: Arrays) -> Any:
        """The carry after the loop."""
        ...


class _Constants:
    """What the functions of a loop close over, without duplicates."""

    def __init__(self) -> None:
        self.values: Arrays = []
        self._places: dict[int, int] = {}

    def place(self, value: Any) -> int:
        """The index of a value, which is added if it is new."""
        if id(value) not in self._places:
            self._places[id(value)] = len(self.values)
            self.values.append(value)
        return self._places[id(value)]

    def arrays(self) -> Arrays:
        """All of them, as JAX arrays."""
        return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in self.values]


class _Traced:
    """A function of lists of arrays, as a jaxpr that closes over nothing.

    Args:
        fn: the function. It returns a tree of arrays.
        args: its arguments, or their types.
        constants: the constants of the loop, to which those of `fn` are added.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], constants: _Constants):
        closed, self.out = jax.make_jaxpr(fn, return_shape=True)(*args)
        self.jaxpr = keep_rules(convert_constvars_jaxpr(closed.jaxpr))
        self.types = closed.out_avals
        self.places = [constants.place(const) for const in closed.consts]

    def __call__(self, consts: Sequence[Any], *args: Any) -> Any:
        own = [consts[i] for i in self.places]
        out = eval_jaxpr(self.jaxpr, (), *own, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(self.out), out)


class Functions:
    """`cond` and `body` of a loop as pure functions that hold no array, so that derivative rules
    may keep them.

    Args:
        cond: the condition, or None for a loop of a fixed number of steps.
        body: a step.
        again: a step that is computed again, when the buffers have their final contents.
        of_cond: the number of constants of the condition. They come first; then those of the step, a carry with which
            a step is safe, and whether any step is made.
        max_steps: the greatest number of steps, or None.
    """

    def __init__(
        self,
        cond: _Traced | None,
        body: _Traced,
        again: _Traced,
        of_cond: int,
        max_steps: int | None,
    ):
        self._cond, self._of_cond = cond, of_cond
        # Steps are numbered as far as int32 goes.
        self._most = None if max_steps is None or max_steps > _INT32 else max_steps
        self._bodies = body, again
        # Whether the condition and a step hold checks, which report the number of the step.
        self._checked_cond = cond is not None and checks(cond.jaxpr)
        self._checked_step = checks(body.jaxpr)
        self.checked = self._checked_cond or self._checked_step
        # Whether a step has a derivative in reverse mode only.
        self.one_way = one_way(body.jaxpr)
        # Whether a step has effects, such as reading the next line of a file, and must not be computed again.
        self.once_only = not all(may_run_again(fn.jaxpr) for fn in (cond, body) if fn is not None)

    def cond(self, consts: Arrays, carry: Arrays, buffers: Arrays, index: Any) -> Any:
        """Whether to take the step of this index: bool[]. The index is only for messages."""
        own_cond = self._cond
        assert own_cond is not None
        # A bool has no derivative, so operations without one may compute it.
        consts, carry, buffers = stop_gradient((consts[: self._of_cond], carry, buffers))
        if self._checked_cond:

            def asked() -> Any:
                return sow_if(None, own_cond, consts, carry, buffers, step=index)

            # Some kinds of loops ask once more after the last step that they may take: nothing depends on it.
            if self._most is None:
                return asked()
            return jax.lax.cond(index < self._most, asked, lambda: jnp.array(False))
        return own_cond(consts, carry, buffers)

    def step(
        self, consts: Arrays, carry: Arrays, buffers: Arrays, index: Any, x: Arrays, replay: bool
    ) -> tuple[Arrays, Arrays, Arrays]:
        """One step; returns `(carry, buffers, y)`. The index is only for messages. An element of a batch for which
        `cond` does not hold stays unchanged, and is computed with a safe carry. With `replay` the buffers have their
        final contents."""
        active, actives, given = None, None, carry
        if self._cond is not None:
            active = self.cond(consts, carry, buffers, index)
            *safe, ever = consts[len(consts) - len(carry) - 1 :]
            given = select_if_vmap(active, carry, safe)
            if buffers:
                # An element that makes no step reads what another one reads, so it needs the other one's carry too.
                given = borrow_if_vmap(ever, given)
            actives = Active(active, ever)
        body, args = self._bodies[replay], (consts[self._of_cond :], actives, given, buffers, x)
        if self._checked_step:
            new, new_buffers, out = sow_if(active, body, *args, step=index)
        elif active is not None and sows(body.jaxpr):
            new, new_buffers, out = sow_if(active, body, *args)
        else:
            new, new_buffers, out = body(*args)
        new = [strong(x) for x in new]
        if active is not None:
            new = select_if_vmap(active, new, carry)
        return new, new_buffers, jax.tree.leaves(out)


class Program(NamedTuple):
    """A loop, traced.

    Attributes:
        functions: its condition and its step.
        consts: all arrays that these depend on besides the carry (see `Functions`).
        carry: the arrays of the initial carry.
        buffers: its buffers.
        layout: the structure of the carry.
        out: the structure of what a step returns besides the carry.
        types: the types of the arrays of the final carry, weak where they are weak in JAX's own loop.
        out_types: the types of what a step returns besides the carry.
    """

    functions: Functions
    consts: Arrays
    carry: Arrays
    buffers: Arrays
    layout: Layout
    out: Any
    types: Sequence[Any]
    out_types: Sequence[Any]

    def finish(self, carry: Arrays, buffers: Arrays) -> Any:
        """The carry as the user sees it when the loop has ended."""
        return self.layout.finish(list(map(weak_like, carry, self.types)), buffers)


def trace_loop(
    init: Any,
    layout: Layout,
    body: Body,
    cond: Callable[[Any], Any] | None = None,
    xs: Sequence[Any] = (),
    *,
    replays: bool,
    of: str,
    max_steps: int | None = None,
) -> Program:
    """Traces the functions of a loop.

    Args:
        init: the carry.
        layout: its structure.
        body: takes the carry and the list of this step's slices; returns the next carry and a tree of arrays.
        cond: the user's condition, or None for a loop of a fixed number of steps.
        xs: the arrays that the steps take slices of.
        replays: whether steps may be computed again.
        of: what `body` returns, for messages.
        max_steps: the greatest number of steps of a loop with a condition, or None.
    """
    one = jax.ShapeDtypeStruct((), jnp.bool_)
    active = None if cond is None else Active(one, one)
    slices = [mapped_aval(x.shape[0], 0, jax.typeof(x)) for x in xs]

    def trace(start: Arrays, replay: bool, constants: _Constants) -> _Traced:
        def run(active: Any, arrays: Arrays, buffers: Arrays, x: Arrays) -> Any:
            new, out = body(layout.fill(arrays, buffers, active, replay), x)
            return *map(_varying_like, layout.take(new, of), (arrays, buffers)), out

        return _Traced(run, (active, start[:count], start[count:], slices), constants)

    arrays, buffers = layout.start(init)
    count, start = len(arrays), [*arrays, *map(strong, buffers)]
    axes: frozenset[Any] = frozenset()
    while True:
        constants, those_of_cond = _Constants(), _Constants()
        traced = trace(start, False, constants)
        settled = [*map(_settled, start, traced.types)]
        if any(new is not old for new, old in zip(settled, start, strict=True)):
            start = settled
            continue
        layout.check_types(list(map(jax.typeof, start)), traced.types, of)
        # The carry is weakly typed only during the trace, so that `x * 2` gets the right type, and in the result.
        carry, buffers = list(map(strong, start[:count])), start[count:]
        of_cond = None if cond is None else _trace_cond(cond, layout, carry, buffers, those_of_cond)
        if of_cond is None or of_cond.types[0].manual_axis_type.varying <= axes:
            break
        # Each device stops independently, so the whole carry differs between them.
        (one,) = of_cond.types
        active, axes = Active(one, one), one.manual_axis_type.varying
        cond, body = vary_inside((cond, body), axes)
        start = [varying_over(x, axes) for x in start]
    again = trace(start, True, constants) if replays and buffers else traced
    if of_cond is not None and sows(of_cond.jaxpr):
        raise _state_in_condition(cond)
    first, consts = those_of_cond.arrays(), constants.arrays()
    functions = Functions(of_cond, traced, again, len(first), max_steps)
    if of_cond is not None:
        if axes:
            refuse_collectives(of_cond.jaxpr, axes, f"`{callable_name(cond)}`")
            refuse_collectives(traced.jaxpr, axes, of)
            consts = [without_gradient(x, axes, of) for x in consts]
        ever = functions.cond(first, carry, buffers, jnp.int32(0))
        start = borrow_if_vmap(ever, carry, constant=True)
        consts = [*first, *_safe(ever, consts, axes, traced), *start, ever]
    types, out_types = traced.types[:count], traced.types[len(carry) + len(buffers) :]
    return Program(functions, consts, carry, buffers, layout, traced.out[2], types, out_types)


def _safe(ever: Any, consts: Arrays, axes: frozenset[Any], body: _Traced) -> Arrays:
    """The arrays that a step closes over; for an element of a batch that makes no step, those of another element."""
    if sows(body.jaxpr):
        # A state is changed in place, so it must not be another element's.
        return consts
    # Arrays that are the same on all devices of `jax.shard_map` stay the same.
    return [x if axes - varying_axes(x) else borrow_if_vmap(ever, [x])[0] for x in consts]


def _settled(x: Any, out: Any) -> Any:
    """An initial value, made to vary over the axes of `shard_map` that a step's result varies over, and, if weakly
    typed, promoted to its dtype."""
    x = varying_over(x, out.manual_axis_type.varying)
    own = jax.typeof(x)
    if not own.weak_type or same_type(own, out):
        return x
    with jax.numpy_dtype_promotion("standard"):
        return x.astype(jnp.result_type(x, out))


def _varying_like(new: Arrays, old: Arrays) -> Arrays:
    """What a step returns, varying over at least the axes that the step's input varied over."""
    return [varying_over(x, varying_axes(y)) for x, y in zip(new, old, strict=True)]


def _trace_cond(
    cond: Callable[[Any], Any],
    layout: Layout,
    carry: Arrays,
    buffers: Arrays,
    constants: _Constants,
) -> _Traced:
    def run(carry: Arrays, buffers: Arrays) -> Any:
        return _as_bool(cond(layout.fill(carry, buffers, None, False)), callable_name(cond))

    return _Traced(run, (carry, buffers), constants)


def _state_in_condition(cond: Any) -> NotImplementedError:
    return NotImplementedError(
        message(
            "the condition of a loop cannot change state",
            where=f"`{callable_name(cond)}`",
            expected="a condition without side effects: how often it is evaluated is unspecified",
            instead="call the layer in the body of the loop",
        )
    )


def _as_bool(pred: Any, name: str) -> Any:
    """The result of a condition, as bool[]."""
    scalar = is_array(pred) and pred.shape == () and pred.dtype == jnp.bool_
    if type(pred) is bool or scalar:
        return jnp.asarray(pred)
    raise type_error(
        "the condition of a loop must be a scalar bool",
        where=f"what `{name}` returns",
        expected="bool[], or a Python bool",
        got=short(pred),
        instead="`x > 0` for a number; `jnp.any(mask)` or `jnp.all(mask)` for an array; "
        "`jax.vmap` of the loop to stop each element on its own",
    )
