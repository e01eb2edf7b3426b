"""The part of a module in the treedef: its class, which fields are children, and the values of the
others.

Every instance points at its `Structure`, inside a one-element tuple: JAX compares that tuple, and
tuples compare their items by identity first, in C. Structures of identical values are one object, so
two models built alike share them and a jitted call compares pointers. Equal values that are not the
same object stay apart: a module keeps the functions that it was given.
"""

import linecache
import types
import weakref
from collections.abc import Callable
from typing import Any

from .._ground import same, static_key
from ..show import field_key
from ..trees import by_name
from ._attributes import set_attributes
from ._sorting import Kind, Mixed

# The entry of an instance's `__dict__` besides its fields: `(Structure,)`. Without it the instance is
# still being built.
KEY = "_vernal_structure"

_PLAIN = frozenset({str, bytes, bool, int, float, complex, type(None)})


def _nothing() -> None:
    return None


class Layout:
    """Which fields of a class are children and which are structure. One object for each class and
    combination of kinds."""

    __slots__ = (
        "__weakref__",
        "children",
        "cls",
        "flatten",
        "keys",
        "kinds",
        "latest",
        "make",
        "rest",
    )

    def __init__(self, cls: type, kinds: dict[str, Kind]):
        self.cls = cls
        self.kinds = kinds
        self.children = tuple(name for name, kind in kinds.items() if kind is not False)
        self.rest = tuple(name for name, kind in kinds.items() if kind is False)
        self.keys = tuple(field_key(cls, name) for name in self.children)
        self.flatten, self.make = _functions(self)
        # Weak, so that the values of a structure live no longer than its modules.
        self.latest: Callable[[], Structure | None] = _nothing


_FUNCTIONS = """def flatten(values{parameters}):
    if {unchanged}:
        return ({children})
    raise KeyError

def make(children, template):
    module = new(cls)
    values = template()
    {targets}= children
    set_dict(module, values)
    return module
"""


def _functions(layout: "Layout") -> tuple[types.FunctionType, types.FunctionType]:
    """The functions that flatten and unflatten.

    The first takes the children out of an instance's `__dict__`, if its static values are still the
    given ones; the second copies the static values and adds the children. They run for every module
    of a model at every call, so they are generated: no loop, no attribute protocol, no user code.
    """
    cls: Any = layout.cls
    kinds = layout.kinds.items()
    mixed = {f"kind_{i}": kind for i, (_, kind) in enumerate(kinds) if isinstance(kind, tuple)}
    children = [
        f"Mixed(values[{name!r}], kind_{i})" if f"kind_{i}" in mixed else f"values[{name!r}]"
        for i, (name, kind) in enumerate(kinds)
        if kind is not False
    ]
    source = _FUNCTIONS.format(
        parameters="".join(f", static_{i}" for i in range(len(layout.rest))),
        unchanged=" and ".join(f"values[{n!r}] is static_{i}" for i, n in enumerate(layout.rest))
        or "True",
        children="".join(f"{child}, " for child in children),
        targets="".join(f"values[{name!r}], " for name in layout.children) or "() ",
    )
    file = f"<vernal pytree of {cls.__module__}.{cls.__qualname__}>"
    # Debuggers and tracebacks find the source here.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    # Assigning the whole `__dict__` is the fastest way to fill an object whose attributes are frozen.
    namespace: dict[str, Any] = {
        "new": object.__new__,
        "cls": cls,
        "set_dict": set_attributes,
        "Mixed": Mixed,
        **mixed,
    }
    exec(compile(source, file, "exec"), namespace)
    return namespace["flatten"], namespace["make"]


def _with_defaults(fn: types.FunctionType, *defaults: Any) -> types.FunctionType:
    return types.FunctionType(fn.__code__, fn.__globals__, argdefs=defaults)


class Structure:
    """A layout together with the values of the fields that are not children. Structures are equal if
    one compiled program serves both.

    Args:
        layout: the layout.
        rest: the values.
    """

    __slots__ = (
        "__weakref__",
        "aux",
        "cls",
        "flatten",
        "key",
        "layout",
        "make",
        "rest",
    )

    def __init__(self, layout: Layout, rest: dict[str, Any]):
        self.layout = layout
        self.rest = rest
        try:
            # Annotations are a dict, and have no effect.
            compared = (x for name, x in rest.items() if name != "__annotations__")
            self.key: Any = tuple(map(static_key, compared))
        except TypeError:
            # A class with Equinox's rule: compared by value in `__eq__`.
            self.key = None
        self.cls = layout.cls
        self.aux = (self,)
        template = {**rest, KEY: self.aux}
        self.flatten = _with_defaults(layout.flatten, *rest.values())
        self.make = _with_defaults(layout.make, template.copy)

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if type(other) is not Structure or self.layout is not other.layout:
            return False
        if self.key is not None and other.key is not None:
            return self.key == other.key
        return all(
            same(value, other.rest[name], ordered=False) for name, value in self.rest.items()
        )

    def __hash__(self) -> int:
        return hash((self.layout, self.key))

    def __repr__(self) -> str:
        rest = ", ".join(f"{name}={value!r}" for name, value in self.rest.items())
        return f"{self.cls.__name__}({rest})"

    def __reduce__(self) -> Any:
        return restore_structure, (self.cls, self.layout.kinds, by_name(self.rest))


# By identity, except for plain values: a function or object never replaces an equal one.
_interned: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()


def _identity(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return kind, *map(_identity, value)
    # An interned structure keeps the object alive, so its address stays its own.
    return static_key(value) if kind in _PLAIN else id(value)


def structure_of(layout: Layout, values: dict[str, Any]) -> Structure:
    """The structure with this layout and its static values, taken from `values`. Plain values there are
    replaced by the structure's own objects."""
    rest = layout.rest
    latest = layout.latest()
    if latest is not None:
        known = latest.rest
        for name in rest:
            if known[name] is not values[name]:
                break
        else:
            return latest
    identity = (layout, *[_identity(values[name]) for name in rest])
    structure = _interned.get(identity)
    if structure is None:
        found = {name: values[name] for name in rest}
        # In one step: two threads may make the first module at the same time.
        structure = _interned.setdefault(identity, Structure(layout, found))
    values.update(structure.rest)
    layout.latest = weakref.ref(structure)
    return structure


def layout_of(cls: Any, kinds: dict[str, Kind]) -> Layout:
    """The one layout of a class for these kinds."""
    layouts = cls._vernal_class.layouts
    key = (*kinds.items(),)
    layout = layouts.get(key)
    if layout is None:
        # In one step: layouts are compared by identity, and two threads may make the first module at the same time.
        layout = layouts.setdefault(key, Layout(cls, kinds))
    return layout


def assemble(cls: Any, kinds: dict[str, Kind], values: dict[str, Any]) -> Any:
    """A finished module from its parts. No `__init__`, no checks. Pickles call it by this name."""
    module: Any = object.__new__(cls)
    values = dict(values)
    values[KEY] = structure_of(layout_of(cls, kinds), values).aux
    set_attributes(module, values)
    return module


def restore_structure(cls: type, kinds: dict[str, Kind], rest: dict[str, Any]) -> Structure:
    """Rebuilds a structure from a pickle or a copy."""
    return structure_of(layout_of(cls, kinds), rest)
