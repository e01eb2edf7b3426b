"""The difference of two pytrees, by key path: the one printer of mismatches.

Both trees are walked side by side, one level at a time, so that the key path at which they diverge
(`.layers[1].activation`) names a difference, instead of two whole structures. Three complications:

* Structure has no path in JAX. For dataclasses (modules), the fields that are not children are
  compared by name; for other nodes, the only thing to report is that their static data differ.
* When flattened, a field may be represented by another object (a list of layers and functions shows
  only its arrays). Then the field's own value is walked, which has a path for everything, and `shown`
  holds the leaves that are leaves of the tree: all others are structure, and compared by value in
  every mode.
* Anything may be in a tree: objects that fail to flatten, to compare or to print. They count as
  leaves, and as different unless they are identical.
"""

import dataclasses
from typing import Any

import jax.tree_util as jtu

from .._ground import one_level_with_keys, same
from ._message import listed, value_error
from ._paths import path_text
from ._pformat import short
from ._values import ARRAYS, array_text, differing_values, is_weak

_MODES = ("shape", "value", "ignore")
_NOTHING = "nothing"
# The attribute, besides the fields of a node, for which of its leaves are not trained.
FROZEN = "__frozen__"
_ABSENT: Any = object()


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place where two trees differ.

    Attributes:
        path_text: the place, as a Python expression.
        expected: the value in the first tree, on one line.
        got: the value in the second.
    """

    path_text: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.path_text}: expected {self.expected}, got {self.got}"


@dataclasses.dataclass(frozen=True)
class _Node:
    children: dict[Any, Any]
    treedef: Any


def _one_level(tree: Any) -> _Node | None:
    """The children of a node by key, or None for a leaf."""
    if jtu.all_leaves([tree]):
        return None
    try:
        keyed, treedef = one_level_with_keys(tree)
    except Exception:
        # For example a dictionary with unorderable keys, or an object that is not built yet.
        return None
    try:
        children = dict(keyed)
    except Exception:
        children = {}
    if len(children) != len(keyed):
        # Keys that are unhashable or repeat say less than positions.
        children = {jtu.FlattenedIndexKey(i): child for i, (_, child) in enumerate(keyed)}
    return _Node(children, treedef)


def _leaf_ids(tree: Any) -> frozenset[int]:
    try:
        return frozenset(map(id, jtu.tree_leaves(tree)))
    except Exception:
        return frozenset()


def _same_structure(a: Any, b: Any) -> bool:
    try:
        return jtu.tree_structure(a) == jtu.tree_structure(b)
    except Exception:
        return False


def _static_data(treedef: Any) -> Any:
    data = treedef.node_data()
    return None if data is None else data[1]


def _same_data(a: Any, b: Any) -> bool:
    """Plain `==`, by which JAX compares treedefs, so that our answer is not stricter than the caller's."""
    try:
        return a is b or bool(a == b)
    except Exception:
        return False


def _field_names(cls: type) -> tuple[str, ...]:
    # Not `__dataclass_fields__`, which holds class variables too.
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name, _ABSENT)
    except Exception:
        return _ABSENT


def _is_array(value: Any) -> bool:
    try:
        return isinstance(value, ARRAYS)
    except Exception:
        # `isinstance` reads `__class__`, which may run a proxy's own code.
        return False


def _show(value: Any) -> str:
    return _NOTHING if value is _ABSENT else short(value)


def _node_text(tree: Any) -> str:
    """A node as text. Built-in containers include their type, because brackets alone are easily overlooked."""
    kind = type(tree)
    return f"{kind.__name__} {short(tree)}" if kind in (list, tuple, dict) else short(tree)


class _Walk:
    """One comparison: the options, the differences found so far, and the pairs being compared."""

    def __init__(self, leaves: str, weak_type: bool, root: str):
        self.leaves = leaves
        self.weak_type = weak_type
        self.root = root
        self.found: list[Difference] = []
        self.active: set[tuple[int, int]] = set()

    def add(self, path: tuple[Any, ...], expected: str, got: str) -> None:
        if expected == got:
            got += " (another one that prints the same)"
        self.found.append(Difference(path_text(path, self.root), expected, got))

    def trees(self, path: tuple[Any, ...], a: Any, b: Any, shown: frozenset[int] | None) -> None:
        """Compares the values at one path. `shown`: the identities of the leaves that are not structure;
        None: all."""
        pair = id(a), id(b)
        if a is b or pair in self.active:
            return
        self.active.add(pair)
        node_a, node_b = _one_level(a), _one_level(b)
        if node_a is None and node_b is None:
            self.leaf(path, a, b, shown)
        elif node_a is None or node_b is None:
            self.add(path, _node_text(a), _node_text(b))
        elif type(a) is not type(b):
            texts = _node_text(a), _node_text(b)
            if texts[0] == texts[1]:
                texts = tuple(f"{type(x).__module__}.{_node_text(x)}" for x in (a, b))
            self.add(path, texts[0], texts[1])
        else:
            self.nodes(path, (a, b), (node_a, node_b), shown)
        self.active.discard(pair)

    def nodes(
        self,
        path: tuple[Any, ...],
        owners: tuple[Any, Any],
        levels: tuple[_Node, _Node],
        shown: frozenset[int] | None,
    ) -> None:
        """Compares two nodes of one class: their children, then their structure."""
        a, b = levels[0].children, levels[1].children
        fields = _field_names(type(owners[0]))
        explained = False
        for key in dict.fromkeys((*a, *b)):
            child = a.get(key, _ABSENT), b.get(key, _ABSENT)
            name = key.name if isinstance(key, jtu.GetAttrKey) else None
            value = child
            if name is not None and name in fields:
                value = _attribute(owners[0], name), _attribute(owners[1], name)
            if child[0] is _ABSENT or child[1] is _ABSENT:
                explained = True
                self.one_sided(path + (key,), child, value)
            elif value[0] is child[0] and value[1] is child[1]:
                self.trees(path + (key,), child[0], child[1], shown)
            elif value[0] is _ABSENT or value[1] is _ABSENT:
                # The field is computed during flattening, or its attribute cannot be read.
                self.trees(path + (key,), child[0], child[1], shown)
            else:
                explained |= self.stood_for(path + (key,), child, value)
        static = [name for name in (*fields, FROZEN) if jtu.GetAttrKey(name) not in {**a, **b}]
        data = _static_data(levels[0].treedef), _static_data(levels[1].treedef)
        if _same_data(data[0], data[1]):
            return
        explained |= self.static_fields(path, owners, static)
        if not explained:
            name = type(owners[0]).__name__
            self.add(path, *(f"{name} with static data {short(datum)}" for datum in data))

    def one_sided(
        self, path: tuple[Any, ...], child: tuple[Any, Any], value: tuple[Any, Any]
    ) -> None:
        """Adds a child of one node that the other does not have, though one of its fields may hold it as
        structure."""
        shown = tuple(
            v if c is _ABSENT and v is not c else c for c, v in zip(child, value, strict=True)
        )
        texts = [_show(x) for x in shown]
        if texts[0] == texts[1]:
            texts = [
                text + (" (structure)" if c is _ABSENT else " (a child)")
                for text, c in zip(texts, child, strict=True)
            ]
        self.add(path, texts[0], texts[1])

    def stood_for(
        self, path: tuple[Any, ...], child: tuple[Any, Any], value: tuple[Any, Any]
    ) -> bool:
        """Compares two fields that other objects represent during flattening."""
        before = len(self.found)
        self.trees(path, value[0], value[1], _leaf_ids(child[0]) | _leaf_ids(child[1]))
        if len(self.found) == before and not _same_structure(child[0], child[1]):
            self.add(path, *(str(jtu.tree_structure(c)) for c in child))
        return len(self.found) > before

    def static_fields(
        self, path: tuple[Any, ...], owners: tuple[Any, Any], names: list[str]
    ) -> bool:
        before = len(self.found)
        for name in names:
            a, b = _attribute(owners[0], name), _attribute(owners[1], name)
            here = path + (jtu.GetAttrKey(name),)
            if a is _ABSENT or b is _ABSENT:
                if a is not b:
                    self.add(here, _show(a), _show(b))
            else:
                self.trees(here, a, b, frozenset())
        return len(self.found) > before

    def leaf(self, path: tuple[Any, ...], a: Any, b: Any, shown: frozenset[int] | None) -> None:
        structure = shown is not None and not (id(a) in shown and id(b) in shown)
        if self.leaves == "ignore" and not structure:
            return
        if not (_is_array(a) and _is_array(b)):
            if not same(a, b):
                self.add(path, short(a), short(b))
            return
        weak = self.weak_type and is_weak(a) != is_weak(b)
        if a.shape != b.shape or a.dtype != b.dtype or weak:
            self.add(path, array_text(a), array_text(b))
        elif structure or self.leaves == "value":
            texts = differing_values(a, b)
            if texts is not None:
                self.add(path, *texts)


def diff(
    expected: Any, got: Any, *, leaves: str = "shape", weak_type: bool = True, root: str = ""
) -> list[Difference]:
    """All places where two pytrees differ.

    Reports nodes of different classes, missing or extra children, and different static fields and
    leaves. Leaves that are not arrays are compared by value. Never fails, whatever the trees hold.

    Args:
        expected: the tree that was expected.
        got: the tree that was found.
        leaves: `"shape"` compares arrays by shape and dtype, so that `jax.ShapeDtypeStruct` and
            NumPy arrays agree with JAX's; `"value"` also compares their elements (NaN equals NaN);
            `"ignore"` compares only structure.
        weak_type: whether a weakly typed array differs from a strongly typed one.
        root: the name of the trees in the paths.

    Returns:
        The differences, in the order of the tree; empty if there are none.

    Raises:
        ValueError: if `leaves` is not one of the three words.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.show import diff
        >>> before = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
        >>> after = {"w": jnp.zeros((3, 2)), "b": None}
        >>> for difference in diff(before, after, root="params"):
        ...     print(difference)
        params['b']: expected f32[3], got None
        params['w']: expected f32[2,3], got f32[3,2]
    """
    if leaves not in _MODES:
        raise value_error(
            "unknown value of `leaves`",
            where="argument `leaves` of diff",
            expected=" or ".join(map(repr, _MODES)),
            got=repr(leaves),
            instead="leaves='shape'",
        )
    walk = _Walk(leaves, weak_type, root)
    try:
        walk.trees((), expected, got, None)
    except RecursionError:
        walk.add((), "trees that can be walked", "trees nested too deeply to compare any further")
    return walk.found


def diff_text(
    expected: Any,
    got: Any,
    *,
    leaves: str = "shape",
    weak_type: bool = True,
    root: str = "",
    limit: int = 10,
) -> str:
    """The differences of two pytrees as text, one line each.

    Args:
        expected: the tree that was expected.
        got: the tree that was found.
        leaves: how leaves are compared, as for `diff`.
        weak_type: whether a weakly typed array differs from a strongly typed one.
        root: the name of the trees in the paths.
        limit: the maximum number of differences to list.

    Returns:
        The lines, or `no difference`.

    Raises:
        ValueError: if `leaves` is not one of `"shape"`, `"value"`, `"ignore"`.

    Example:
        >>> from vernal.show import diff_text
        >>> diff_text([1, 2, 3], (1, 2, 3), root="x")
        'x: expected list [1, 2, 3], got tuple (1, 2, 3)'
        >>> print(diff_text([1, 2], [1, 2, 3]))
        [2]: expected nothing, got 3
    """
    found = diff(expected, got, leaves=leaves, weak_type=weak_type, root=root)
    return listed(found, "\n", limit) or "no difference"
