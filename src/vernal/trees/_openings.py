"""The one walker over callables and containers.

For each kind of object that Python hides values in, `open_up` returns its immediate parts and a
*node*: the rest of the object, how to rebuild it from other parts, and the name of each part inside.
Refusing hidden arrays, hoisting captured values, describing a call and pickling by name all use it,
so they agree on what is visible.

Not opened: classes, Python modules, objects that a settled library publishes by name, and objects
that are neither callables, containers nor dataclasses.
"""

import collections
import dataclasses
import functools
import operator
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._ground import Alive, is_library_name, never_changes, one_level, one_level_with_keys
from ..show import path_text

# Wrappers that only cache the results or the programs of the function inside, as does a class with
# `_vernal_remembers`.
_REMEMBERING = {type(wrapper(lambda: None)) for wrapper in (jax.jit, functools.cache)}
_SEQUENCES = (collections.deque, set, frozenset)
_BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
_OPERATORS = (operator.methodcaller, operator.itemgetter, operator.attrgetter)
# Types whose values have no parts.
_LEAVES = frozenset({str, bytes, int, float, bool, complex, type(None), type, np.ndarray})


class Node:
    """An object without its parts.

    Args:
        key: what equality compares.
        names: the names of its parts.

    Attributes:
        has_shell: whether it is made empty first, and filled afterwards.
        cells: how many of its first parts are needed already to make it empty.
        owner: which part a method is bound to.
        is_settled: whether it is a function of a settled package that assigns nothing it captures.
    """

    has_shell = False
    cells = 0
    owner: int | None = None
    is_settled = False

    def __init__(self, key: tuple[Any, ...] = (), names: Sequence[Any] | None = None):
        self.key = key
        self.names = names

    def shell(self, cells: list[Any]) -> Any:
        """The object before its parts are known."""

    def fill(self, shell: Any, parts: list[Any]) -> None:
        """Puts the parts into a shell."""

    def make(self, parts: list[Any]) -> Any:
        """The object, for kinds without a shell."""

    def labels(self, count: int) -> Sequence[Any]:
        """The names of its parts; None for a part that has the name of the object itself."""
        return [None] * count if self.names is None else self.names

    def texts(self, count: int) -> Sequence[str]:
        """The paths to its parts, in Python's notation; for a function, only to its variables."""
        return [f"[{name!r}]" for name in self.labels(count)]


class _Cell(Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return types.CellType()

    def fill(self, shell: Any, parts: list[Any]) -> None:
        for part in parts:
            shell.cell_contents = part


class _Function(Node):
    """A Python function."""

    has_shell = True

    def __init__(self, fn: types.FunctionType):
        self.code, self.globals = fn.__code__, fn.__globals__
        self.cells = len(self.code.co_freevars)
        self.is_settled = never_changes(fn)
        self.defaults = len(fn.__defaults__ or ())
        self.keywords = tuple(fn.__kwdefaults__ or ())
        self.attributes = tuple(fn.__dict__)
        self.described = {
            name: getattr(fn, name)
            for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__")
        }
        positional = self.code.co_varnames[: self.code.co_argcount]
        with_default = positional[len(positional) - self.defaults :]
        names = [*self.code.co_freevars, *with_default, *self.keywords, *self.attributes]
        # The node keeps the globals alive, so their id is not reused.
        key = self.code, id(self.globals), self.defaults, self.keywords, self.attributes
        # A user's function may read state that changes, so two of them are different even if they differ only in
        # their arrays.
        super().__init__(key if self.is_settled else (*key, Alive(fn)), names)

    def texts(self, count: int) -> Sequence[str]:
        names = (self.names or ())[: count - len(self.attributes)]
        captured = [f".{name} (captured)" for name in names[: self.cells]]
        return [*captured, *[f".{name} (default)" for name in names[self.cells :]]]

    @staticmethod
    def parts(fn: types.FunctionType) -> list[Any]:
        """Cells, defaults and attributes, in the order of the names."""
        return [
            *(fn.__closure__ or ()),
            *(fn.__defaults__ or ()),
            *(fn.__kwdefaults__ or {}).values(),
            *fn.__dict__.values(),
        ]

    def shell(self, cells: list[Any]) -> Any:
        fn = types.FunctionType(self.code, self.globals, closure=tuple(cells) or None)
        for name, value in self.described.items():
            setattr(fn, name, value)
        return fn

    def fill(self, shell: Any, parts: list[Any]) -> None:
        values = iter(parts[self.cells :])
        if self.defaults:
            shell.__defaults__ = tuple(next(values) for _ in range(self.defaults))
        if self.keywords:
            shell.__kwdefaults__ = {name: next(values) for name in self.keywords}
        shell.__dict__.update(zip(self.attributes, values, strict=True))


class _Wrapped(Node):
    """A compiled (or cached) function becomes the plain function inside it. It computes the same, and a
    plain function takes whatever was a static argument. During tracing, which is when tracers are
    captured, an inner `jit` is only a boundary in the program, and JAX hides arrays behind it: concrete
    arrays that it closes over stay constants inside."""

    def make(self, parts: list[Any]) -> Any:
        return parts[0]

    def texts(self, count: int) -> Sequence[str]:
        return [".__wrapped__"]


class _Made(Node):
    """An object made by calling `key[0]` with the parts: read-only mappings, static methods."""

    def make(self, parts: list[Any]) -> Any:
        return self.key[0](*parts)


class _Method(_Made):
    owner = 1

    def texts(self, count: int) -> Sequence[str]:
        return [".__func__", ".__self__"]


class _BuiltinMethod(Node):
    def make(self, parts: list[Any]) -> Any:
        return getattr(parts[0], self.key[1])

    def texts(self, count: int) -> Sequence[str]:
        return [".__self__"]


class _Sequence(Node):
    def make(self, parts: list[Any]) -> Any:
        cls, *options = self.key
        return cls(parts, *options)


class _Partial(Node):
    def make(self, parts: list[Any]) -> Any:
        cls, count, names = self.key
        return cls(*parts[:count], **dict(zip(names, parts[count:], strict=True)))

    def texts(self, count: int) -> Sequence[str]:
        _, positional, names = self.key
        args = [f".args[{i}]" for i in range(positional - 1)]
        return [".func", *args, *[f".keywords[{name!r}]" for name in names]]


class _List(Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return []

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.extend(parts)


class _Dict(Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return {}

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.update(zip(self.key[0], parts, strict=True))


class _Namespace(_Dict):
    def shell(self, cells: list[Any]) -> Any:
        return types.SimpleNamespace()

    def fill(self, shell: Any, parts: list[Any]) -> None:
        super().fill(vars(shell), parts)

    def texts(self, count: int) -> Sequence[str]:
        return [f".{name}" for name in self.key[0]]


class _Module(Node):
    """A module, with all fields that are not static: functions that are structure are walked too."""

    def __init__(self, module: Any):
        names = tuple(module.__tree_fields__())
        self.blank = module.__tree_replace__(dict.fromkeys(names), False)
        super().__init__((jtu.tree_structure(self.blank),), names)

    def make(self, parts: list[Any]) -> Any:
        return self.blank.__tree_replace__(dict(zip(self.names or (), parts, strict=True)), False)


class _Tree(Node):
    def make(self, parts: list[Any]) -> Any:
        return self.key[0].unflatten(parts)

    def _keys(self, count: int) -> list[Any]:
        return [key for key, _ in one_level_with_keys(self.make([0] * count))[0]]

    def labels(self, count: int) -> Sequence[Any]:
        keys = self._keys(count)
        return [getattr(k, "name", getattr(k, "key", getattr(k, "idx", None))) for k in keys]

    def texts(self, count: int) -> Sequence[str]:
        return [path_text((key,)) for key in self._keys(count)]


class _Object(Node):
    """An object that consists of its attributes: `jax.custom_jvp`, a dataclass, an object with
    `__call__`, or one whose method is held. No `__init__` runs."""

    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return object.__new__(self.key[0])

    def fill(self, shell: Any, parts: list[Any]) -> None:
        for name, part in zip(self.key[1], parts, strict=True):
            object.__setattr__(shell, name, part)

    def texts(self, count: int) -> Sequence[str]:
        return [f".{name}" for name in self.key[1]]


def _itself(x: Any) -> Any:
    """A key entry that only this object equals, without keeping it alive."""
    return Alive(x) if type(x).__weakrefoffset__ else object()


def _attributes(x: Any) -> dict[str, Any] | None:
    """The attributes of an object that consists only of them, or None."""
    made_in_c = [
        isinstance(base.__dict__.get("__new__"), types.BuiltinFunctionType)
        for base in type(x).__mro__[:-1]
    ]
    if isinstance(x, (type, jax.Array)) or any(made_in_c):
        return None
    state = object.__getstate__(x)
    if type(state) is tuple:  # of a class with slots
        state = {**(state[0] or {}), **state[1]}
    return state if type(state) is dict else None


# Long: one case for each kind of object that Python hides values in.
def open_up(x: Any, as_owner: bool = False) -> tuple[Node, list[Any]] | None:
    """Opens an object into a node and its parts.

    Args:
        x: any Python object.
        as_owner: whether a method is bound to it, so that it is opened whatever its kind.

    Returns:
        A node and its parts; None for a leaf.

    Example:
        >>> import functools
        >>> from vernal.trees import open_up
        >>> node, parts = open_up(functools.partial(max, 1, key=abs))
        >>> parts, node.texts(len(parts))
        ([<built-in function max>, 1, <built-in function abs>], ['.func', '.args[0]', ".keywords['key']"])
    """
    cls: Any = type(x)
    if cls in _LEAVES:
        return None
    if cls is types.CellType:
        try:
            return _Cell(), [x.cell_contents]
        except ValueError:
            return _Cell(), []
    if is_library_name(x):
        return None
    if cls is types.FunctionType:
        return _Function(x), _Function.parts(x)
    if (cls in _REMEMBERING or hasattr(cls, "_vernal_remembers")) and hasattr(x, "__wrapped__"):
        return _Wrapped((cls,)), [x.__wrapped__]
    if cls is types.MethodType or (hasattr(cls, "__self__") and jtu.is_tree_node(cls)):
        return _Method((cls,)), [x.__func__, x.__self__]
    if cls in _BUILTIN_METHODS and not isinstance(x.__self__, (types.ModuleType, type)):
        return _BuiltinMethod((cls, x.__name__)), [x.__self__]
    if cls in (staticmethod, classmethod):
        return _Made((cls,)), [x.__func__]
    if cls in _OPERATORS:
        make, arguments = x.__reduce__()
        return _Made((operator.call,)), [make, *arguments]
    if isinstance(x, functools.partial):
        key = cls, 1 + len(x.args), tuple(x.keywords)
        names = [None, *range(len(x.args)), *x.keywords]
        return _Partial(key, names), [x.func, *x.args, *x.keywords.values()]
    if cls is list:
        return _List((len(x),), range(len(x))), list(x)
    if cls is dict:
        return _Dict((tuple(x),), tuple(x)), list(x.values())
    if cls is types.MappingProxyType:
        return _Made((cls,)), [dict(x)]
    if cls is types.SimpleNamespace:
        return _Namespace((tuple(vars(x)),), tuple(vars(x))), list(vars(x).values())
    if cls is slice:
        return _Made((cls,), ("start", "stop", "step")), [x.start, x.stop, x.step]
    if cls in _SEQUENCES:
        options = (x.maxlen,) if cls is collections.deque else ()
        return _Sequence((cls, *options), range(len(x))), list(x)
    if hasattr(cls, "__tree_fields__"):
        try:
            return _Module(x), list(x.__tree_fields__().values())
        except KeyError:
            # Not sorted yet: it is inside its own `__init__`, and every field set so far is a child.
            pass
    if jtu.is_tree_node(cls):
        parts, treedef = one_level(x)
        return _Tree((treedef,)), parts
    if as_owner or callable(x) or dataclasses.is_dataclass(cls):
        attributes = _attributes(x)
        if attributes:
            names = tuple(attributes)
            itself = () if is_library_name(cls) else (_itself(x),)
            return _Object((cls, names, *itself), names), list(attributes.values())
    return None
