"""Descriptions of values, which tell one value from another: a signature is made of these.

A description outlives the call, so it holds no array, tracer or user's function. It has the abstract
value of an array, a text and a hash of a static value, and the code object of a function and, one by
one, what the function captures.
"""

import dataclasses
import functools
import os
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._ground import callable_name, one_level, one_level_with_keys, static_key
from ..modules import BoundMethod
from ..show import FROZEN, is_traced, short, spec_text
from ..trees import is_array, open_up

_ABSENT: Any = object()
_NUMBERS = (bool, int, float, complex)
# Static containers longer than this are compared only as a whole, by hash.
_LONG = 100
# A captured NumPy array of at most this many bytes is compared by value.
_SMALL = 1 << 20


class Code(NamedTuple):
    """The code of a function, with its place, which Python's own comparison leaves out."""

    code: types.CodeType
    file: str
    line: int

    @property
    def text(self) -> str:
        name = self.code.co_name
        place = f"{os.path.basename(self.file)}:{self.line}"
        return f"<{'lambda' if name == '<lambda>' else name} at {place}>"


# The place of a traced array.
_TRACED = "inside a transformation"
# The kind of a value without parts.
STATIC = "static"
# The kind of an array that a function captures.
CONSTANT = "constant"


class Array:
    """An array: what a trace depends on, and its placement, on which only the compiled program depends.

    Attributes:
        hashes: a hash of what a trace depends on, and one of what the compiled program depends on.
    """

    __slots__ = ("aval", "hashes", "where")
    size = 1

    def __init__(self, x: Any):
        self.aval = jax.typeof(x)
        self.where: Any = _TRACED
        if not is_traced(x):
            self.where = x.sharding if getattr(x, "committed", False) else "uncommitted"
        self.hashes = hash(self.aval), hash((self.aval, self.where))

    @property
    def text(self) -> str:
        return spec_text(self.aval)

    def texts_with(self, other: "Array") -> tuple[str, str]:
        """The texts of both, with as much detail as is needed to tell them apart."""
        spec, other_spec = self.text, other.text
        if spec != other_spec:
            return spec, other_spec
        where = _where_text(self.where), _where_text(other.where)
        if where[0] == where[1] or _TRACED in (self.where, other.where):
            where = _where_text(self.aval.sharding), _where_text(other.aval.sharding)
        return f"{spec} {where[0]}", f"{spec} {where[1]}"


class Part:
    """Anything but an array.

    Args:
        kind: the parts of two values are compared one by one if their kinds are equal.
        text: the value on one line.
        mark: tells apart values with equal texts and equal parts.
        parts: its parts, by the text of the key.

    Attributes:
        hashes: as for `Array`, so that equal subtrees of two large trees are skipped.
        size: the number of parts in it, itself included.
    """

    __slots__ = ("hashes", "kind", "mark", "parts", "size", "text")

    def __init__(
        self, kind: Any, text: str, mark: Any, parts: "dict[str, Description] | None" = None
    ):
        self.kind = kind
        self.text = text
        self.mark = mark
        self.parts: dict[str, Description] = {} if parts is None else parts
        self.size: int = 1 + sum(part.size for part in self.parts.values())
        inside = [part.hashes for part in self.parts.values()]
        own = kind, text, mark, *self.parts
        self.hashes = hash((own, *[h[0] for h in inside])), hash((own, *[h[1] for h in inside]))

    @property
    def full_text(self) -> str:
        if isinstance(self.kind, Code):
            return self.kind.text
        return self.kind if isinstance(self.kind, str) and self.kind != STATIC else self.text


Description = Array | Part


def describe(value: Any, static: bool = False) -> Description:
    """Describes a value.

    Args:
        value: anything.
        static: whether arrays in it are part of the structure, like those that a function captures,
            and are compared by identity.

    Returns:
        The description, part by part. It keeps nothing in the value alive.
    """
    return _Walk().see(value, static)


def _where_text(where: Any) -> str:
    if isinstance(where, jax.sharding.NamedSharding):
        return f"sharded {where.spec!r} over {mesh_text(where.mesh)}"
    if isinstance(where, jax.sharding.SingleDeviceSharding):
        (device,) = where.device_set
        return f"on {device.platform}:{device.id}"
    return where if isinstance(where, str) else f"sharded {where}"


def mesh_text(mesh: Any) -> str:
    axes = ", ".join(
        f"{name}={size}" + ("" if kind == jax.sharding.AxisType.Explicit else f" {kind.name}")
        for (name, size), kind in zip(mesh.shape.items(), mesh.axis_types, strict=True)
    )
    return f"mesh({axes})" if axes else "no mesh"


def _mark(value: Any) -> int | None:
    """A number that equal static values have in common. It keeps nothing alive."""
    try:
        return hash(static_key(value))
    except Exception:
        # Not hashable, or its own `__hash__` fails: only the text is compared.
        return None


class _Walk:
    """One description being made.

    Attributes:
        found: the descriptions made so far, because models have many references to few functions; with
            the value, which keeps it alive. None marks a value whose description is in progress.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[int, bool], tuple[Any, Description | None]] = {}

    def see(self, value: Any, static: bool) -> Description:
        kind = type(value)
        if is_array(value) or kind is jax.ShapeDtypeStruct:
            return _constant(value) if static else Array(value)
        if value is None or kind in _NUMBERS:
            return Part(STATIC, repr(value), kind)
        # For a function `static` makes no difference, and a function may lead back to itself.
        key = id(value), static or kind is types.FunctionType
        if key in self.found:
            return self.found[key][1] or Part("cycle", "<recursive>", None)
        self.found[key] = value, None
        try:
            description = self.compound(value, static)
        except Exception:
            # Anything may be captured: a dictionary with unordered keys, a broken proxy.
            description = Part(STATIC, short(value), None)
        self.found[key] = value, description
        return description

    def compound(self, value: Any, static: bool) -> Description:
        if type(value) is types.CellType:
            return self.cell(value)
        names = _field_names(value)
        if names:
            children = _children(value)
            return self.fields(value, names, lambda name: static or name not in children)
        opened = None if static and _is_long(value) else open_up(value)
        if opened is None or isinstance(value, (set, frozenset)):
            return _without_parts(value)
        node, items = opened
        hidden = static or not _is_node(value)
        parts: dict[str, Description] = {}
        # The attributes of functions have no text.
        for text, item in zip(node.texts(len(items)), items, strict=False):
            # The function of a `jax.tree_util.Partial` is structure, while the rest are children.
            parts[text] = self.see(item, hidden or text == ".func")
        return _whole(value, parts)

    def cell(self, cell: types.CellType) -> Description:
        """A variable that a function captures."""
        try:
            return self.see(cell.cell_contents, True)
        except ValueError:
            return Part(STATIC, "not assigned yet", None)

    def fields(self, value: Any, names: Iterable[str], static: Callable[[str], bool]) -> Part:
        """A value with named fields: a module, a dataclass."""
        found = {name: getattr(value, name, _ABSENT) for name in names}
        frozen = found.pop(FROZEN, _ABSENT)
        parts = {f".{k}": self.see(v, static(k)) for k, v in found.items() if v is not _ABSENT}
        if frozen is not _ABSENT:
            parts[" (frozen)"] = Part(STATIC, ", ".join(frozen), None)
        return _of_class(type(value), parts, None)


def _without_parts(value: Any) -> Part:
    """A value without parts: a class, a builtin, a set, a user's object."""
    if isinstance(value, type) or not isinstance(getattr(value, "__name__", None), str):
        return Part(STATIC, short(value), _mark(value))
    return Part(type(value).__name__, f"<{callable_name(value)}>", _mark(value))


def _whole(value: Any, parts: dict[str, Description]) -> Part:
    """A value whose parts have been described."""
    cls = type(value)
    mark = None if _is_node(value) else _mark(value)
    if isinstance(value, types.FunctionType):
        code = value.__code__
        kind = Code(code, code.co_filename, code.co_firstlineno)
        local = code.co_name == "<lambda>" or "<locals>" in value.__qualname__
        return Part(kind, kind.text if local else f"<{value.__name__}>", mark, parts)
    if isinstance(value, (types.MethodType, BoundMethod)):
        return Part("method", f"<method {callable_name(value)}>", mark, parts)
    if isinstance(value, functools.partial):
        return Part("partial", f"<partial {callable_name(value)}>", mark, parts)
    if cls in (list, tuple):
        return Part(cls.__name__, f"{cls.__name__} of length {len(value)}", mark, parts)
    if not _is_node(value):
        return Part(cls.__name__, f"<{callable_name(value)}>", mark, parts)
    # Data that the class keeps apart from its children has no name.
    return _of_class(cls, parts, None if cls is dict else _mark(one_level(value)[1].node_data()[1]))


def _constant(x: Any) -> Part:
    """An array that a function captures."""
    small = isinstance(x, (np.ndarray, np.generic)) and not x.dtype.hasobject and x.nbytes <= _SMALL
    return Part(CONSTANT, spec_text(x), hash(x.tobytes()) if small else id(x))


def _of_class(cls: type, parts: dict[str, Description], mark: Any) -> Part:
    return Part(f"{cls.__module__}.{cls.__qualname__}", cls.__name__, (id(cls), mark), parts)


def _is_node(value: Any) -> bool:
    return jtu.is_tree_node(type(value))


def _is_long(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) and len(value) > _LONG


def _children(value: Any) -> set[str]:
    """The fields that JAX sees."""
    keys = [key for key, _ in one_level_with_keys(value)[0]] if _is_node(value) else []
    return {key.name for key in keys if isinstance(key, jtu.GetAttrKey)}


def _field_names(value: Any) -> tuple[str, ...]:
    """The fields of a node that is a dataclass, or of a dataclass that is compared by them."""
    cls: Any = type(value)
    if not dataclasses.is_dataclass(cls):
        return ()
    if _is_node(value):
        return (*[f.name for f in dataclasses.fields(cls)], FROZEN)
    compared = [f.name for f in dataclasses.fields(cls) if f.compare]
    return tuple(compared) if cls.__dataclass_params__.eq else ()  # pyright: ignore[reportAttributeAccessIssue] (a dataclass's)
