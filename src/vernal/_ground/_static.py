"""Equality of static values: when may one compiled program stand for two Python values?

Python's `==` is too generous for that (`1 == 1.0 == True`, `0.0 == -0.0`) and sometimes too
strange (arrays, NaN). `same` is the one rule that every structure in the library compares by;
`intern_key` is a hashable form of the same rule. Functions are equal if they do the same:
`_functions.py`. A wrong "yes" gives wrong numbers, a wrong "no" only compiles again: in doubt the
answer is no.
"""

import math
import types
from typing import Any

import numpy as np

from ._functions import function_token
from ._snapshots import FUNCTIONS, compared_fields, compares_by_fields

# Types whose `==` is exact between values of one type.
_EXACT: frozenset[type] = frozenset(
    {
        str,
        bytes,
        int,
        bool,
        type(None),
        type(Ellipsis),
        type,
        types.BuiltinFunctionType,
        types.ModuleType,
        np.dtype,
    }
)


_NUMBERS = (float, complex)  # of a subclass, when the rules for exact types have passed


def _same_float(a: float, b: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b and math.copysign(1.0, a) == math.copysign(1.0, b)


def _parts(value: Any) -> tuple[Any, ...] | None:
    """What an object's own `==` compares, where that is known and would be compared too generously."""
    if type(value) in (range, slice):
        return value.start, value.stop, value.step
    return compared_fields(value)


def _parts_are_all(kind: type) -> bool:
    """Whether values with the same parts are equal, so that their own `==` need not be asked."""
    return kind in (range, slice) or compares_by_fields(kind)


class _ByRule:
    """A key that compares by `same`, for values whose own `==` is too generous."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return type(other) is _ByRule and same(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self.value)


def same(a: Any, b: Any) -> bool:
    """Whether two static values are interchangeable inside a compiled program.

    Args:
        a: any Python object.
        b: any Python object.

    Returns:
        True if both are one object, or have the same type and equal contents, where numbers of
        different type, zeros of different sign and containers of different type are different, NaN
        is the same as NaN, and functions are the same if they do the same.
    """
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _EXACT:
        return a == b
    if kind in FUNCTIONS:
        return function_token(a) is function_token(b)
    if issubclass(kind, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if issubclass(kind, float):
        return _same_float(a, b)
    if issubclass(kind, complex):
        return _same_float(a.real, b.real) and _same_float(a.imag, b.imag)
    if issubclass(kind, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if issubclass(kind, dict):
        return len(a) == len(b) and all(
            same(ka, kb) and same(a[ka], b[kb]) for ka, kb in zip(a, b, strict=True)
        )
    if issubclass(kind, (set, frozenset)):
        return set(map(intern_key, a)) == set(map(intern_key, b))
    parts = _parts(a)
    if parts is not None:
        if not same(parts, _parts(b)):
            return False
        if _parts_are_all(kind):
            return True
    try:
        equal = a == b
        return equal is True or (type(equal) is np.bool_ and bool(equal))
    except Exception:
        # A value that cannot be compared is only ever the same as itself.
        return False


def intern_key(value: Any) -> Any:
    """A hashable key with `intern_key(a) == intern_key(b)` only if `same(a, b)`.

    Args:
        value: any Python object.

    Returns:
        The key.

    Raises:
        TypeError: if the value, or something inside it, cannot be hashed.
    """
    kind = type(value)
    if kind in _EXACT:
        return (kind, value)
    if kind in FUNCTIONS:
        return (kind, function_token(value))
    if kind is float:
        return (kind, "nan") if value != value else (kind, value, math.copysign(1.0, value))
    if kind is complex:
        return (kind, intern_key(value.real), intern_key(value.imag))
    if issubclass(kind, tuple):
        return (kind, *map(intern_key, value))
    if kind is frozenset:
        return (kind, frozenset(map(intern_key, value)))
    if issubclass(kind, np.generic):
        return (kind, str(value.dtype), value.tobytes())
    hash(value)
    parts = _parts(value)
    if parts is not None and _parts_are_all(kind):
        try:
            return (kind, *map(intern_key, parts))
        except TypeError:
            # A hash of its own makes up for a field that has none.
            return (kind, _ByRule(value))
    by_rule = parts is not None or issubclass(kind, _NUMBERS)
    return (kind, _ByRule(value) if by_rule else value)
