"""Converts any carry of a loop to two lists of arrays, and back.

The carry of a loop is any tree. The loop computes with its arrays, and with its Python numbers as
arrays; all other leaves (strings, functions, ...) must be the same after a step as before. The
arrays that `buffers` selects are kept apart: `body` and `cond` see each as a `Buffer`.

A `Buffer` of an outer loop stays one here, whether or not it is selected: what it knows of that
loop (whether it is running, whether it is replaying) holds inside too.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import same
from ..show import diff_text, path_text, short, value_error
from ..trees import is_array
from ._buffers import Active, Buffer

Path = tuple[Any, ...]


def is_buffer(x: Any) -> TypeGuard[Buffer]:
    """Whether `x` is a buffer of a loop."""
    return isinstance(x, Buffer)


def is_number(x: Any) -> bool:
    """Whether `x` is a Python number, which becomes an array in a loop, or one for which JAX has settled a dtype."""
    if type(x) in (bool, int, float, complex):
        return True
    return isinstance(x, (int, float, complex)) and hasattr(x, "aval")


def _to_array(x: Any) -> Any:
    return jnp.asarray(x) if is_number(x) or is_array(x) else x


def numbers_to_arrays(tree: Any) -> Any:
    """The tree with a JAX array in place of every Python number and NumPy array."""
    return jtu.tree_map(_to_array, tree, is_leaf=is_buffer)


class _Marker:
    """A placeholder for one leaf while `buffers` selects."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """A leaf that is not an array."""

    value: Any


@dataclasses.dataclass(frozen=True)
class _Varying:
    """A leaf that is an array, or the `Buffer` of an outer loop.

    Attributes:
        outer: that `Buffer`, if it is one.
        selected: whether it is one of this loop's buffers.
    """

    outer: Buffer | None
    selected: bool

    @property
    def is_buffer(self) -> bool:
        """Whether a step sees it as a `Buffer`."""
        return self.selected or self.outer is not None


class Carry:
    """The structure of a carry: everything in it except the arrays.

    Args:
        tree: the carry.
        buffers: the user's function that selects the buffers, or None.
        name: what the user calls this carry, for messages.
    """

    def __init__(self, tree: Any, buffers: Callable[[Any], Any] | None, name: str):
        found, self.treedef = jtu.tree_flatten_with_path(tree, is_leaf=is_buffer)
        self.name = name
        self.paths = [path for path, _ in found]
        selected = frozenset() if buffers is None else _select(buffers, self.treedef, found)
        self.slots = [
            _Varying(leaf if is_buffer(leaf) else None, i in selected)
            if is_buffer(leaf) or is_array(leaf) or is_number(leaf)
            else _Fixed(leaf)
            for i, (_, leaf) in enumerate(found)
        ]

    def start(self, tree: Any) -> tuple[list[Any], list[Any]]:
        """The arrays and the buffers of a carry of this structure."""
        return self._lists(jtu.tree_leaves(numbers_to_arrays(tree), is_leaf=is_buffer))

    def take(self, tree: Any, of: str) -> tuple[list[Any], list[Any]]:
        """The `(arrays, buffers)` of a step's result; `of` names it in messages. Raises `ValueError` if the
        structure, or a leaf that is not an array, differs from the carry's."""
        tree = numbers_to_arrays(tree)
        leaves, treedef = jtu.tree_flatten(tree, is_leaf=is_buffer)
        if treedef != self.treedef or not all(map(self._fits, self.slots, leaves)):
            nothing = jax.ShapeDtypeStruct((), jnp.float32)
            example = self._fill(
                itertools.repeat(nothing),
                itertools.repeat(nothing),
                lambda slot, array: Buffer(array) if slot.is_buffer else array,
            )
            raise value_error(
                "the carry of a loop must keep its structure",
                where=of,
                expected="the structure of the initial carry, with the same non-array values",
                got=diff_text(example, _shapeless(tree), root=self.name),
                instead="return the same containers, strings and functions; use arrays for values that change",
            )
        return self._lists(leaves)

    @staticmethod
    def _fits(slot: "_Fixed | _Varying", leaf: Any) -> bool:
        if isinstance(slot, _Fixed):
            return same(slot.value, leaf)
        return is_buffer(leaf) if slot.is_buffer else is_array(leaf)

    def _lists(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        lists: tuple[list[Any], list[Any]] = [], []
        for slot, leaf in zip(self.slots, leaves, strict=True):
            if isinstance(slot, _Varying):
                lists[slot.selected].append(leaf.contents if is_buffer(leaf) else leaf)
        return lists

    def new_buffers(self) -> list[bool]:
        """Which of its buffers do not come from an outer loop."""
        slots = [slot for slot in self.slots if isinstance(slot, _Varying) and slot.selected]
        return [slot.outer is None for slot in slots]

    def fill(
        self,
        arrays: Any,
        buffers: Any,
        active: Active | None,
        replay: bool,
        states: Sequence[Any] | None = None,
    ) -> Any:
        """The carry as the user's functions see it: `active` is whether this element of the batch still runs (or
        None), `replay` whether the buffers have their final contents, `states` what has happened to them."""
        of_buffers = itertools.repeat(None) if states is None else iter(states)

        def see(slot: _Varying, array: Any) -> Any:
            if slot.selected:
                state = next(of_buffers)
                outer = Buffer(array, state=state) if slot.outer is None else slot.outer
                return outer.inside(array, active, replay)
            return array if slot.outer is None else slot.outer.holding(array)

        return self._fill(iter(arrays), iter(buffers), see)

    def finish(self, arrays: Any, buffers: Any) -> Any:
        """The carry after the loop."""
        return self._fill(
            iter(arrays),
            iter(buffers),
            lambda slot, array: array if slot.outer is None else slot.outer.holding(array),
        )

    def _fill(
        self, arrays: Iterator[Any], buffers: Iterator[Any], see: Callable[[_Varying, Any], Any]
    ) -> Any:
        return self.treedef.unflatten(
            slot.value
            if isinstance(slot, _Fixed)
            else see(slot, next(buffers if slot.selected else arrays))
            for slot in self.slots
        )

    def check_types(self, before: Sequence[Any], after: Sequence[Any], of: str) -> None:
        """Refuses a step that changes the type of an array. `before` has the types that a step is given, arrays and
        then buffers; `after` those that it returns, perhaps followed by others; `of` names the result in messages."""
        # In the order of the lists: arrays before buffers.
        varying = [
            (slot.selected, path)
            for slot, path in zip(self.slots, self.paths, strict=True)
            if isinstance(slot, _Varying)
        ]
        paths = [path for _, path in sorted(varying, key=lambda pair: pair[0])]
        lines = [
            f"{path_text(path, self.name)}: expected {x.str_short()}, got {y.str_short()}"
            for path, x, y in zip(paths, before, after, strict=False)
            if not same_type(x, y)
        ]
        if lines:
            raise value_error(
                "every array in the carry of a loop must keep its type",
                where=of,
                expected="the shapes, dtypes and shardings of the initial carry",
                got="\n".join(lines),
                instead="cast with `.astype(...)`; start from arrays of the final shape, dtype and sharding",
            )


def same_type(a: Any, b: Any) -> bool:
    """Whether two types of arrays agree in all but whether they are weak."""

    def facts(t: Any) -> Any:
        # Leaves out the mesh: a number made while tracing has none.
        return t.shape, t.dtype, t.sharding.spec, t.manual_axis_type.varying

    return facts(a) == facts(b)


def _shapeless(tree: Any) -> Any:
    """The tree with all its arrays made alike, to compare structures."""
    nothing = jax.ShapeDtypeStruct((), jnp.float32)

    def alike(x: Any) -> Any:
        return Buffer(nothing) if is_buffer(x) else nothing if is_array(x) else x

    return jtu.tree_map(alike, tree, is_leaf=is_buffer)


def _select(
    buffers: Callable[[Any], Any], treedef: Any, found: list[tuple[Path, Any]]
) -> frozenset[int]:
    """Which leaves the user's function selects."""
    ghost = treedef.unflatten([_Marker(i) for i in range(len(found))])
    picked = jtu.tree_leaves(buffers(ghost))
    for mark in picked:
        leaf = found[mark.index][1] if isinstance(mark, _Marker) else mark
        if not isinstance(mark, _Marker) or not (is_buffer(leaf) or is_array(leaf)):
            raise value_error(
                "`buffers` must select arrays of the carry",
                where="argument `buffers`",
                expected="a function from the carry to some of its arrays: `lambda carry: carry[1]`",
                got=short(leaf),
                instead="return arrays of the carry, or subtrees of arrays; several in a tuple or list",
            )
    return frozenset(mark.index for mark in picked)
