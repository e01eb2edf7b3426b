"""`reap`: turns a function that reads and overwrites slots into one that takes and returns them."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from .._ground import as_arrays, keeping_calls, strong
from ..transforms import check_callable
from ..trees import split
from ._evaluate import evaluate
from ._slots import Slots
from ._sow import reaping
from ._views import View


def reap(
    fn: Callable[..., Any], capture: Iterable[Hashable] | None = None
) -> Callable[..., tuple[Any, ...]]:
    """Makes a function that returns the new values of its slots along with its result.

    Inside `fn`, use `vernal.harvest.planted` and `sow` to read and set the slots like variables: each `planted` gives
    what was sown last, across calls, and in loops from one step to the next. The function is traced, as by `jax.jit`;
    all of JAX's transformations may be used around it and inside it. Derivatives are those of the plain function,
    and do not pass through the slots.

    Args:
        fn: called as `fn(slots, *args, **kwargs)`. It may take and return any Python objects.
        capture: labels of `vernal.harvest.capture`.

    Returns:
        A function of the same arguments that returns `(result, slots)`, with the last values of the slots: arrays
        of the same shapes and dtypes. A slot that was not sown keeps its value. With `capture`, there is a third
        result: a dictionary from each label to the value that was captured last. It has derivatives like any other
        result. A `jax.lax.scan` captures at every step, along a leading axis.

    Raises:
        TypeError: if `fn` is not callable.
        ValueError: at a call, if a value is sown for an array that is neither one of `slots`, nor indexed, sliced,
            reshaped, transposed or cast from one; if devices or elements of a map disagree about a slot they share.
        NotImplementedError: at a call, if a slot is sown where this is not supported, such as in the condition of a
            loop, or in a `jax.checkpoint` that `fn` differentiates itself; if a value is captured in a branch, a
            `while_loop`, a `jax.shard_map`, or a function with its own derivative rule.

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
    labels = None if capture is None else list(capture)

    def reaped(slots: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        values, slots_rest = split(slots)
        arrays, rest = split((args, kwargs))

        def flat(values: list[Any], arrays: list[Any]) -> Any:
            args, kwargs = rest.fill(arrays)
            with keeping_calls():
                return split(fn(slots_rest.fill(values), *args, **kwargs))

        # Later values have no derivative and a strong type, so the first ones must too.
        values = [jax.lax.stop_gradient(strong(x)) for x in values]
        with reaping():
            closed, (_, out_rest) = jax.make_jaxpr(flat, return_shape=True)(values, arrays)
        current = Slots(values, labels=labels or ())
        views = [*map(View, range(len(values))), *[None] * len(arrays)]
        out, _ = evaluate(closed.jaxpr, closed.consts, [*values, *arrays], views, current)
        results = out_rest.fill(as_arrays(out)), slots_rest.fill(as_arrays(current.values))
        if labels is None:
            return results
        caught = {k: current.rests[k].fill(as_arrays(x)) for k, x in current.caught.items()}
        return *results, caught

    return reaped
