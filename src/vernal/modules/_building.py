"""The steps from the end of `__init__` to a finished, frozen module."""

import dataclasses
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import frozen, one_level_with_keys, static_key
from ..trees import is_array, node_parts
from . import _refusals as refuse
from ._attributes import attributes_of
from ._fields import array_dtype_for, resolve_annotation
from ._lazy import LazyChild
from ._marks import freeze_fields
from ._sorting import (
    CONTAINERS,
    Kind,
    hides_arrays,
    is_data,
    is_node,
    kind_by_type,
    sort_value,
)
from ._structure import KEY, Layout, layout_of, structure_of


class ClassInfo:
    """The library's notes on a module class, filled in when the first instance is built.

    A pickle of a class by value (cloudpickle) must not contain them: they are found again through
    the class.
    """

    def __init__(self, cls: type, every_field_is_child: bool):
        self.cls = cls
        self.every_field_is_child = every_field_is_child
        # Equinox's rule only warns. A transformed function is not responsible for what it wraps.
        self.may_hide_arrays = every_field_is_child or getattr(
            cls, "_vernal_may_hide_arrays", False
        )
        self.layouts: dict[Any, Layout] = {}
        self.by_kinds: dict[tuple[Kind | None, ...], Layout] = {}
        # Fields where a number of this type stays a number: their annotation does not ask for an array.
        self.stay_numbers: set[tuple[str, type]] = set()
        self.declared: frozenset[str] = frozenset()
        self.ready = False

    def __reduce__(self) -> Any:
        return class_info, (self.cls,)

    def filled(self) -> "ClassInfo":
        """These notes, complete. (The first instance may come from a pickle.)"""
        if not self.ready:
            self.fill()
        return self

    def fill(self) -> None:
        fields = dataclasses.fields(self.cls)  # pyright: ignore[reportArgumentType] (every module class is a dataclass)
        self.names = tuple(f.name for f in fields)
        self.declared = frozenset(self.names)
        self.converters = [
            (f.name, f.metadata["converter"]) for f in fields if f.metadata.get("converter")
        ]
        # Their converters see what the user wrote.
        self.converted = frozenset(name for name, _ in self.converters)
        self.defaults = {f.name: f.default for f in fields}
        self.annotations = {f.name: f.type for f in fields if not f.metadata.get("static")}
        self.named = tuple((f.name, bool(f.metadata.get("static"))) for f in fields)
        self.buffers = tuple(f.name for f in fields if not f.metadata.get("trainable", True))
        self.checks = [
            klass.__dict__["__check_init__"]
            for klass in self.cls.__mro__
            if "__check_init__" in klass.__dict__
        ]
        self.ready = True

    def as_array(self, name: str, number: Any) -> Any:
        """A Python number as the array that the field's annotation asks for, or the number itself if
        it does not ask for one."""
        if self.every_field_is_child or name not in self.annotations:
            return number
        if (name, type(number)) in self.stay_numbers:
            return number
        annotation = resolve_annotation(self.cls, name, self.annotations[name])
        dtype = array_dtype_for(annotation, number)
        if dtype is not None:
            return jnp.asarray(number, dtype)
        if annotation is not None:
            self.stay_numbers.add((name, type(number)))
        return number


def class_info(cls: Any) -> ClassInfo:
    """The library's notes on a module class."""
    return cls._vernal_class


NUMBERS = frozenset({bool, int, float, complex})


def check_declared(info: ClassInfo, name: str) -> None:
    """Refuses `self.name = value` in `__init__` if the class does not declare the field."""
    if name not in info.filled().declared:
        raise dataclasses.FrozenInstanceError(refuse.undeclared(info.cls, name, info.names))


def finish(self: Any, values: dict[str, Any], info: ClassInfo) -> None:
    """Converts, sorts and freezes a module whose `__init__` has returned, then runs its checks."""
    if not info.ready:
        info.fill()
    for name, converter in info.converters:
        if name in values or _class_default(self, info, name):
            values[name] = _number_as_array(info, name, converter(values[name]))
    _sort_and_freeze(self, values, info)
    for check in info.checks:
        check(self)


def end_construction(module: Any) -> None:
    """Sorts and freezes a module whose `__init__` was called by other code, which converts and checks it afterwards.
    Does nothing if a field is not set."""
    info, values = class_info(type(module)).filled(), attributes_of(module)
    if not all(hasattr(module, name) for name in info.names):
        return
    # Static fields become part of the structure, which must be final.
    converted = {name: fn for name, fn in info.converters if (name, True) in info.named}
    given = {name: getattr(module, name) for name in converted}
    values.update({name: converted[name](value) for name, value in given.items()})
    _sort_and_freeze(module, values, info)
    values.update(given)


def _sort_and_freeze(self: Any, values: dict[str, Any], info: ClassInfo) -> None:
    every_field_is_child = info.every_field_is_child
    if _held_early and id(self) in _held_early:
        _held_early.discard(id(self))
        _refuse_return(self, info, self, (), set())
    kinds: list[Kind | None] = []
    for name, static in info.named:
        try:
            value = values[name]
        except KeyError:
            if not _class_default(self, info, name):
                kinds.append(None)
                continue
            if every_field_is_child and not static:
                # As in Equinox, the default of an unset field stays on the class, and is not a child.
                del values[name]
                kinds.append(None)
                continue
            value = values[name] = _number_as_array(info, name, values[name])
        kind = kind_by_type(type(value))
        if kind is None or (kind and static and value is not None):
            kind = _look_closer(self, info, name, value, static)
            if kind is False:
                values[name] = frozen(value)
        kinds.append(False if static else every_field_is_child or kind)
    key = tuple(kinds)
    layout = info.by_kinds.get(key)
    if layout is None:
        layout = info.by_kinds[key] = layout_of(
            info.cls, {n: k for n, k in zip(info.names, key, strict=True) if k is not None}
        )
    if info.buffers:
        layout = layout_of(info.cls, freeze_fields(info.cls, layout.kinds, values, info.buffers))
    values[KEY] = structure_of(layout, values).aux


def _number_as_array(info: ClassInfo, name: str, value: Any) -> Any:
    return info.as_array(name, value) if type(value) in NUMBERS else value


def _class_default(self: Any, info: ClassInfo, name: str) -> bool:
    """Whether the class has a value for an unset field, which then becomes the instance's; False for
    a property."""
    for klass in info.cls.__mro__:
        if name in klass.__dict__ and type(klass.__dict__[name]) is not LazyChild:
            value = klass.__dict__[name]
            is_default = value is info.defaults[name]
            if hasattr(type(value), "__set__") or (
                hasattr(type(value), "__get__") and not is_default
            ):
                return False
            attributes_of(self)[name] = value
            return True
    raise refuse.not_initialised(info.cls, name)


def check_new(info: ClassInfo, name: str, value: Any) -> None:
    """Refuses a value that surgery may not put into a field, as `__init__` would.

    Args:
        info: the notes on the class.
        name: the name of the field.
        value: the new value, which is not a child, or not only.
    """
    new = object()
    _refuse_inside(new, info, name, value, (), (new,))


def _look_closer(self: Any, info: ClassInfo, name: str, value: Any, static: bool) -> Kind:
    """Sorts a value whose type alone does not decide its kind, and refuses what would fail later."""
    if static:
        _refuse_static_arrays(info, name, value)
        _refuse_structure(info, name, (), value)
        return False
    # Look at the type, because `functools.wraps` copies a whole `__dict__`.
    if hasattr(type(value), "_vernal_class") and KEY in attributes_of(value):
        _refuse_inside_transformed(info, name, (), value)
        return True
    _refuse_inside(self, info, name, value, (), (self,))
    return sort_value(value)


def _leaves_of_static(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The leaves with their paths, also of a dict whose keys have no order (which a child may not be)."""
    if type(value) is dict:
        for key, part in value.items():
            for path, leaf in _leaves_of_static(part):
                yield (jtu.DictKey(key), *path), leaf
    else:
        yield from jtu.tree_leaves_with_path(value)


def _refuse_static_arrays(info: ClassInfo, name: str, value: Any) -> None:
    for path, leaf in _leaves_of_static(value):
        # NumPy scalars are hashable values; anything with axes or on a device is not.
        if is_array(leaf) and (type(leaf).__hash__ is None or hasattr(leaf, "aval")):
            error = refuse.array_in_static(info.cls, name, path, leaf)
            if not info.every_field_is_child:
                raise error
            # Equinox's rule.
            warnings.warn(str(error), stacklevel=6)
            return


# The ids of modules that another module holds although they were not finished. A stale id, of a
# module whose construction failed, only costs one more check.
_held_early: set[int] = set()


def _is_unfinished(value: Any) -> bool:
    return hasattr(type(value), "_vernal_class") and KEY not in attributes_of(value)


def _refuse_return(
    self: Any, info: ClassInfo, node: Any, path: tuple[Any, ...], seen: set[int]
) -> None:
    """Refuses a cycle from `self` back to itself through modules that were given `self` during its construction."""
    if id(node) in seen:
        return
    seen.add(id(node))
    for key, part in node_parts(node) or []:
        below = (*path, key)
        if part is self:
            raise refuse.cycle(info.cls, below[0].name, below[1:])
        _refuse_return(self, info, part, below, seen)


def _refuse_inside(
    self: Any,
    info: ClassInfo,
    name: str,
    value: Any,
    path: tuple[Any, ...],
    above: tuple[Any, ...],
) -> None:
    if any(value is x for x in above):
        raise refuse.cycle(info.cls, name, path)
    owner = getattr(value, "__self__", None)
    if owner is self:
        raise refuse.method_of_self(info.cls, name, getattr(value, "__name__", "method"))
    for early in (value, owner):
        if _is_unfinished(early):
            _held_early.add(id(early))
    if isinstance(value, CONTAINERS) and is_node(value):
        for key, child in one_level_with_keys(value)[0]:
            if kind_by_type(type(child)) is None:
                _refuse_inside(self, info, name, child, (*path, key), (*above, value))
    elif not is_node(value):
        _refuse_structure(info, name, path, value)
    elif hasattr(type(value), "_vernal_class") and KEY in attributes_of(value):
        _refuse_inside_transformed(info, name, path, value)


def _refuse_structure(info: ClassInfo, name: str, path: tuple[Any, ...], value: Any) -> None:
    """Refuses structure that hides arrays, or that has no stable hash."""
    if info.may_hide_arrays or is_data(value):
        return
    if hides_arrays(value):
        if callable(value):
            raise refuse.hidden_in_callable(info.cls, name, path, value)
        raise refuse.hidden_in_object(info.cls, name, path, value)
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _refuse_structure(info, name, path, part)
    try:
        static_key(value)
        # Reading from an iterator consumes it, and a compiled program would read once for all calls.
        changes = hasattr(type(value), "__next__")
    except (TypeError, ValueError):  # ValueError: a writable memoryview
        changes = True
    if changes:
        raise refuse.unhashable(info.cls, name, path, value)


def _refuse_inside_transformed(
    info: ClassInfo, name: str, path: tuple[Any, ...], module: Any
) -> None:
    """Refuses `filter_vmap(f)` and its like, which may wrap anything, if `f` hides arrays."""
    if info.may_hide_arrays or not getattr(type(module), "_vernal_may_hide_arrays", False):
        return
    structure = attributes_of(module)[KEY][0]
    if any(map(hides_arrays, structure.rest.values())):
        raise refuse.hidden_in_callable(info.cls, name, path, module)
