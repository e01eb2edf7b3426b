"""Functions equal by value: one token for all functions that do the same.

A new `optax.adam(1e-3)` is a new set of closures, and so is a lambda in a loop. For a compiled
program they are what they were before, if code, defaults, captured values and the global variables
that they read are the same. Two such functions have the same token.

A function is looked at when it is first met, and remembered by its identity. Looked at again, each
time, is only what may have changed in the variables that it captures: those that are assigned after
the function was made, and lists, sets and dictionaries. What the function assigns or changes itself
is left out of that: a function that counts its calls stays what it was. Left out as well, as in
`jax.jit`, are its global variables, its defaults and the attributes of captured objects; they matter
when the next function is made.

Nothing here keeps a function alive, or what it captures.
"""

import threading
import types
import weakref
from typing import Any

import numpy as np

from ._snapshots import ATOMS, EMPTY, MUTABLE, Freezer, contents, is_named
from ._stand_ins import Snapshot

# What a captured variable had in it: a plain value itself, a weak reference to anything else, or
# what a container had in it.
Mark = Any
Watch = tuple[tuple[weakref.ref[types.FunctionType], tuple[Mark, ...]], ...]

_PLAIN = (*ATOMS, float, complex, np.generic)
_ANYTHING = object()
# Containers beyond these are not looked at again.
_DEEPEST, _LONGEST = 4, 1000


class Token:
    """Stands for functions that are equal by value. Compared by identity."""

    __slots__ = ("__weakref__",)


class _Held:
    """What a container had in it."""

    __slots__ = ("kind", "marks")

    def __init__(self, kind: type, marks: list[Mark]):
        self.kind = kind
        self.marks = marks


def _items(container: Any) -> Any:
    if type(container) is dict:
        return [*container, *container.values()]
    return container


def _mark(value: Any, variable: bool, depth: int = 0) -> Mark:
    """What to compare a value with later on: all of it if it stands where something else may be put,
    otherwise only the containers in it."""
    if isinstance(value, tuple) or type(value) in MUTABLE:
        variable = variable or not isinstance(value, tuple)
        if depth == _DEEPEST or len(value) > _LONGEST:
            return _ANYTHING
        marks = [_mark(item, variable, depth + 1) for item in _items(value)]
        steady = not variable and all(mark is _ANYTHING for mark in marks)
        return _ANYTHING if steady else _Held(type(value), marks)
    if not variable:
        return _ANYTHING
    if isinstance(value, _PLAIN) or value is EMPTY:
        return value
    return weakref.ref(value) if type(value).__weakrefoffset__ else _ANYTHING


def _still(mark: Mark, value: Any) -> bool:
    """Whether a value is what it was when it was marked."""
    if mark is value or mark is _ANYTHING:
        return True
    if type(mark) is weakref.ref:
        return mark() is value
    if type(mark) is not _Held or type(value) is not mark.kind:
        return False
    items = _items(value)
    if len(items) != len(mark.marks):
        return False
    for inner, item in zip(mark.marks, items, strict=True):
        if inner is not item and not _still(inner, item):
            return False
    return True


def _watch(freezer: Freezer) -> Watch:
    """What to look at again when the function is met another time."""
    found: list[Any] = []
    for fn, later in freezer.functions:
        marks: list[Mark] = []
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            value = contents(cell)
            own = id(cell) in freezer.own
            marks.append(_ANYTHING if own else _mark(value, name in later or value is EMPTY))
        if any(mark is not _ANYTHING for mark in marks):
            found.append((weakref.ref(fn), tuple(marks)))
    return tuple(found)


def _unchanged(watch: Watch) -> bool:
    for reference, marks in watch:
        fn = reference()
        if fn is None:
            return False
        for cell, mark in zip(fn.__closure__ or (), marks, strict=True):
            if mark is not _ANYTHING and not _still(mark, contents(cell)):
                return False
    return True


class _Memory(weakref.ref):
    """What is remembered of a function while it lives."""

    __slots__ = ("key", "token", "watch")

    key: int
    token: Token
    watch: Watch


_remembered: dict[int, _Memory] = {}
_tokens: weakref.WeakValueDictionary[Snapshot, Token] = weakref.WeakValueDictionary()
# Comparing snapshots may run a `==` of the user's, and that may come back here.
_lock = threading.RLock()


def _forget(memory: Any) -> None:
    if _remembered.get(memory.key) is memory:
        _remembered.pop(memory.key, None)


def _recall(fn: Any) -> Token | None:
    memory = _remembered.get(id(fn))
    if memory is not None and memory() is fn and (not memory.watch or _unchanged(memory.watch)):
        return memory.token
    return None


def _meet(fn: Any) -> Token:
    """Looks at a function for the first time, or again after a change."""
    freezer = Freezer()
    snapshot = None
    # What its module has under its name is equal to nothing else, whatever it holds.
    if not is_named(fn) or getattr(fn, "__closure__", None):
        try:
            snapshot = Snapshot(freezer.freeze(fn))
        except Exception:
            # Too much to compare, or a `__hash__` or a flattening of the user's that fails.
            snapshot = None
    with _lock:
        token = _recall(fn)
        if token is None:
            memory = _Memory(fn, _forget)
            token = memory.token = _token_of(snapshot)
            memory.key, memory.watch = id(fn), _watch(freezer)
            _remembered[id(fn)] = memory
    return token


def _token_of(snapshot: Snapshot | None) -> Token:
    if snapshot is None:
        return Token()
    try:
        return _tokens.setdefault(snapshot, Token())
    except Exception:
        # A `==` of the user's that fails.
        return Token()


def function_token(fn: Any) -> Token:
    """The token that a function shares with all functions that do the same.

    Args:
        fn: a function, method, `functools.partial`, or what `jax.jit`, `jax.custom_jvp`,
            `jax.custom_vjp` or `functools.cache` make of a function.

    Returns:
        The token, which keeps nothing alive. A function that holds something which cannot be
        compared has a token of its own.

    Example:
        >>> import functools
        >>> function_token(functools.partial(max, 2)) is function_token(functools.partial(max, 2))
        True
        >>> function_token(functools.partial(max, 2)) is function_token(functools.partial(max, 2.0))
        False
    """
    return _recall(fn) or _meet(fn)
