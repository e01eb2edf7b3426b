"""When may one static value stand for another in a compiled program?

Python's `==` is too generous (`1 == 1.0 == True`, `0.0 == -0.0`) and unusable for some values (arrays,
NaN). Every structure in the library is compared by `static_key`; `same` applies the same rule to two
values. A wrong "yes" gives wrong numbers, a wrong "no" only compiles again: in doubt the answer is no.
Functions have their own rules: `_functions.py`.
"""

import dataclasses
import functools
import types
from typing import Any

import jax.tree_util as jtu
import numpy as np

from ._functions import (
    FrozenPartial,
    NotPlainError,
    frozen,
    function_key,
    is_library_name,
    unchanging_key,
)
from ._keys import Itself, is_dtype, plain_key
from ._one_level import one_level

# Subclasses of these inherit an `==` that ignores attributes and overridden methods.
_BUILTIN = (str, bytes, int, float, complex, tuple, frozenset)


def static_key(value: Any) -> Any:
    """The key of a static value: `static_key(a) == static_key(b)` if and only if one compiled program
    may serve both.

    Args:
        value: any Python object.

    Returns:
        A hashable key. It keeps the value alive.

    Raises:
        TypeError: if the value, or something inside it, has no hash that stays the same.
    """
    return _key(value, True)


def _key(value: Any, freezes: bool = False) -> Any:
    """The key. `freezes` says whether `frozen` reaches the value when it becomes structure."""
    kind = type(value)
    key = plain_key(value)
    if key is not None:
        return key
    if kind is types.FunctionType:
        return kind, function_key(value)
    if kind is tuple:
        return kind, *[_key(item, freezes) for item in value]
    if kind is frozenset:
        return kind, frozenset(map(_key, value))
    if kind is functools.partial or kind is FrozenPartial:
        try:
            return unchanging_key(frozen(value) if freezes else value, function_key)
        except NotPlainError:
            # Its contents can change.
            return Itself(value)
    if kind in (range, slice):
        return kind, _key((value.start, value.stop, value.step))
    return _object_key(kind, value)


def _object_key(kind: type, value: Any) -> Any:
    """The key of an object whose class defines its comparison, or that equals only itself."""
    if hasattr(kind, "__jax_array__"):
        raise TypeError(f"{kind.__name__!r} stands for an array, which can change in place")
    parameters = _dataclass_parameters(kind)
    # A class that only inherits them may be compared in any way.
    own = "__dataclass_params__" in vars(kind)
    if jtu.is_tree_node(kind):
        _refuse_changeable(value)
    elif own and not parameters.frozen and not parameters.eq:
        raise _changeable(kind)
    if kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__:
        return kind, value
    # A method is made anew at every access, from an object that may have changed meanwhile.
    if kind in (types.MethodType, types.BuiltinMethodType):
        return kind, Itself(value)
    # In the key, so that a value whose own hash has changed in place is another one.
    now = hash(value)
    if isinstance(value, _BUILTIN) and _inherits_comparison(kind):
        if kind.__dictoffset__ != 0 and not is_library_name(kind):
            return kind, Itself(value)
        base: Any = next(b for b in _BUILTIN if issubclass(kind, b))
        return kind, _key(base(value))
    if parameters is None or not _written_by_dataclass(kind.__eq__):
        return kind, now, value
    if not own:
        # The inherited `==` ignores everything that the subclass adds.
        return kind, Itself(value)
    if not parameters.frozen:
        raise _changeable(kind)
    fields = [getattr(value, f.name, None) for f in dataclasses.fields(kind) if f.compare]
    try:
        return kind, *map(_key, fields)
    except TypeError:
        if _written_by_dataclass(kind.__hash__):
            raise
        # The class's own hash makes up for a field that has none.
        return kind, now, value


def _dataclass_parameters(kind: type) -> Any:
    return getattr(kind, "__dataclass_params__", None)


def _changeable(kind: type) -> TypeError:
    return TypeError(f"unhashable type: {kind.__name__!r}, which can change in place")


def _refuse_changeable(node: Any) -> None:
    """Refuses a pytree with mutable nodes, such as lists."""
    kind = type(node)
    frozen_dataclass = getattr(_dataclass_parameters(kind), "frozen", False)
    if hasattr(kind, "__tree_fields__"):
        inside = node.__tree_fields__().values()
    elif isinstance(node, tuple) or frozen_dataclass:
        inside = one_level(node)[0]
    elif node is None or hasattr(kind, "_vernal_unchanging"):
        return
    else:
        raise _changeable(kind)
    for child in inside:
        if jtu.is_tree_node(type(child)):
            _refuse_changeable(child)


def _inherits_comparison(kind: type) -> bool:
    return any(kind.__eq__ is base.__eq__ for base in _BUILTIN)


def _written_by_dataclass(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def same(a: Any, b: Any, *, ordered: bool = True) -> bool:
    """Whether one compiled program may currently serve both of two static values.

    Args:
        a: any Python object.
        b: any Python object.
        ordered: whether dicts in a different order are different, because code may iterate over them.
            Pass False for classes with Equinox's rule.

    Returns:
        True if both have the same `static_key`, or, if they cannot be hashed, the same type and equal
        parts.
    """
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b) and not (is_dtype(a) and is_dtype(b)):
        return False
    try:
        if issubclass(kind, np.ndarray):
            return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        if kind in (tuple, list):
            return len(a) == len(b) and all(
                same(x, y, ordered=ordered) for x, y in zip(a, b, strict=True)
            )
        if kind is dict:
            others = b if ordered else map({static_key(k): k for k in b}.get, map(static_key, a))
            return len(a) == len(b) and all(
                same(k, other) and same(a[k], b[other], ordered=ordered)
                for k, other in zip(a, others, strict=True)
            )
        if kind is set:
            return frozenset(map(static_key, a)) == frozenset(map(static_key, b))
        return static_key(a) == static_key(b)
    except Exception:
        return _equal(kind, a, b)


def _equal(kind: type, a: Any, b: Any) -> bool:
    """The answer for values that have no key."""
    try:
        if dataclasses.is_dataclass(kind) and _written_by_dataclass(kind.__eq__):
            compared = [f.name for f in dataclasses.fields(kind) if f.compare]
            return all(same(getattr(a, name, None), getattr(b, name, None)) for name in compared)
        return (a == b) is True
    except Exception:
        # A value that cannot be compared is only the same as itself.
        return False
