"""What to write instead, for each kind of difference that makes a function compile again."""

import os
import re
from typing import Any

from ._descriptions import CONSTANT, Array, Code, Description, Part

_NUMBERS = (int, float, complex)
_FIELD = re.compile(r"\.(\w+)$")
_OPTAX = f"{os.sep}optax{os.sep}"


def cure(path: str, a: Description, b: Description) -> str:
    """What to write so that two values at a path make one program; empty if there is no general advice."""
    if isinstance(a, Array) and isinstance(b, Array):
        return _of_arrays(path, a, b)
    if any(isinstance(x, Array) for x in (a, b)) and any(_is_number(x) for x in (a, b)):
        return f"jnp.asarray({path}) each time"
    if _is_number(a) and _is_number(b):
        if path.endswith((" (captured)", " (default)")):
            return "pass the number as an argument, an array"
        if "." not in path:
            return f"jnp.asarray({path})"
        # It may be a size, which has to compile again; an array that is not declared a buffer would be trained.
        field = _FIELD.search(path)
        return (
            f"if it changes: `{field[1]}: jax.Array = vernal.field(trainable=False)`"
            if field
            else ""
        )
    if _is_constant(a) and _is_constant(b):
        return "pass the array as an argument"
    same = isinstance(a, Part) and isinstance(a.kind, Code) and a.text == b.text
    return "make the function once, outside of the loop" if same else ""


def is_optax(x: Part) -> bool:
    """Whether a value is a function of Optax, whose numbers are part of the program."""
    return isinstance(x.kind, Code) and _OPTAX in x.kind.file


OPTIMIZER = "vernal.Optimizer, and optimizer.replace(learning_rate=...)"
SETTING = "change the setting once, before the first call"


def _of_arrays(path: str, a: Array, b: Array) -> str:
    before, after = a.aval, b.aval
    if before.ndim != after.ndim:
        return ""
    if before.shape != after.shape:
        return "pad to one shape, or leave out what does not fill it"
    if before.dtype != after.dtype:
        return "cast to one dtype, .astype(...)"
    if before.weak_type != after.weak_type:
        return f"jnp.asarray({path}, jnp.{before.dtype.name})"
    return "jax.device_put(..., sharding) before the loop, the same for each call"


def _is_number(x: Any) -> bool:
    return isinstance(x, Part) and x.mark in _NUMBERS


def _is_constant(x: Any) -> bool:
    return isinstance(x, Part) and x.kind == CONSTANT
