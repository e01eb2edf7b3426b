"""Any value in words, with what is needed to tell it from another one: a signature is made of these.

A description outlives the call, so it holds no array, no tracer and no function of the user: of
arrays it has the abstract value, of static values a text and a hash, of functions the code object
and, one by one, what they capture.
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

from .._ground import callable_name, one_level_with_keys, static_key
from ..modules import BoundMethod
from ..show import FROZEN, is_traced, path_text, short, spec_text
from ..trees import is_array

_ABSENT: Any = object()
_NUMBERS = (bool, int, float, complex)
# Of static containers that are longer than this only the whole is compared, by its hash.
_LONG = 100
# Bytes up to which a captured NumPy array is compared by value.
_SMALL = 1 << 20


class _Code(NamedTuple):
    """The code of a function. Where it is does not count in Python's own comparison."""

    code: types.CodeType
    file: str
    line: int

    @property
    def text(self) -> str:
        name = self.code.co_name
        place = f"{os.path.basename(self.file)}:{self.line}"
        return f"<{'lambda' if name == '<lambda>' else name} at {place}>"


# Where a traced array is.
_TRACED = "inside a transformation"
# The kind of what has no parts.
STATIC = "static"


class Array:
    """An array: what a trace depends on, and where the array is, on which only the compiled
    program depends.

    Attributes:
        hashes: of what a trace depends on, and of what the compiled program depends on.
    """

    __slots__ = ("aval", "hashes", "where")

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
        """Both in words, with as much as is needed to tell them apart."""
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
        kind: what must be equal for the parts to be compared one by one.
        text: the thing on one line.
        mark: tells apart what has equal texts and equal parts.
        parts: what it is made of, by the text of the key.

    Attributes:
        hashes: as for `Array`, so that what is equal in two large trees is not looked at.
    """

    __slots__ = ("hashes", "kind", "mark", "parts", "text")

    def __init__(
        self, kind: Any, text: str, mark: Any, parts: "dict[str, Description] | None" = None
    ):
        self.kind = kind
        self.text = text
        self.mark = mark
        self.parts: dict[str, Description] = {} if parts is None else parts
        inside = [part.hashes for part in self.parts.values()]
        own = kind, text, mark, *self.parts
        self.hashes = hash((own, *[h[0] for h in inside])), hash((own, *[h[1] for h in inside]))

    @property
    def full_text(self) -> str:
        if isinstance(self.kind, _Code):
            return self.kind.text
        return self.kind if isinstance(self.kind, str) and self.kind != STATIC else self.text


Description = Array | Part


def describe(value: Any, static: bool = False) -> Description:
    """Describes a value.

    Args:
        value: anything.
        static: whether arrays in it are part of the structure, as in what a function captures:
            those are compared by identity.

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
        # Not hashable, or its own `__hash__` fails: the text has to do.
        return None


class _Walk:
    """One description being made.

    Attributes:
        found: what was described before, since models have many references to few functions; with
            the value, which so stays what it is. None stands for what is being described now.
    """

    def __init__(self) -> None:
        self.found: dict[tuple[int, bool], tuple[Any, Description | None]] = {}

    def see(self, value: Any, static: bool) -> Description:
        kind = type(value)
        if is_array(value) or kind is jax.ShapeDtypeStruct:
            return _constant(value) if static else Array(value)
        if value is None or kind in _NUMBERS:
            return Part(STATIC, repr(value), kind)
        # To a function it makes no difference, and it may lead back to itself.
        key = id(value), static or kind is types.FunctionType
        if key in self.found:
            return self.found[key][1] or Part("cycle", "<recursive>", None)
        self.found[key] = value, None
        try:
            description = self.compound(value, static)
        except Exception:
            # Anything may be captured: a dictionary whose keys have no order, a broken proxy.
            description = Part(STATIC, short(value), None)
        self.found[key] = value, description
        return description

    def compound(self, value: Any, static: bool) -> Description:
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, (types.MethodType, BoundMethod)):
            parts = {".__self__": self.see(value.__self__, static or not _is_node(value))}
            parts[".__func__"] = self.see(value.__func__, True)
            return Part("method", f"<method {callable_name(value)}>", None, parts)
        if isinstance(value, functools.partial):
            hidden = static or not _is_node(value)
            parts = {".func": self.see(value.func, True)}
            parts |= {f".args[{i}]": self.see(x, hidden) for i, x in enumerate(value.args)}
            parts |= {f".keywords[{k!r}]": self.see(x, hidden) for k, x in value.keywords.items()}
            return Part("partial", f"<partial {callable_name(value)}>", None, parts)
        if _is_node(value) and not (static and _is_long(value)):
            return self.node(value, static)
        if _is_value(value):
            names = [f.name for f in dataclasses.fields(value) if f.compare]
            return self.fields(value, names, lambda name: True)
        return self.opaque(value)

    def opaque(self, value: Any) -> Part:
        """What has no parts: a class, a builtin, an object of the user. And what `jax.jit`,
        `jax.custom_jvp`, ... make of a function."""
        if isinstance(value, type) or not isinstance(getattr(value, "__name__", None), str):
            return Part(STATIC, short(value), _mark(value))
        inner = getattr(value, "__wrapped__", None)
        parts = {} if inner is None else {".__wrapped__": self.see(inner, True)}
        mark = _mark(value) if inner is None else None
        return Part(type(value).__name__, f"<{callable_name(value)}>", mark, parts)

    def function(self, fn: types.FunctionType) -> Part:
        code = fn.__code__
        parts: dict[str, Description] = {}
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                parts[f".{name} (captured)"] = self.see(cell.cell_contents, True)
            except ValueError:
                parts[f".{name} (captured)"] = Part(STATIC, "not assigned yet", None)
        defaults = fn.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount]
        named = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
        for name, value in {**named, **(fn.__kwdefaults__ or {})}.items():
            parts[f".{name} (default)"] = self.see(value, True)
        kind = _Code(code, code.co_filename, code.co_firstlineno)
        local = code.co_name == "<lambda>" or "<locals>" in fn.__qualname__
        return Part(kind, kind.text if local else f"<{fn.__name__}>", None, parts)

    def node(self, value: Any, static: bool) -> Part:
        cls = type(value)
        keyed, treedef = one_level_with_keys(value)
        if cls in (list, tuple):
            parts = {f"[{i}]": self.see(x, static) for i, x in enumerate(value)}
            return Part(cls.__name__, f"{cls.__name__} of length {len(value)}", None, parts)
        fields = _field_names(cls)
        if fields:
            children = {key.name for key, _ in keyed if isinstance(key, jtu.GetAttrKey)}
            names = (*fields, FROZEN)
            return self.fields(value, names, lambda name: static or name not in children)
        if not keyed and callable(value):
            return self.opaque(value)
        # What the class keeps apart from its children has no name.
        data = None if cls is dict else treedef.node_data()[1]
        parts = {path_text((key,)): self.see(child, static) for key, child in keyed}
        return _of_class(cls, parts, _mark(data))

    def fields(self, value: Any, names: Iterable[str], static: Callable[[str], bool]) -> Part:
        found = {name: getattr(value, name, _ABSENT) for name in names}
        parts = {f".{k}": self.see(v, static(k)) for k, v in found.items() if v is not _ABSENT}
        return _of_class(type(value), parts, None)


def _constant(x: Any) -> Part:
    """An array that a function captures."""
    small = isinstance(x, (np.ndarray, np.generic)) and not x.dtype.hasobject and x.nbytes <= _SMALL
    return Part("constant", spec_text(x), hash(x.tobytes()) if small else id(x))


def _of_class(cls: type, parts: dict[str, Description], mark: Any) -> Part:
    return Part(f"{cls.__module__}.{cls.__qualname__}", cls.__name__, (id(cls), mark), parts)


def _is_node(value: Any) -> bool:
    return jtu.is_tree_node(type(value))


def _is_long(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict)) and len(value) > _LONG


def _is_value(value: Any) -> bool:
    """Whether an object is an instance of a dataclass that compares by its fields."""
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.eq


def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()
