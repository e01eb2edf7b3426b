"""Flat modules: the flat form that a compiled call caches in a module, and lazy modules.

A compiled call needs a module's arrays as a flat list, and a key for everything else. Together they
are a `Flat`. A module that has been an argument before keeps its `Flat` for the next call.

A training loop passes the model that one compiled step returns to the next step and never looks at
it. Building the tree of modules, only to flatten it again, would take most of the time of such a
call. So a compiled function returns a *lazy* module: it has its class and its structure, and a `Flat`
in place of its children. The first access to a child unflattens it, whether through its attribute
(a `LazyChild`, added to the class with its first lazy instance, runs when the instance has no such
attribute), through `module.__dict__`, or by flattening (`_module.py`).

Modules do not change, but the lists and dicts in them may, and `object.__setattr__` bypasses every
guard. So a module's `Flat` is used again only if every object on the way to its arrays is still the
same one.
"""

import inspect
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.tree_util as jtu

from ._attributes import attributes_of, set_attributes
from ._structure import KEY, Structure
from ._torch_names import is_hint

FLAT = "_vernal_flat"

# Follows the items of a list or dict, so that an item cannot seem to move from one to the next. (The
# attributes of a module end with its structure.)
_END: Any = (object(),)
_is, _all_of = operator.is_, itertools.chain.from_iterable


class Flat:
    """A flat module.

    Args:
        arrays: its arrays, in order.
        key: everything else, as an object that two modules share exactly if one compiled program
            serves both.
        unflatten: makes the module from the arrays; set only for a lazy module.

    Attributes:
        own: the module's attributes, without this one, which is the last.
        parts: what else leads to the arrays: the attributes of modules in it, lists, dicts.
        items: the contents of `parts`.
    """

    __slots__ = ("arrays", "items", "key", "own", "parts", "unflatten")

    def __init__(
        self,
        arrays: list[Any],
        key: Any,
        unflatten: Callable[[list[Any]], Any] | None = None,
    ):
        self.arrays = arrays
        self.key = key
        self.unflatten = unflatten
        self.own: Sequence[Any] = ()
        self.parts: list[Iterable[Any]] = []
        self.items: list[Any] = []

    def fits(self, module: Any) -> bool:
        """Whether the module is unchanged since it was flattened."""
        values = attributes_of(module)
        return (
            len(values) == len(self.own) + 1
            and all(map(_is, values.values(), self.own))
            and (not self.parts or all(map(_is, _all_of(self.parts), self.items)))
        )


_SEEN = object()


def remember_flat(module: Any, flat: Flat) -> None:
    """Caches a flat form in a module from its second call on; the first call only marks the module as seen.

    Args:
        module: the module.
        flat: its flat form, just made.
    """
    values = attributes_of(module)
    if KEY not in values:  # made without `__init__`, or inside of it
        return
    if FLAT not in values:
        # Looking for what may change costs as much as flattening: too much for a single call.
        values[FLAT] = _SEEN
        return
    # Last, after the attributes that it is compared with. It holds no reference to the dict that it is in.
    values.pop(FLAT, None)
    flat.own, flat.parts = tuple(values.values()), []
    known = all(_watch(values[name], flat.parts) for name in values[KEY][0].layout.children)
    flat.items = list(_all_of(flat.parts))
    values[FLAT] = flat if known else _SEEN


def _watch(value: Any, parts: list[Iterable[Any]]) -> bool:
    cls = type(value)
    if hasattr(cls, "_vernal_class"):
        values = unflattened(value)
        if KEY not in values:
            return False
        parts.append(values.values())
        return all(_watch(values[name], parts) for name in values[KEY][0].layout.children)
    if cls is list:
        parts += (value, _END)
        return all(_watch(item, parts) for item in value)
    if cls is dict:
        parts += (value.keys(), _END, value.values(), _END)
        return all(_watch(item, parts) for item in value.values())
    if issubclass(cls, tuple):
        return all(_watch(item, parts) for item in value)
    return value is None or not jtu.is_tree_node(cls)


def lazily(
    module: Any, key: Any, unflatten: Callable[[list[Any]], Any]
) -> Callable[[list[Any]], Any] | None:
    """Makes a function that builds lazy modules like this one.

    Args:
        module: the pattern.
        key: the key of its flat form.
        unflatten: makes the whole module from its arrays.

    Returns:
        A function from the arrays to a lazy module; None if some access to a child of such a module
        would go unnoticed.
    """
    structure: Structure = unflattened(module)[KEY][0]
    cls: Any = structure.cls
    if cls.__getattribute__ is not object.__getattribute__:
        return None
    for name in structure.layout.children:
        found = inspect.getattr_static(cls, name, _END)
        if found is _END or is_hint(found):
            setattr(cls, name, LazyChild(name))
        elif type(found) is not LazyChild:
            # The class's default would be found in place of the child.
            return None
    new, template = object.__new__, {**structure.rest, KEY: structure.aux}
    own = tuple(template.values())

    def make(arrays: list[Any]) -> Any:
        lazy = new(cls)
        flat = Flat(arrays, key, unflatten)
        flat.own = own
        set_attributes(lazy, {**template, FLAT: flat})
        return lazy

    return make


_unflattening = threading.RLock()


def unflattened(module: Any) -> dict[str, Any]:
    """The attributes of a module, which is no longer lazy."""
    values = attributes_of(module)
    flat = values.get(FLAT)
    if type(flat) is Flat and flat.unflatten is not None:
        with _unflattening:  # two threads that both access it first must see the same objects
            if values.get(FLAT) is flat:
                children = attributes_of(flat.unflatten(flat.arrays))
                for name in values[KEY][0].layout.children:
                    # Keep what `object.__setattr__` has put there.
                    values.setdefault(name, children[name])
                # From now on a caller may hold, and change, a list or dict in it.
                values.pop(FLAT, None)
    return values


class LazyChild:
    """The class attribute under the name of a child. An instance that holds the child takes precedence.

    Args:
        name: the name of the child.
    """

    __slots__ = ("name",)

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is not None:
            values = unflattened(module)
            if self.name in values:
                return values[self.name]
        raise AttributeError(f"{owner.__name__!r} has no attribute {self.name!r}")
