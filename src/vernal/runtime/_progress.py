"""Progress meters: a compiled loop shows its progress.

The difficulty: the loop runs in compiled code, Python draws the display, and a call from one to the
other costs more than a small step of the loop. One compiled program may run in several threads at
once, hold several meters, be batched, and run parts of itself again (to differentiate them).

The plan: a meter is three functions, `init`, `step` and `close`, on a state of three scalars that
the loop carries. `init` gets a number from the host, at run time, so that every run has its own bar.
`step` compares the progress with what was shown last, in compiled code, and calls the host only if
it has grown by `minimum_increase`. The host stores the bars by number.

The calls to the host return the number, and so become part of the state: each can only happen
after the one before, and `close`, the only call with an effect of its own, after all of them. Code
that runs again only for its derivative does not call again, because its number is not used.

Invariants: the state never has a batch axis that matters (`step` and `close` look across the whole
batch); it carries no derivative; the host draws only progress beyond what it has drawn, and nothing
for a closed bar. So where steps run again together with their state, as in a checkpointed loop, the
host is called once more for every percent and shows nothing. (A checkpoint around `init` and `close`
runs them again as well: the second run has a second bar.)

Glossary: *number* names a bar; *shown* is the progress that was drawn last; *latest* is the progress
of the last step, for `close`.
"""

import abc
import functools
import itertools
import threading
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from .._ground import Primitive, lower_fun, register_lowering
from ..modules import Module, field
from ..primitives import unvmap_max, unvmap_min
from ..show import short, value_error

State = TypeVar("State")

_NUMBER = jax.ShapeDtypeStruct((), np.int32)
# The rounding of float32 in the sum of a hundred increases.
_ROUNDING = 1e-6


class ProgressState(Module):
    """The state that a loop carries for a meter that draws.

    Attributes:
        number: int32[], which bar.
        shown: float32[], the progress that was drawn last.
        latest: float32[], the progress of the last step.
    """

    number: Any
    shown: Any
    latest: Any


class AbstractProgressMeter(Module, Generic[State]):
    """Shows the progress of a compiled loop: call `init` before it, `step` in it, `close` after it.

    Always call `close`: without it the state is unused, so the compiler eliminates the meter and
    nothing is drawn. Subclasses define the three methods. The state is a pytree of arrays that the loop
    carries. All three may be called under every transformation, and have no derivative. Under `vmap`
    they show the batch as a whole; inside `shard_map` every device has its own bar. Of several
    processes (`vernal.sharding.initialise`) only the first draws.

    Example:
        >>> import jax
        >>> import vernal
        >>> meter = vernal.runtime.TextProgressMeter(minimum_increase=0.5)
        >>> @jax.jit
        ... def loop():
        ...     def body(i, state):
        ...         return meter.step(state, (i + 1) / 10)
        ...     meter.close(jax.lax.fori_loop(0, 10, body, meter.init()))
        >>> loop(); jax.effects_barrier()
        0.00%
        50.00%
        100.00%
    """

    @abc.abstractmethod
    def init(self) -> State:
        """Opens a bar, when the program runs.

        Returns:
            The state for the first `step`.
        """

    @abc.abstractmethod
    def step(self, state: State, progress: Any) -> State:
        """Shows the progress, if it has grown enough.

        Args:
            state: what `init` or the last `step` returned.
            progress: a real scalar from 0 to 1. Under `vmap` the smallest of the batch counts.

        Returns:
            The state for the next `step`, with the same structure, shapes and dtypes.
        """

    @abc.abstractmethod
    def close(self, state: State) -> None:
        """Closes the bar, when the program reaches this point.

        Args:
            state: what the last `step` returned.
        """


class NoProgressMeter(AbstractProgressMeter):
    """Shows nothing."""

    def init(self) -> None:
        return None

    def step(self, state: Any, progress: Any) -> Any:
        del progress
        return state

    def close(self, state: Any) -> None:
        del state


class Bar(abc.ABC):
    """The host's display for one run of a loop. Only one thread calls it at a time."""

    @abc.abstractmethod
    def draw(self, progress: float) -> None:
        """Shows a progress from 0 to 1, greater than the one before."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Leaves what was drawn last on the screen."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Leaves what was drawn last where it is; the next `draw` begins anew below."""


class _Host:
    """All open bars, with what they have drawn.

    The host does not learn that a computation has failed, so an open bar may never move again.
    Therefore all bars settle when a new one is opened, and those that still move are drawn again
    below it.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.bars: dict[int, tuple[Bar, float]] = {}
        # The bars drawn since the last one was opened.
        self.moving: set[int] = set()

    def _draw(self, number: int, bar: Bar, progress: float) -> None:
        self.bars[number] = bar, progress
        self.moving.add(number)
        try:
            bar.draw(progress)
        except (OSError, ValueError):
            # The stream was closed: drop the bar rather than fail the computation.
            self._forget(number)

    def _forget(self, number: int) -> None:
        del self.bars[number]
        self.moving.discard(number)

    def open(self, meter: Any) -> Any:
        with self.lock:
            for bar, _ in self.bars.values():
                bar.settle()
            self.moving.clear()
            number = next(self.numbers)
            # Of several processes that run the same program, only the first draws.
            if jax.process_index() == 0:
                self._draw(number, meter._bar(number), 0.0)
        return np.int32(number)

    def move(self, number: Any, progress: Any) -> Any:
        with self.lock:
            bar, before = self.bars.get(int(number), (None, 1.0))
            if bar is not None and float(progress) > before:
                self._draw(int(number), bar, float(progress))
        return np.int32(number)

    def close(self, number: Any, progress: Any) -> None:
        with self.lock:
            self.move(number, progress)
            if int(number) in self.bars:
                self.bars[int(number)][0].finish()
                self._forget(int(number))


_host = _Host()


def several_moving() -> bool:
    """Whether more than one bar is moving, so that they must be told apart."""
    return len(_host.moving) > 1


def _open_on_host(*, meter: Any) -> Any:
    return io_callback(functools.partial(_host.open, meter), _NUMBER)


# An operation that makes a new number whenever it runs. JAX's callbacks do not serve: the compiler moves
# the pure one out of loops, because none of its arguments change, and `jax.checkpoint` refuses the one
# with effects. This one has an effect for the compiler, but none for JAX.
_open_p = Primitive("open_bar")
_open_p.def_impl(lambda *, meter: jnp.asarray(_host.open(meter)))
_open_p.def_abstract_eval(lambda *, meter: jax.make_jaxpr(_one_number)().out_avals[0])
register_lowering(_open_p, lower_fun(_open_on_host, multiple_results=False))


def _one_number() -> Any:
    return jnp.zeros((), np.int32)


class DrawingMeter(AbstractProgressMeter):
    """A meter that the host draws. Subclasses define how, in `_bar`."""

    minimum_increase: float = field(default=0.01, converter=float)

    def __check_init__(self) -> None:
        if not 0.01 <= self.minimum_increase <= 1:
            raise value_error(
                "`minimum_increase` of a progress meter is out of range",
                where=f"{type(self).__name__}(minimum_increase=...)",
                expected="a number from 0.01 to 1",
                got=repr(self.minimum_increase),
                instead="minimum_increase=0.02",
            )

    @abc.abstractmethod
    def _bar(self, number: int) -> Bar:
        """A new bar. Called on the host."""

    def init(self) -> ProgressState:
        return ProgressState(
            _open_p.bind(meter=self), np.zeros((), np.float32), np.zeros((), np.float32)
        )

    def step(self, state: Any, progress: Any) -> ProgressState:
        progress = jnp.asarray(progress)
        if progress.shape != () or not jnp.isrealobj(progress):
            raise value_error(
                "the progress of a loop must be one number",
                where=f"argument `progress` of {type(self).__name__}.step",
                expected="a real scalar from 0 to 1",
                got=short(progress),
                instead="jnp.min(progress) for an array",
            )
        number, shown, before = map(unvmap_max, (state.number, state.shown, state.latest))
        progress = jax.lax.stop_gradient(progress).astype(jnp.float32)
        progress = jnp.clip(unvmap_min(progress), 0, 1)
        # A progress that is NaN is neither shown nor kept.
        is_due = progress - shown >= np.float32(self.minimum_increase - _ROUNDING)
        number, shown = jax.lax.cond(is_due, _move, _stay, number, shown, progress)
        return ProgressState(number, shown, jnp.fmax(progress, before))

    def close(self, state: Any) -> None:
        jax.debug.callback(_host.close, unvmap_max(state.number), unvmap_max(state.latest))


def _move(number: Any, shown: Any, progress: Any) -> Any:
    del shown
    return jax.pure_callback(_host.move, _NUMBER, number, progress), progress


def _stay(number: Any, shown: Any, progress: Any) -> Any:
    del progress
    return number, shown
