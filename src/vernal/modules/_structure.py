"""What a treedef knows of a module: its class, which fields are children, and the values of those
that are not.

Every instance points at its `Structure`, inside a one-element tuple: that tuple is what JAX
compares, and tuples compare their items by identity first, in C. Structures are interned where
their static values can be hashed, so that two models built alike share them and a jitted call
compares pointers. Modules are immutable, so the first flatten of one also remembers the result:
from then on flattening it is a single attribute read, in C.
"""

import linecache
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .._ground import by_name, intern_key, same
from ._attributes import set_attributes
from ._sorting import Kind, Mixed

# The entries of an instance's `__dict__` besides its fields: `(Structure,)`, without which it is
# still being built, and, once it has been flattened, `(children, (Structure,))`.
KEY = "_vernal_structure"
FLAT = "_vernal_flat"


def _nothing() -> None:
    return None


class Layout:
    """Which fields of a class are children and which are structure. One object per class and
    combination of kinds."""

    __slots__ = (
        "__weakref__",
        "children",
        "cls",
        "get",
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
        self.keys = tuple(jtu.GetAttrKey(name) for name in self.children)
        self.get = _getter([(name, kinds[name]) for name in self.children])
        self.make = _maker(self)
        # Weak, so that what a structure holds lives no longer than the modules that have it.
        self.latest: Callable[[], Structure | None] = _nothing


def _getter(children: list[tuple[str, Kind]]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """The function from an instance's `__dict__` to its children. Runs at every first flatten, so
    it is `itemgetter` if it can be."""
    names = [name for name, _ in children]
    if any(isinstance(kind, tuple) for _, kind in children):
        return lambda d: tuple(
            Mixed(d[name], kind) if isinstance(kind, tuple) else d[name] for name, kind in children
        )
    if not names:
        return lambda d: ()
    if len(names) == 1:
        only = names[0]
        return lambda d: (d[only],)
    return operator.itemgetter(*names)


_MAKE = """def make(children, template):
    module = new(cls)
    values = template()
    {targets}= children
    set_dict(module, values)
    return module
"""


def _maker(layout: "Layout") -> types.FunctionType:
    """The function that unflattens: a copy of the static values with the children put in.

    It runs for every module of a model at every call, so it is generated: no loop, no attribute
    protocol, no code of the user.
    """
    cls: Any = layout.cls
    targets = "".join(f"values[{name!r}], " for name in layout.children) or "() "
    source = _MAKE.format(targets=targets)
    file = f"<vernal unflatten of {cls.__module__}.{cls.__qualname__}>"
    # Debuggers and tracebacks find the source here.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    # Assigning a whole `__dict__` is the fastest way to fill an object whose attributes are frozen.
    namespace: dict[str, Any] = {"new": object.__new__, "cls": cls, "set_dict": set_attributes}
    exec(compile(source, file, "exec"), namespace)
    return namespace["make"]


class Structure:
    """A layout together with the values of what is not a child.

    Args:
        layout: the layout.
        rest: the values.
        key: what they were when it was made, for comparison; None if they cannot be hashed.
    """

    __slots__ = ("__weakref__", "aux", "cls", "get", "key", "layout", "make", "rest")

    def __init__(self, layout: Layout, rest: dict[str, Any], key: Any = None):
        self.layout = layout
        self.rest = rest
        self.key = key
        self.cls = layout.cls
        self.get = layout.get
        self.aux = (self,)
        template = {**rest, KEY: self.aux}
        make = layout.make
        self.make = types.FunctionType(make.__code__, make.__globals__, argdefs=(template.copy,))

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        if type(other) is not Structure or self.layout is not other.layout:
            return False
        if self.key is not None and other.key is not None:
            return self.key == other.key
        return all(same(value, other.rest[name]) for name, value in self.rest.items())

    def __hash__(self) -> int:
        return hash(self.layout if self.key is None else self.key)

    def __repr__(self) -> str:
        rest = ", ".join(f"{name}={value!r}" for name, value in self.rest.items())
        return f"{self.cls.__name__}({rest})"

    def __reduce__(self) -> Any:
        return restore_structure, (self.cls, self.layout.kinds, by_name(self.rest))


_interned: weakref.WeakValueDictionary[Any, Structure] = weakref.WeakValueDictionary()


def _key(layout: Layout, rest: dict[str, Any]) -> Any:
    return (layout, *[intern_key(value) for value in rest.values()])


def _is_other(known: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether a function among some static values is another object than the one in its place."""
    return any(callable(value) and value is not known[name] for name, value in found.items())


def structure_of(layout: Layout, values: dict[str, Any]) -> Structure:
    """The structure with this layout and, from `values`, the static values that the layout calls
    for."""
    rest = layout.rest
    latest = layout.latest()
    if latest is not None:
        known = latest.rest
        for name in rest:
            if known[name] is not values[name]:
                break
        else:
            return latest
    found = {name: values[name] for name in rest}
    try:
        key = _key(layout, found)
        structure = _interned.get(key)
        # A function that the structure holds may have captured a list that has changed since.
        if structure is None or (
            _is_other(structure.rest, found) and _key(layout, structure.rest) != key
        ):
            structure = _interned[key] = Structure(layout, found, key)
    except TypeError:
        # Something unhashable: not shared, but compared by value all the same.
        structure = Structure(layout, found)
    layout.latest = weakref.ref(structure)
    return structure


def layout_of(cls: Any, kinds: dict[str, Kind]) -> Layout:
    """The one layout of a class for these kinds."""
    layouts = cls._vernal_class.layouts
    key = (*kinds.items(),)
    layout = layouts.get(key)
    if layout is None:
        # In one step: layouts are compared by identity, and two threads may make the first module.
        layout = layouts.setdefault(key, Layout(cls, kinds))
    return layout


def assemble(cls: Any, kinds: dict[str, Kind], values: dict[str, Any]) -> Any:
    """A finished module from its parts. No `__init__`, no checks. Pickles call it by this name."""
    module: Any = object.__new__(cls)
    set_attributes(module, {**values, KEY: structure_of(layout_of(cls, kinds), values).aux})
    return module


def restore_structure(cls: type, kinds: dict[str, Kind], rest: dict[str, Any]) -> Structure:
    """Rebuilds a structure from a pickle or a copy."""
    return structure_of(layout_of(cls, kinds), rest)
