"""`breakpoint_if`: a breakpoint inside of compiled code, where something is wrong."""

from typing import Any

import jax

from ..primitives import unvmap_any


def breakpoint_if(pred: Any, **kwargs: Any) -> None:
    """Stops in JAX's debugger when the program runs, if `pred` holds.

    Args:
        pred: a bool, or an array of them: it stops if any is true. Under `vmap` it stops if `pred`
            holds for any element of the batch; the debugger then shows the elements one by one.
        **kwargs: for `jax.debug.breakpoint`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> @jax.jit
        ... def f(x):
        ...     y = jnp.log(x)
        ...     vernal.debug.breakpoint_if(jnp.isnan(y))
        ...     return y
        >>> f(jnp.array(1.0))
        Array(0., dtype=float32, weak_type=True)
    """
    jax.lax.cond(unvmap_any(pred), lambda: jax.debug.breakpoint(**kwargs), lambda: None)
