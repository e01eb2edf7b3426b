"""Which of the variables that a function captures may be assigned after it was made.

    for scale in (1.0, 2.0):
        f = lambda x: scale * x

Every `f` shares one variable, so that the first one is changed by the second turn of the loop. Such
a function is equal to no other, whatever it holds now: one that is put in its place would do
something else later. That cannot be seen from the function, but from the code of the function that
made it, which is found under its name.
"""

import dis
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

_ASSIGNS = frozenset({"STORE_DEREF", "DELETE_DEREF"})
# What comes after these in the code is not what is run next.
_LEAVES = ("JUMP_", "RETURN_", "RAISE_", "RERAISE")


def with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Some code and that of all functions in it.

    Args:
        code: the `__code__` of a function.
    """
    yield code
    for constant in code.co_consts:
        if type(constant) is types.CodeType:
            yield from with_inner(constant)


def _path(outer: types.CodeType, code: types.CodeType) -> list[types.CodeType] | None:
    """The functions around some code, from the outermost inwards, and the code itself."""
    if outer is code or (outer.co_qualname == code.co_qualname and outer == code):
        return [outer]
    for constant in outer.co_consts:
        if type(constant) is types.CodeType:
            path = _path(constant, code)
            if path is not None:
                return [outer, *path]
    return None


def _around(fn: types.FunctionType) -> list[types.CodeType] | None:
    first, *attributes = fn.__code__.co_qualname.split(".<locals>.")[0].split(".")
    found = fn.__globals__.get(first)
    for name in attributes:
        found = vars(found).get(name) if isinstance(found, type) else None
    if isinstance(found, property):
        found = found.fget
    try:
        found = inspect.unwrap(found)  # pyright: ignore[reportArgumentType] (anything may be there)
    except Exception:
        return None
    return _path(found.__code__, fn.__code__) if type(found) is types.FunctionType else None


def _reachable(code: types.CodeType, start: int) -> set[int]:
    """The places in some code that may be run after the one at `start`."""
    bytecode = dis.Bytecode(code)
    entries: Any = bytecode.exception_entries  # pyright: ignore[reportAttributeAccessIssue] (typeshed lacks it)
    steps = list(bytecode)
    following = dict(zip((s.offset for s in steps), steps[1:], strict=False))
    by_offset = {step.offset: step for step in steps}
    found: set[int] = set()
    todo = [start]
    while todo:
        step = by_offset[todo.pop()]
        onward = [e.target for e in entries if e.start <= step.offset < e.end]
        if step.opcode in dis.hasjrel:
            onward.append(step.argval)
        if not step.opname.startswith(_LEAVES) and step.offset in following:
            onward.append(following[step.offset].offset)
        new = set(onward) - found
        found |= new
        todo += new
    return found


def _later(owner: types.CodeType, made: types.CodeType, name: str) -> bool:
    """Whether a function may assign its variable after it has made the inner function `made`."""
    steps = list(dis.get_instructions(owner))
    start = next(step.offset for step in steps if step.argval is made)
    stores = [s.offset for s in steps if s.opname in _ASSIGNS and s.argval == name]
    is_parameter = name in owner.co_varnames[: _parameters(owner)]
    if len(stores) == 1 and not is_parameter and start not in _reachable(owner, stores[0]):
        # There is nothing in it before, as when a function calls itself.
        return False
    return not _reachable(owner, start).isdisjoint(stores)


def _parameters(code: types.CodeType) -> int:
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_argcount + code.co_kwonlyargcount + stars


def _assigned_later(path: list[types.CodeType], name: str) -> bool:
    code = path[-1]
    owner = max(i for i, outer in enumerate(path[:-1]) if name in outer.co_cellvars)
    if _later(path[owner], path[owner + 1], name):
        return True
    own = set(map(id, with_inner(code)))
    return any(
        id(inner) not in own and name in inner.co_freevars and step.opname in _ASSIGNS
        for inner in with_inner(path[owner])
        for step in dis.get_instructions(inner)
        if step.argval == name
    )


_known: dict[int, tuple[weakref.ref[types.CodeType], frozenset[str]]] = {}


def assigned_later(fn: types.FunctionType) -> frozenset[str]:
    """The captured variables of a function that something else may assign after it was made.

    Args:
        fn: any function. What it assigns itself, as a counter does, does not count.

    Returns:
        Their names; those of all captured variables if the code around the function is not found.
    """
    code = fn.__code__
    known = _known.get(id(code))
    if known is not None and known[0]() is code:
        return known[1]
    # The class that `super()` needs is assigned by Python, once.
    names = frozenset(code.co_freevars) - {"__class__"}
    path = _around(fn) if names else [code]
    if path is None:
        return names
    found = frozenset(name for name in names if _assigned_later(path, name))
    key = id(code)
    _known[key] = weakref.ref(code, lambda _: _known.pop(key, None)), found
    return found
