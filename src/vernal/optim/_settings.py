"""Which settings of an optimiser are leaves, and which are structure.

A compiled step must not be compiled again for a new learning rate, so numbers that are computed
with are arrays. Three kinds of float stay structure:

* Settings close to one, of which the optimiser computes `1 - b` (the betas of Adam, decays of
  averages): in float32, `1 - 0.999` is off by 1e-5, and by 1e-3 for `0.99999`, where Python's float
  has all its digits. They are known by their names, or by a default from 0.8 to one.
* A weight decay of exactly zero: Optax then leaves the term out, and `0 * inf` with it.
* What the factory looks at while it builds, which a traced value does not allow, or adds to
  something (`optax.fromage` computes `1 / sqrt(1 + lr**2) - 1`), which loses digits like `1 - b`.

An array given by the user is always a leaf.
"""

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._ground import trace_state_clean
from ..show import is_traced
from ..trees import is_array
from ._factory import Factory

_CLOSE_TO_ONE = re.compile(r"(\w+_)?(b\d|beta\d?|rho|decay|decay_rate)")
_BETA = re.compile(r"b\d")
_INTEGER = re.compile(r"(\w+_)?(steps|period|key|seed)")


# The annotation of a parameter whose number stays structure, whatever its name and value.
Fixed = typing.NewType("Fixed", float)


def is_weight_decay(name: str) -> bool:
    """Whether a setting is a weight decay, by its name."""
    return "weight_decay" in name


def is_number(value: Any) -> bool:
    """Whether a setting is a real number: of Python (but no bool), or an array of them."""
    if isinstance(value, (bool, int, float)):
        return not isinstance(value, bool)
    return is_array(value) and (
        jnp.issubdtype(value.dtype, np.floating) or jnp.issubdtype(value.dtype, np.integer)
    )


def _wants_float(parameter: inspect.Parameter | None) -> bool:
    """Whether a parameter that is given an integer means a real number."""
    if parameter is None or _INTEGER.fullmatch(parameter.name):
        return False
    if parameter.default not in (inspect.Parameter.empty, None):
        return isinstance(parameter.default, float)
    annotation = parameter.annotation
    return annotation is float or float in typing.get_args(annotation)


def _close_to_one(name: str, parameter: inspect.Parameter | None) -> bool:
    if is_weight_decay(name):
        return False
    default = None if parameter is None else parameter.default
    if isinstance(default, float):
        # A beta of one stands for no average at all, which Optax asks about (`scale_by_sm3`).
        return 0.8 <= default < 1 or (default == 1 and _BETA.fullmatch(name) is not None)
    return _CLOSE_TO_ONE.fullmatch(name) is not None


def is_leaf_setting(name: str, value: Any, parameter: inspect.Parameter | None) -> bool:
    """Whether a setting becomes an array.

    Args:
        name: the name of the factory's parameter.
        value: what it is given.
        parameter: the parameter, or None where the factory takes any keyword.

    Returns:
        True if it is a leaf, False if it is structure.
    """
    if not is_number(value):
        return False
    if isinstance(value, jax.Array):
        return jnp.issubdtype(value.dtype, np.inexact) or _wants_float(parameter)
    if parameter is not None and parameter.annotation is Fixed:
        return False
    if _close_to_one(name, parameter) and np.ndim(value) == 0:
        return False
    if is_weight_decay(name) and np.ndim(value) == 0 and value == 0:
        return False
    return isinstance(value, (float, np.inexact, np.ndarray)) or _wants_float(parameter)


def weakly_typed(numbers: Any) -> Any:
    """A name for what is compiled below."""
    return numbers


_as_arrays = jax.jit(weakly_typed)


def as_leaves(numbers: dict[str, Any]) -> dict[str, jax.Array]:
    """Numbers as weakly typed arrays, whatever they were given as.

    Weakly typed, because a float32 learning rate would turn the state of bfloat16 weights to
    float32; always, because a change of type is compiled anew. (A traced number, and one with
    axes, keeps its type.)
    """
    made: dict[str, Any] = {}
    plain: dict[str, float] = {}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) and (is_traced(value) or np.ndim(value) > 0):
            made[name] = jnp.asarray(value)
        else:
            plain[name] = float(value)
    # All in one call, which takes a third of the time of `jnp.asarray` for each.
    arrays = _as_arrays(plain) if trace_state_clean() else plain
    for name, value in arrays.items():
        # Still a number while tracing, and under `jax.disable_jit()`.
        made[name] = value if isinstance(value, jax.Array) else jnp.asarray(value)
    return made


def untraceable(
    factory: Factory, numbers: dict[str, Any], build: Callable[[dict[str, Any]], Any]
) -> frozenset[str]:
    """Which numbers must stay what they are for a factory, found out by trying, once.

    Args:
        factory: what is known of the factory.
        numbers: the settings in question.
        build: calls the factory with some of these replaced.

    Returns:
        The names of those that it looks at, or adds to others, while it builds.
    """
    names = frozenset(numbers)
    found = factory.untraceable.get(names)
    if found is None:
        found = factory.untraceable[names] = _find_untraceable(numbers, build)
    return found


def _find_untraceable(
    numbers: dict[str, Any], build: Callable[[dict[str, Any]], Any]
) -> frozenset[str]:
    def refuses(traced: dict[str, Any]) -> bool:
        try:
            made = jax.make_jaxpr(lambda given: (build(given), None)[1])(traced)
        except Exception:
            # Whatever it says of a tracer; what it says of the number itself is heard below.
            return True
        return any(equation.primitive.name in ("add", "sub") for equation in made.jaxpr.eqns)

    if not refuses(numbers):
        return frozenset()
    build(numbers)
    return frozenset(name for name, value in numbers.items() if refuses({name: value}))
