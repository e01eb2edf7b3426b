"""`from_optax`: an Optax object that exists already, as an `Optimizer`.

The difficulty: what `optax.adam(1e-3)` returns is two closures, which say neither who made them nor
of what. The plan: take the numbers out of them (`vernal.transforms.captured`), and name each after
the variable that held it. What is left, a recipe that compares by value, is the factory of an
ordinary `Optimizer`, and the numbers are its settings.
"""

import collections
import inspect
import itertools
import keyword
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground import is_named, signature_of
from ..show import is_traced, message, short
from ..transforms import Recipe, captured
from ._factory import factory_of
from ._optimizer import Optimizer
from ._settings import Fixed, is_leaf_setting, is_weight_decay, untraceable
from ._step import optax_promotes

# What a transformation is tried with: it is never computed.
_PARAMETERS = {
    "matrix": jax.ShapeDtypeStruct((4, 3), jnp.float32),
    "vector": jax.ShapeDtypeStruct((3,), jnp.float32),
}


def _is_real(x: Any) -> bool:
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return jnp.issubdtype(x.dtype, jnp.floating)
    return isinstance(x, float)


def _is_taken(x: Any) -> bool:
    """What is taken out of closures: real numbers, and JAX's arrays of whatever else but booleans,
    at which one looks (masks)."""
    return _is_real(x) or (isinstance(x, jax.Array) and x.dtype != np.bool_)


def _variable(path: Sequence[Any]) -> str:
    """The name at the end of a path, with the positions inside: `scales_0`."""
    last = max((i for i, label in enumerate(path) if isinstance(label, str)), default=0)
    text = re.sub(r"\W", "_", "_".join(map(str, path[last:])))
    return text if text.isidentifier() and not keyword.iskeyword(text) else f"value_{text}"


def _own_names(variables: dict[int, str]) -> dict[int, str]:
    """A name of its own for each value: its variable, numbered where several have the same."""
    count = collections.Counter(variables.values())
    taken = {variable for variable, n in count.items() if n == 1}
    names: dict[int, str] = {}
    for i, variable in variables.items():
        numbered = (f"{variable}_{n}" for n in itertools.count(1))
        names[i] = variable if count[variable] == 1 else next(n for n in numbered if n not in taken)
        taken.add(names[i])
    return names


class _Slot:
    """Stands for a number in what is pickled."""

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name


def _is_slot(x: Any) -> bool:
    return isinstance(x, _Slot)


class _Opened:
    """The factory of an optimiser that was taken apart. Its keyword arguments are the numbers.

    Args:
        recipe: makes the Optax object of its values.
        names: of the values, in the order of the recipe.
        parameters: the same names, in the order of reading, and how they are treated.
        name: of the Optax object.
    """

    def __init__(
        self,
        recipe: Recipe,
        names: Sequence[str],
        parameters: Sequence[inspect.Parameter],
        name: str,
    ):
        self.recipe = recipe
        self.names = names
        self.__signature__ = inspect.Signature(parameters)
        self.__name__ = name

    def __call__(self, **settings: Any) -> Any:
        return self.recipe([settings[name] for name in self.names])

    def __eq__(self, other: Any) -> bool:
        return (
            type(other) is _Opened
            and self.recipe == other.recipe
            and self.__signature__ == other.__signature__
        )

    def __hash__(self) -> int:
        return hash(self.recipe)

    def __repr__(self) -> str:
        return f"<{self.__name__} of Optax>"

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> Any:
        # As picklable as the Optax object itself: cloudpickle takes closures, pickle does not.
        made = self.recipe([_Slot(name) for name in self.names])
        return _opened_again, (made, tuple(self.__signature__.parameters.values()), self.__name__)


def _opened_again(made: Any, parameters: Sequence[inspect.Parameter], name: str) -> _Opened:
    slots, recipe = captured(made, _is_slot, closed=is_named, as_value=True)
    return _Opened(recipe, [slot.name for slot in slots], parameters, name)


def _is_transformation(x: Any) -> bool:
    return (
        not isinstance(x, type)
        and callable(getattr(x, "init", None))
        and callable(getattr(x, "update", None))
    )


def _try_step(transformation: Any) -> None:
    """A step of a transformation, without computing anything."""
    signature = signature_of(transformation.update)
    kinds = {p.kind for p in signature.parameters.values()} if signature else set()

    def step(params: Any) -> None:
        extra: dict[str, Any] = {}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            value = jnp.sum(params["vector"])
            extra = {"value": value, "grad": params, "value_fn": lambda p: jnp.sum(p["vector"])}
        transformation.update(params, transformation.init(params), params, **extra)

    with optax_promotes():
        jax.eval_shape(step, _PARAMETERS)


def _trial(recipe: Recipe, names: Sequence[str], values: dict[str, Any]) -> Callable[..., None]:
    """A function that tries the whole transformation with some of the numbers replaced. Where that
    needs a model of its own (masks, labels), it tries the transformations inside."""

    def nodes(given: dict[str, Any]) -> list[Any]:
        return recipe.every_node([given[name] for name in names])

    @cache
    def possible() -> list[int]:
        found: list[int] = []
        for i, node in enumerate(nodes(values)):
            if _is_transformation(node) and found[:1] != [0]:
                try:
                    _try_step(node)
                except Exception:  # Whatever it says of parameters that are not its own.
                    continue
                found.append(i)
        return found

    def run(given: dict[str, Any]) -> None:
        made = nodes({**values, **given})
        for i in possible():
            _try_step(made[i])

    return run


def _stays(variable: str, value: Any) -> bool:
    """Whether a number is close to one, by its name or by itself, so that it stays structure."""
    if not _is_real(value) or np.ndim(value) > 0 or is_traced(value) or is_weight_decay(variable):
        return False
    itself = inspect.Parameter(variable, inspect.Parameter.KEYWORD_ONLY, default=float(value))
    return not all(is_leaf_setting(variable, value, parameter) for parameter in (None, itself))


def _as_constant(value: Any) -> Any:
    """A number that stays structure, which no array can."""
    return value.item() if isinstance(value, (jax.Array, np.generic)) and value.ndim == 0 else value


def from_optax(transformation: Any) -> Optimizer:
    """An Optax object that exists already, as an `Optimizer`.

    Use it for what is made elsewhere, or has no factory: `Optimizer(optax.adam, 1e-3)` knows its
    settings by their own names, where `from_optax(optax.adam(1e-3))` finds what the closures have
    kept. The object is taken apart as it is at this moment: what it captured is copied, recursively
    through closures, chains, masks, schedules and the user's own functions.

    Real numbers (and JAX's arrays) are the settings of the optimiser, under the names of the
    variables that hold them; `step_size`, which Optax computes as minus the learning rate, for
    example. Where several have one name they are numbered: `step_size_1`, `step_size_2`. As in any
    `Optimizer` they are leaves, so that a fresh object, with the same or with other numbers, runs
    the program that is compiled already; and structure are those close to one (named `b1`, `decay`,
    ..., or from 0.8 to one), a weight decay of zero, and those at which the transformation looks
    while it runs, which is found by trying. Everything else is structure, and compares by value;
    where it can only be compared by identity, a new object is compiled anew.

    Args:
        transformation: what a factory of Optax returns, or any object with the methods `init` and
            `update` of one.

    Returns:
        The optimiser.

    Raises:
        TypeError: for something else.

    Example:
        >>> import optax
        >>> import vernal
        >>> opt = vernal.optim.from_optax(optax.chain(optax.clip(2.0), optax.adam(0.1)))
        >>> sorted(opt.settings)
        ['eps', 'eps_root', 'max_delta', 'step_size']
        >>> opt.structure
        (('b1', 0.9), ('b2', 0.999))
        >>> faster = opt.replace(step_size=-0.2)
    """
    if isinstance(transformation, Optimizer) or not _is_transformation(transformation):
        raise TypeError(_refusal(transformation))
    values, recipe = captured(transformation, _is_taken, closed=is_named, as_value=True)
    variables = {i: _variable(path) for i, path in recipe.paths().items()}
    own = _own_names(variables)
    names = [own[i] for i in range(len(values))]
    given = dict(zip(names, values, strict=True))
    fixed = {own[i] for i, variable in variables.items() if _stays(variable, values[i])}
    tried = {n: x for n, x in given.items() if n not in fixed and not is_traced(x)}
    fixed |= untraceable(factory_of(recipe), tried, _trial(recipe, names, given))
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Fixed if name in fixed else float if _is_real(given[name]) else Any,
        )
        for name in own.values()
    ]
    # The function that does it was defined inside the one that people call.
    name = getattr(transformation.update, "__qualname__", type(transformation).__name__)
    factory = _Opened(recipe, names, parameters, name.partition(".")[0])
    return Optimizer(factory, **{n: _as_constant(x) if n in fixed else x for n, x in given.items()})


def _refusal(x: Any) -> str:
    if isinstance(x, Optimizer):
        instead = "use it as it is"
    elif callable(x):
        instead = "call it first: from_optax(optax.adam(1e-3)), or Optimizer(optax.adam, 1e-3)"
    else:
        instead = "an optimiser of Optax"
    return message(
        "from_optax takes a transformation of Optax",
        where="from_optax(transformation)",
        expected="an object with the methods `init` and `update`, such as `optax.adam(1e-3)`",
        got=short(x),
        instead=instead,
    )
