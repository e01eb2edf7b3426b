"""Which settings of an optimiser are leaves, and which are structure.

A compiled step must not be compiled again for a new learning rate, so numbers that are computed
with are arrays. Three kinds of float stay structure:

* Settings close to one, of which the optimiser computes `1 - b` (the betas of Adam, decays of
  averages): in float32, `1 - 0.999` is off by 1e-5, and by 1e-3 for `0.99999`, where Python's float
  has all its digits. They are known by their names, or by a default between one half and one.
* A weight decay of exactly zero: Optax then leaves the term out, and `0 * inf` with it.
* What the factory looks at while it builds, which a traced value does not allow (`looked_at`).

An array given by the user is always a leaf.
"""

import contextlib
import inspect
import re
import typing
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..show import is_traced
from ..trees import is_array

_CLOSE_TO_ONE = re.compile(r"(\w+_)?(b\d|beta\d?|rho|decay|decay_rate|ema_decay)")


def _is_weight_decay(name: str) -> bool:
    return "weight_decay" in name


def is_number(value: Any) -> bool:
    """Whether a setting is a number: of Python (but no bool), or an array of numbers."""
    if isinstance(value, (bool, np.bool_)):
        return False
    return isinstance(value, (int, float)) or (
        is_array(value) and jnp.issubdtype(value.dtype, np.number)
    )


def _wants_float(parameter: inspect.Parameter | None) -> bool:
    """Whether a parameter that is given an integer means a real number."""
    if parameter is None:
        return False
    if parameter.default not in (inspect.Parameter.empty, None):
        return isinstance(parameter.default, float)
    annotation = parameter.annotation
    return annotation is float or float in typing.get_args(annotation)


def _close_to_one(name: str, parameter: inspect.Parameter | None) -> bool:
    if _is_weight_decay(name):
        return False
    default = None if parameter is None else parameter.default
    if isinstance(default, float):
        return 0.5 <= default < 1
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
    if _close_to_one(name, parameter) and np.ndim(value) == 0:
        return False
    if _is_weight_decay(name) and np.ndim(value) == 0 and value == 0:
        return False
    return isinstance(value, (float, np.inexact, np.ndarray)) or _wants_float(parameter)


def as_leaf(value: Any) -> jax.Array:
    """A number as a weakly typed array, whatever it was given as.

    Weakly typed, because a float32 learning rate would turn the state of bfloat16 weights to
    float32; always, because a change of type is compiled anew. (A traced number, and one with
    axes, keeps its type.)
    """
    if is_traced(value) or np.ndim(value) > 0 or getattr(value, "weak_type", False):
        return jnp.asarray(value)
    return jnp.asarray(float(value))


# For each factory and the names of some settings, which of these it looks at.
_known: weakref.WeakKeyDictionary[Any, dict[frozenset[str], frozenset[str]]]
_known = weakref.WeakKeyDictionary()


def looked_at(
    factory: Any, numbers: dict[str, Any], build: Callable[[dict[str, Any]], Any]
) -> frozenset[str]:
    """Which numbers a factory cannot be given traced, found out by trying, once for each factory.

    Args:
        factory: the factory.
        numbers: the settings in question.
        build: calls the factory with some of these replaced.

    Returns:
        The names of those to keep as Python numbers.
    """
    names = frozenset(numbers)
    with contextlib.suppress(KeyError, TypeError):  # TypeError: a factory that cannot be hashed
        return _known[factory][names]

    def refuses(traced: dict[str, Any]) -> bool:
        try:
            jax.eval_shape(lambda given: (build(given), None)[1], traced)
        except Exception:
            # Whatever it says of a tracer; what it says of the number itself is heard below.
            return True
        return False

    found: frozenset[str] = frozenset()
    if refuses(numbers):
        build(numbers)
        found = frozenset(name for name, value in numbers.items() if refuses({name: value}))
    with contextlib.suppress(TypeError):
        _known.setdefault(factory, {})[names] = found
    return found
