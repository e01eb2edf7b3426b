"""Numbers that remember how they were computed.

The difficulty: factories of schedules look at their settings while they build. They compare
`peak_value` with zero, refuse a negative rate, round `pct_start * steps`; a traced number allows
none of that. And what they build holds other numbers than they were given: quotients of them.

The plan: call the factory with `Recorded` numbers. Each has a concrete value, by which it compares,
and the formula by which it was computed from the settings. The formulas are found in what the
factory returns, and are computed again, of other settings, while a program is traced. What the
factory decided is in what it returned: other decisions are another structure.

A recorded number that is converted to a plain one (`int(x)`, `jnp.log(x)`) loses its formula: the
settings that it was computed from are noted in `converted`, and must stay what they are.
"""

import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..show import is_traced, message, short

# A number, or `("given", i)`, or the name of a function of `operator` and the formulas it is given.
Formula = Any


def compute(formula: Formula, given: Sequence[Any]) -> Any:
    """The value of a formula.

    Args:
        formula: the formula of a recorded number.
        given: the settings by position.

    Returns:
        The number.
    """
    if not isinstance(formula, tuple):
        return formula
    name, *parts = formula
    if name == "given":
        return given[parts[0]]
    return getattr(operator, name)(*(compute(part, given) for part in parts))


def _positions(formula: Formula) -> set[int]:
    if not isinstance(formula, tuple):
        return set()
    name, *parts = formula
    return {parts[0]} if name == "given" else set().union(*map(_positions, parts))


def _is_plain(x: Any) -> bool:
    return isinstance(x, (int, float, np.number)) and not isinstance(x, Recorded)


def _agreed(answer: Any) -> bool:
    """The one answer to a question about several numbers at once."""
    if is_traced(answer) or np.ndim(answer) == 0:
        return bool(answer)
    answers = np.unique(np.asarray(answer))
    if len(answers) != 1:
        raise ValueError(
            message(
                "a factory decides differently for the numbers of one array",
                where="settings with an axis, one number for each element of a population",
                expected="numbers that all give the same kind of schedule",
                got="a comparison that holds for some of them",
                instead="make one Schedule for each",
            )
        )
    return bool(answers[0])


class Recorded:
    """A number with its formula.

    Args:
        value: the concrete number; or an array of numbers for which the same is to be decided.
        formula: how it was computed.
        converted: takes the positions of the settings whose formula was lost.
    """

    __slots__ = ("converted", "formula", "value")
    # NumPy's operators leave it to ours.
    __array_ufunc__ = None

    def __init__(self, value: Any, formula: Formula, converted: set[int]):
        self.value = value
        self.formula = formula
        self.converted = converted

    def plain(self) -> Any:
        """The value without formula, for whoever needs no less."""
        self.converted |= _positions(self.formula)
        return self.value

    def __repr__(self) -> str:
        return repr(self.value)

    def __bool__(self) -> bool:
        return _agreed(self.value != 0)

    def __hash__(self) -> int:
        return hash(self.plain())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self.plain(), dtype)

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.plain())


class StandIn:
    """Stands for a schedule that is a setting, while the factory builds.

    Args:
        name: of the setting.
        formula: `("given", i)`.
    """

    __slots__ = ("formula", "name")

    def __init__(self, name: str, formula: Formula):
        self.name = name
        self.formula = formula

    def __call__(self, count: Any) -> Any:
        raise TypeError(
            message(
                "a factory calls the schedule that it is given while it builds",
                where=f"the setting `{self.name}`",
                expected="a factory that calls it in the function that it returns",
                got=f"a call with {short(count)}",
                instead="give it the value as a number: another setting of the factory",
            )
        )


def _operator(name: str, swapped: bool = False) -> Callable[..., Any]:
    fn = getattr(operator, name)

    def method(self: Recorded, *others: Any) -> Any:
        known = all(isinstance(x, Recorded) or _is_plain(x) for x in others)
        if not known:
            args = [self.plain(), *others]
            return fn(*(reversed(args) if swapped else args))
        pairs = [
            (x.value, x.formula) if isinstance(x, Recorded) else (x, x) for x in (self, *others)
        ]
        values, formulas = zip(*(reversed(pairs) if swapped else pairs), strict=True)
        return Recorded(fn(*values), (name, *formulas), self.converted)

    return method


def _comparison(name: str) -> Callable[..., Any]:
    fn = getattr(operator, name)

    def method(self: Recorded, other: Any) -> bool:
        return _agreed(fn(self.value, other.value if isinstance(other, Recorded) else other))

    return method


def _conversion(fn: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Recorded, *args: Any) -> Any:
        return fn(self.plain(), *args)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Recorded, f"__{_name}__", _operator(_name))
    setattr(Recorded, f"__r{_name}__", _operator(_name, swapped=True))
for _name in ("neg", "pos", "abs"):
    setattr(Recorded, f"__{_name}__", _operator(_name))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Recorded, f"__{_name}__", _comparison(_name))
for _fn in (float, int, complex, round, operator.index):
    setattr(Recorded, f"__{_fn.__name__}__", _conversion(_fn))
numbers.Real.register(Recorded)
