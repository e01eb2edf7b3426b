"""The registry of all caches of the library, so that one call empties them all."""

from collections.abc import Callable
from typing import Any

_clearers: list[Callable[[], Any]] = []


def register_cache(clear: Callable[[], Any]) -> None:
    """Adds a cache to those that `clear_caches` empties.

    Args:
        clear: called without arguments to empty the cache.
    """
    _clearers.append(clear)


def clear_caches() -> None:
    """Empties all of Vernal's caches: those of compiled programs, of functions and of structures.

    `jax.clear_caches()` empties JAX's own. After both, the next call of a compiled function
    compiles again.

    Example:
        >>> import vernal
        >>> vernal.clear_caches()
    """
    for clear in _clearers:
        clear()
