"""`reap`: from a function that reads and overwrites slots to one that takes them and returns them."""

from collections.abc import Callable
from typing import Any

import jax

from .._ground import strong
from ..transforms import check_callable
from ..trees import split
from ._evaluate import evaluate
from ._slots import Slots
from ._views import View


def reap(fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Makes a function that returns the new values of its slots along with its result.

    Inside, `vernal.harvest.planted` and `sow` use the slots as variables: each `planted` sees what was sown last,
    across calls, and in loops from one step to the next. The function is traced, as by `jax.jit`; around it and
    inside of it all of JAX's transformations may be used. Derivatives are those of the plain function, and do
    not pass through the slots.

    Args:
        fn: called as `fn(slots, *args, **kwargs)`. What it takes and returns may be any Python objects.

    Returns:
        A function of the same arguments that returns `(result, slots)`, with the last values of the slots: arrays
        of the same shapes and dtypes. What was not sown is as it was given.

    Raises:
        TypeError: if `fn` is not callable.
        ValueError: at a call, if a value is sown for an array that is not one of `slots`, nor indexed, sliced,
            reshaped, transposed or cast from one; if devices or elements of a map disagree about a slot they share.
        NotImplementedError: at a call, if a slot is sown where it cannot be, such as in the condition of a loop,
            or in a `jax.checkpoint` that `fn` differentiates itself.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.harvest import planted, reap, sow
        >>> def count(slot, x):
        ...     return sow(slot, planted(slot) + 1, 2 * x)
        >>> def several(slot, xs):
        ...     return jax.lax.map(lambda x: count(slot, x), xs)
        >>> reap(several)(jnp.array(0), jnp.arange(4))
        (Array([0, 2, 4, 6], dtype=int32), Array(4, dtype=int32))
    """
    check_callable(fn, "reap")

    def reaped(slots: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        values, slots_rest = split(slots)
        arrays, rest = split((args, kwargs))

        def flat(values: list[Any], arrays: list[Any]) -> Any:
            args, kwargs = rest.fill(arrays)
            return split(fn(slots_rest.fill(values), *args, **kwargs))

        # Derivative and weak type of the first value would not last.
        values = [jax.lax.stop_gradient(strong(x)) for x in values]
        closed, (_, out_rest) = jax.make_jaxpr(flat, return_shape=True)(values, arrays)
        current = Slots(values)
        views = [*map(View, range(len(values))), *[None] * len(arrays)]
        out, _ = evaluate(closed.jaxpr, closed.consts, [*values, *arrays], views, current)
        return out_rest.fill(out), slots_rest.fill(current.values)

    return reaped
