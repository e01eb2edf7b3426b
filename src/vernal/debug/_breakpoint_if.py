"""`breakpoint_if`: a conditional breakpoint inside compiled code."""

from typing import Any

import jax
import jax.numpy as jnp

from ..transforms import check


def breakpoint_if(pred: Any, **kwargs: Any) -> None:
    """Stops in JAX's debugger at run time if `pred` holds.

    Args:
        pred: a bool, or an array of bools: it stops if any is true. Under `vmap` it stops if `pred`
            holds for any element of the batch; the debugger then shows the elements one by one. In
            loops and branches of `vernal.loops`, elements that are done, or take another branch, do
            not count.
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
    holds = check(jnp.asarray(pred).astype(bool), explain="breakpoint_if", kind="ask")
    jax.lax.cond(holds, lambda: jax.debug.breakpoint(**kwargs), lambda: None)
