"""Paths with wildcards, and rules by path.

Freezing, initialising, sharding, saving and surgery all have to say "these leaves". They say it in one
language, which is described at `Pattern`, and ask one object, `Paths`, what it means in a tree.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu

from ._names import named_leaves
from ._path_syntax import captured, keys_of, read
from ._paths import Paths

_T = TypeVar("_T")
_REQUIRED: Any = object()


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A path to a place in a tree, or to several.

    The same place may be written as a name or as the Python expression that reaches it, with or without
    the tree itself in front: `layers.0.weight`, `.layers[0].weight`, `model.layers[0].weight`. This is
    how summaries and errors print it, and wherever a path is asked for, it can be pasted.

    * `.x` (at the beginning also `x`) is the attribute, the dictionary key or the index `x`. Text with
      other signs in it is written in double quotes, `heads."a.b"`, or in backquotes.
    * `[0]`, `['a.b']` or `[(0, 1)]` is just this key. Behind a dot, a bracket is a set of characters.
    * `*` is any text within one part (`[*]` any key), `?` one character, and `[abc]`, `[a-z]`, `[!abc]`
      one of (or none of) these, as in a shell; they see the text of a key without its quotes.
    * `**`, as a part of its own, is any number of parts, also none.
    * `{a,b}` is what `a` or `b` are; there may be dots, wildcards and further braces inside.

    In a tree, a path without wildcards is what has just this name; only if nothing has, quotes and kinds
    of keys do not count. If a path means nothing as it is written, and begins with the word `model` or
    `tree`, that is the tree itself.

    Args:
        text: for example `blocks.*.attn.{q,k,v}.weight` or `**.bias`.

    Attributes:
        text: as given.

    Raises:
        ValueError: if a quote, bracket or brace is not closed, a part is empty, or `**` is not a
            part of its own.

    Example:
        >>> from vernal.trees import Pattern
        >>> Pattern("blocks.*.{attn,mlp}.**").matches("blocks.3.attn.q.weight")
        True
        >>> Pattern(".blocks[3].attn.q.weight").matches("blocks.3.attn.q.weight")
        True
        >>> Pattern("**.bias").matches("bias")
        True
        >>> Pattern("layers.0").matches("layers.0.weight")
        False
    """

    text: str

    def __post_init__(self):
        read(self.text)

    @property
    def stars(self) -> int | None:
        """How many `*` and `**` there are; None if there are other wildcards, or braces."""
        [parts, *others] = read(self.text)
        if others or not all(part.pieces for part in parts):
            return None
        return sum(part.pieces.count(None) for part in parts)

    def matches(self, path: str | Sequence[Any]) -> bool:
        """Whether the pattern matches a leaf.

        Args:
            path: its name, as `path_name` spells it, or its key path.

        Returns:
            True if the pattern matches the whole name.
        """
        keys = keys_of(path)
        return any(captured(parts, keys) is not None for parts in read(self.text))

    def covers(self, path: str | Sequence[Any]) -> bool:
        """Whether the pattern matches a leaf or a part of the tree that it is in.

        Args:
            path: the name of the leaf, as `path_name` spells it, or its key path.

        Returns:
            True if the pattern matches the name or its beginning up to some dot.

        Example:
            >>> from vernal.trees import Pattern
            >>> Pattern("layers.0").covers("layers.0.weight")
            True
        """
        keys = keys_of(path)
        return any(
            captured(parts, keys[:end]) is not None
            for parts in read(self.text)
            for end in range(len(keys) + 1)
        )


def match_paths(
    pytree: Any,
    rules: Mapping[str, _T],
    *,
    default: Any = _REQUIRED,
    is_leaf: Callable[[Any], bool] | None = None,
    where: str = "match_paths(tree, rules)",
) -> Any:
    """Gives each leaf of a tree the value of the one rule that is for it.

    The order of the rules means nothing: two rules for one leaf are an error, and so is a rule that
    is for no leaf, because a mistyped path must not pass for "nothing to do".

    Args:
        pytree: any pytree.
        rules: values by path (see `Pattern`) of leaves or, without wildcards, of parts of the tree, for
            all leaves in them. The values may be anything.
        default: the value for leaves without a rule. Without it, they are an error.
        is_leaf: as in `jax.tree.map`.
        where: what errors say about where they are.

    Returns:
        A tree of the same structure, with a value in place of each leaf.

    Raises:
        ValueError: if a leaf has no rule (and there is no default) or several, or if a rule has no
            leaf; one error tells all of them. And if a path cannot be read.

    Example:
        >>> from vernal.trees import match_paths
        >>> model = {"encoder": {"weight": 1.0, "bias": 2.0}, "head": {"weight": 3.0}}
        >>> match_paths(model, {"encoder": "frozen", "head.**": "trained"})
        {'encoder': {'bias': 'frozen', 'weight': 'frozen'}, 'head': {'weight': 'trained'}}
        >>> match_paths(model, {"**.bias": True}, default=False)
        {'encoder': {'bias': True, 'weight': False}, 'head': {'weight': False}}
    """
    treedef = jtu.tree_structure(pytree, is_leaf=is_leaf)
    paths = Paths(named_leaves(pytree, is_leaf))
    found, idle = paths.rules(rules)
    unruled = [i for i, texts in enumerate(found) if not texts] if default is _REQUIRED else []
    if idle or unruled or any(len(texts) > 1 for texts in found):
        raise paths.refusal(
            where,
            idle,
            found,
            unruled,
            instead="a `default=` for leaves without a rule" if unruled else None,
        )
    return treedef.unflatten([rules[texts[0]] if texts else default for texts in found])
