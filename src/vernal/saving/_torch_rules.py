"""Rules that map tensors of another program to leaves of a model.

A rule has one of our paths on one side and a pattern of their names on the other. The texts that our
wildcards `*` and `**` match replace their wildcards, in order, and `#` in their name is an index along
one of our leading axes. Each rule gives one link for each leaf that it matches: names on our side,
names on theirs, and how to convert both ways.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from ..show import value_error
from ..trees import Paths, Pattern

_WILDCARD = re.compile(r"\*\*|\*")


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One side of a rule for `from_torch`: tensors that hold the numbers of our leaves in another form.

    The functions take and return NumPy arrays: `load` takes the tensors of `theirs`, one argument for
    each, and `dump` our leaves that the rule applies to, one argument for each. If the other side has
    several, they return a tuple. With `#` in the names they are called for each index.

    Args:
        theirs: the name of a tensor, or a tuple of names, with the wildcards of our side.
        load: makes our leaves from their tensors.
        dump: makes their tensors from our leaves; None if `to_torch` is not needed.

    Example:
        >>> import numpy as np
        >>> from vernal.saving import Conversion, from_torch, to_torch
        >>> rules = {"weight": Conversion("kernel", np.transpose, np.transpose)}
        >>> model = from_torch({"weight": np.zeros((3, 2))}, {"kernel": np.ones((2, 3))}, rules)
        >>> model["weight"].shape, to_torch(model, rules)["kernel"].shape
        ((3, 2), (2, 3))
    """

    theirs: str | tuple[str, ...]
    load: Callable[..., Any]
    dump: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True, init=False)
class Tied:
    """One side of a rule for `from_torch`: one weight that is stored under several names.

    Some names may be missing, as one is in Hugging Face files. Those that are present must be equal.
    `to_torch` writes all of them.

    Args:
        first: the name of a tensor, with the wildcards of our side.
        *others: further names of it.

    Example:
        >>> import numpy as np
        >>> from vernal.saving import Tied, from_torch, to_torch
        >>> rules = {"embedding": Tied("wte.weight", "lm_head.weight")}
        >>> model = from_torch({"embedding": np.zeros(2)}, {"wte.weight": np.ones(2)}, rules)
        >>> sorted(to_torch(model, rules))
        ['lm_head.weight', 'wte.weight']
    """

    theirs: tuple[str, ...]

    def __init__(self, first: str, *others: str):
        object.__setattr__(self, "theirs", (first, *others))


Theirs = str | tuple[str, ...] | Conversion | Tied | None
Rules = Mapping[str | tuple[str, ...], Theirs]


class Link(NamedTuple):
    """Our leaves and their tensors that hold the same numbers.

    `theirs` has one `#` for each of our `depth` leading axes; `conversion` is that of the rule, or
    None.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    depth: int = 0
    conversion: Conversion | Tied | None = None

    def sources(self, index: tuple[int, ...]) -> list[str]:
        """Their names for one index along the leading axes."""
        # Without a rule, `#` is an ordinary character of the name.
        return [_indexed(name, index) if self.depth else name for name in self.theirs]

    def __str__(self) -> str:
        return " and ".join(map(repr, self.theirs))


def _indexed(name: str, index: tuple[int, ...]) -> str:
    parts = name.split("#")
    return "".join(itertools.chain(*zip(parts, map(str, index), strict=False), parts[-1:]))


def _filled(pattern: str, captured: list[str]) -> str:
    if len(captured) > len(_WILDCARD.findall(pattern)):
        # A whole part of the tree: its leaves are below it.
        pattern += ".**"
    texts = iter(captured)
    parts = _WILDCARD.sub(lambda _: next(texts), pattern).split(".")
    # `**` may match nothing.
    return ".".join(filter(None, parts))


def _bad_rule(key: Any, what: str, expected: str, instead: str | None = None) -> ValueError:
    return value_error(what, where=f"rule {key!r}", expected=expected, instead=instead)


def _check(key: Any, ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    """Refuses a rule whose two sides do not match."""
    if not theirs:
        raise _bad_rule(key, "a rule names no tensor", "a name; or None, to keep the leaf as it is")
    own = {pattern: Pattern(pattern).stars for pattern in ours}
    for pattern, stars in own.items():
        if stars is None:
            raise _bad_rule(
                key,
                f"what matches in {pattern!r} cannot be filled in on the other side",
                "paths in which * and ** are the only wildcards",
                "a rule for each of the names",
            )
    counts = {*own.values(), *(len(_WILDCARD.findall(name)) for name in theirs)}
    if len(counts) > 1:
        raise _bad_rule(
            key,
            "the two sides of a rule have different numbers of wildcards",
            f"as many * and ** in each of {', '.join(map(repr, (*ours, *theirs)))}",
            "# for the index along a leading axis of ours",
        )
    if len({name.count("#") for name in theirs}) > 1:
        raise _bad_rule(
            key,
            "the tensors of a rule do not have the same leading axes",
            f"as many # in each of {', '.join(map(repr, theirs))}",
        )


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _rule_links(key: str | tuple[str, ...], value: Theirs, full: Paths, short: Paths) -> list[Link]:
    """The links of one rule; they have no tensors if the rule keeps the leaves."""
    ours = _tuple(key)
    paths = short if all(map(short.leaves, ours)) else full
    full_name = dict(zip(paths.names, full.names, strict=True))
    if value is None:
        chosen = [paths.leaves(path) for path in ours]
        idle = [path for path, leaves in zip(ours, chosen, strict=True) if not leaves]
        found = [Link((paths.names[i],), ()) for leaves in chosen for i in leaves]
    else:
        conversion = value if isinstance(value, Conversion | Tied) else None
        theirs = _tuple(value.theirs if isinstance(value, Conversion | Tied) else value)
        _check(key, ours, theirs)
        linked = paths.counterparts(ours)
        absent = {name for names, _ in linked for name in names} - set(full_name)
        idle = [path for path in ours if not paths.leaves(path)] or sorted(absent)
        depth = theirs[0].count("#")
        found = [
            Link(names, tuple(_filled(name, texts) for name in theirs), depth, conversion)
            for names, texts in linked
        ]
    if idle:
        raise paths.refusal(f"rule {key!r}", idle)
    return [link._replace(ours=tuple(map(full_name.__getitem__, link.ours))) for link in found]


def links_of(
    names: Collection[str], rules: Rules, short: Mapping[str, str] | None = None
) -> list[Link]:
    """Links for all leaves: by the rules, otherwise to the tensor of the same name, or of the `short` name, which
    rules may use too. Raises `ValueError` if a rule cannot be parsed or matches no leaf, or two match the same."""
    theirs = [name if short is None else short[name] for name in names]
    paths, others = Paths(names), Paths(theirs)
    owners: dict[str, list[Any]] = {name: [] for name in names}
    links: list[Link] = []
    for key, value in rules.items():
        for link in _rule_links(key, value, paths, others):
            for name in link.ours:
                owners[name].append(key)
            links.append(link)
    if any(len(keys) > 1 for keys in owners.values()):
        raise paths.refusal("the rules for names of another program", found=list(owners.values()))
    return [link for link in links if link.theirs] + [
        Link((name,), (other,))
        for (name, keys), other in zip(owners.items(), theirs, strict=True)
        if not keys
    ]
