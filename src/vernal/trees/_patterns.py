"""Paths with wildcards, and rules by path.

Freezing, initialising, sharding, saving and surgery all select leaves. They share one language, which
`Pattern` describes, and one object, `Paths`, that finds the matches in a tree.
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
    """A path to one or more places in a tree.

    Write a place as a name or as the Python expression that reaches it, with or without the tree itself
    in front: `layers.0.weight`, `.layers[0].weight`, `model.layers[0].weight`. Summaries and errors print
    paths in this form; paste them wherever a path is expected.

    * `.x` (at the beginning also `x`) is the attribute, the dictionary key or the index `x`. Write text
      with other characters in double quotes, `heads."a.b"`, or in backquotes.
    * `[0]`, `['a.b']` or `[(0, 1)]` is exactly this key. After a dot, a bracket is a set of characters.
    * `*` matches any text within one part (`[*]` any key), `?` one character, and `[abc]`, `[a-z]`,
      `[!abc]` one character in (or not in) the set, as in a shell; they match the text of a key without
      its quotes.
    * `**`, as a part of its own, matches any number of parts, including none.
    * `{a,b}` matches what `a` or `b` matches; dots, wildcards and further braces may be inside.

    A path without wildcards matches the place with exactly this name. If there is none, quotes and kinds
    of keys are ignored. If a path matches nothing as written, and begins with the word `model` or `tree`,
    that word is the tree itself.

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
        """The number of `*` and `**`; None if there are other wildcards, or braces."""
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
    """Gives each leaf of a tree the value of the one rule that applies to it.

    The order of the rules does not matter: two rules for one leaf are an error. So is a rule that
    applies to no leaf, because a mistyped path must not pass for "nothing to do".

    Args:
        pytree: any pytree.
        rules: values by path (see `Pattern`) of leaves or, without wildcards, of parts of the tree, for
            all leaves in them. The values may be anything.
        default: the value for leaves without a rule. If not given, such leaves are an error.
        is_leaf: as in `jax.tree.map`.
        where: the location that errors give.

    Returns:
        A tree of the same structure, with a value in place of each leaf.

    Raises:
        ValueError: if a leaf has no rule (and there is no default) or several, or if a rule has no
            leaf; one error lists all of them. Also if a path cannot be parsed.

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
            instead="give `default=` for leaves without a rule" if unruled else None,
        )
    return treedef.unflatten([rules[texts[0]] if texts else default for texts in found])
