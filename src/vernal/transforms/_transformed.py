"""The base of every transformed function: `filter_jit(f)`, `filter_grad(f)`, `filter_vmap(f)`, ...

A transformed function is a module that wraps the function: it has its name, documentation and
signature, binds as a method, pickles if the function does, and is a pytree whose arrays are those of
the function (if that is a module itself).
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from .._ground import callable_name
from ..modules import BoundMethod, Module, module_update_wrapper
from ..show import short, type_error
from ..trees import Rest, by_name, split
from ._returned import check_hides_nothing
from ._traced_shapes import explain, is_shape_error

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")


class Transformed(Module, Generic[P, T]):
    """A function under a transformation: the base class of what the transformations here return.

    It is a module that wraps the function. A subclass adds the settings of the transformation as
    static fields, and `__call__`; `vernal.modules.module_update_wrapper` gives an instance the name
    and documentation of the function.

    Args:
        fn: the function.
    """

    # What the wrapped function closes over is not checked: see `modules/_building.py`.
    _vernal_may_hide_arrays = True

    fn: Callable[P, T]

    @property
    def __wrapped__(self) -> Callable[P, T]:
        return self.fn

    @abc.abstractmethod
    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls the transformed function."""

    def __reduce__(self) -> Any:
        # A decorated function is pickled by its name, as functions are. (Except in the running script,
        # which another process does not have.)
        named = by_name(self)
        if named is not self and self.__module__ != "__main__":
            return named.__reduce__()
        # Name, documentation and annotations are not pickled, but taken from the function again:
        # `jax.Array`, a likely annotation, cannot be pickled before JAX 0.12.
        fields = dataclasses.fields(self)
        return _again, (type(self), {f.name: by_name(getattr(self, f.name)) for f in fields})

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "Transformed[P, T]": ...
    @overload
    def __get__(
        self: "Transformed[Concatenate[Any, Q], T]", instance: object, owner: Any = None
    ) -> Callable[Q, T]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)


def _again(cls: type[Transformed[..., Any]], fields: dict[str, Any]) -> Any:
    """Rebuilds a transformed function from a pickle or a copy."""
    return wrap(cls(**fields))


def wrap(transformed: Any) -> Any:
    """Gives a new transformed function the name, documentation and signature of what it wraps."""
    return module_update_wrapper(transformed)


def check_callable(fn: Any, transform: str) -> None:
    """Refuses anything that is not callable.

    Args:
        fn: what the user passed.
        transform: the name of the transformation, for the message.

    Raises:
        TypeError: if `fn` is not callable.
    """
    if not callable(fn):
        raise type_error(
            f"{transform} needs a function",
            where=f"{transform}(fn)",
            expected="a callable",
            got=short(fn),
            instead=f"{transform}(f)(x) rather than {transform}(f(x))",
        )


def call_inside(fn: Callable[..., Any] | None, rest: Rest, arrays: list[Any]) -> Any:
    """Calls the user's function inside a transformation, and explains a traced value that reaches
    a shape.

    Args:
        fn: the function, if `rest` does not hold it.
        rest: the structure of `(fn, args, kwargs)`.
        arrays: the (traced) arrays that fill it.

    Returns:
        What the function returns.

    Raises:
        TracedShapeError: in place of JAX's error for a traced value in a shape.
        ValueError: for a result that hides a traced value.
    """
    called, args, kwargs = rest.fill(arrays)
    target: Any = fn if called is None else called
    try:
        return check_hides_nothing(target(*args, **kwargs), callable_name(target))
    except TypeError as error:
        if is_shape_error(error):
            explained = explain(error, target, rest, list(arrays))
            for note in getattr(error, "__notes__", ()):
                explained.add_note(note)
            raise explained from error
        raise


def inside(fn: Callable[..., Any], rest: Rest) -> Callable[[list[Any]], tuple[list[Any], Rest]]:
    """The function as JAX sees it: from the arrays among its arguments to the arrays in its result,
    and the rest of the result.

    Args:
        fn: the user's function.
        rest: the structure of `(fn, args, kwargs)`.

    Returns:
        A function from a list of arrays to `(arrays, rest)` of the result.
    """

    def run(arrays: list[Any]) -> tuple[list[Any], Rest]:
        return split(call_inside(fn, rest, arrays))

    run.__name__ = run.__qualname__ = callable_name(fn)
    return run
