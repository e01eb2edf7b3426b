"""`functools.partial` as a module."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..show import type_error
from ._module import Module

Return = TypeVar("Return")


class Partial(Module, Generic[Return]):
    """`functools.partial` as a pytree: arrays among the stored arguments are traced and trained.

    Stored arguments come first; those of the call follow.

    Raises:
        TypeError: at the call, if a keyword argument is stored already.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> add = vernal.Partial(jnp.add, jnp.ones(2))
        >>> add(jnp.ones(2))
        Array([2., 2.], dtype=float32)
        >>> len(jax.tree.leaves(add))
        1
    """

    # As in any transformation, the function may close over arrays. A module refuses such a `Partial`
    # in a field.
    _vernal_may_hide_arrays = True

    func: Callable[..., Return]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __init__(self, func: Callable[..., Return], /, *args: Any, **kwargs: Any):
        """Stores the function and its first arguments.

        Args:
            func: the function to call.
            *args: its first positional arguments.
            **kwargs: keyword arguments; the call cannot give them again.
        """
        self.func = func
        self.args = args
        self.keywords = kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Return:
        """Calls `func(*self.args, *args, **self.keywords, **kwargs)`."""
        twice = sorted(self.keywords.keys() & kwargs.keys())
        if twice:
            raise type_error(
                f"keyword argument `{twice[0]}` was given twice",
                where="Partial.__call__",
                expected="keywords other than the stored ones: " + ", ".join(self.keywords),
                got=f"{twice[0]}=...",
                instead="make a new Partial without it",
            )
        return self.func(*self.args, *args, **kwargs, **self.keywords)
