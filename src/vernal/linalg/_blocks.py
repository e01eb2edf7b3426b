"""How many products of a function are made at once.

Many products together read the arrays of the function once (for a matrix: 5 to 11 times as fast as one by one), but
need the intermediate values of all of them at once. For a network's Hessian these do not fit into the cache of a CPU,
and one by one is up to 3 times as fast. Both sizes are read from the traced function.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu

from .._ground import jaxprs_in_params

# Bytes of intermediate values at once: the cache of one core, or a share of an accelerator's memory.
_CPU, _ACCELERATOR = 2**20, 2**30

# A function that computes no more than this many vectors is limited by moving vectors in and out.
_CHEAP = 4


def block_size(mv: Callable[[Any], Any], structure: Any, columns: int) -> int:
    """The number of products of a function with a vector of this structure to make at once: from 1 to `columns`, the
    number that is wanted."""
    if columns <= 1:
        return columns
    closed = jax.make_jaxpr(mv)(structure)
    computed = sum(_computed(closed.jaxpr))
    if computed <= _CHEAP * sum(map(_bytes, jtu.tree_leaves(structure))):
        return columns
    room = _CPU if jax.default_backend() == "cpu" else _ACCELERATOR
    held = sum(map(_bytes, closed.consts))
    at_once = max(1, min(columns, (room + held) // computed))
    # Equal blocks if possible: a remainder is compiled separately.
    return max(
        (d for d in range(at_once // 2 + 1, at_once + 1) if columns % d == 0), default=at_once
    )


def _computed(jaxpr: Any) -> Iterator[int]:
    """Bytes of everything that a program computes; the bodies of its loops count once."""
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        for program in inner:
            yield from _computed(program)
        if not inner:
            yield from (_bytes(variable.aval) for variable in equation.outvars)


def _bytes(x: Any) -> int:
    dtype = getattr(x, "dtype", None)
    return math.prod(x.shape) * getattr(dtype, "itemsize", 0) if dtype is not None else 0
