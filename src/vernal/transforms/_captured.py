"""What a callable captures: takes arrays out of closures, and puts others in.

The difficulty: JAX sees arrays in pytrees, but a Python function hides them in closure cells,
defaults, `functools.partial`, methods, wrappers of wrappers. Functions may refer to themselves
(recursion), to each other, and share cells (`nonlocal`); and a closure without arrays must stay the
same object, because it may count its calls or append to a list.

The plan: (1) walk everything that the callable holds, breadth first, and number each node once,
by identity; (2) mark the nodes from which something wanted can be reached; (3) keep a recipe: the
parts of a marked node, and any other node itself. The recipe rebuilds the marked nodes around new
values. Cycles are closed where Python closes them: cells, functions, lists, dicts and plain objects
are made empty first, and all filled at the end; everything else is made from its parts.

Invariants: a recipe holds nothing that was wanted, so it may be part of a treedef or of a cache.
Two recipes are equal only if the two callables do the same with equal values: the same code and
globals, the same parts in the same places, and wherever the object itself is kept, objects that may
stand for each other (`static_key`), whatever they hold now.

Glossary. A *node* is opened, and has parts; anything else is a leaf. A *reference* says where a
part comes from: `("node", i)`, `("value", i)` for a wanted leaf, `("fixed", leaf)`.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

from .._ground import static_key
from ..trees import Node, open_up

Reference = tuple[str, Any]


class Recipe:
    """Rebuilds a callable around new values in place of those that were taken out of it.

    Call it with the values. Recipes compare by value: two are equal if the callables differ only in
    the values that were taken out.

    Args:
        nodes: for every node, how to make it.
        references: for every node, where its parts come from.
        originals: for every node that holds nothing wanted, the object itself, in a tuple; None for
            the others.
        root: the reference to the callable.
    """

    __slots__ = ("_key", "nodes", "originals", "references", "root")

    def __init__(
        self,
        nodes: Sequence[Node],
        references: Sequence[Sequence[Reference]],
        originals: Sequence[tuple[Any] | None],
        root: Reference,
    ):
        self.nodes = nodes
        self.references = references
        self.originals = originals
        self.root = root
        self._key: Any = None

    def __call__(self, values: Sequence[Any]) -> Any:
        """The callable with these values in it; the original if nothing was taken out."""
        return self._builder(values)(self.root)

    def _builder(self, values: Sequence[Any]) -> Callable[[Reference], Any]:
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
            elif self.nodes[i].has_shell and not self.nodes[i].cells:
                shells.append(i)
                made[i] = self.nodes[i].shell([])
        # Functions last: they are made from their cells.
        for i, node in enumerate(self.nodes):
            if i not in made and node.cells:
                shells.append(i)
                cells = self.references[i][: node.cells]
                made[i] = node.shell([made[which] for _, which in cells])
        for i in shells:
            self.nodes[i].fill(made[i], [part(r) for r in self.references[i]])
        return part

    def paths(self) -> dict[int, tuple[Any, ...]]:
        """The path from the callable to each value: names of variables and attributes, keys,
        positions. Ordered as the values appear to a reader."""
        found: dict[int, tuple[Any, ...]] = {}
        seen: set[int] = set()
        todo: list[tuple[Reference, tuple[Any, ...]]] = [(self.root, ())]
        while todo:
            (kind, which), path = todo.pop()
            if kind == "value":
                found.setdefault(which, path)
            elif kind == "node" and which not in seen:
                seen.add(which)
                parts = self.references[which]
                labels = self.nodes[which].labels(len(parts))
                steps = [path if label is None else (*path, label) for label in labels]
                todo.extend(reversed([*zip(parts, steps, strict=True)]))
        return found

    def key(self) -> Any:
        """A hashable value that equality compares."""
        if self._key is None:
            self._key = self._key_of(self.root, {})
        return self._key

    def _key_of(self, reference: Reference, seen: dict[int, int], opened: bool = False) -> Any:
        kind, which = reference
        if kind != "node":
            return (kind, which) if kind == "value" else _key_or_identity(which)
        original = self.originals[which]
        if original is not None and not opened:
            return _key_or_identity(original[0])
        if which in seen:
            return "again", seen[which]
        seen[which] = len(seen)
        node = self.nodes[which]
        # Variables of a library function are compared by their contents.
        count = node.cells if node.is_settled else 0
        parts = [self._key_of(x, seen, i < count) for i, x in enumerate(self.references[which])]
        return type(node), _key_or_identity(node.key), *parts

    def __deepcopy__(self, memo: Any) -> "Recipe":
        # Structure, like a function.
        return self

    def __eq__(self, other: Any) -> bool:
        return self is other or (type(other) is Recipe and self.key() == other.key())

    def __hash__(self) -> int:
        return hash(self.key())


def _key_or_identity(x: Any) -> Any:
    try:
        return static_key(x)
    except TypeError:
        # The recipe keeps it alive, and so its address.
        return "is", id(x)


def captured(
    fn: Any,
    wanted: Callable[[Any], bool],
) -> tuple[list[Any], Recipe]:
    """Takes values out of a callable, wherever it holds them.

    It looks, recursively, into closure cells, defaults, keyword defaults and attributes of functions,
    `functools.partial`, methods and what they are bound to, the function that `jax.jit` wraps (which
    takes its place), `jax.custom_jvp`, `jax.custom_vjp` and other callable objects, modules and other
    pytrees. It does not look into global variables, classes, and objects that are neither callable
    nor pytrees.

    Args:
        fn: a callable, or any tree of them.
        wanted: which leaves to take out.

    Returns:
        `(values, rebuild)`. A value that is held in several places is listed once.
        `rebuild(new_values)` is the callable with these in place of the old ones; objects in it that
        hold nothing wanted stay the same. If nothing is wanted it returns `fn`. `rebuild` itself
        holds none of the values, and compares by value: two of them are equal if the callables
        differ only in the values.

    Example:
        >>> from vernal.transforms import captured
        >>> def scale_by(factor):
        ...     return lambda x: factor * x
        >>> values, rebuild = captured(scale_by(2.0), lambda x: isinstance(x, float))
        >>> values, rebuild([10.0])(3.0), rebuild.paths()
        ([2.0], 30.0, {0: ('factor',)})
    """
    values: list[Any] = []
    objects: list[Any] = []
    nodes: list[Node] = []
    todo: collections.deque[tuple[int, list[Any]]] = collections.deque()
    known: dict[int, Reference] = {}

    def reference(x: Any, as_owner: bool = False) -> Reference:
        if id(x) in known:
            return known[id(x)]
        opened = open_up(x, as_owner)
        if opened is not None:
            known[id(x)] = ("node", len(nodes))
            todo.append((len(nodes), opened[1]))
            nodes.append(opened[0])
            # Kept alive during the walk, so that its id is not reused.
            objects.append(x)
            return known[id(x)]
        if wanted(x):
            values.append(x)
            known[id(x)] = ("value", len(values) - 1)
            return known[id(x)]
        return ("fixed", x)

    root = reference(fn, as_owner=True)
    references: list[tuple[Reference, ...]] = []
    while todo:
        i, parts = todo.popleft()
        owner = nodes[i].owner
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
