"""What the code of a function reads from outside, and what it changes there.

Read off the bytecode, because two functions with equal code are the same function only if the
global variables they read are the same too, and because a list to which a function appends is no
constant of it.
"""

import dis
import types
import weakref
from typing import Any, NamedTuple

from ._assignments import with_inner

# Methods that change the container they belong to.
_CHANGING = frozenset(
    "add append appendleft clear difference_update discard extend extendleft insert "
    "intersection_update pop popitem popleft remove reverse rotate setdefault sort "
    "symmetric_difference_update update __setitem__ __delitem__".split()
)
_LOADS_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_LOADS_CELL = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_LOADS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SETS_ITEM = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})
_SILENT = frozenset({"CACHE", "EXTENDED_ARG", "NOP"})


class Usage(NamedTuple):
    """What some code does with variables that are not its own.

    Args:
        reads: the global variables it reads, each with the attributes it takes of it:
            `("config", "scale")` for `config.scale`.
        imports: the modules it imports.
        assigns: the captured variables it assigns.
        changes: the captured and global variables whose contents it changes.
    """

    reads: tuple[tuple[str, ...], ...]
    imports: frozenset[str]
    assigns: frozenset[str]
    changes: frozenset[str]


def _start(step: dis.Instruction) -> Any:
    """Where the expression of an instruction begins: `x` and `x[0] = 1` begin at the same place."""
    positions = step.positions
    return positions and (positions.lineno, positions.col_offset)


def _find_usage(code: types.CodeType) -> Usage:
    reads: dict[tuple[str, ...], None] = {}
    imports: set[str] = set()
    assigns: set[str] = set()
    changes: set[str] = set()
    for part in with_inner(code):
        steps = [step for step in dis.get_instructions(part) if step.opname not in _SILENT]
        items = {_start(step) for step in steps if step.opname in _SETS_ITEM}
        for i, step in enumerate(steps):
            name = step.opname
            if name == "STORE_DEREF":
                assigns.add(step.argval)
            elif name == "IMPORT_NAME":
                imports.add(step.argval)
            elif name in _LOADS_GLOBAL or name in _LOADS_CELL:
                chain = [step.argval]
                while steps[i + len(chain)].opname in _LOADS_ATTRIBUTE:
                    chain.append(steps[i + len(chain)].argval)
                if name in _LOADS_GLOBAL:
                    reads[tuple(chain)] = None
                if _start(step) in items or _CHANGING.intersection(chain[1:]):
                    changes.add(step.argval)
    return Usage(tuple(reads), frozenset(imports), frozenset(assigns), frozenset(changes))


_known: dict[int, tuple[weakref.ref[types.CodeType], Usage]] = {}


def usage(code: types.CodeType) -> Usage:
    """What some code does with variables that are not its own, the functions inside it included.

    Args:
        code: the `__code__` of a function.

    Returns:
        The usage, remembered for as long as the code lives.
    """
    # By identity: code hashes and compares by its contents, which takes as long as all the rest.
    known = _known.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    found = _find_usage(code)
    key = id(code)
    _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), found
    return found
