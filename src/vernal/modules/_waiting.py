"""Modules that are filled in when they are first looked at.

A training loop hands the model that one compiled step returns to the next one and never looks at
it. Building the tree of modules, only to take it apart again, would be most of the time of such a
call. So a compiled function returns a module that *waits*: it has its class and its structure, and
in place of its children the arrays as a flat list, which the next call takes as they are. The first
look at a child, by whatever means, puts all children in.

    values[FORM]    the module's arrays and everything else, taken apart: a `Form`
    form.fill       makes the whole module; only a module that waits has it

A look arrives at one of three places: an attribute that is missing (`__getattr__`, which a class is
given when the first of its instances has to wait, because classes that have it are slower),
`module.__dict__`, and flattening (`_FirstFlatten` in `_module.py`).

A module that is not waiting may have a form as well, so that it is flattened once for many calls.
Modules do not change, but the lists and dicts in them may: what these hold is compared by identity
before the form is used again.
"""

import itertools
import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any

import jax.tree_util as jtu

from ._attributes import attributes_of, set_attributes
from ._structure import KEY, Structure

FORM = "_vernal_form"

# What stands behind each list or dict, so that items cannot seem to move from one to the next.
_END: Any = (object(),)


class Form:
    """A tree taken apart.

    Args:
        arrays: its arrays, in order.
        key: everything else, as a value that two trees share exactly if one compiled program may
            stand for both.
        fill: makes the tree from the arrays, for a module that waits.

    Attributes:
        watched: the lists and dicts in the tree, and what was in them.
    """

    __slots__ = ("arrays", "fill", "key", "watched")

    def __init__(
        self,
        arrays: list[Any],
        key: Any,
        fill: Callable[[list[Any]], Any] | None = None,
    ):
        self.arrays = arrays
        self.key = key
        self.fill = fill
        self.watched: Watched | None = None


class Watched:
    """The lists and dicts in a tree, to see whether any has changed in place.

    Args:
        parts: the lists, and the keys and values of the dicts.
    """

    __slots__ = ("items", "parts")

    def __init__(self, parts: list[Iterable[Any]]):
        self.parts = parts
        self.items = list(itertools.chain.from_iterable(parts))

    def unchanged(self) -> bool:
        """Whether all of them hold the objects that they held."""
        return all(map(operator.is_, itertools.chain.from_iterable(self.parts), self.items))


_SEEN = object()


def remember_form(module: Any, form: Form) -> None:
    """Leaves a form in a module that has come along before; the first time it is only noted.

    Args:
        module: the module.
        form: what it has just been taken apart into.
    """
    values = attributes_of(module)
    if FORM not in values:
        # Looking for what may change costs as much as flattening: not for one call.
        values[FORM] = _SEEN
        return
    parts: list[Iterable[Any]] = []
    known = _watch(module, parts)
    form.watched = Watched(parts) if parts else None
    values[FORM] = form if known else _SEEN


def _watch(value: Any, parts: list[Iterable[Any]]) -> bool:
    cls = type(value)
    if hasattr(cls, "_vernal_class"):
        values = filled(value)
        if KEY not in values:
            return False
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


def waiting_maker(
    module: Any, key: Any, fill: Callable[[list[Any]], Any]
) -> Callable[[list[Any]], Any] | None:
    """How to make modules like this one that wait.

    Args:
        module: the pattern.
        key: of its form.
        fill: makes the whole module from its arrays.

    Returns:
        A function from the arrays to a module that waits; None if not every look at a child of such
        a module could be seen.
    """
    structure: Structure = filled(module)[KEY][0]
    cls: Any = structure.cls
    if cls.__getattribute__ is not object.__getattribute__:
        return None
    if getattr(cls, "__getattr__", _missing) is not _missing:
        return None
    # A default of the class would be found in place of the child.
    if any(hasattr(cls, name) for name in structure.layout.children):
        return None
    if not hasattr(cls, "__getattr__"):
        cls.__getattr__ = _missing
    new, template = object.__new__, {**structure.rest, KEY: structure.aux}

    def make(arrays: list[Any]) -> Any:
        waiting = new(cls)
        set_attributes(waiting, {**template, FORM: Form(arrays, key, fill)})
        return waiting

    return make


_filling = threading.RLock()


def filled(module: Any) -> dict[str, Any]:
    """The attributes of a module, which waits no longer."""
    values = attributes_of(module)
    form = values.get(FORM)
    if type(form) is Form and form.fill is not None:
        with _filling:  # two threads that look first shall see the same objects
            if values.get(FORM) is form:
                children = attributes_of(form.fill(form.arrays))
                for name in values[KEY][0].layout.children:
                    values[name] = children[name]
                # From now on somebody may hold, and change, a list or dict in it.
                del values[FORM]
    return values


def _missing(module: Any, name: str) -> Any:
    """`__getattr__` of a class of which an instance has waited."""
    filled(module)
    return object.__getattribute__(module, name)
