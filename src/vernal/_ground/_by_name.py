"""Pickling functions that Python's pickle cannot.

`jax.nn.relu` and most of `jax.numpy` are objects that wrap a function of the same name, and
pickle, which looks at the function inside, finds "not the same object"; `copy.deepcopy` makes a
second one, which is another function to every cache. Both go away when such an object is pickled
as what it is: a name in a module.
"""

import sys
import types
from typing import Any


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


def by_name(value: Any) -> Any:
    """A stand-in for pickling that keeps importable callables what they are.

    Args:
        value: any Python object.

    Returns:
        `value`, or a copy of it if it is a list, tuple or dict, with every callable that can be
        imported by its name, but is neither a plain function nor a class, replaced by an object
        that unpickles (and copies) to that very callable.
    """
    if type(value) in (list, tuple):
        return type(value)(map(by_name, value))
    if type(value) is dict:
        return {key: by_name(item) for key, item in value.items()}
    if not callable(value) or isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return value
    module = getattr(value, "__module__", None)
    # `jnp.add` and its like have the short name only.
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if isinstance(module, str) and isinstance(name, str) and module in sys.modules:
        try:
            found = _find(module, name)
        except AttributeError:
            return value
        if found is value:
            return _Name(module, name)
    return value
