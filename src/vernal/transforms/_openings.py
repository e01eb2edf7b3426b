"""Opening what a callable is made of, one level at a time.

For each kind of thing that Python hides values in, a *node* says what it is made of besides its
parts, how to make it again of other parts, and what each part is called inside. `_captured.py`
walks with it through everything that a callable holds.
"""

import functools
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import one_level, one_level_with_keys
from ..modules import BoundMethod, Module
from ..trees import is_array
from ._jit import filter_jit

# What only remembers the results or the programs of the function inside.
_REMEMBERING = tuple(
    type(wrapper(lambda: None)) for wrapper in (jax.jit, functools.cache, filter_jit)
)


class Node:
    """What a marked node is made of, besides its parts. `key` is what equality compares."""

    # Whether it is made empty first, and filled afterwards.
    has_shell = False

    def __init__(self, key: tuple[Any, ...] = ()):
        self.key = key

    def shell(self, cells: list[Any]) -> Any:
        """The node before its parts are known."""

    def fill(self, shell: Any, parts: list[Any]) -> None:
        """Puts the parts into a shell."""

    def make(self, parts: list[Any]) -> Any:
        """The node, of those kinds that have no shell."""

    def labels(self, count: int) -> Sequence[Any]:
        """What its parts are called; None for a part that bears the name of the node itself."""
        return [None] * count


class _Cell(Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return types.CellType()

    def fill(self, shell: Any, parts: list[Any]) -> None:
        for part in parts:
            shell.cell_contents = part


class Function(Node):
    has_shell = True

    def __init__(self, fn: types.FunctionType):
        self.code, self.globals = fn.__code__, fn.__globals__
        self.defaults = len(fn.__defaults__ or ())
        self.keywords = tuple(fn.__kwdefaults__ or ())
        self.attributes = tuple(fn.__dict__)
        self.names = {
            name: getattr(fn, name)
            for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__")
        }
        # The recipe keeps the globals alive, so their id stays theirs.
        super().__init__(
            (self.code, id(self.globals), self.defaults, self.keywords, self.attributes)
        )

    @staticmethod
    def parts(fn: types.FunctionType) -> list[Any]:
        return [
            *(fn.__closure__ or ()),
            *(fn.__defaults__ or ()),
            *(fn.__kwdefaults__ or {}).values(),
            *fn.__dict__.values(),
        ]

    def labels(self, count: int) -> Sequence[Any]:
        positional = self.code.co_varnames[: self.code.co_argcount]
        with_default = positional[len(positional) - self.defaults :]
        return [*self.code.co_freevars, *with_default, *self.keywords, *self.attributes]

    def shell(self, cells: list[Any]) -> Any:
        fn = types.FunctionType(self.code, self.globals, closure=tuple(cells) or None)
        for name, value in self.names.items():
            setattr(fn, name, value)
        return fn

    def fill(self, shell: Any, parts: list[Any]) -> None:
        values = iter(parts[len(self.code.co_freevars) :])
        if self.defaults:
            shell.__defaults__ = tuple(next(values) for _ in range(self.defaults))
        if self.keywords:
            shell.__kwdefaults__ = {name: next(values) for name in self.keywords}
        shell.__dict__.update(zip(self.attributes, values, strict=True))


class _Wrapped(Node):
    """A compiled (or cached) function becomes the plain function inside it. What it computes is the
    same, and a plain function takes whatever was a static argument. While something is traced,
    which is when tracers are captured, a `jit` inside is only a boundary in the program; and one
    that JAX hides arrays behind: concrete arrays that it closes over stay constants inside."""

    def make(self, parts: list[Any]) -> Any:
        return parts[0]


class Made(Node):
    """Made by calling `key[0]` with the parts: methods."""

    def make(self, parts: list[Any]) -> Any:
        return self.key[0](*parts)


class _Partial(Node):
    def make(self, parts: list[Any]) -> Any:
        cls, count, names = self.key
        return cls(*parts[:count], **dict(zip(names, parts[count:], strict=True)))

    def labels(self, count: int) -> Sequence[Any]:
        return [None, *range(self.key[1] - 1), *self.key[2]]


class _List(Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return []

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.extend(parts)

    def labels(self, count: int) -> Sequence[Any]:
        return range(count)


class _Dict(Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return {}

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.update(zip(self.key[0], parts, strict=True))

    def labels(self, count: int) -> Sequence[Any]:
        return self.key[0]


class _Module(Node):
    """A module, with all fields that are not static: a function that is structure is walked too."""

    def __init__(self, module: Any):
        self.names = tuple(module.__tree_fields__())
        self.blank = module.__tree_replace__(dict.fromkeys(self.names), False)
        super().__init__((jtu.tree_structure(self.blank),))

    def make(self, parts: list[Any]) -> Any:
        return self.blank.__tree_replace__(dict(zip(self.names, parts, strict=True)), False)

    def labels(self, count: int) -> Sequence[Any]:
        return self.names


class _Tree(Node):
    def make(self, parts: list[Any]) -> Any:
        return self.key[0].unflatten(parts)

    def labels(self, count: int) -> Sequence[Any]:
        keyed, _ = one_level_with_keys(self.make([0] * count))
        return [getattr(k, "name", getattr(k, "key", getattr(k, "idx", None))) for k, _ in keyed]


class _Object(Node):
    """An object with nothing but a `__dict__`: `jax.custom_jvp`, an object with `__call__`, or one
    whose method is held. No `__init__` runs."""

    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return object.__new__(self.key[0])

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.__dict__.update(zip(self.key[1], parts, strict=True))

    def labels(self, count: int) -> Sequence[Any]:
        return self.key[1]


def _attributes(x: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object that is nothing else, or None."""
    if isinstance(x, type) or is_array(x):
        return None
    made_in_c = [
        isinstance(base.__dict__.get("__new__"), types.BuiltinFunctionType)
        for base in type(x).__mro__[:-1]
    ]
    if any(made_in_c):
        return None
    state = object.__getstate__(x)
    return state if type(state) is dict else None


# Long: one case for each kind of thing that Python hides values in.
def open_up(x: Any, as_owner: bool) -> tuple[Node, list[Any]] | None:
    """A node and its parts; None for a leaf."""
    cls = type(x)
    if cls is types.CellType:
        try:
            return _Cell(), [x.cell_contents]
        except ValueError:
            return _Cell(), []
    if cls is types.FunctionType:
        return Function(x), Function.parts(x)
    if cls in _REMEMBERING:
        return _Wrapped((cls,)), [x.__wrapped__]
    if cls in (types.MethodType, BoundMethod):
        return Made((cls,)), [x.__func__, x.__self__]
    if isinstance(x, functools.partial):
        key = cls, 1 + len(x.args), tuple(x.keywords)
        return _Partial(key), [x.func, *x.args, *x.keywords.values()]
    if cls is list:
        return _List((len(x),)), list(x)
    if cls is dict:
        return _Dict((tuple(x),)), list(x.values())
    if isinstance(x, Module):
        try:
            return _Module(x), list(x.__tree_fields__().values())
        except KeyError:
            # Not sorted yet: it is inside its own `__init__`, and all that is set is a child.
            pass
    if x is not None and jtu.is_tree_node(cls):
        parts, treedef = one_level(x)
        return _Tree((treedef,)), parts
    if as_owner or callable(x):
        attributes = _attributes(x)
        if attributes:
            return _Object((cls, tuple(attributes))), list(attributes.values())
    return None
