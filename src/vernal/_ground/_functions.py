"""Functions as static values: when may one stand for another in a compiled program?

Two functions are the same only if neither can ever change:

1. it is the same object;
2. both are `functools.partial` of the same parts (and a bound method of a module is a pytree, whose
   parts JAX compares);
3. both are *library functions* of the same code: defined in a settled package, with defaults and
   captured values that are immutable and plain, JAX arrays (by identity), or such functions, and
   without an assignment to what they capture;
4. everything else equals only itself.

The third rule makes four fresh `optax.adam(1e-3)` one compilation. The key of a library function is
computed once and never goes stale, because nothing in it can change.
"""

import dis
import enum
import functools
import os
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax

from ._keys import Alive, Itself, plain_key

# The packages whose functions, classes and global variables are never replaced: rule 3.
settled_packages = {"jax", "jaxlib", "numpy", "scipy", "optax", "vernal", *sys.stdlib_module_names}
# Where the standard library is.
_STANDARD = os.path.dirname(getattr(os, "__file__", ""))


class FrozenPartial(functools.partial):
    """A `functools.partial` whose keywords cannot be changed in place.

    Two partials of the same parts are one static value. That is sound only if neither can change, so
    this class replaces a partial with keywords that becomes structure.
    """

    @property
    def keywords(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride] (read only)
        """The keyword arguments, as a mapping that cannot be changed."""
        return types.MappingProxyType(functools.partial.keywords.__get__(self))  # pyright: ignore[reportAttributeAccessIssue] (a descriptor)


def frozen(value: Any) -> Any:
    """The value in the form that structure may hold: each partial with keywords becomes a
    `FrozenPartial`.

    Args:
        value: any static value.
    """
    if type(value) is functools.partial and not vars(value):
        parts = value.func, *value.args, *value.keywords.values()
        new = tuple(map(frozen, parts))
        if not value.keywords and all(map(_is, new, parts)):
            return value
        count = 1 + len(value.args)
        return FrozenPartial(*new[:count], **dict(zip(value.keywords, new[count:], strict=True)))
    if type(value) is tuple:
        items = tuple(map(frozen, value))
        return value if all(map(_is, items, value)) else items
    return value


def _is(a: Any, b: Any) -> bool:
    return a is b


_keys: weakref.WeakKeyDictionary[types.FunctionType, Any] = weakref.WeakKeyDictionary()


class NotPlainError(Exception):
    """Something could change."""


def _in_settled_module(namespace: Any) -> bool:
    """Whether these are the global variables of a module of a settled package. (A function's own
    `__module__` does not count: `functools.wraps` copies it.)"""
    name = namespace.get("__name__")
    if not isinstance(name, str) or name.partition(".")[0] not in settled_packages:
        return False
    module = sys.modules.get(name)
    if module is None or vars(module) is not namespace:
        return False
    # A user's file may have the name of a module of the standard library.
    file = getattr(module, "__file__", None)
    if file is None or name.partition(".")[0] not in sys.stdlib_module_names:
        return True
    return file.startswith(_STANDARD) and "-packages" not in file


def function_key(fn: types.FunctionType) -> Any:
    """The key that a Python function is compared by.

    Args:
        fn: the function.

    Returns:
        A hashable key. All library functions of the same code and captured values share one; for any
        other function it is the function itself.
    """
    if not _in_settled_module(fn.__globals__):
        return fn
    key = _keys.get(fn)
    if key is None:
        try:
            key = _keys[fn] = _library_key(fn, ())
        except NotPlainError:
            return fn
    return key


def _library_key(fn: types.FunctionType, outer: tuple[Any, ...]) -> Any:
    """The code of a library function and what it captured."""
    if fn in outer or not never_changes(fn):
        raise NotPlainError
    # Attributes that a decorator sets on a function are not compared, so there must be none.
    if any(name != "__wrapped__" for name in fn.__dict__):
        raise NotPlainError
    outer = (*outer, fn)
    try:
        captured = [cell.cell_contents for cell in fn.__closure__ or ()]
    except ValueError:
        raise NotPlainError from None
    parts = (*captured,), fn.__defaults__ or (), *(fn.__kwdefaults__ or {}).items()
    return Itself(fn.__code__), unchanging_key(parts, lambda fn: _library_key(fn, outer))


def unchanging_key(x: Any, of_function: Callable[[types.FunctionType], Any]) -> Any:
    """The key of a value that cannot change: an immutable plain value, a JAX array, a function, a
    partial, or an object that a settled library has under its name.

    Args:
        x: anything.
        of_function: the key of a function.

    Raises:
        NotPlainError: for anything else.
    """
    kind = type(x)
    if kind is types.FunctionType:
        return kind, of_function(x)
    if isinstance(x, enum.Enum):
        # A member is one object, but its value may be a list.
        return kind, Itself(x), unchanging_key(x.value, of_function)
    key = plain_key(x)
    if key is not None:
        return key
    if isinstance(x, jax.Array):
        return Alive(x)
    if kind is FrozenPartial or (kind is functools.partial and not (x.keywords or vars(x))):
        parts = (unchanging_key(part, of_function) for part in (x.func, *x.args))
        named = ((name, unchanging_key(part, of_function)) for name, part in x.keywords.items())
        return functools.partial, (*parts,), (*named,)
    if kind is tuple or (isinstance(x, tuple) and hasattr(kind, "_fields")):
        return kind, *(unchanging_key(item, of_function) for item in x)
    if kind is frozenset:
        return kind, frozenset(unchanging_key(item, of_function) for item in x)
    if is_library_name(x):
        return kind, Itself(x)
    raise NotPlainError


def is_library_name(x: Any) -> bool:
    """Whether a settled module has this class or callable under its name, as for `jnp.square` and
    `np.add`: then there is only ever one of it.

    Args:
        x: anything.
    """
    module = sys.modules.get(getattr(x, "__module__", None) or "")
    if module is None or not _in_settled_module(vars(module)):
        return False
    # Only now, because a user's object may compute its name.
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
    return isinstance(name, str) and vars(module).get(name) is x


def never_changes(fn: types.FunctionType) -> bool:
    """Whether a function is of a settled package, and assigns nothing that it captures.

    Args:
        fn: the function.
    """
    return _in_settled_module(fn.__globals__) and not _assigns_captured(fn.__code__)


@functools.lru_cache(maxsize=4096)
def _assigns_captured(code: types.CodeType) -> bool:
    return any(
        step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
        for step in dis.get_instructions(code)
    )
