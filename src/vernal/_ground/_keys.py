"""Keys by which objects and plain values are compared, because Python's `==` is too generous."""

import enum
import math
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np


class Itself:
    """The key of an object that equals only itself. Keeps it alive, and so its address."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return type(other) is Itself and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Alive:
    """Like `Itself`, without keeping the object alive: equal to no other key once it is gone."""

    __slots__ = ("id", "ref")

    def __init__(self, value: Any):
        self.ref = weakref.ref(value)
        self.id = id(value)

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        value = self.ref()
        return type(other) is Alive and value is not None and value is other.ref()

    def __hash__(self) -> int:
        return self.id


# Types whose `==` is exact between values of one type.
_EXACT = frozenset({str, bytes, int, bool, type(None), type(Ellipsis)})
_SCALAR_TYPE = type(jnp.float32)


def is_dtype(x: Any) -> bool:
    """Whether something is a dtype, or one of the scalar types of `jax.numpy`, which equal it.

    (Not so NumPy's: they equal it as well, but called they compute another thing.)
    """
    return type(x) is _SCALAR_TYPE or isinstance(x, np.dtype)


def plain_key(x: Any) -> Any:
    """The key of a plain value (text, a number, a dtype, a member of an enumeration); None for
    anything else."""
    kind = type(x)
    if kind in _EXACT:
        return kind, x
    if kind is float:
        return (kind, "nan") if x != x else (kind, x, math.copysign(1.0, x))
    if kind is complex:
        return kind, plain_key(x.real), plain_key(x.imag)
    if is_dtype(x):
        return np.dtype, np.dtype(x)
    if issubclass(kind, np.generic):
        return kind, str(x.dtype), x.tobytes()
    return (kind, Itself(x)) if issubclass(kind, enum.Enum) else None
