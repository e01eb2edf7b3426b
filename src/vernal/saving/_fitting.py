"""Filling a tree from a store of named arrays: which entry is for which leaf, what does not fit, and
the error or report on it. `load` and `Checkpoints.restore` share it."""

import abc
from collections.abc import Mapping
from types import FunctionType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..show import short, shown_name, type_error, value_error
from ._file import Entry
from ._leaves import Spec, is_key, leaves_by_name, place, spec_of
from ._links import every_source, load_link
from ._report import LoadReport
from ._torch_rules import Link, Rules, links_of
from ._weights import Tensor


class Request(NamedTuple):
    """An entry to read for the leaf of this name, which it fits, except perhaps for the precision."""

    entry: Entry
    like: Any
    name: str


class Store(abc.ABC):
    """Named arrays that can be read: a file, or a checkpoint.

    Args:
        path: its name in errors.
        entries: its entries, by name.
    """

    def __init__(self, path: str, entries: Mapping[str, Entry]):
        self.path = path
        self.entries = entries

    @abc.abstractmethod
    def array(self, entry: Entry) -> np.ndarray:
        """The elements of an entry; for a key, its key data."""

    def leaves(self, requests: list[Request]) -> list[Any]:
        """The entries, each as a leaf of the same kind and on the same devices as the leaf it is for."""
        return [
            place(self.array(entry), like, shown_name(name), entry.remarks.get("key"))
            for entry, like, name in requests
        ]


_CAST = (jnp.floating, jnp.complexfloating)


def _fits(wanted: Spec, found: Spec | None, like: Any, cast: bool) -> bool:
    if cast and found is not None:
        # A number keeps its kind: an int never becomes a float, nor a complex number a real one.
        for kind in _CAST:
            if jnp.issubdtype(wanted.dtype, kind) and jnp.issubdtype(found.dtype, kind):
                found = found._replace(dtype=wanted.dtype)
    if type(like) is int and found is not None and found.dtype == "uint64":
        # A Python int was stored as signed or unsigned, depending on its value.
        found = found._replace(dtype=wanted.dtype)
    return wanted == found


def _refuse(path: str, report: LoadReport, empty: list[str], strict: bool, castable: bool) -> None:
    """Raises the error for the report, if there is one. `empty` names leaves that would be kept, but have no value;
    `castable` says whether some differ only in their precision."""
    cure = "give cast=True to convert to the precision of `like`; " if castable else ""
    if strict and report != LoadReport():
        raise value_error(
            "the file does not fit the tree",
            where=path,
            expected="an entry of the right shape and dtype for every leaf of `like`, and no other",
            got=str(report),
            instead=cure
            + "load into a tree like the one that was saved; give `rename` for what has another name "
            "now; or give strict=False to take what fits, keep the values of `like` elsewhere, "
            "and get this list as a report",
        )
    if empty:
        about_them = LoadReport(
            missing={
                n: report.missing.get(n, "nothing") for n in empty if n not in report.misshapen
            },
            misshapen={n: report.misshapen[n] for n in empty if n in report.misshapen},
        )
        raise value_error(
            "leaves of `like` that are only a shape and dtype have no value to keep where the file does not fit",
            where=path,
            got=str(about_them),
            instead=cure + "give `like` arrays there",
        )


def _is_rename(link: Link) -> bool:
    return len(link.ours) == len(link.theirs) == 1 and not link.depth and link.conversion is None


class _Filling:
    """One call of `fill`: the wanted leaves, and what was found for them."""

    def __init__(self, store: Store, leaves: dict[str, Any], cast: bool):
        self.store = store
        self.cast = cast
        self.castable = False
        self.leaves = leaves
        specs = {name: spec_of(leaf, shown_name(name)) for name, leaf in leaves.items()}
        self.wanted = {name: spec for name, spec in specs.items() if spec is not None}
        self.report = LoadReport()
        self.requests: list[Request] = []
        self.converted: dict[str, np.ndarray] = {}

    def rename(self, ours: str, theirs: str) -> None:
        """Finds the entry of a leaf, without reading its elements yet."""
        spec, entry = self.wanted[ours], self.store.entries.get(theirs)
        source = "" if ours == theirs else f" (from {theirs!r})"
        if entry is None:
            self.report.missing[ours] = f"{spec}{source}"
        elif not _fits(spec, entry.spec, self.leaves[ours], self.cast):
            self.castable |= _fits(spec, entry.spec, self.leaves[ours], cast=True)
            self.report.misshapen[ours] = (str(spec), f"{entry}{source}")
        else:
            self.requests.append(Request(entry, self.leaves[ours], ours))

    def convert(self, link: Link) -> None:
        """Makes the values of leaves that the store has in another form."""
        keys = [name for name in link.ours if is_key(self.leaves[name])]
        if keys:
            self.report.misshapen.update(
                (name, (str(self.wanted[name]), f"{link}: random keys can only be renamed"))
                for name in keys
            )
            return
        theirs = {name: Tensor(self.store, entry) for name, entry in self.store.entries.items()}
        values = load_link(link, self.wanted, theirs, self.report) or ()
        self.converted.update(zip(link.ours, values, strict=False))


def fill(store: Store, like: Any, strict: bool, rename: Rules | None, cast: bool) -> Any:
    """A tree like `like` with the values of a store; see `load`."""
    if isinstance(like, (type, FunctionType)):
        raise type_error(
            "`like` must be a model, not a function that makes one",
            where=store.path,
            expected="a tree",
            got=short(like),
            instead="jax.eval_shape(Net, key), a model whose arrays take no memory",
        )
    leaves = leaves_by_name(like, "`like`")
    filling = _Filling(store, leaves, cast)
    links = links_of(filling.wanted, rename or {})
    unused = dict(store.entries)
    for link in links:
        if _is_rename(link):
            filling.rename(link.ours[0], link.theirs[0])
        else:
            filling.convert(link)
        for name in every_source(link, filling.wanted):
            unused.pop(name, None)
    report = filling.report
    report.extra.update((name, str(entry)) for name, entry in unused.items())
    taken = {request.name for request in filling.requests} | set(filling.converted)
    kept = [name for name in filling.wanted if name not in taken]
    empty = [name for name in kept if isinstance(leaves[name], jax.ShapeDtypeStruct)]
    _refuse(store.path, report, empty, strict, filling.castable)
    loaded = dict(leaves)
    for request, leaf in zip(filling.requests, store.leaves(filling.requests), strict=True):
        loaded[request.name] = leaf
    for name, value in filling.converted.items():
        loaded[name] = place(value, leaves[name], shown_name(name))
    tree = jtu.tree_structure(like).unflatten(loaded.values())
    return tree if strict else (tree, report)
