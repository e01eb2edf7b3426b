"""Patterns over the names of leaves, and rules by pattern.

Freezing, initialising, sharding, saving and donation all have to say "these leaves". They say it in
one language: a pattern is a name (see `path_name`) in which

* `*` matches any text within one part, `?` one character, `[abc]`, `[a-z]` and `[!abc]` one of (or
  none of) these, as in a shell;
* `**`, as a part of its own, matches any number of parts, also none;
* `{a,b}` matches what `a` or `b` match; there may be dots, wildcards and further braces inside.

Everything within quotes is literal. A pattern matches whole names: `layers.0` is no layer but a
leaf, and `layers.0.**` is everything below. Wildcards see the text of a key without its quotes.
"""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu

from .._ground import register_cache
from ..show import listed, shown_name, value_error
from ._names import is_quoted, name_keys, named_leaves, parts_of, path_name, tokens_of, unquote

_T = TypeVar("_T")
_REQUIRED: Any = object()
# A pattern without braces: one regular expression for each part, and None for `**`.
_Parts = tuple[re.Pattern[str] | None, ...]


def _bad_pattern(text: str, problem: str, instead: str) -> ValueError:
    return value_error(
        f"the pattern {text!r} cannot be read",
        expected="a dotted name with *, **, ?, [abc] or {a,b} in it",
        got=problem,
        instead=instead,
    )


def _expand(text: str, tokens: Sequence[str]) -> list[list[str]]:
    """All ways to choose one alternative from each pair of braces."""
    if "{" not in tokens:
        if "}" in tokens:
            raise _bad_pattern(text, "} without {", "write {a,b}, or quote the key")
        return [list(tokens)]
    start = tokens.index("{")
    depth, alternatives = 0, [[]]
    for end in range(start, len(tokens)):
        token = tokens[end]
        depth += (token == "{") - (token == "}")
        if depth == 0:
            break
        if token == "," and depth == 1:
            alternatives.append([])
        elif end > start:
            alternatives[-1].append(token)
    else:
        raise _bad_pattern(text, "{ without }", "write {a,b}, or quote the key")
    before, after = tokens[:start], tokens[end + 1 :]
    return [
        choice
        for alternative in alternatives
        for choice in _expand(text, [*before, *alternative, *after])
    ]


def _part(text: str, tokens: Sequence[str]) -> re.Pattern[str] | None:
    """One part of a pattern, as a regular expression; None for `**`."""
    if not tokens:
        raise _bad_pattern(
            text, "an empty part", 'write single dots, none at the ends; an empty key is ""'
        )
    if list(tokens) == ["*", "*"]:
        return None
    if any(first == second == "*" for first, second in zip(tokens, tokens[1:], strict=False)):
        raise _bad_pattern(text, "** beside other text", "give ** a part of its own: a.**.b")
    return re.compile(
        "".join(
            re.escape(unquote(token)) if is_quoted(token) else _wildcard(token) for token in tokens
        ),
        re.DOTALL,
    )


def _wildcard(token: str) -> str:
    # `translate` wraps what we want, (?s:...)\Z, for a whole text.
    return fnmatch.translate(token).removesuffix(r"\Z").removesuffix(r"\z")


@functools.lru_cache(maxsize=1024)
def _compiled(text: str) -> tuple[_Parts, ...]:
    """A pattern without braces for each way to choose from them."""
    return tuple(
        tuple(_part(text, part) for part in parts_of(choice))
        for choice in _expand(text, tokens_of(text))
    )


register_cache(_compiled.cache_clear)


def _matches(parts: Sequence[re.Pattern[str] | None], keys: Sequence[str]) -> bool:
    if not parts:
        return not keys
    first, *rest = parts
    if first is None:
        return any(_matches(rest, keys[i:]) for i in range(len(keys) + 1))
    return bool(keys) and bool(first.fullmatch(keys[0])) and _matches(rest, keys[1:])


def _fits(text: str, keys: Sequence[str]) -> bool:
    return any(_matches(parts, keys) for parts in _compiled(text))


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern over the names of leaves.

    Matches whole names, part by part: `*` any text within one part, `?` one character, `[abc]`,
    `[a-z]`, `[!abc]` one of (none of) these, `**` as a part of its own any number of parts, also
    none, and `{a,b}` what `a` or `b` match. Text in double quotes or backquotes is literal; every
    name, as `path_name` spells it, is a pattern for itself.

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
        >>> Pattern("**.bias").matches("bias")
        True
        >>> Pattern("layers.0").matches("layers.0.weight")
        False
    """

    text: str

    def __post_init__(self):
        _compiled(self.text)

    def matches(self, path: str | Sequence[Any]) -> bool:
        """Whether the pattern matches a leaf.

        Args:
            path: its name, as `path_name` spells it, or its key path.

        Returns:
            True if the pattern matches the whole name.
        """
        return _fits(self.text, name_keys(path if isinstance(path, str) else path_name(path)))

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
        keys = name_keys(path if isinstance(path, str) else path_name(path))
        return any(_fits(self.text, keys[:i]) for i in range(len(keys) + 1))


def _idle_hint(pattern: str, names: Sequence[str]) -> str:
    """Why a pattern may have matched nothing: most often it names a node, not the leaves below."""
    below = Pattern(f"{pattern}.**") if pattern else None
    if below is not None and any(below.matches(name) for name in names):
        return f"{pattern!r} (this is a node: for the leaves in it, write {below.text!r})"
    return repr(pattern)


def _refuse_rules(found: Mapping[str, list[str]], idle: Sequence[str], gaps: bool) -> None:
    """Raises unless each leaf in `found` has one rule (or none, without `gaps`) and none is idle."""
    names = list(found)
    unmatched = [shown_name(name) for name, texts in found.items() if gaps and not texts]
    ambiguous = [
        f"{shown_name(name)}: {' and '.join(map(repr, texts))}"
        for name, texts in found.items()
        if len(texts) > 1
    ]
    problems = [
        (unmatched, "no rule for {} of the leaves"),
        (ambiguous, "more than one rule for {} of the leaves"),
        ([_idle_hint(pattern, names) for pattern in idle], "no leaf for {} of the rules"),
    ]
    got = [f"{title.format(len(some))}:\n" + listed(some, "\n") for some, title in problems if some]
    if not got:
        return
    if not unmatched and not ambiguous:
        got.append("the leaves are:\n" + listed(map(shown_name, names), "\n"))
    raise value_error(
        "the rules do not fit the leaves of the tree",
        where="match_paths(tree, rules)",
        expected="exactly one rule for every leaf, and a leaf for every rule",
        got="\n".join(got),
        instead="a `default=` for leaves without a rule; narrower patterns where two match",
    )


def match_paths(
    pytree: Any,
    rules: Mapping[str, _T],
    *,
    default: Any = _REQUIRED,
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Gives each leaf of a tree the value of the one rule whose pattern matches its name.

    The order of the rules means nothing: two rules for one leaf are an error, and so is a rule that
    matches no leaf, because a mistyped pattern must not pass for "nothing to do".

    Args:
        pytree: any pytree.
        rules: values by pattern (see `Pattern`). The values may be anything.
        default: the value for leaves that no rule matches. Without it, they are an error.
        is_leaf: as in `jax.tree.map`.

    Returns:
        A tree of the same structure, with a value in place of each leaf.

    Raises:
        ValueError: if a leaf has no rule (and there is no default) or several, or if a rule has no
            leaf; one error tells all of them. And if a pattern cannot be read.

    Example:
        >>> from vernal.trees import match_paths
        >>> model = {"encoder": {"weight": 1.0, "bias": 2.0}, "head": {"weight": 3.0}}
        >>> match_paths(model, {"encoder.**": "frozen", "head.**": "trained"})
        {'encoder': {'bias': 'frozen', 'weight': 'frozen'}, 'head': {'weight': 'trained'}}
        >>> match_paths(model, {"**.bias": True}, default=False)
        {'encoder': {'bias': True, 'weight': False}, 'head': {'weight': False}}
    """
    treedef = jtu.tree_structure(pytree, is_leaf=is_leaf)
    keys = {name: name_keys(name) for name in named_leaves(pytree, is_leaf)}
    found = {name: [text for text in rules if _fits(text, keys[name])] for name in keys}
    used = {text for texts in found.values() for text in texts}
    idle = [text for text in rules if text not in used]
    _refuse_rules(found, idle, gaps=default is _REQUIRED)
    return treedef.unflatten([rules[texts[0]] if texts else default for texts in found.values()])
