"""`assert_dce`: computation that the compiler must eliminate."""

from typing import Literal, TypeVar

import numpy as np

from ..show import short, value_error
from ..transforms import fail_if
from ..trees import split
from ._on_error import choose

T = TypeVar("T")


def assert_dce(x: T, msg: str, *, on_error: Literal["default", "raise", "off"] = "default") -> T:
    """Raises an error while a compiled program runs, if the program uses the result.

    Put it on a computation that should be eliminated: `assert_dce(expensive(y), "...")`. If a compiled
    program does not use the result, the compiler eliminates it as dead code, and this check with it.
    Outside of compiled code nothing is eliminated, and it returns `x`.

    Args:
        x: any tree with at least one array in it.
        msg: the message.
        on_error: `"raise"` or `"off"`; `"default"` follows the environment variable `VERNAL_ON_ERROR`,
            where every other value means `"raise"`.

    Returns:
        `x`.

    Raises:
        RuntimeCheckError: when a compiled program runs that uses the result.
        ValueError: if `x` has no array, or for an unknown `on_error`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.runtime import assert_dce
        >>> @jax.jit
        ... def f(x):
        ...     unused = assert_dce(jnp.exp(x), "the exponential is computed")
        ...     return x + 1
        >>> print(f(1.0))
        2.0
    """
    if on_error in ("nan", "breakpoint"):
        raise value_error(
            "assert_dce can only raise",
            where="argument `on_error`",
            expected="default, raise or off",
            got=on_error,
            instead="error_if(x, True, msg, on_error=...)",
        )
    if choose(on_error) == "off":
        return x
    arrays, rest = split(x)
    if not arrays:
        raise value_error(
            "assert_dce has no array to watch",
            where="argument `x`",
            expected="a tree with at least one array in it",
            got=short(x),
            instead="pass the arrays that should not be computed",
        )
    return rest.fill(fail_if(arrays, np.True_, explain=msg, kind="end compiled"))
