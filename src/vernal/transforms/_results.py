"""Putting together what a compiled call returns.

A compiled program returns its arrays in groups (see `_forms.py`) and a `Maker`, which knows
everything else and puts the result together. It is a pytree without leaves, so it passes through
`jax.jit` as structure, and a program that is traced again for other shapes may return another one.

A module is not put together: it waits (see `modules/_waiting.py`), with its list of arrays and its
key as its form.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from ..modules import Module, waiting_maker
from ..trees import is_array
from ._boundary import Rest, split
from ._forms import is_plain_tuple, take_apart

# From the group of a result to the result; None where the group is the result.
Make = Callable[[Any], Any] | None


class Maker:
    """Puts a result together.

    Args:
        make: the function that does, or None.
    """

    __slots__ = ("make",)

    def __init__(self, make: Make):
        self.make = make


# A one-element tuple as aux data: JAX then compares identical makers by identity, in C.
jtu.register_pytree_node(Maker, lambda maker: ((), (maker,)), lambda aux, _: aux[0])


def pack(out: Any) -> tuple[Any, Maker]:
    """Takes a result apart, while it is traced.

    Args:
        out: any tree.

    Returns:
        `(group, maker)`; `maker.make(group)`, if there is one, is the tree again.
    """
    group, make = _pack(out)
    return group, Maker(make)


def _pack(out: Any) -> tuple[Any, Make]:
    if is_array(out):
        return out, None
    if isinstance(out, tuple) and is_plain_tuple(out):
        packed = [_pack(item) for item in out]
        groups, makes = [group for group, _ in packed], [make for _, make in packed]
        return groups, _tuple_maker(type(out), makes) if makes else lambda group: out
    arrays, rest = split(out)
    return arrays, (isinstance(out, Module) and _waiting_maker(out, rest)) or rest.fill


def _tuple_maker(cls: type, makes: list[Make]) -> Make:
    whole = tuple if cls is tuple else functools.partial(tuple.__new__, cls)

    def make(groups: list[Any]) -> Any:
        return whole([g if m is None else m(g) for m, g in zip(makes, groups)])  # noqa: B905 (as many)

    return make


def _waiting_maker(out: Any, rest: Rest) -> Make:
    try:
        key = take_apart(out).key
    except TypeError:
        # A static value that cannot be hashed: an error where the module is an argument, not here.
        return None
    return waiting_maker(out, key, rest.fill)
