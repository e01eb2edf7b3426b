"""Parses a path, in either spelling, into its parts.

`layers.0.weight` and `.layers[0].weight` have the same three parts. A part is the name of a key (see
`path_name`), a wildcard test for the text of a key, or `**`.
"""

import fnmatch
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._ground import register_cache
from ..show import BRACKET, key_names, name_in_brackets, name_of_text, quoted, unquoted, value_error

# A quoted part, a set of characters, or one character.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`|\[!?\]?[^\]]*\]|.', re.DOTALL)
_ONE, _MANY = re.compile("(.*)", re.DOTALL), None


class Part(NamedTuple):
    """One part of a path.

    Attributes:
        source: the text as written, with its brackets or its leading dot.
        pieces: the literal texts in it, and None for each `*`; empty if it has other wildcards.
        test: the pattern for the text of a key, with a group for each `*`; None for `**`.
        name: the name of the key, if the part has no wildcards.
        exact: whether the key must have this name, not only this text.
    """

    source: str
    pieces: tuple[str | None, ...]
    test: re.Pattern[str] | None
    name: str | None = None
    exact: bool = False


DEEP = Part(".**", (None,), _MANY)
Parts = tuple[Part, ...]


def _unreadable(text: str, got: str, instead: str) -> ValueError:
    return value_error(
        f"the path {text!r} cannot be read",
        expected="a name such as layers.0.weight, or an expression such as .layers[0].weight, perhaps with "
        "*, **, ?, [abc] or {a,b} in it",
        got=got,
        instead=instead,
    )


_CLOSE = "close it, or put a key with this character in double quotes, as path_name does"


class _Key(str):
    """A token that is a key in brackets."""

    __slots__ = ()


def _tokens(text: str) -> list[str]:
    """Splits a path into quoted parts, keys in brackets, sets of characters, and single characters."""
    tokens: list[str] = []
    end = 0
    while end < len(text):
        # After a dot, a bracket begins a set.
        bracket = None if text[:end].endswith(".") else BRACKET.match(text, end)
        found = bracket or _TOKEN.match(text, end)
        assert found is not None
        token = found[0]
        if token in '"`[':
            raise _unreadable(text, f"{token} that is not closed", _CLOSE)
        if token[0] == '"':
            try:
                unquoted(token)
            except ValueError as error:
                raise _unreadable(text, f"{token}, which is not JSON ({error})", _CLOSE) from None
        tokens.append(_Key(token) if bracket else token)
        end = found.end()
    return tokens


def _expand(text: str, tokens: Sequence[str]) -> list[list[str]]:
    """All ways to choose one alternative from each pair of braces."""
    if "{" not in tokens:
        if "}" in tokens:
            raise _unreadable(text, "} without {", "write {a,b}, or quote the key")
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
        raise _unreadable(text, "{ without }", "write {a,b}, or quote the key")
    before, after = tokens[:start], tokens[end + 1 :]
    return [
        choice
        for alternative in alternatives
        for choice in _expand(text, [*before, *alternative, *after])
    ]


def _cut(text: str, tokens: Sequence[str]) -> list[list[str]]:
    """The tokens of each part."""
    if not tokens:
        return []
    # The leading dot of an expression.
    rest = tokens[1:] if tokens[0] == "." else tokens
    parts: list[list[str]] = [[]]
    for before, token in zip((".", *rest), rest, strict=False):
        if isinstance(token, _Key):
            # It ends the part before it, if there is one.
            parts[len(parts) - (not parts[-1]) :] = [[token]]
        elif token == ".":
            parts.append([])
        elif isinstance(before, _Key):
            raise _unreadable(text, f"{token} directly after {before}", "write a dot between them")
        else:
            parts[-1].append(token)
    return parts


def _literal(tokens: Sequence[str]) -> str:
    """The name of the key that a part without wildcards stands for."""
    first = tokens[0] if len(tokens) == 1 else ""
    if isinstance(first, _Key):
        return name_in_brackets(first[1:-1])
    if first[:1] == "`":
        return name_in_brackets(first)
    text = "".join(map(unquoted, tokens))
    return quoted(text) if any(token[0] in '"`' for token in tokens) else name_of_text(text)


def _part(text: str, tokens: Sequence[str], dot: str) -> Part:
    if not tokens:
        raise _unreadable(
            text, "an empty part", 'write single dots, none at the end; an empty key is ""'
        )
    if list(tokens) == ["*", "*"]:
        return DEEP
    if any(first == second == "*" for first, second in itertools.pairwise(tokens)):
        raise _unreadable(text, "** beside other text", "give ** a part of its own: a.**.b")
    if isinstance(tokens[0], _Key):
        source = tokens[0]
        if source == "[*]":
            return Part(source, (None,), _ONE)
        name = _literal(tokens)
        return Part(source, (unquoted(name),), re.compile(re.escape(unquoted(name))), name, True)
    source = dot + "".join(tokens)
    wild = [token for token in tokens if token in ("*", "?") or token[0] == "["]
    pieces = tuple(None if token == "*" else unquoted(token) for token in tokens)
    test = re.compile("".join(map(_test, tokens)), re.DOTALL)
    stars = all(token == "*" for token in wild)
    return Part(source, pieces if stars else (), test, None if wild else _literal(tokens))


def _test(token: str) -> str:
    if token == "*":
        return "(.*)"
    if token == "?" or token[0] == "[":
        # `translate` wraps the expression as (?s:...)\Z, to match a whole text.
        return fnmatch.translate(token).removesuffix(r"\Z").removesuffix(r"\z")
    return re.escape(unquoted(token))


@functools.lru_cache(maxsize=4096)
def read(text: str) -> tuple[Parts, ...]:
    """The parts of a path, for each choice of alternatives in its braces."""
    return tuple(
        tuple(
            _part(text, part, "." if i or choice[0] == "." else "")
            for i, part in enumerate(_cut(text, choice))
        )
        for choice in _expand(text, _tokens(text))
    )


register_cache(read.cache_clear)


def keys_of(path: str | Sequence[Any]) -> tuple[str, ...]:
    """The names of the keys of a place, given by its name or its key path."""
    if not isinstance(path, str):
        return key_names(path)
    return tuple(_literal(part) for part in _cut(path, _tokens(path)))


def captured(parts: Parts, keys: tuple[str, ...]) -> list[str] | None:
    """The texts that the wildcards `*` and `**` match at a place; None if the path does not match it."""
    if not parts:
        return None if keys else []
    first, rest = parts[0], parts[1:]
    if first.test is None:
        for end in range(len(keys), -1, -1):
            found = captured(rest, keys[end:])
            if found is not None:
                return [".".join(keys[:end]), *found]
        return None
    if not keys or (first.exact and first.name != keys[0]):
        return None
    match = first.test.fullmatch(unquoted(keys[0]))
    found = captured(rest, keys[1:]) if match else None
    if match is None or found is None:
        return None
    return [*([keys[0]] if first.pieces == (None,) else match.groups()), *found]


def is_literal(parts: Parts) -> bool:
    """Whether a path has no wildcards."""
    return all(part.name is not None for part in parts)


def filled(parts: Parts, texts: Iterator[str]) -> tuple[str, ...]:
    """The place that a path names with these texts for its wildcards `*` and `**`."""
    keys: list[str] = []
    for part in parts:
        if part.name is not None:
            keys.append(part.name)
        elif part.pieces == (None,):
            keys.extend(keys_of(next(texts)))
        else:
            keys.append(name_of_text("".join(next(texts) if p is None else p for p in part.pieces)))
    return tuple(keys)
