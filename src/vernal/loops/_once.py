"""Loops outside of compiled code, compiled once for the same functions and types.

The cache knows the user's functions by identity, as `jax.lax` and `filter_jit` do; a module, or a method of one, by
its structure. A program must not keep alive a function or the arrays that it closes over: it holds weak references,
and is dropped as soon as one of its functions is.
"""

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from .._ground import current_program, register_cache
from ..transforms import filter_jit
from ..trees import is_array

_programs: dict[Any, "_Program"] = {}
register_cache(_programs.clear)


class _Program:
    """A compiled function that runs a loop, with some of the user's functions.

    Args:
        name: the name of the loop.
        run: runs the loop, given a tuple of functions.
        functions: the functions; None in place of one that is passed at each call.
        key: the key of the program in the cache.
    """

    def __init__(self, name: str, run: Callable[..., Any], functions: Sequence[Any], key: Any):
        def forget(_: Any) -> None:
            _programs.pop(key, None)

        self._run = run
        self._references = [None if f is None else weakref.ref(f, forget) for f in functions]
        self.__name__ = self.__qualname__ = name
        self.compiled = filter_jit(self)

    def is_of(self, functions: Sequence[Any]) -> bool:
        """Whether these are its functions, and none is a new function at the address of a dead one."""
        pairs = zip(self._references, functions, strict=True)
        return all(reference is None or reference() is fn for reference, fn in pairs)

    def __call__(self, trees: Sequence[Any], *args: Any, **options: Any) -> Any:
        pairs = zip(self._references, trees, strict=True)
        functions = [tree if reference is None else reference() for reference, tree in pairs]
        return self._run(functions, *args, **options)


def _holds_tracer(fn: Any) -> bool:
    """Whether a function closes over a value of an outer transformation, and so differs at every call."""
    cells = getattr(fn, "__closure__", None) or ()
    return any(cell != _EMPTY and isinstance(cell.cell_contents, Tracer) for cell in cells)


_EMPTY = types.CellType()


def compiled_once(
    name: str, run: Callable[..., Any], functions: Sequence[Any], *args: Any, **options: Any
) -> Any:
    """Calls `run(functions, *args, **options)`, which runs a loop; outside of compiled code, compiles it first.

    Args:
        name: the name of the loop.
        run: a function that lives as long as the package.
        functions: the user's functions; None for one that was not given.
        *args: the arguments of `run`.
        **options: its keyword arguments.

    Returns:
        What `run` returns.
    """
    if current_program() or any(map(_holds_tracer, functions)) or jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue] (declared at run time)
        return run(functions, *args, **options)
    leaves = [f if f is None or jtu.all_leaves([f]) else None for f in functions]
    trees = [None if leaf is not None else f for f, leaf in zip(functions, leaves, strict=True)]
    key = run, *[id(leaf) for leaf in leaves]
    try:
        program = _programs.get(key)
        if program is None or not program.is_of(leaves):
            program = _programs[key] = _Program(name, run, leaves, key)
        for x in jtu.tree_leaves((trees, args, options)):
            if not is_array(x):
                hash(x)
    except TypeError:
        # Not hashable, or not weakly referable: such functions cannot be a key of the cache.
        return run(functions, *args, **options)
    return program.compiled(trees, *args, **options)
