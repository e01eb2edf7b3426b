"""What a callable carries inside: taking arrays out of closures, and putting others in.

The difficulty: JAX sees arrays in pytrees, but a Python function hides them in closure cells,
defaults, `functools.partial`, methods, wrappers of wrappers. Functions may refer to themselves
(recursion), to each other, and share cells (`nonlocal`); and a closure that holds no array must
stay the very object that it was, because it may count its calls or append to a list.

The plan: (1) walk everything that the callable holds, breadth first, and number each node once,
by identity; (2) mark the nodes from which something wanted can be reached; (3) keep a recipe: for
a marked node what it is made of, for any other the object itself. The recipe rebuilds the marked
nodes around new values. Cycles are tied where Python ties them: cells, functions, lists, dicts and
plain objects are made empty first, and all filled at the end; everything else is made of its parts.

Invariants: a recipe holds nothing that was wanted, so it may be part of a treedef or of a cache.
Two recipes are equal only if the two callables do the same with equal values: the same code and
globals, the same parts in the same places, everything not taken out interchangeable (`same`).
They compare what was found during the walk: a cell that is assigned later does not change it.

Glossary. A *node* is opened, and has parts; anything else is a leaf. A *reference* says where a
part comes from: `("node", i)`, `("value", i)` for a leaf that was wanted, `("fixed", leaf)`.
"""

import collections
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import one_level, same
from ..modules import BoundMethod, Module
from ..trees import is_array
from ._jit import filter_jit

Reference = tuple[str, Any]

# What only remembers the results or the programs of the function inside.
_REMEMBERING = tuple(
    type(wrapper(lambda: None)) for wrapper in (jax.jit, functools.cache, filter_jit)
)


class _Node:
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


class _Cell(_Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return types.CellType()

    def fill(self, shell: Any, parts: list[Any]) -> None:
        for part in parts:
            shell.cell_contents = part


class _Function(_Node):
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


class _Wrapped(_Node):
    """A compiled (or cached) function becomes the plain function inside it. What it computes is the
    same, and a plain function takes whatever was a static argument. While something is traced,
    which is when tracers are captured, a `jit` inside is only a boundary in the program; and one
    that JAX hides arrays behind: concrete arrays that it closes over stay constants inside."""

    def make(self, parts: list[Any]) -> Any:
        return parts[0]


class _Made(_Node):
    """Made by calling `key[0]` with the parts: methods."""

    def make(self, parts: list[Any]) -> Any:
        return self.key[0](*parts)


class _Partial(_Node):
    def make(self, parts: list[Any]) -> Any:
        cls, count, names = self.key
        return cls(*parts[:count], **dict(zip(names, parts[count:], strict=True)))


class _List(_Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return []

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.extend(parts)


class _Dict(_Node):
    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return {}

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.update(zip(self.key[0], parts, strict=True))


class _Module(_Node):
    """A module, with all fields that are not static: a function that is structure is walked too."""

    def __init__(self, module: Any):
        self.names = tuple(module.__tree_fields__())
        self.blank = module.__tree_replace__(dict.fromkeys(self.names), False)
        super().__init__((jtu.tree_structure(self.blank),))

    def make(self, parts: list[Any]) -> Any:
        return self.blank.__tree_replace__(dict(zip(self.names, parts, strict=True)), False)


class _Tree(_Node):
    def make(self, parts: list[Any]) -> Any:
        return self.key[0].unflatten(parts)


class _Object(_Node):
    """An object with nothing but a `__dict__`: `jax.custom_jvp`, an object with `__call__`, or one
    whose method is held. No `__init__` runs."""

    has_shell = True

    def shell(self, cells: list[Any]) -> Any:
        return object.__new__(self.key[0])

    def fill(self, shell: Any, parts: list[Any]) -> None:
        shell.__dict__.update(zip(self.key[1], parts, strict=True))


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
def _open(x: Any, as_owner: bool) -> tuple[_Node, list[Any]] | None:
    """A node and its parts; None for a leaf."""
    cls = type(x)
    if cls is types.CellType:
        try:
            return _Cell(), [x.cell_contents]
        except ValueError:
            return _Cell(), []
    if cls is types.FunctionType:
        return _Function(x), _Function.parts(x)
    if cls in _REMEMBERING:
        return _Wrapped((cls,)), [x.__wrapped__]
    if cls in (types.MethodType, BoundMethod):
        return _Made((cls,)), [x.__func__, x.__self__]
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


class Recipe:
    """How to make a callable from the values that were taken out of it.

    Args:
        nodes: for every node what it is made of.
        references: for every node where its parts come from.
        originals: for every node that holds nothing wanted the object itself, in a tuple; None for
            the others.
        root: the callable.
    """

    __slots__ = ("nodes", "originals", "references", "root")

    def __init__(
        self,
        nodes: Sequence[_Node],
        references: Sequence[Sequence[Reference]],
        originals: Sequence[tuple[Any] | None],
        root: Reference,
    ):
        self.nodes = nodes
        self.references = references
        self.originals = originals
        self.root = root

    def __call__(self, values: Sequence[Any]) -> Any:
        """The callable with these values in it; itself if nothing was taken out."""
        made: dict[int, Any] = {}

        def part(reference: Reference) -> Any:
            kind, which = reference
            if kind == "value":
                return values[which]
            if kind == "fixed":
                return which
            if which not in made:
                made[which] = self.nodes[which].make([part(r) for r in self.references[which]])
            return made[which]

        shells: list[int] = []
        for i, original in enumerate(self.originals):
            if original is not None:
                made[i] = original[0]
            elif self.nodes[i].has_shell and not isinstance(self.nodes[i], _Function):
                shells.append(i)
                made[i] = self.nodes[i].shell([])
        # Functions last: they are made of their cells.
        for i, node in enumerate(self.nodes):
            if i not in made and isinstance(node, _Function):
                shells.append(i)
                cells = self.references[i][: len(node.code.co_freevars)]
                made[i] = node.shell([made[which] for _, which in cells])
        for i in shells:
            self.nodes[i].fill(made[i], [part(r) for r in self.references[i]])
        return part(self.root)

    def leaves(self) -> list[Any]:
        """Everything that was found and neither opened nor taken out."""
        return [leaf for parts in self.references for kind, leaf in parts if kind == "fixed"]

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        return (
            type(other) is Recipe
            and len(self.nodes) == len(other.nodes)
            and all(
                type(a) is type(b) and same(a.key, b.key)
                for a, b in zip(self.nodes, other.nodes, strict=True)
            )
            and same((self.references, self.root), (other.references, other.root))
        )

    def __hash__(self) -> int:
        codes = tuple(node.code for node in self.nodes if isinstance(node, _Function))
        return hash((len(self.nodes), codes))


def captured(fn: Any, wanted: Callable[[Any], bool]) -> tuple[list[Any], Recipe]:
    """Takes values out of a callable, wherever it holds them.

    Looked into are closure cells, defaults, keyword defaults and attributes of functions,
    `functools.partial`, methods and what they are bound to, the function that `jax.jit` wraps (which
    takes its place), `jax.custom_jvp`, `jax.custom_vjp` and other callable objects, modules and
    other pytrees; all of it recursively. Not looked into are global variables, classes, and objects
    that can neither be called nor are pytrees.

    Args:
        fn: a callable, or any tree of them.
        wanted: which leaves to take out.

    Returns:
        `(values, rebuild)`. A value that is held in several places is there once.
        `rebuild(new_values)` is the callable with these in place of the old ones; whatever holds
        nothing wanted is the same object in it. If nothing is wanted it returns `fn`. `rebuild`
        itself holds none of the values, and compares by value: two of them are equal if the
        callables differ in nothing but the values.
    """
    values: list[Any] = []
    objects: list[Any] = []
    nodes: list[_Node] = []
    todo: collections.deque[tuple[int, list[Any]]] = collections.deque()
    known: dict[int, Reference] = {}

    def reference(x: Any, as_owner: bool = False) -> Reference:
        if id(x) in known:
            return known[id(x)]
        opened = _open(x, as_owner)
        if opened is not None:
            known[id(x)] = ("node", len(nodes))
            todo.append((len(nodes), opened[1]))
            nodes.append(opened[0])
            # Kept while walking, so that no other object is given its id.
            objects.append(x)
        elif wanted(x):
            known[id(x)] = ("value", len(values))
            values.append(x)
        else:
            return ("fixed", x)
        return known[id(x)]

    root = reference(fn)
    references: list[tuple[Reference, ...]] = []
    while todo:
        i, parts = todo.popleft()
        owner = 1 if isinstance(nodes[i], _Made) else None
        references.append(tuple(reference(x, k == owner) for k, x in enumerate(parts)))
    marked = _holders(references)
    originals = [None if i in marked else (x,) for i, x in enumerate(objects)]
    return values, Recipe(nodes, references, originals, root)


def _holders(references: list[tuple[Reference, ...]]) -> set[int]:
    """The nodes from which a value can be reached."""
    parents: list[list[int]] = [[] for _ in references]
    todo: list[int] = []
    for i, parts in enumerate(references):
        for kind, which in parts:
            if kind == "node":
                parents[which].append(i)
            elif kind == "value":
                todo.append(i)
    marked: set[int] = set()
    while todo:
        i = todo.pop()
        if i not in marked:
            marked.add(i)
            todo.extend(parents[i])
    return marked
