"""Snapshots: what a function is made of at one moment, as a value that can be hashed.

Two functions with equal snapshots do the same. The difficulty is what may not happen meanwhile: a
snapshot must not keep alive anything of the user's (arrays, tracers, the function itself), and must
never be equal by accident (an address that is used again, a list changed in place).

So plain values are in it as they are; whatever is compared by identity, or by a `==` of its own, is
in it weakly, and equal to nothing once it is gone; and what cannot be looked into is equal to
nothing at all. Functions are compared by code, defaults, captured values, attributes and the global
variables that they read, each of them in the same way.
"""

import collections
import dataclasses
import enum
import functools
import hashlib
import operator
import sys
import types
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._assignments import assigned_later
from ._code import Usage, usage
from ._jax_private import jitted_options
from ._one_level import one_level
from ._stand_ins import Code, Namespace, Weak

Jitted = type(jax.jit(lambda: None))
_Cached = type(functools.cache(lambda: None))

# Kinds of callables that are compared by snapshot.
FUNCTIONS = frozenset(
    {
        types.FunctionType,
        types.MethodType,
        functools.partial,
        jax.custom_jvp,
        jax.custom_vjp,
        Jitted,
        _Cached,
    }
)

# Values that are equal if their types and they themselves are, and that hold nothing else.
ATOMS = frozenset({str, bytes, int, bool, type(None), type(Ellipsis), type(NotImplemented)})
# Likewise, with all their subclasses.
_FIXED = (
    np.dtype,
    np.ufunc,
    jax.Device,
    enum.Enum,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
)
# Arrays, modules and classes: by identity, weakly.
_SIMPLE = (jax.Array, Tracer, type, types.ModuleType, complex, np.generic, *_FIXED)
_MAPPINGS = frozenset({dict, collections.OrderedDict, types.MappingProxyType})
_SEQUENCES = frozenset({tuple, list, collections.deque})
MUTABLE = (list, dict, set, collections.deque)

# Packages whose functions and global variables are taken as constants.
_SETTLED = frozenset({"jax", "jaxlib", "numpy", "scipy", "vernal", *sys.stdlib_module_names})
# What a function is called and how it is documented is not what it does.
_LABELS = frozenset(
    "__name__ __qualname__ __module__ __doc__ __annotations__ __annotate__ __type_params__ "
    "__signature__".split()
)
# The flag of types made at run time. Generators, iterators and locks have other types.
_HEAP_TYPE = 1 << 9
# A function that holds more values than these is compared by identity.
_LIMIT = 10_000


EMPTY = object()


class TooMuchError(Exception):
    """A function holds more than is worth comparing."""


def contents(cell: Any) -> Any:
    """What a closure cell holds; `EMPTY` if nothing has been assigned yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def _package(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""


def _settled(module: Any) -> bool:
    return _package(module) in _SETTLED


def is_named(x: Any) -> bool:
    """Whether a callable is what its module has under its name."""
    name = getattr(x, "__qualname__", None) or getattr(x, "__name__", None)
    found = sys.modules.get(getattr(x, "__module__", None) or "")
    if found is None or not isinstance(name, str):
        return False
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
    return found is x


def _plain_state(x: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object that has no other state; None where it has, or may have."""
    for base in type(x).__mro__[:-1]:
        made_in_python = base.__flags__ & _HEAP_TYPE
        if not made_in_python or isinstance(vars(base).get("__new__"), types.BuiltinFunctionType):
            return None
    state = object.__getstate__(x) or {}
    return state if type(state) is dict else None


class Freezer:
    """Takes one snapshot.

    Attributes:
        functions: the functions with captured variables that were met, each once, with the names of
            those that something else may assign.
        own: the ids of the cells that these functions assign or whose contents they change.
    """

    def __init__(self) -> None:
        self.functions: list[tuple[types.FunctionType, frozenset[str]]] = []
        self.own: set[int] = set()
        self._numbers: dict[int, int] = {}
        # So that no other object is given the id of one that was met.
        self._met: list[Any] = []
        self._count = 0

    def freeze(self, x: Any) -> Any:
        """The value in its snapshot."""
        self._count += 1
        if self._count > _LIMIT:
            raise TooMuchError
        kind = type(x)
        if kind in ATOMS:
            return kind, x
        if isinstance(x, float):
            return kind, x.hex()
        number = self._numbers.get(id(x))
        if number is not None:
            return "again", number
        if not isinstance(x, _SIMPLE):
            self._numbers[id(x)] = len(self._numbers)
            self._met.append(x)
            return self._opened(kind, x)
        if isinstance(x, complex):
            return kind, x.real.hex(), x.imag.hex()
        if isinstance(x, np.generic):
            return kind, str(x.dtype), x.tobytes()
        return (kind, x) if isinstance(x, _FIXED) else Weak(x)

    def _opened(self, kind: type, x: Any) -> Any:
        if kind is types.FunctionType:
            return self._function(x)
        if kind in _MAPPINGS:
            return kind, tuple((self.freeze(k), self.freeze(v)) for k, v in x.items())
        if kind is set or kind is frozenset:
            return kind, frozenset(map(self.freeze, x))
        if kind in _SEQUENCES or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
            return kind, tuple(map(self.freeze, x))
        if kind is types.MethodType:
            return kind, self.freeze(x.__func__), self._owner(x.__self__)
        if issubclass(kind, functools.partial) and not jtu.is_tree_node(kind):
            parts = x.func, x.args, x.keywords
            return kind, *map(self.freeze, parts), self._attributes(vars(x))
        if kind in FUNCTIONS:
            return self._wrapper(x)
        if kind is np.ndarray:
            return self._array(x)
        if kind is types.BuiltinFunctionType:
            return self._builtin(x)
        return self._object(kind, x)

    def _function(self, fn: types.FunctionType) -> Any:
        home = fn.__globals__.get("__name__")
        named = is_named(fn)
        if named and _settled(home):
            return Weak(fn)
        used = usage(fn.__code__)
        later = assigned_later(fn)
        if fn.__closure__:
            self.functions.append((fn, later))
        return (
            "function",
            Weak(fn) if named else (Code(fn.__code__), self._home(fn)),
            () if named else self._attributes(fn.__dict__),
            self.freeze(fn.__defaults__),
            self.freeze(fn.__kwdefaults__),
            tuple(
                self._variable(name, cell, used, name in later)
                for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
            ),
            () if _settled(home) else self._globals(fn, used),
        )

    @staticmethod
    def _home(fn: types.FunctionType) -> Any:
        """What stands for the dictionary of global variables."""
        name = fn.__globals__.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        in_module = module is not None and vars(module) is fn.__globals__
        return Weak(module) if in_module else Namespace(fn)

    def _variable(self, name: str, cell: Any, used: Usage, later: bool) -> Any:
        value = contents(cell)
        changes = name in used.changes and isinstance(value, MUTABLE)
        if changes or name in used.assigns:
            self.own.add(id(cell))
        # Frozen in any case: something in it may have to be watched.
        frozen = self.freeze(value)
        return self._nothing_else() if changes or later else frozen

    def _globals(self, fn: types.FunctionType, used: Usage) -> Any:
        """The values of the global variables that a function reads, where they are not settled."""
        found: list[Any] = []
        for name, *attributes in used.reads:
            value = fn.__globals__.get(name)
            if name in used.changes and isinstance(value, MUTABLE):
                return self._nothing_else()
            chain = [self.freeze(value)]
            for attribute in attributes:
                value = self._attribute(value, attribute)
                if value is None:
                    break
                chain.append(self.freeze(value))
            found.append(tuple(chain))
        if not all(map(_settled, used.imports)):
            return self._nothing_else()
        return tuple(found)

    @staticmethod
    def _attribute(owner: Any, name: str) -> Any:
        """What a module or a class has under a name; None where it need not be looked at."""
        if isinstance(owner, types.ModuleType):
            return None if _settled(owner.__name__) else vars(owner).get(name)
        if isinstance(owner, type) and not _settled(owner.__module__):
            value = next((vars(k)[name] for k in owner.__mro__ if name in vars(k)), None)
            return None if hasattr(value, "__get__") else value
        return None

    def _attributes(self, values: dict[str, Any]) -> Any:
        return tuple((k, self.freeze(v)) for k, v in values.items() if k not in _LABELS)

    def _wrapper(self, x: Any) -> Any:
        """What `jax.jit`, `jax.custom_jvp` and the like make of a function."""
        if is_named(x) and _settled(x.__module__):
            return Weak(x)
        values = {k: v for k, v in vars(x).items() if k != "_jit_info"}
        options = jitted_options(x) if type(x) is Jitted else ()
        if options is None:
            return self._nothing_else()
        return type(x), self.freeze(options), self._attributes(values)

    def _builtin(self, x: Any) -> Any:
        of_module = x.__self__ is None or isinstance(x.__self__, (type, types.ModuleType))
        return Weak(x) if of_module else self._nothing_else()

    def _array(self, x: np.ndarray) -> Any:
        if x.dtype.hasobject:
            return np.ndarray, x.shape, self.freeze(x.tolist())
        digest = hashlib.blake2b(np.ascontiguousarray(x).data.cast("B") if x.size else b"")
        return np.ndarray, x.dtype, x.shape, digest.digest()

    def _owner(self, x: Any) -> Any:
        """What a method is bound to. Python makes the method anew each time it is asked for, so
        this is no new function: an ordinary object is looked at as little as when it is passed."""
        if type(x).__eq__ is object.__eq__ and not jtu.is_tree_node(type(x)):
            return self._identity(x)
        return self.freeze(x)

    def _identity(self, x: Any) -> Any:
        return Weak(x) if type(x).__weakrefoffset__ else self._nothing_else()

    def _object(self, kind: Any, x: Any) -> Any:
        if jtu.is_tree_node(kind):
            children, treedef = one_level(x)
            return kind, self.freeze(treedef.node_data()[1]), tuple(map(self.freeze, children))
        if kind in (operator.attrgetter, operator.itemgetter, operator.methodcaller):
            return kind, self.freeze(x.__reduce__())
        if compares_by_fields(kind):
            return kind, self.freeze(compared_fields(x))
        if kind in (range, slice):
            return kind, self.freeze((x.start, x.stop, x.step))
        if kind is types.SimpleNamespace:
            return kind, self.freeze(vars(x))
        if _settled(getattr(x, "__module__", None)) and is_named(x):
            return self._identity(x)
        if kind.__eq__ is not object.__eq__:
            return (kind, x) if not kind.__weakrefoffset__ else (kind, Weak(x, own_rule=True))
        # JAX's own objects of C++ are constants, and those that are equal are one object.
        state = {} if _package(kind.__module__) in ("jax", "jaxlib") else _plain_state(x)
        if state == {} and not kind.__weakrefoffset__:
            # It has no contents, so that it keeps nothing alive.
            return kind, id(x), x
        if state is None:
            return self._nothing_else()
        return self._identity(x), self._attributes(state)

    @staticmethod
    def _nothing_else() -> Any:
        """Stands for what cannot be compared."""
        return object()


def compared_fields(x: Any) -> tuple[Any, ...] | None:
    """The fields that count when a dataclass is compared.

    Args:
        x: any object.

    Returns:
        Their values; None for anything but a dataclass that compares by them.
    """
    parameters = getattr(type(x), "__dataclass_params__", None)
    if parameters is None or not parameters.eq:
        return None
    return tuple(getattr(x, f.name, None) for f in dataclasses.fields(x) if f.compare)


def compares_by_fields(kind: type) -> bool:
    """Whether the `==` of a class is the one that `dataclasses` wrote.

    Args:
        kind: any class.
    """
    code = getattr(kind.__eq__, "__code__", None)
    return (
        hasattr(kind, "__dataclass_params__")
        and code is not None
        and code.co_filename == "<string>"
    )
