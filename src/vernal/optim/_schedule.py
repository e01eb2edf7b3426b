"""`Schedule`: a learning rate that changes with the step count, as a value.

Every call of an Optax schedule factory returns a new closure. A `Schedule` calls the factory whenever it is called
itself, with its leaves, traced or not: nothing that the factory decides is kept.
"""

from collections.abc import Callable
from typing import Any

from .._ground import callable_name
from ..show import short, type_error
from ._call import FactoryCall
from ._trials import run_alike
from ._whole import optax_promotes


def _value(schedule: Any, count: Any) -> Any:
    with optax_promotes():
        return schedule.build()(count)


class Schedule(FactoryCall):
    """An Optax schedule as a value: a module whose leaves are its numbers.

    Pass it to an `Optimizer` in place of a learning rate, or call it with the step count. In a compiled step another
    one, with the same or with other numbers, runs the same program. For a population of schedules, stack the numbers,
    and use `vmap`.

    Leaves are chosen as in an `Optimizer`: floats and arrays are leaves; step counts, boundaries and flags are not.
    These floats of Optax's factories are structure too, because they are compared or converted to integers:
    `peak_value` of `warmup_cosine_decay_schedule`, `decay_rate` of the exponential ones, scales at boundaries,
    everything in `sgdr_schedule`, shares and divisors of the one-cycle schedules. For a warm-up whose peak is a leaf,
    join two schedules::

        Schedule(optax.join_schedules, [Schedule(optax.linear_schedule, 0.0, peak, 100),
            Schedule(optax.cosine_decay_schedule, peak, 900)], boundaries=[100])

    Args:
        factory: a function that returns a function of the step count, such as
            `optax.cosine_decay_schedule`. Settings may be schedules too.
        *args: the positional arguments of the factory.
        **settings: its keyword arguments. An array with axes is a population.

    Attributes:
        factory: as given.
        settings: by name, the settings that are leaves, or trees that may hold leaves.
        structure: the other settings, as pairs of name and value.

    Raises:
        TypeError: for a setting that the factory does not have, or one that is missing; for a factory that does not
            return a function; for a leaf that the factory looks at (compares or converts): pass it as a
            `vernal.Static`.

    Example:
        >>> import jax, optax
        >>> import vernal
        >>> schedule = vernal.optim.Schedule(optax.linear_schedule, 0.0, 1.0, transition_steps=10)
        >>> rate_at = jax.jit(lambda schedule, count: schedule(count))
        >>> print(rate_at(schedule, 5), rate_at(schedule.replace(end_value=3.0), 5))
        0.5 1.5
        >>> rate_at._cache_size()
        1
        >>> opt = vernal.Optimizer(optax.adam, schedule)
    """

    def __init__(self, factory: Callable[..., Any], /, *args: Any, **settings: Any):
        super().__init__(factory, *args, **settings)

    def build(self) -> Callable[[Any], Any]:
        """The Optax schedule.

        Returns:
            The function of the step count that the factory returns for the numbers of this schedule.
        """
        made = super().build()
        if callable(made):
            return made
        name = callable_name(self.factory)
        raise type_error(
            "the factory of a Schedule must return a function of the step count",
            where=f"Schedule({name}, ...)",
            expected="a function such as `optax.cosine_decay_schedule`",
            got=f"{name}, which returns {short(made)}",
            instead="Optimizer(...) for a gradient transformation",
        )

    def _as_setting(self) -> Any:
        return self

    def __call__(self, count: Any) -> Any:
        """The value at a step count.

        Args:
            count: the number of steps taken before, an integer.

        Returns:
            The value, a scalar.

        Raises:
            TypeError: for a setting that the schedule looks at (compares or converts).
        """
        return run_alike(self, _value, count)
