"""`Schedule`: a learning rate that changes with the count of steps, as a value.

Optax's schedules are closures, new ones at every call of their factory, and most factories look at
their numbers while they build: none can be called while a program is traced. So the factory is
called once, when the Schedule is made, with numbers that remember how they were computed
(`_recorded.py`). The Schedule keeps what came out, without the numbers, and puts those of its
leaves in whenever it is called.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._ground import by_name, callable_name, is_named
from ..modules import field
from ..show import is_traced, message, path_text, short
from ..transforms import Recipe, captured
from ..trees import is_array
from ._call import FactoryCall, is_call
from ._factory import factory_of
from ._recorded import Recorded, StandIn, compute
from ._settings import as_leaves, is_leaf_setting, is_number
from ._step import optax_promotes

_LOOKED_AT = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def _is_leaf(path: Sequence[Any], value: Any, parameters: Any) -> bool:
    """Whether a number becomes a leaf, by where it is in the settings."""
    if not is_number(value):
        return False
    if np.ndim(value) > 0 or len(path) > 1:
        return isinstance(value, float) or (
            is_array(value) and jnp.issubdtype(value.dtype, jnp.floating)
        )
    # Without its name, which would tell a setting close to one: no schedule computes `1 - b`.
    return is_leaf_setting("", value, parameters.get(path[0].key))


def _concrete(value: Any) -> Any:
    """What a number compares by: with all its digits, if it has no axes."""
    if is_traced(value):
        return value
    return np.asarray(value) if np.ndim(value) > 0 else float(value)


class _Settings:
    """The settings of a call, as a flat list; and the calls of the factory with recorded numbers."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.fn = fn
        self.factory = factory_of(fn)
        self.values = self.factory.by_name(args, kwargs)
        keyed, self.treedef = jtu.tree_flatten_with_path(self.values, is_leaf=is_call)
        self.paths = [path for path, _ in keyed]
        self.items = [x for _, x in keyed]
        parameters = self.factory.parameters
        self.numbers = {i for i, (path, x) in enumerate(keyed) if _is_leaf(path, x, parameters)}
        self.schedules = {i for i, x in enumerate(self.items) if is_call(x)}

    def call(self, recorded: set[int]) -> tuple[Any, set[int]]:
        """What the factory returns, and the recorded numbers that it made plain ones of."""
        converted: set[int] = set()
        items = list(self.items)
        for i in recorded:
            items[i] = Recorded(_concrete(items[i]), ("given", i), converted)
        for i in self.schedules:
            items[i] = StandIn(self.name(i), ("given", i))
        args, kwargs = self.factory.arguments(self.treedef.unflatten(items))
        with optax_promotes():
            return self.fn(*args, **kwargs), converted

    def name(self, i: int) -> str:
        path = self.paths[i]
        return path_text(path[1:], root=str(path[0].key))

    def works_with(self, i: int) -> bool:
        try:
            self.call({i})
        except Exception:
            # Whatever a factory says of a number that is none of Python's.
            return False
        return True

    def build(self) -> tuple[Any, set[int]]:
        """The schedule, and which of the numbers are recorded in it."""
        recorded = self.numbers
        while True:
            try:
                made, converted = self.call(recorded)
            except _LOOKED_AT as error:
                raise self.looked_at(recorded) from error
            except Exception:
                kept = {i for i in recorded if self.works_with(i)}
                if kept == recorded or any(np.ndim(self.items[i]) > 0 for i in recorded):
                    raise
                made, converted = None, recorded - kept
            if any(is_traced(self.items[i]) for i in converted):
                raise self.looked_at(converted)
            if not converted:
                return made, recorded
            recorded = recorded - converted
            for i in converted:
                self.items[i] = _concrete(self.items[i])

    def looked_at(self, which: set[int]) -> TypeError:
        traced = [self.name(i) for i in sorted(which) if is_traced(self.items[i])]
        name = self.factory.name
        return TypeError(
            message(
                f"`{name}` looks at its numbers while it builds, and one of them is traced",
                where=f"Schedule({name}, ...), inside a function that is being traced",
                expected="concrete numbers",
                got=f"traced ones: {', '.join(traced)}",
                instead=f"make the Schedule outside, and inside `schedule.replace({traced[0]}=...)`",
            )
        )


class Schedule(FactoryCall):
    """An Optax schedule as a value: a module whose leaves are its numbers.

    It is called with the count of steps, and is given to an `Optimizer` in place of a learning
    rate. In a compiled step a new one, with the same or with other numbers, runs the same program;
    a population of schedules is one with stacked numbers, under `vmap`.

    Leaves are all settings that are real numbers, wherever they are in the arguments: initial,
    peak and final values, rates of decay, exponents, factors; as weakly typed arrays, under their
    own names. Structure are counts of steps and boundaries (integers), flags, functions, what is
    left to the factory, and a number that the factory makes an integer of, such as `pct_start` of
    `optax.cosine_onecycle_schedule`.

    The factory is called once, here. What it decides by comparing numbers (most treat zero in their
    own way) stays decided for as long as the leaves are changed by `jax.tree.map` or `vmap`;
    `replace` asks it again.

    Args:
        factory: a function that returns a function of the count, such as
            `optax.cosine_decay_schedule`. Settings may be schedules too, as in
            `Schedule(optax.join_schedules, [first, second], boundaries=[100])`.
        *args: its first settings.
        **settings: the others. An array with axes is a population.

    Attributes:
        factory: as given.
        settings: the settings that are, or contain, leaves, by name.
        structure: the other ones, as pairs of name and value.

    Raises:
        TypeError: for a setting that the factory does not have, or one that is missing; for a
            factory that returns something else; for a traced number that the factory looks at.
        ValueError: for a population of which the factory would make different kinds of schedule.

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

    _recipe: Recipe = field(static=True, repr=False)
    _formulas: tuple[Any, ...] = field(static=True, repr=False)

    def __init__(self, factory: Callable[..., Any], /, *args: Any, **settings: Any):
        given = _Settings(factory, args, settings)
        made, recorded = given.build()
        if not callable(made):
            raise TypeError(
                message(
                    "the factory of a Schedule returns a function of the count of steps",
                    where=f"Schedule({callable_name(factory)}, ...)",
                    expected="a function such as `optax.cosine_decay_schedule`",
                    got=f"{callable_name(factory)}, which returns {short(made)}",
                    instead="Optimizer(...) for a transformation of gradients",
                )
            )
        values, recipe = captured(made, _is_given, closed=is_named, as_value=True)
        numbers = as_leaves({given.name(i): given.items[i] for i in recorded})
        items = [numbers.get(given.name(i), x) for i, x in enumerate(given.items)]
        settled = given.treedef.unflatten(items)
        leaves = {given.paths[i][0].key for i in recorded | given.schedules}
        self.factory = factory
        self.settings = {name: settled[name] for name in given.values if name in leaves}
        self.structure = tuple((n, v) for n, v in given.values.items() if n not in leaves)
        self._recipe = recipe
        self._formulas = tuple(value.formula for value in values)

    def build(self) -> Callable[[Any], Any]:
        """The Optax schedule.

        Returns:
            The function of the count that the factory makes, with the numbers of this schedule.
        """
        items = jtu.tree_leaves(self.given(), is_leaf=is_call)
        return self._recipe([compute(formula, items) for formula in self._formulas])

    def __call__(self, count: Any) -> Any:
        """The value at a count of steps.

        Args:
            count: the number of steps taken before, an integer.

        Returns:
            The value, a scalar.
        """
        with optax_promotes():
            return self.build()(count)

    def _with(self, values: dict[str, Any]) -> Any:
        # The factory cannot look at traced numbers; what it decided for the old ones remains.
        if any(map(is_traced, jtu.tree_leaves(values))):
            settings = {name: values[name] for name in self.settings}
            same_rest = all(values[name] is value for name, value in self.structure)
            if len(values) == len(self.given()) and same_rest and _alike(self.settings, settings):
                return self.__tree_replace__({"settings": settings}, sort=False)
        return super()._with(values)

    def __reduce__(self) -> Any:
        # Made again: code inside of functions cannot be pickled.
        args, kwargs = factory_of(self.factory).arguments(self.given())
        return _again, tuple(map(by_name, (self.factory, args, kwargs)))


def _again(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Schedule:
    return Schedule(factory, *args, **kwargs)


def _is_given(x: Any) -> bool:
    return isinstance(x, (Recorded, StandIn))


def _alike(old: Any, new: Any) -> bool:
    """Whether two trees of settings differ in nothing but numbers that are leaves."""
    leaves, treedef = jtu.tree_flatten(old, is_leaf=is_call)
    others, other_treedef = jtu.tree_flatten(new, is_leaf=is_call)

    def fits(a: Any, b: Any) -> bool:
        if is_call(a) and is_call(b):
            return jtu.tree_structure(a) == jtu.tree_structure(b)
        return a is b or (is_array(a) and is_array(b))

    return treedef == other_treedef and all(map(fits, leaves, others))
