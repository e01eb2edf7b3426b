"""Hooks: a module that passes the result of its call through a function.

Like the mark of frozen arrays, the function is a hidden static entry of the module: it goes through every
transformation with the module, whose class and fields do not change.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ._attributes import Attributes, attributes_of
from ._lazy import unflattened
from ._structure import KEY, assemble

T = TypeVar("T")

HOOK = "__hook__"


def hooked(module: T, hook: Callable[[Any], Any]) -> T:
    """Passes the result of a module's call through a function.

    Args:
        module: any module whose class has a `__call__`.
        hook: takes the result of the call; its own result is returned instead. It replaces an earlier hook.

    Returns:
        The module with this hook, which is part of its structure.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> layer = vernal.nn.Lambda(jnp.sin)
        >>> vernal.modules.hooked(layer, jnp.negative)(0.0) == -layer(0.0)
        Array(True, dtype=bool, weak_type=True)
    """
    current = unflattened(module)
    kinds = {**current[KEY][0].layout.kinds, HOOK: False}
    return assemble(type(module), kinds, {n: current[n] for n in kinds if n != HOOK} | {HOOK: hook})


def handed_on(module: Any, call: Callable[..., Any], result: Any) -> Any:
    """The result of a module's call, passed through its hook if it has one. `call` is the function that has run: a
    class may call the `__call__` of its base class, and the hook applies only to its own."""
    # (A function found in a class may be called with anything.)
    hook = attributes_of(module).get(HOOK) if isinstance(module, Attributes) else None
    if hook is None or inspect.unwrap(type(module).__call__) is not inspect.unwrap(call):
        return result
    return hook(result)
