"""Checks of numbers of products and tolerances."""

import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from ..show import message, short, spec_text, type_error, value_error
from ..transforms import TracedShapeError
from ..trees import is_array_like


def positive_int(value: Any, name: str, where: str, *, minimum: int = 1) -> int:
    """Checks for a Python int of at least `minimum`. A traced number is a `TracedShapeError`, to which `filter_jit`
    adds the argument that it comes from.

    Args:
        value: the number.
        name: of the argument.
        where: for the message.
        minimum: the least that makes sense.
    """
    if isinstance(value, Tracer):
        raise TracedShapeError(
            message(
                f"`{name}` is traced, and shapes depend on it",
                where=where,
                expected="a Python int, known before the program is compiled",
                got=f"a traced value {value.aval.str_short()}",
                instead=_instead(name),
            )
        ) from _complaint(value)
    number = _index(value)
    if number is None:
        raise type_error(
            f"`{name}` is not a whole number",
            where=where,
            expected="a Python int",
            got=repr(value),
        )
    _check_least(number, name, where, minimum)
    return number


def whole_number(value: Any, name: str, where: str, *, minimum: int, most: int) -> Array:
    """A number of products as an array of JAX's default integers, so that all of them share a compilation.

    It may be a Python int, or an integer array of shape (), which may be traced. Outside of the range from `minimum`,
    the least that makes sense, to `most`, which shapes are made for, a Python int is refused and an array is clamped.

    Args:
        value: the number.
        name: of the argument.
        where: for the message.
        minimum: the least number.
        most: the greatest.
    """
    if isinstance(value, Array):
        if value.shape != () or not jnp.issubdtype(value.dtype, jnp.integer):
            raise type_error(
                f"`{name}` is not a whole number",
                where=where,
                expected="a Python int, or an integer array of shape ()",
                got=spec_text(value),
            )
        # In its own dtype: a small or a large one must not wrap around.
        info = jnp.iinfo(value.dtype)
        low, high = (jnp.asarray(min(bound, info.max), value.dtype) for bound in (minimum, most))
        return jnp.clip(value, low, high).astype(int)
    number = positive_int(value, name, where, minimum=minimum)
    if number > most:
        raise value_error(
            f"`{name}` is greater than `max_{name}`",
            where=where,
            expected=f"{name} <= {most}",
            got=f"{name}={number}",
            instead=f"a larger `max_{name}`, for which shapes are allocated",
        )
    return jnp.asarray(number, int)


def tolerance(value: Any, name: str, where: str, dtype: Any) -> Array:
    """A tolerance, which may be traced, as an array of shape () and the real dtype of the result; None is zero. A
    negative, infinite or NaN tolerance is refused if its value is known.

    Args:
        value: the tolerance.
        name: of the argument.
        where: for the message.
        dtype: of the result.
    """
    number = real_number(0 if value is None else value, name, where, dtype)
    if value is not None and not isinstance(value, Tracer) and not 0 <= float(value) < math.inf:
        raise value_error(
            f"`{name}` is not a tolerance",
            where=where,
            expected=f"0 <= {name} < inf",
            got=f"{name}={value}",
        )
    return number


def real_number(value: Any, name: str, where: str, dtype: Any) -> Array:
    """A real number, which may be traced, as an array of shape () and a given dtype.

    Args:
        value: the number.
        name: of the argument.
        where: for the message.
        dtype: of the result.
    """
    if isinstance(value, bool) or not isinstance(
        value, int | float | np.generic | np.ndarray | Array
    ):
        raise type_error(
            f"`{name}` is not a number", where=where, expected="a real number", got=repr(value)
        )
    if isinstance(value, np.generic | np.ndarray | Array) and (
        value.shape != () or jnp.issubdtype(value.dtype, jnp.complexfloating) or value.dtype == bool
    ):
        raise type_error(
            f"`{name}` is not a number",
            where=where,
            expected="a real number, or an array of one",
            got=spec_text(value),
        )
    return jnp.asarray(value).astype(dtype)


def real_array(value: Any, name: str, where: str, dtype: Any) -> Array:
    """Real numbers, which may be traced, as an array of a given dtype.

    Args:
        value: an array, or a number.
        name: of the argument.
        where: for the message.
        dtype: of the result.
    """
    given = np.asarray(value) if isinstance(value, list | tuple) else value
    kinds = jnp.integer, jnp.floating
    if not is_array_like(given) or not any(
        jnp.issubdtype(jnp.result_type(given), k) for k in kinds
    ):
        raise type_error(
            f"`{name}` is not real numbers",
            where=where,
            expected="a real number, or an array of them",
            got=short(value),
        )
    return jnp.asarray(given).astype(dtype)


def _index(value: Any) -> int | None:
    """A whole number as an int; None for anything else."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_least(number: int, name: str, where: str, minimum: int) -> None:
    if number < minimum:
        raise value_error(
            f"`{name}` is too small",
            where=where,
            expected=f"{name} >= {minimum}",
            got=f"{name}={number}",
        )


def _instead(name: str) -> str:
    text = (
        f"compute `{name}` with Python's `min` and `max` (not `jnp.minimum`, which returns a traced array even for "
        "Python numbers)"
    )
    return (
        text + "; or give `max_matvecs` as well, for which shapes are allocated"
        if name == "matvecs"
        else text
    )


def _complaint(value: Tracer) -> Exception | None:
    """JAX's error for a traced value in place of an int: it knows which argument the value comes from."""
    try:
        operator.index(value)
    except Exception as error:
        return error
    return None
