"""`filter_closure_convert` as in Equinox: the program is a leaf."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

from ... import transforms
from ...modules import field
from ._module import Module


class _ClosureConvert(Module):
    """A traced function: its program and the arrays that it closed over are leaves.

    Libraries partition such a function by `is_array`, carry one half through a loop, and combine it with the other
    half of another trace. That needs equal structures of two traces, so the program must not be part of it.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    shell: Any = field(static=True)

    def _whole(self) -> Any:
        return dataclasses.replace(self.shell, jaxpr=self.jaxpr, consts=self.consts)

    @property
    def in_struct(self) -> Any:
        """`(args, kwargs)` with a `jax.ShapeDtypeStruct` in place of every array."""
        return self.shell.in_struct

    @property
    def out_struct(self) -> Any:
        """The result, likewise."""
        return self._whole().out_struct

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._whole()(*args, **kwargs)


class _TrivialClosureConvert(Module):
    """A function without a closure, which is called as it is: what it reads from its module is not a leaf."""

    fn: Callable[..., Any]
    shell: Any = field(static=True)

    @property
    def in_struct(self) -> Any:
        """`(args, kwargs)` with a `jax.ShapeDtypeStruct` in place of every array."""
        return self.shell.in_struct

    @property
    def out_struct(self) -> Any:
        """The result, likewise; found by tracing the function."""
        args, kwargs = self.in_struct
        return transforms.filter_eval_shape(self.fn, *args, **kwargs)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        self.shell.check(args, kwargs)
        return self.fn(*args, **kwargs)


def filter_closure_convert(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`vernal.filter_closure_convert`, with the program as a leaf of the result.

    Args:
        fn: the function.
        *args: arguments like those of the later calls.
        **kwargs: likewise.

    Returns:
        A module that is called like `fn`, with `in_struct` and `out_struct`.
    """
    if isinstance(fn, (_ClosureConvert, _TrivialClosureConvert)):
        return fn
    traced = transforms.filter_closure_convert(fn, *args, **kwargs)
    shell = dataclasses.replace(traced, jaxpr=None, consts=())
    if isinstance(fn, types.FunctionType) and fn.__closure__ is None:
        return _TrivialClosureConvert(fn, shell)
    return _ClosureConvert(traced.jaxpr, traced.consts, shell)
