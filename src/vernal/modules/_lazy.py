"""Flat modules: what a compiled call remembers of a module, and modules that are lazy.

A compiled call needs a module's arrays as a flat list, and a key for everything else. Both are a
`Flat`. A module that has been an argument before keeps its own, for the next call.

A training loop hands the model that one compiled step returns to the next one and never looks at
it. Building the tree of modules, only to flatten it again, would be most of the time of such a
call. So a compiled function returns a module that is *lazy*: it has its class and its structure,
and in place of its children a `Flat`. The first look at a child, by whatever means, unflattens it:
its attribute (a `LazyChild`, which the class is given when the first of its instances is lazy, finds
that the instance has none), `module.__dict__`, or flattening (`_module.py`).

Modules do not change, but the lists and dicts in them may, and `object.__setattr__` goes past every
guard. So a `Flat` that a module keeps is used again only if everything on the way to its arrays is
still the very same object.
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

FLAT = "_vernal_flat"

# What stands behind a list or dict, so that items cannot seem to move from one to the next. (Behind
# the attributes of a module stands its structure.)
_END: Any = (object(),)
_is, _all_of = operator.is_, itertools.chain.from_iterable


class Flat:
    """A flat module.

    Args:
        arrays: its arrays, in order.
        key: everything else, as an object that two modules share exactly if one compiled program may
            stand for both.
        unflatten: makes the module from the arrays; only that of a lazy module is set.

    Attributes:
        own: the module's attributes, but for this one, which is the last.
        parts: what else leads to the arrays: the attributes of modules in it, lists, dicts.
        items: what was in them.
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
        """Whether the module is what it was when it was flattened."""
        values = attributes_of(module)
        return (
            len(values) == len(self.own) + 1
            and all(map(_is, values.values(), self.own))
            and (not self.parts or all(map(_is, _all_of(self.parts), self.items)))
        )


_SEEN = object()


def remember_flat(module: Any, flat: Flat) -> None:
    """Leaves a flat form in a module that has come along before; the first time it is only noted.

    Args:
        module: the module.
        flat: what it has just been flattened to.
    """
    values = attributes_of(module)
    if KEY not in values:  # made without `__init__`, or inside of it
        return
    if FLAT not in values:
        # Looking for what may change costs as much as flattening: not for one call.
        values[FLAT] = _SEEN
        return
    # Last, behind what it is compared with. It does not refer to the attributes that it is one of.
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
    """How to make lazy modules like this one.

    Args:
        module: the pattern.
        key: of its flat form.
        unflatten: makes the whole module from its arrays.

    Returns:
        A function from the arrays to a lazy module; None if not every look at a child of such a
        module could be seen.
    """
    structure: Structure = unflattened(module)[KEY][0]
    cls: Any = structure.cls
    if cls.__getattribute__ is not object.__getattribute__:
        return None
    for name in structure.layout.children:
        found = inspect.getattr_static(cls, name, _END)
        if found is _END:
            setattr(cls, name, LazyChild(name))
        elif type(found) is not LazyChild:
            # A default of the class would be found in place of the child.
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
    """The attributes of a module, which is lazy no longer."""
    values = attributes_of(module)
    flat = values.get(FLAT)
    if type(flat) is Flat and flat.unflatten is not None:
        with _unflattening:  # two threads that look first shall see the same objects
            if values.get(FLAT) is flat:
                children = attributes_of(flat.unflatten(flat.arrays))
                for name in values[KEY][0].layout.children:
                    # What was put there by force stays.
                    values.setdefault(name, children[name])
                # From now on somebody may hold, and change, a list or dict in it.
                values.pop(FLAT, None)
    return values


class LazyChild:
    """What a class has under the name of a child. Instances that hold the child go before it.

    Args:
        name: of the child.
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
