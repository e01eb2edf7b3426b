"""`sow_if`: slots and checks under the condition of a loop, for each element of a batch by itself.

A loop runs its step for a whole batch until the last element has finished. `select_if_vmap` keeps the carry of a
finished element; `sow_if` keeps the slots that the step sows, and ignores its checks.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .._ground import convert_constvars_jaxpr
from ..primitives import select_if_vmap
from ..transforms import check_callable
from ..trees import split
from ._evaluate import evaluate
from ._slots import Slots, Views, sows
from ._sow import planted, sow
from ._views import View

T = TypeVar("T")


def sow_if(pred: Any, fn: Callable[..., T], *args: Any, step: Any = None) -> T:
    """Calls a function whose slot updates and checks take effect only where a condition holds.

    As with `select_if_vmap`, `pred` is assumed to be True unless `vmap` maps it, as in the body of a loop that runs
    until every element of the batch has finished. Where it is mapped, elements with a False `pred` keep their slots,
    and no check (`vernal.runtime.error_if`) fails for them.

    Args:
        pred: bool[], or None if everything takes effect.
        fn: the function. It is traced. It may take and return any Python objects.
        *args: its arguments.
        step: i32[], the number of the step that a failed check reports; None outside of steps.

    Returns:
        What `fn` returns, for all elements.

    Raises:
        TypeError: if `fn` is not callable, or `pred` is not a bool.
        ValueError: if `pred` differs between elements of a batch that share a slot that is sown.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.harvest import planted, reap, sow, sow_if
        >>> def count(slot, x):
        ...     return sow(slot, planted(slot) + 1, 2 * x)
        >>> @jax.vmap
        ... def count_if(slot, x, pred):
        ...     return sow_if(pred, count, slot, x)
        >>> counts, xs, preds = jnp.array([5, 5]), jnp.array([3, 4]), jnp.array([True, False])
        >>> reap(count_if)(counts, xs, preds)
        (Array([6, 8], dtype=int32), Array([6, 5], dtype=int32))
    """
    check_callable(fn, "sow_if")
    arrays, rest = split(args)

    def flat(*arrays: Any) -> Any:
        return split(fn(*rest.fill(arrays)))

    closed, (_, out_rest) = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    inputs = [*map(jnp.asarray, closed.consts), *arrays]
    states = sows(closed.jaxpr)
    before = planted(inputs) if states else inputs
    views: Views = [View(i) if states else None for i in range(len(inputs))]
    values = [*map(jax.lax.stop_gradient, before)]
    places: dict[str, Any] = {}
    if pred is not None:
        places["active"] = len(values)
        known = jnp.ones((), bool)
        values.append(select_if_vmap(pred, known, ~known))
    if step is not None:
        places["step"] = len(values)
        values.append(step)
    slots = Slots(values, **places)
    program = convert_constvars_jaxpr(closed.jaxpr)
    out, _ = evaluate(program, (), inputs, views, slots)
    result = out_rest.fill(out)
    sown = {slot for slot, _ in slots.sown}
    for needed, which in ((True, sown & slots.needed), (False, sown - slots.needed)):
        if which:
            new = slots.of(sorted(which))
            if pred is not None:
                new = select_if_vmap(pred, new, [before[i] for i in sorted(which)])
            result = sow([inputs[i] for i in sorted(which)], new, result, needed=needed)
    return result
