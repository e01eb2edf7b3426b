"""Errors that say in which layer they were raised.

An exception that leaves the call of a nested module gets a note (PEP 678):
`Raised in model.blocks[2].linear (Model > Block > Linear)`. The innermost call that the exception leaves writes it,
once, from Python's own stack: the running calls, and the modules that they belong to. So nothing is recorded while no
error occurs, and the note is text: it does not keep a module alive.

A module is found in another one by identity. One that was rebuilt on the way, as a `Stack` rebuilds its layers, is
found by its structure if no other module there has the same one; otherwise the note gives only its class.
"""

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.tree_util as jtu

from .._ground import makes_a_program
from ..show import listed, path_text
from ._attributes import attributes_of
from ._hooks import handed_on
from ._structure import KEY

_RAISED = "Raised in "

# Calls of these return something that runs later, after the call.
_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def telling(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the `__call__` of a module class so that errors say where they were raised.

    Args:
        call: the function in the class body.

    Returns:
        `call` with the note and the hook (see `_hooks.py`); `call` itself if it returns before its body runs.
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

    # Unwrapped, because under jaxtyping's import hook cloudpickle could not pickle it with its class.
    return functools.update_wrapper(inspect.unwrap(__call__), call)


# The files whose functions `__call__` run while a module is called, with the module, or a method of it, as `self`. (By
# file, because the code of such a function has copies: cloudpickle makes some.)
files_of_calls = {sys._getframe().f_code.co_filename}


def tell(module: Any, error: Exception) -> None:
    """Adds to an exception the note of the module that raised it, if that is nested and no inner call has added one.

    Args:
        module: whose call or method the exception is leaving.
        error: the exception.
    """
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        return
    try:
        if not any(str(note).startswith(_RAISED) for note in getattr(error, "__notes__", ())):
            # Read nothing from the innermost call: Python would keep its locals, the exception included, alive as long
            # as the traceback of that exception.
            outer = itertools.islice(_frames(sys._getframe()), 1, None)
            note = _note(_running(outer, module))
            if note:
                error.add_note(note)
    except Exception:
        # A tree of the user that cannot be walked must not hide the real error.
        pass


def note_of_place() -> str:
    """The note of an error that is raised here, for one that is raised later, when the compiled program runs.

    Only of the modules inside of the innermost program: JAX may run it for other callers.

    Returns:
        `Raised in model.norm (Model > BatchNorm)`, or an empty text outside of the call of a nested module.

    Example:
        >>> import vernal
        >>> class Layer(vernal.Module):
        ...     def __call__(self):
        ...         return vernal.modules.note_of_place()
        >>> class Model(vernal.Module):
        ...     layer: Layer
        ...     def __call__(self):
        ...         return self.layer()
        >>> Model(Layer())()
        'Raised in model.layer (Model > Layer)'
    """
    try:
        return _note(_running(_frames(sys._getframe(), all_programs=False)))
    except Exception:
        return ""  # as in `tell`


def _note(modules: list[Any]) -> str:
    if len(modules) < 2:
        return ""
    names = listed([type(module).__name__ for module in modules], " > ")
    return f"{_RAISED}{_place(modules)} ({names})"


def _running(frames: Iterable[types.FrameType], *innermost: Any) -> list[Any]:
    """The modules whose calls or methods these are, the outermost first, `innermost` last."""
    found = [*filter(_is_layer, innermost)]
    for frame in frames:
        owner = frame.f_locals["self"]
        outer = owner if hasattr(type(owner), "_vernal_class") else owner.__self__
        if _is_layer(outer) and not (found and found[-1] is outer):
            found.append(outer)
    return found[::-1]


def _frames(frame: types.FrameType | None, all_programs: bool = True) -> Iterator[types.FrameType]:
    """The calls of modules among the frames of a stack, from the innermost outwards: of all programs that are being
    made, or the innermost."""
    while frame is not None and (all_programs or not makes_a_program(frame)):
        code = frame.f_code
        if code.co_name == "__call__" and code.co_filename in files_of_calls:
            yield frame
        frame = frame.f_back


def _is_layer(value: Any) -> bool:
    """Whether a value is a finished module that is not a transformed function."""
    cls: Any = type(value)
    return (
        hasattr(cls, "_vernal_class")
        and not getattr(cls, "_vernal_may_hide_arrays", False)
        and KEY in attributes_of(value)
    )


def _place(modules: list[Any]) -> str:
    """The path from the first of some modules to the last, as far as it is known."""
    *outer, last = modules
    for i, module in enumerate(outer):
        paths = _paths(module, last)
        if paths:
            return _place(modules[: i + 1]) + " or ".join(paths)
    # Not the class of the outermost, which the note has anyway: so the path can be pasted.
    return f"{_place(outer)} > {type(last).__name__}" if outer else "model"


def _paths(tree: Any, module: Any) -> list[str]:
    """The paths of a module in a tree; it may be in several places."""
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
