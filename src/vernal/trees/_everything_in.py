"""`everything_in`: all objects reachable from a value."""

import collections
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from ._openings import open_up

# Objects without references that matter here, and packages whose objects refer to JAX's current work.
_OPAQUE = (
    str,
    bytes,
    int,
    float,
    complex,
    jax.Array,
    np.ndarray,
    types.ModuleType,
    types.FunctionType,
)
_MACHINERY = ("jax", "jaxlib", "numpy")


def everything_in(
    x: Any, closed: Callable[[Any], bool] = lambda _: False, objects: bool = False
) -> Iterator[Any]:
    """All objects reachable from a value, itself included, each once.

    The variables of a module (`globals()`) are not opened: they are read by name, and lead to the whole program.

    Args:
        x: any Python object.
        closed: returns True for objects that are not opened.
        objects: whether to open objects other than callables, containers and dataclasses, too: an object leads to all
            that it refers to (attributes, an exception's arguments, a generator's variables), a class defined in a
            function to its own attributes. An object that leads to more than some thousands of others leads to the
            whole program: stop there.

    Yields:
        The objects, breadth first.

    Example:
        >>> from vernal.trees import everything_in
        >>> def scale_by(factor):
        ...     return lambda x: factor * x
        >>> [x for x in everything_in({"f": scale_by(2.5)}) if isinstance(x, float)]
        [2.5]
        >>> error = ValueError({"f": scale_by(2.5)})
        >>> [x for x in everything_in(error, objects=True) if isinstance(x, float)]
        [2.5]
    """
    seen: dict[int, Any] = {}
    todo = collections.deque([(x, False)])
    while todo:
        item, as_owner = todo.popleft()
        if id(item) in seen:
            continue
        # Kept alive during the walk, so that no other object gets its id.
        seen[id(item)] = item
        yield item
        if closed(item) or _is_module_namespace(item):
            continue
        opened = open_up(item, as_owner)
        if opened is not None:
            node, parts = opened
            todo.extend((part, k == node.owner) for k, part in enumerate(parts))
        elif objects:
            todo.extend((part, False) for part in _referents(item))


def _referents(x: Any) -> list[Any]:
    """The objects that an object refers to, as Python's garbage collector sees it."""
    cls = type(x)
    if x is None or isinstance(x, _OPAQUE) or _package(cls) in _MACHINERY:
        return []
    if isinstance(x, type):
        # A class of a module outlives the call; one defined in a function may hold the function's values.
        return list(vars(x).values()) if "<locals>" in x.__qualname__ else []
    return gc.get_referents(x)


def _is_module_namespace(x: Any) -> bool:
    """Whether `x` is the `globals()` of a module: it leads to the rest of the program, and is read by name."""
    return type(x) is dict and "__builtins__" in x


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]
