"""The results of a compiled call: flattened inside the program, unflattened after it.

A compiled program returns a single array directly. For any other result it returns the leaves (see
`_flatten.py`) and an `Unflatten`, which has everything else and rebuilds the result. `Unflatten` is a
pytree without leaves, so it passes through `jax.jit` as structure, and a program that is traced again
for other shapes may return another one. A module is not unflattened: it is returned lazy (see
`modules/_lazy.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from ..modules import Module, lazily
from ..trees import Rest, is_array, split
from ._flatten import flatten, is_plain_tuple

# From the leaves of a result to the result; None where the leaves are the result.
Function = Callable[[Any], Any] | None


class Unflatten:
    """Rebuilds a result from its leaves.

    Args:
        unflatten: the function that rebuilds it.
    """

    __slots__ = ("unflatten",)

    def __init__(self, unflatten: Callable[[Any], Any]):
        self.unflatten = unflatten


# A one-element tuple as aux data: JAX then compares identical ones by identity, in C.
jtu.register_pytree_node(Unflatten, lambda x: ((), (x,)), lambda aux, _: aux[0])


def flatten_result(out: Any) -> Any:
    """Flattens a result, during the trace.

    Args:
        out: any tree.

    Returns:
        An array unchanged; for any other tree `(leaves, unflatten)`, where
        `unflatten.unflatten(leaves)` is the tree.
    """
    leaves, unflatten = _flatten(out)
    return leaves if unflatten is None else (leaves, Unflatten(unflatten))


def whole_result(out: Any) -> Any:
    """Unflattens the output of `flatten_result`, once its leaves have been computed.

    Args:
        out: what the program returned.
    """
    return out[1].unflatten(out[0]) if type(out) is tuple else out


def _flatten(out: Any) -> tuple[Any, Function]:
    if is_array(out):
        return out, None
    if isinstance(out, tuple) and is_plain_tuple(out):
        items = [_flatten(item) for item in out]
        leaves, functions = [x for x, _ in items], [fn for _, fn in items]
        return leaves, _tuple_of(type(out), functions) if items else lambda leaves: out
    arrays, rest = split(out)
    return arrays, (isinstance(out, Module) and _lazily(out, rest)) or rest.fill


def _tuple_of(cls: type, functions: list[Function]) -> Function:
    whole = tuple if cls is tuple else functools.partial(tuple.__new__, cls)

    def unflatten(leaves: list[Any]) -> Any:
        return whole([x if f is None else f(x) for x, f in zip(leaves, functions)])  # noqa: B905 (as many)

    return unflatten


def _lazily(out: Any, rest: Rest) -> Function:
    try:
        key = flatten(out).key
    except TypeError:
        # A static value that cannot be hashed: an error where the module is an argument, not here.
        return None
    return lazily(out, key, rest.fill)
