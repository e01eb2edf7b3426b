"""Finds the places that paths match in a tree, and makes the error for paths that match none, or too many."""

import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..show import listed, shown_name, unquoted, value_error
from ._path_syntax import DEEP, Parts, captured, filled, is_literal, keys_of, read

_Keys = tuple[str, ...]

# The names of the tree in errors and summaries.
_ROOTS = ("model", "tree")


class Paths:
    """The places of a tree, found by paths (see `Pattern`).

    Args:
        leaves: the leaves, by name or by key path.
        called: the words for them in messages, singular and plural: they may be parts.

    Attributes:
        names: the names of the leaves.

    Example:
        >>> from vernal.trees import Paths
        >>> paths = Paths(["layers.0.weight", "layers.0.bias", "scale"])
        >>> paths.leaves("layers.*.bias"), paths.leaves(".layers[0]"), paths.leaves("*")
        ([1], [0, 1], [2])
        >>> paths.covered("*")
        [0, 1, 2]
    """

    def __init__(
        self,
        leaves: Iterable[str | Sequence[Any]],
        called: tuple[str, str] = ("leaf", "leaves"),
    ):
        self._one, self._many = called
        self._keys = [keys_of(path) for path in leaves]
        self.names = [".".join(keys) for keys in self._keys]
        # The leaves in each node, by its keys.
        self._nodes: dict[_Keys, list[int]] = {}
        for i, keys in enumerate(self._keys):
            for end in range(len(keys) + 1):
                self._nodes.setdefault(keys[:end], []).append(i)

    def leaves(self, path: str) -> list[int]:
        """The leaves that a rule applies to.

        Args:
            path: the path. With wildcards, the rule applies to the leaves that it matches; without, to the
                leaf of this name, or to all leaves in the part of this name.

        Returns:
            The positions of the leaves; empty if the path matches nothing here.
        """
        return self._found(path, self._leaves)

    def covered(self, path: str) -> list[int]:
        """The leaves that a path matches, or that are in a part that it matches.

        Args:
            path: the path; it matches leaves and parts of the tree.

        Returns:
            The positions of the leaves; empty if the path matches nothing here.
        """
        return self._found(
            path, lambda parts: [i for n in self._places(parts) for i in self._nodes[n]]
        )

    def nodes(self, path: str) -> list[str]:
        """The places that a path matches.

        Args:
            path: the path; it matches leaves and parts of the tree.

        Returns:
            Their names.
        """
        places = list(self._nodes)
        position = {place: i for i, place in enumerate(places)}
        found = self._found(path, lambda parts: [position[n] for n in self._places(parts)])
        return [".".join(places[i]) for i in found]

    def rules(self, paths: Iterable[str]) -> tuple[list[list[str]], list[str]]:
        """The rules that apply to each leaf.

        Args:
            paths: the paths of the rules.

        Returns:
            For each leaf the paths that apply to it, and the paths that apply to none.
        """
        found: list[list[str]] = [[] for _ in self._keys]
        idle: list[str] = []
        for path in paths:
            chosen = self.leaves(path)
            for i in chosen:
                found[i].append(path)
            if not chosen:
                idle.append(path)
        return found, idle

    def counterparts(self, paths: Sequence[str]) -> list[tuple[tuple[str, ...], list[str]]]:
        """The corresponding leaves of several paths.

        Args:
            paths: the paths, with `*` and `**` as their only wildcards, and equally many in each.

        Returns:
            For each leaf that the first path applies to: its name and the names that the other paths get
            with the same texts for their wildcards; and these texts. If the paths are parts of the tree
            without wildcards, there is one more text: the rest of the path below them.
        """
        every = [self._rooted(read(path)[0]) for path in paths]
        chosen = self._leaves(every[0])
        if is_literal(every[0]) and any(len(self._keys[i]) > len(every[0]) for i in chosen):
            every = [(*parts, DEEP) for parts in every]
        texts = [captured(every[0], self._keys[i]) or [] for i in chosen]
        return [
            ((self.names[i], *(".".join(filled(parts, iter(some))) for parts in every[1:])), some)
            for i, some in zip(chosen, texts, strict=True)
        ]

    def _rooted(self, parts: Parts) -> Parts:
        rest = _without_root(parts)
        return parts if rest is None or self._places(parts) else rest

    def _found(self, path: str, search: Callable[[Parts], Iterable[int]]) -> list[int]:
        choices = read(path)
        found = {i for parts in choices for i in search(parts)}
        if not found:
            rests = map(_without_root, choices)
            found = {i for rest in rests if rest is not None for i in search(rest)}
        return sorted(found)

    def _leaves(self, parts: Parts) -> list[int]:
        if not is_literal(parts):
            return [i for i, keys in enumerate(self._keys) if captured(parts, keys) is not None]
        found = [(n, i) for n in self._places(parts) for i in self._nodes[n]]
        return [i for n, i in found if self._keys[i] == n] or [i for _, i in found]

    def _places(self, parts: Parts) -> list[_Keys]:
        """The nodes that a path matches."""
        if not is_literal(parts):
            return [keys for keys in self._nodes if captured(parts, keys) is not None]
        keys = tuple(part.name or "" for part in parts)
        if keys in self._nodes:
            return [keys]
        alike = self._by_text.get(tuple(map(unquoted, keys)), [])
        return [place for place in alike if captured(parts, place) is not None]

    @functools.cached_property
    def _by_text(self) -> dict[_Keys, list[_Keys]]:
        """The nodes by the texts of their keys, without quotes."""
        found: dict[_Keys, list[_Keys]] = {}
        for keys in self._nodes:
            found.setdefault(tuple(map(unquoted, keys)), []).append(keys)
        return found

    def refusal(
        self,
        where: str,
        idle: Sequence[str] = (),
        found: Sequence[Sequence[Any]] = (),
        unruled: Sequence[int] = (),
        *,
        others: Sequence[str] = (),
        text: Callable[[Any], str] = repr,
        instead: str | None = None,
    ) -> ValueError:
        """Makes the one error about paths that do not fit a tree.

        Args:
            where: the call that it is about.
            idle: the paths that match nothing here, as written.
            found: for each leaf the paths (or other rules) that apply to it; at most one is allowed.
            unruled: the positions of leaves that need a rule and have none.
            others: lines about other problems.
            text: formats a rule in `found`.
            instead: what to write instead.

        Returns:
            The error, to be raised. It suggests paths that may have been meant.
        """
        several = [
            f"{shown_name(name)}: more than one path matches it, {' and '.join(map(text, rules))}"
            for name, rules in zip(self.names, found, strict=False)
            if len(rules) > 1
        ]
        none = [f"{shown_name(self.names[i])}: no path matches it" for i in unruled]
        near = {path: self.near(path) for path in idle}
        missed = [f"{path!r}: {near[path] or f'no {self._one} there'}" for path in idle]
        got = [listed(lines, "\n") for lines in (several, none, others, missed) if lines]
        if got == [listed(missed, "\n")] and not all(near.values()):
            names = map(shown_name, self.names)
            got.append(f"the {self._many} are:\n" + (listed(names, "\n") or "none"))
        return value_error(
            "the paths do not match the tree",
            where=where,
            expected=f"paths of {self._many}, or of parts with {self._many} in them"
            + (f", and at most one path for each {self._one}" if several or none else ""),
            got="\n".join(got),
            instead=instead or ("narrow the paths until only one matches" if several else None),
        )

    def near(self, path: str) -> str:
        """Suggests what a path that matches nothing may have meant.

        Args:
            path: the path.

        Returns:
            Text for the line of an error; empty if nothing is near.

        Example:
            >>> from vernal.trees import Paths
            >>> Paths(["encoder.weight", "head.weight"]).near(".encodr.weight")
            "no leaf there; did you mean 'encoder.weight'?"
        """
        close: list[str] = []
        meant = [self._rooted(parts) for parts in read(path)]
        for parts in meant:
            if self._leaves((*parts, DEEP)):
                return f"a part, not a {self._one}; for the {self._many} in it, write {_text(parts) + '.**'!r}"
            close += self._corrected(parts)
        if close:
            return f"no {self._one} there; did you mean {' or '.join(map(repr, dict.fromkeys(close)))}?"
        if any((part.name or "").startswith("-") for parts in meant for part in parts):
            return f"no {self._one} there; the indices of a path count from the start: 0, 1, 2"
        return ""

    def _corrected(self, parts: Parts) -> list[str]:
        """The path with one part corrected to the spelling of a key, or without its beginning, or whole
        paths that are similar."""
        keys = dict.fromkeys(key for place in self._nodes for key in place)
        found: list[str] = []
        for i, part in enumerate(parts):
            # A different index is another layer, not a misspelling.
            if part.name is None or part.name in keys or _is_index(part.name):
                continue
            for key in difflib.get_close_matches(part.name, keys):
                changed = (*parts[:i], *read(key)[0], *parts[i + 1 :])
                if self._places(changed):
                    found.append(_text(changed))
        for start in range(1, len(parts)):
            # The dropped beginning is most often the name of a variable.
            rest = parts[start:]
            if not found and rest[0].test is not None and self._places(rest):
                found.append("".join(part.source for part in rest))
        if found or not is_literal(parts) or any(_is_index(part.name) for part in parts):
            return found
        known = dict.fromkeys(".".join(keys) for keys in self._nodes if keys)
        return difflib.get_close_matches(_text(parts), known)


def _is_index(name: str | None) -> bool:
    return name is not None and name.removeprefix("-").isdecimal()


def _without_root(parts: Parts) -> Parts | None:
    """A path without the leading name of the tree; None if it has none."""
    return parts[1:] if parts and parts[0].source in _ROOTS else None


def _text(parts: Parts) -> str:
    texts = (part.name or part.source.removeprefix(".") for part in parts)
    return ".".join("*" if text == "[*]" else text for text in texts)
