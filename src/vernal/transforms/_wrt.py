"""What a derivative is taken with respect to: the option `wrt` of `filter_grad` and its siblings.

A call is taken apart once, into the arrays that are differentiated, the other arrays, and the rest. A *target* is one thing
that `wrt` names (an argument); it is a range of the leaves of `(fn, args, kwargs)`, found by counting and not by path, because
this runs at every call. Its result is a tree of its own structure, with None wherever nothing was differentiated.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import callable_name, signature_of
from ..show import message, path_text, short
from ..trees import (
    is_array,
    is_inexact_array,
    is_inexact_array_like,
    picked_paths,
    values_with_paths,
)
from ._boundary import Path, Rest, parameter_name, split, to_positional

Wrt = int | str | tuple[int | str, ...] | Callable[[Any], Any]

_POSITIONAL = (
    "POSITIONAL_ONLY",
    "POSITIONAL_OR_KEYWORD",
)
_INSTEAD_OF = {
    "argnums": "say what to differentiate with `wrt`: wrt=1, wrt=(0, 2), wrt='x', or wrt=lambda model: model.weight",
    "holomorphic": "take the real part of a complex loss; for a holomorphic function of arrays use jax.grad itself",
    "allow_int": "leave it out: integers are not differentiated, and get None",
}


def check_options(
    transform: str, wrt: Any, refused: dict[str, Any], known: str = "has_aux or wrt"
) -> None:
    """Refuses the options that a transformation does not have, and a `wrt` that can never be right.

    Args:
        transform: the name of the transformation, for the message.
        wrt: what the user gave.
        refused: the options that are not known.
        known: those that are.

    Raises:
        TypeError: for either.
    """
    if refused:
        name = next(iter(refused))
        raise TypeError(
            message(
                f"{transform} has no option `{name}`",
                where=f"{transform}(fn, {name}=...)",
                expected=known,
                got=name,
                instead=_INSTEAD_OF.get(name, f"leave `{name}` out"),
            )
        )
    parts = wrt if isinstance(wrt, tuple) and wrt else (wrt,)
    if wrt is None or callable(wrt) or all(type(part) in (int, str) for part in parts):
        return
    raise TypeError(
        message(
            "`wrt` does not say what to differentiate",
            where=f"{transform}(fn, wrt={short(wrt)})",
            expected="an argument's number or name, a tuple of those, or a function that picks nodes of the first argument",
            got=short(wrt),
            instead="wrt=0, wrt=(0, 'scale'), or wrt=lambda model: (model.weight, model.bias)",
        )
    )


class Target:
    """One argument that is differentiated, wholly or in part."""

    __slots__ = ("name", "paths", "start", "tree", "treedef")

    def __init__(self, name: str, tree: Any, treedef: Any, start: int, paths: list[Path] | None):
        self.name = name
        self.tree = tree
        self.treedef = treedef
        # Its leaves among those of `(fn, args, kwargs)` begin here.
        self.start = start
        # What was picked of it; None if that is the whole.
        self.paths = paths

    def picks(self) -> list[bool]:
        """Which leaves are asked for, arrays or not."""
        if self.paths is None:
            return [True] * self.treedef.num_leaves
        found = jtu.tree_flatten_with_path(self.tree)[0]
        return [any(path[: len(p)] == p for p in self.paths) for path, _ in found]

    def parts(self) -> list[tuple[str, Any]]:
        """Everything that was asked for by name, with its value."""
        if self.paths is None:
            return [(self.name, self.tree)]
        return [
            (path_text(p, self.name), jtu.tree_reduce) if not p else (path_text(p, self.name), p)
            for p in self.paths
        ]


class Call:
    """One call, taken apart into what is differentiated and what is not."""

    __slots__ = ("arrays", "chosen", "fn", "positions", "rest", "single", "targets")

    def __init__(self, fn: Any, rest: Rest, arrays: list[Any], targets: list[Target], single: bool):
        self.fn = fn
        self.rest = rest
        self.arrays = arrays
        self.targets = targets
        self.single = single

    def with_chosen(self, chosen: Sequence[Any]) -> list[Any]:
        """All arrays of the call, those that are differentiated replaced."""
        return []
