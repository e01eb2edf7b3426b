"""Names and signatures of anything that can be called."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def callable_name(fn: Any) -> str:
    """The name of a callable, for messages.

    Args:
        fn: a function, method, partial, class or callable object.

    Returns:
        Its `__name__` (looking through `functools.partial`), or the name of its class.
    """
    name = getattr(fn, "__name__", None)
    if isinstance(name, str):
        return name
    if isinstance(fn, functools.partial):
        return callable_name(fn.func)
    return type(fn).__name__


def signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a callable, or None where Python cannot tell (some builtins).

    Args:
        fn: any callable.

    Returns:
        `inspect.signature(fn)` or None.
    """
    try:
        return inspect.signature(fn)
    except (ValueError, TypeError):
        return None
