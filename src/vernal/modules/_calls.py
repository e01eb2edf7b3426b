"""Errors that say in which layer they were raised.

An exception that leaves the call of a module within another one is given a note (PEP 678):
`Raised in model.blocks[2].linear (Model > Block > Linear)`. It is made once, by the innermost call that the exception
leaves, from Python's own stack: the calls that are running, and the modules that they belong to. So nothing is
recorded while all is well, and the note is text: it keeps no module alive.

A module is found in another one by identity. One that was rebuilt on the way, as a `Stack` does with its layers, is
found by its structure if nothing else there has the same; otherwise its class is all that is said.
"""

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu

from ..show import listed, path_text
from ._attributes import attributes_of
from ._hooks import handed_on
from ._structure import KEY

_RAISED = "Raised in "

# Calls of these make something that runs later, when the call is over.
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def telling(call: Callable[..., Any]) -> Callable[..., Any]:
    """The `__call__` of a class of modules, whose errors say where they were raised.

    Args:
        call: as it stands in the class.

    Returns:
        The same with the note, and with a hook (see `_hooks.py`); `call` itself if it returns before its body has run.
    """
    if not isinstance(call, types.FunctionType) or call.__code__.co_flags & _LATER:
        return call

    def __call__(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        try:
            result = call(self, *args, **kwargs)
        except Exception as error:
            tell(self, error)
            raise
        return handed_on(self, call, result)

    # Unwrapped, because under the import hook of jaxtyping it could not travel with its class (cloudpickle).
    return functools.update_wrapper(inspect.unwrap(__call__), call)


# The files whose functions `__call__` run while a module is called, with the module, or a method of it, as `self`. (The
# code of such a function has copies: cloudpickle makes some.)
files_of_calls = {sys._getframe().f_code.co_filename}


def tell(module: Any, error: Exception) -> None:
    """Notes on an exception in which module it was raised, if that is in another one and no call further inside has
    noted it.

    Args:
        module: whose call or method the exception is leaving.
        error: the exception.
    """
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        return
    try:
        if not any(str(note).startswith(_RAISED) for note in getattr(error, "__notes__", ())):
            modules = _running(module)
            if len(modules) > 1:
                names = listed([type(module).__name__ for module in modules], " > ")
                error.add_note(f"{_RAISED}{_place(modules)} ({names})")
    except Exception:
        # A tree of the user that cannot be walked must not hide the real error.
        pass


def _running(module: Any) -> list[Any]:
    """The modules of which a call or a method is running in this thread, the outermost first, `module` last."""
    found: list[Any] = [module] if _is_layer(module) else []
    # Nothing is read from the innermost call: Python would keep what it holds, the exception too, as long as the
    # traceback of this very exception.
    for frame in itertools.islice(_frames(sys._getframe()), 1, None):
        owner = frame.f_locals["self"]
        outer = owner if hasattr(type(owner), "_vernal_class") else owner.__self__
        if _is_layer(outer) and not (found and found[-1] is outer):
            found.append(outer)
    return found[::-1]


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """The calls of modules among the frames of a stack, from the innermost outwards."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__call__" and code.co_filename in files_of_calls:
            yield frame
        frame = frame.f_back


def _is_layer(value: Any) -> bool:
    """Whether a value is a module, and neither a function under a transformation nor under construction."""
    cls: Any = type(value)
    return (
        hasattr(cls, "_vernal_class")
        and not getattr(cls, "_vernal_may_hide_arrays", False)
        and KEY in attributes_of(value)
    )


def _place(modules: list[Any]) -> str:
    """The path to the last of some modules, from the first one as far as it is known."""
    *outer, last = modules
    for i, module in enumerate(outer):
        paths = _paths(module, last)
        if paths:
            return _place(modules[: i + 1]) + " or ".join(paths)
    # Of the outermost not the class, which is said beside it: so the path can be pasted.
    return f"{_place(outer)} > {type(last).__name__}" if outer else "model"


def _paths(tree: Any, module: Any) -> list[str]:
    """Where a module is in a tree, which may be in several places."""
    leaves = jtu.tree_leaves_with_path(tree, is_leaf=lambda x: x is module)
    found = [path_text(path) for path, leaf in leaves if leaf is module]
    if found:
        return found
    structure = jtu.tree_structure(module)

    def is_like_it(x: Any) -> bool:
        return type(x) is type(module) and jtu.tree_structure(x) == structure

    leaves = jtu.tree_leaves_with_path(tree, is_leaf=is_like_it)
    alike = [path_text(path) for path, leaf in leaves if is_like_it(leaf)]
    return alike if len(alike) == 1 else []
