"""Finding misused buffers: an element that is written twice, or written after it was read.

A loop cannot see that: to it a buffer is a plain array. So while `debug_buffers` is on, every loop with buffers first
runs once more, as a plain loop without derivatives, whose carry also holds the states of the buffers (see
`_buffer_states.py`). The loop itself is unchanged; its inputs are threaded through the check.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._ground import trace_flag
from ..harvest import reap
from ..transforms import chosen, poison, replaced, varying_axes
from ..trees import split
from ._buffer_states import has_failed
from ._buffers import Active
from ._carry import Carry, numbers_to_arrays
from ._program import Program, trace_loop


@functools.cache
def _flag() -> Any:
    # Made on first use: importing the package leaves JAX unchanged.
    return trace_flag("vernal_debug_buffers", "Check how the buffers of loops are used.")


def debug_buffers(enable: bool = True) -> contextlib.AbstractContextManager[None]:
    """A context in which loops check how their buffers are used.

    An element of a buffer may be written once, and read after it is written, or if it is never written. A loop that
    breaks this rule silently has a wrong derivative; in this context it raises an error. Checking takes at least twice
    the time, and more memory. Functions that are already compiled are compiled again inside.

    Args:
        enable: whether to check; False turns the check off inside another such context.

    Returns:
        A context manager, for the thread that enters it.

    Raises:
        RuntimeCheckError: when such a loop runs, if it writes an element that was read or written before, or reads an
            old version of an element.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.loops import debug_buffers, fori_loop
        >>> def running_sum(xs):
        ...     def body(i, sums):
        ...         return sums.at[i].set(xs[i] + sums[i - 1])  # sums[-1] is read before it is written
        ...     return fori_loop(0, 3, body, jnp.zeros(3), buffers=lambda sums: sums)
        >>> with debug_buffers():
        ...     running_sum(jnp.ones(3))
        Traceback (most recent call last):
            ...
        vernal.runtime.RuntimeCheckError: an element of a buffer is written after it was read
        ...
    """
    return _flag()(enable)


def check_buffers(
    program: Program,
    xs: list[Any],
    init: Any,
    layout: Carry,
    body: Callable[[Any, list[Any]], tuple[Any, Any]],
    cond: Callable[[Any], Any] | None,
    of: str,
    run: Callable[[Program, list[Any]], Sequence[Any]],
) -> tuple[Program, list[Any]]:
    """A loop that ends the program if it misuses its buffers, while `debug_buffers` is on.

    Args:
        program: the loop.
        xs: the stacks that its steps take slices of.
        init: its initial carry, as the user gave it.
        layout: the structure of the carry.
        body: as for `trace_loop`.
        cond: as for `trace_loop`.
        of: as for `trace_loop`.
        run: runs a loop with its `xs`, without derivatives; returns the arrays and the buffers of its last carry.

    Returns:
        The loop and `xs`, whose values and derivatives depend on the outcome of the check.
    """
    watched = layout.new_buffers()
    if not (_flag.cache_info().currsize and _flag().value and any(watched)):
        return program, xs
    arrays, rest = split(numbers_to_arrays(init))
    cut = jax.lax.stop_gradient
    noted = trace_loop(
        rest.fill([cut(x) for x in arrays]),
        _Watched(layout, watched),
        lambda seen, x: (_step(layout, body, cond, of, seen, x), ()),
        None if cond is None else lambda seen: cond(seen.carry()),
        xs,
        replays=False,
        of=of,
    )
    noted = noted._replace(consts=[cut(x) for x in noted.consts])
    states = noted.finish(*run(noted, [cut(x) for x in xs]))
    failed = jnp.array([has_failed(state) for state in states]).any()
    consts, carry, buffers, xs = (
        [_tied(x, failed) for x in part]
        for part in (program.consts, program.carry, program.buffers, xs)
    )
    return program._replace(consts=consts, carry=carry, buffers=buffers), xs


def _tied(x: Any, failed: Any) -> Any:
    """The array, made to depend on a flag. Its derivative depends on the flag too: the program may use that alone."""
    apart = varying_axes(failed) - varying_axes(x)
    if apart:
        # Arrays that are the same on all devices stay the same.
        failed = jax.lax.pmax(failed.astype(jnp.int32), tuple(sorted(apart))) > 0
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x * jnp.where(failed, jnp.nan, 1).astype(x.dtype)
    return poison(x, failed)


class _Seen(NamedTuple):
    """A carry and the states of its buffers."""

    layout: Carry
    watched: Sequence[bool]
    arrays: list[Any]
    buffers: list[Any]
    states: list[Any]
    active: Active | None

    def carry(self, states: Sequence[Any] | None = None) -> Any:
        """The carry as the user's functions see it; with `states`, their reads and writes are recorded there."""
        if states is not None:
            states = replaced([None] * len(self.watched), self.watched, states)
        return self.layout.fill(self.arrays, self.buffers, self.active, False, states)


class _Watched:
    """The layout of a carry that ends with the states of its buffers, in place of a `Carry`."""

    def __init__(self, layout: Carry, watched: Sequence[bool]):
        self._layout = layout
        self._watched = watched
        self.check_types = layout.check_types

    def start(self, tree: Any) -> tuple[list[Any], list[Any]]:
        arrays, buffers = self._layout.start(tree)
        new = [jnp.zeros_like(x, jnp.int8) for x in chosen(buffers, self._watched)]
        return [*arrays, *new], buffers

    def fill(
        self, arrays: list[Any], buffers: list[Any], active: Active | None, replay: bool
    ) -> _Seen:
        del replay
        n = len(arrays) - sum(self._watched)
        return _Seen(self._layout, self._watched, arrays[:n], buffers, arrays[n:], active)

    def take(self, tree: _Seen, of: str) -> tuple[list[Any], list[Any]]:
        del of
        return [*tree.arrays, *tree.states], tree.buffers

    def finish(self, arrays: list[Any], buffers: list[Any]) -> list[Any]:
        """The states."""
        del buffers
        return arrays[len(arrays) - sum(self._watched) :]


def _step(
    layout: Carry,
    body: Callable[[Any, list[Any]], tuple[Any, Any]],
    cond: Callable[[Any], Any] | None,
    of: str,
    seen: _Seen,
    x: list[Any],
) -> _Seen:
    def step(states: list[Any]) -> Any:
        if cond is not None:
            # A replayed step calls it again, after more has been written.
            cond(seen.carry(states))
        return layout.take(body(seen.carry(states), x)[0], of)

    (arrays, buffers), states = reap(step)(seen.states)
    return seen._replace(arrays=arrays, buffers=buffers, states=states)
