"""Pickling functions that Python's pickle cannot.

`jax.nn.relu` and most of `jax.numpy` are objects that wrap a function of the same name. Pickle looks
at the function inside and fails with "not the same object"; `copy.deepcopy` makes a second object,
which every cache takes for another function. Pickling such an object by its name in its module
solves both.
"""

import functools
import sys
import types
from typing import Any

import jax.tree_util as jtu

from ._openings import open_up


def _find(module: str, name: str) -> Any:
    __import__(module)
    found: Any = sys.modules[module]
    for part in name.split("."):
        found = getattr(found, part)
    return found


class _Name:
    """Stands for a function inside a pickle. Unpickling gives the function itself."""

    def __init__(self, module: str, name: str):
        self.module = module
        self.name = name

    def __reduce__(self) -> Any:
        return _find, (self.module, self.name)


class _Itself:
    """Stands for a callable of the running script. Copying gives the callable itself.

    Pickling is left to the pickler: another process runs another script, to which cloudpickle can
    send the function.
    """

    def __init__(self, value: Any):
        self.value = value

    def __deepcopy__(self, memo: Any) -> Any:
        return self.value

    def __reduce__(self) -> Any:
        return _given, (self.value,)


class _PartialOf:
    """Stands for a `functools.partial`. Copying gives the partial itself, as copying a function does."""

    def __init__(self, value: functools.partial):
        self.value = value

    def __deepcopy__(self, memo: Any) -> Any:
        return self.value

    def __reduce__(self) -> Any:
        partial = self.value
        parts = partial.func, partial.args, dict(partial.keywords)
        return _partial, (type(partial), *map(by_name, parts))


def _partial(cls: Any, func: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    return cls(func, *args, **keywords)


def _given(value: Any) -> Any:
    return value


def by_name(value: Any) -> Any:
    """Prepares a value for pickling, so that importable callables come back as themselves.

    Args:
        value: any Python object.

    Returns:
        `value`, or a copy of it if it is a container, in which every callable that can be imported by
        its name, but is neither a plain function nor a class, is replaced by an object that unpickles
        (and copies) to that callable.
    """
    if isinstance(value, (list, tuple, dict, set, frozenset)) and (opened := open_up(value)):
        node, parts = opened
        named = list(map(by_name, parts))
        if not node.has_shell:
            return node.make(named)
        container = node.shell([])
        node.fill(container, named)
        return container
    if isinstance(value, functools.partial) and not jtu.is_tree_node(type(value)):
        return _PartialOf(value)
    if not callable(value) or isinstance(
        value, (type, types.FunctionType, types.BuiltinFunctionType)
    ):
        return value
    module = getattr(value, "__module__", None)
    # `jnp.add` and its like have only the short name.
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(module, str) and isinstance(name, str) and module in sys.modules:
        try:
            found = _find(module, name)
        except AttributeError:
            return value
        if found is value:
            return _Itself(value) if module == "__main__" else _Name(module, name)
    return value
