"""Methods of a module that go through a transformation together with their module.

`module.method` is an object with two slots, not a module: it costs about as much as Python's own
bound methods.
"""

import inspect
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

import jax.tree_util as jtu

from ._calls import files_of_calls, tell


class _Doc:
    """A docstring for the class and, on an instance, that of the function."""

    def __init__(self, text: str):
        self.text = text

    def __get__(self, method: Any, owner: Any) -> str | None:
        return self.text if method is None else method.__func__.__doc__


class BoundMethod:
    __doc__ = _Doc(  # pyright: ignore[reportAssignmentType] (a descriptor that gives one)
        """A method and the module it is bound to: a callable pytree whose arrays are the module's.

    What `module.method` gives. Two are equal if the functions are the same and the modules equal.

    Args:
        func: the function, which takes the module first.
        owner: the module.
    """
    )

    __slots__ = ("__func__", "__self__", "__weakref__")

    def __init__(self, func: Callable[..., Any], owner: Any):
        self.__func__ = func
        self.__self__ = owner

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.__func__(self.__self__, *args, **kwargs)
        except Exception as error:
            tell(self.__self__, error)
            raise

    def __eq__(self, other: Any) -> Any:
        if type(other) is not BoundMethod:
            return NotImplemented
        if self.__func__ is not other.__func__ and self.__func__ != other.__func__:
            return False
        try:
            # Different hashes mean different traced arrays, which only the device could compare.
            if hash(self) != hash(other):
                return False
        except TypeError:
            # A class with Equinox's rule has no hash but can be compared.
            pass
        return bool(self.__self__ == other.__self__)

    def __hash__(self) -> int:
        return hash((self.__func__, self.__self__))

    def __repr__(self) -> str:
        return f"<bound method {self.__qualname__} of {self.__self__!r}>"

    def __getattr__(self, name: str) -> Any:
        # Name, qualified name, annotations, `lower`, ...: whatever the function has.
        if name in ("__func__", "__self__"):
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __reduce__(self) -> Any:
        return BoundMethod, (self.__func__, self.__self__)

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.__func__, self.__self__)

    @property
    def __signature__(self) -> inspect.Signature:
        signature = inspect.signature(self.__func__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


files_of_calls.add(sys._getframe().f_code.co_filename)


def _flatten(method: BoundMethod) -> tuple[tuple[Any, ...], Any]:
    func = method.__func__
    if jtu.is_tree_node(type(func)):
        return (method.__self__, func), None
    return (method.__self__,), (func,)


def _flatten_with_keys(method: BoundMethod) -> tuple[tuple[Any, ...], Any]:
    children, aux = _flatten(method)
    keys = (jtu.GetAttrKey("__self__"), jtu.GetAttrKey("__func__"))
    return tuple(zip(keys, children, strict=False)), aux


def _unflatten(aux: Any, children: Any) -> BoundMethod:
    if aux is None:
        owner, func = children
        return BoundMethod(func, owner)
    return BoundMethod(aux[0], children[0])


jtu.register_pytree_with_keys(BoundMethod, _flatten_with_keys, _unflatten, _flatten)


class Method:
    """Replaces a function of the body of a module class: reading it from an instance binds it.

    Code that finds it in the `__dict__` of the class (a base class in `__init_subclass__`, a class decorator,
    `inspect`) may call, wrap, inspect and annotate it like the function that it stands for. Its `__class__` is that of
    functions.
    """

    __slots__ = ("__wrapped__",)

    def __init__(self, func: Callable[..., Any]):
        object.__setattr__(self, "__wrapped__", func)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] (read-only)
        return types.FunctionType

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _function_of(self)(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        func = _function_of(self)
        return func if instance is None else BoundMethod(func, instance)

    def __getattribute__(self, name: str) -> Any:
        # This class has its own, too.
        if name in ("__module__", "__doc__"):
            return getattr(_function_of(self), name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":
            raise AttributeError(name)
        return getattr(_function_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_function_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_function_of(self), name)

    def __eq__(self, other: Any) -> Any:
        return _function_of(self) is (_function_of(other) if type(other) is Method else other)

    def __hash__(self) -> int:
        return hash(_function_of(self))

    def __repr__(self) -> str:
        return repr(_function_of(self))

    def __reduce__(self) -> Any:
        return Method, (_function_of(self),)


# In C, and so faster than `__getattribute__`.
_function_of: Callable[[Method], Callable[..., Any]] = Method.__dict__["__wrapped__"].__get__


def as_method(name: str, value: Any, *declared: Collection[str]) -> Any:
    """The value to store under a name in a module class, for a value from its body or from an assignment.

    Args:
        name: the name.
        value: the value.
        *declared: names of fields, where a function is a default and stays a function.

    Returns:
        A `Method` in place of a function; any other value unchanged.
    """
    if (
        type(value) is not types.FunctionType
        or (name.startswith("__") and name.endswith("__") and name != "__call__")
        or any(name in names for names in declared)
        or getattr(value, "__isabstractmethod__", False)
    ):
        return value
    return Method(value)
