"""`assert_max_traces`: limits how often a function may be compiled.

The body of a compiled function runs once for each trace, so counting its runs counts compilations. The
signature of each is kept, so that the error for one too many can say what has changed.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from .._ground import callable_name
from ..modules import BoundMethod, Module, field, module_update_wrapper
from ..show import message, short, type_error, value_error
from ..transforms import Signature, signature_of_call


class _Counter:
    """The traces of one function. It is structure, and shared by all copies."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seen: list[Signature] = []


class _AtMost(Module):
    # As in any transformation, the wrapped function may close over arrays.
    _vernal_may_hide_arrays = True

    fn: Any
    max_traces: Any = field(static=True)
    counter: Any = field(static=True)

    @property
    def __wrapped__(self) -> Any:
        return self.fn

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        now = signature_of_call(self.fn, args, kwargs)
        with self.counter.lock:
            earlier = list(self.counter.seen)
            self.counter.seen.append(now)
        if self.max_traces is not None and len(earlier) >= self.max_traces:
            # Compared with the most similar earlier call.
            changes = min((before.differences(now) for before in earlier), key=len, default=[])
            raise RuntimeError(
                message(
                    f"`{callable_name(self.fn)}` was traced {len(earlier) + 1} times",
                    where=f"assert_max_traces(max_traces={self.max_traces})",
                    expected=f"at most {self.max_traces}",
                    got="\n".join(map(str, changes))
                    or "arguments that are all as before: it was compiled anew, or called outside of `jit`",
                    instead="arguments of the same shapes and dtypes, arrays where numbers change "
                    "(`jnp.asarray(x)`), and one function object rather than a new one for each call",
                )
            )
        return self.fn(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundMethod(self, instance)


def assert_max_traces(
    fn: Callable[..., Any] | None = None, *, max_traces: int | None
) -> Callable[..., Any]:
    """Limits how often a function may be traced: a guard against repeated compilation.

    Use it inside `jit`, also as a decorator.

    Args:
        fn: the function. Without it, a decorator is returned.
        max_traces: how often it may be called; None: without limit (`get_num_traces` returns the
            count).

    Returns:
        The function. All copies of it count together, including those in a model that went through a
        transformation.

    Raises:
        TypeError: if `fn` cannot be called.
        ValueError: if `max_traces` is negative.
        RuntimeError: in the call that is one too many. It names the arguments that differ from those
            of the most similar earlier call.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_jit
        ... @vernal.debug.assert_max_traces(max_traces=1)
        ... def power(x, n):
        ...     return x**n
        >>> _ = power(jnp.array(2.0), 3)
        >>> try:
        ...     power(jnp.array(2.0), 4)
        ... except RuntimeError as error:
        ...     print(str(error).partition("  instead")[0])
        `power` was traced 2 times
          where: assert_max_traces(max_traces=1)
          expected: at most 1
          got: n: 3 -> 4
        <BLANKLINE>
    """
    if fn is None:
        return functools.partial(assert_max_traces, max_traces=max_traces)
    if not callable(fn):
        raise type_error(
            "assert_max_traces needs a function",
            where="assert_max_traces(fn)",
            expected="a callable",
            got=short(fn),
            instead="assert_max_traces(f, max_traces=1)(x)",
        )
    if max_traces is not None and max_traces < 0:
        raise value_error(
            "the number of traces cannot be negative",
            where="argument `max_traces`",
            expected="a number from 0, or None",
            got=repr(max_traces),
            instead="max_traces=1",
        )
    return module_update_wrapper(_AtMost(fn, max_traces, _Counter()))


def get_num_traces(fn: Any) -> int:
    """How often a function under `assert_max_traces` was traced.

    Args:
        fn: the result of `assert_max_traces`, also if it was wrapped since (by `filter_jit`,
            `jax.jit`, `functools.wraps`).

    Returns:
        The number of calls.

    Raises:
        ValueError: if it does not contain an `assert_max_traces`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> f = jax.jit(vernal.debug.assert_max_traces(jnp.sin, max_traces=None))
        >>> _ = f(jnp.zeros(2)), f(jnp.ones(2)), f(jnp.zeros(3))
        >>> vernal.debug.get_num_traces(f)
        2
    """
    found = fn
    while not isinstance(found, _AtMost):
        # A bound method has both: the object that it binds, and the plain function inside that.
        inner = getattr(found, "__func__", None)
        if inner is None:
            inner = getattr(found, "__wrapped__", None)
        if inner is None:
            raise value_error(
                "the traces of this function are not counted",
                where="get_num_traces(fn)",
                expected="a function inside of assert_max_traces",
                got=short(fn),
                instead="jax.jit(assert_max_traces(fn, max_traces=None))",
            )
        found = inner
    return len(found.counter.seen)
