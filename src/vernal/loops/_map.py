"""`map`: a function called on one slice after another."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from ..harvest import sow_if
from ..transforms import filter_vmap
from ..trees import is_array
from ._carry import numbers_to_arrays
from ._once import compiled_once
from ._options import check_count, check_function
from ._scan import number_of_steps, scan


def map(
    f: Callable[[Any], Any],
    xs: Any,
    *,
    batch_size: int | None = None,
    kind: str = "lax",
    checkpoints: int | str | None = None,
) -> Any:
    """Calls `f` on every slice of `xs`, one after the other, and stacks the results.

    Like `jax.lax.map`, for any Python objects. Use it where `vmap`, which computes all slices at once,
    needs too much memory: `map` needs that of one slice (or of `batch_size`) at a time.

    Args:
        f: takes a slice, returns any tree. Traced as in `while_loop`.
        xs: any tree with arrays in it. They are sliced along their first axis; all other leaves
            are passed to every call unchanged.
        batch_size: how many slices to compute at once, by `vmap`; by default one, without `vmap`. A failed
            check reports the step and the index in its batch: element `step * batch_size + index`.
        kind: `"lax"` or `"checkpointed"`, as in `scan`.
        checkpoints: for `"checkpointed"`, as in `scan`.

    Returns:
        The results, with arrays stacked and everything else returned once.

    Raises:
        TypeError: if `f` cannot be called, or an option has the wrong type.
        ValueError: if the arrays in `xs` have different numbers of slices, or as in `scan`.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.loops import map
        >>> xs = {"fn": jnp.sin, "x": jnp.zeros(5)}
        >>> map(lambda x: (x["fn"](x["x"]), "any object"), xs, batch_size=2)
        (Array([0., 0., 0., 0., 0.], dtype=float32), 'any object')
    """
    check_function("map", "f", f)
    if batch_size is not None:
        check_count("map", "batch_size", batch_size, 1)
    number_of_steps("map", xs, None)
    return compiled_once(
        "map", _run, [f], xs, batch_size=batch_size, kind=kind, checkpoints=checkpoints
    )


def _run(
    functions: Sequence[Any], xs: Any, *, batch_size: int | None, kind: str, checkpoints: Any
) -> Any:
    """`map` with options that have been checked."""
    (f,) = functions
    n = number_of_steps("map", xs, None)
    if batch_size is None:
        return _one_by_one(f, xs, kind, checkpoints)
    batched = filter_vmap(lambda x: numbers_to_arrays(f(x)))
    whole = n - n % batch_size
    head = _mapped(lambda x: x[:whole].reshape(-1, batch_size, *x.shape[1:]), xs)
    out = _one_by_one(batched, head, kind, checkpoints)
    out = _mapped(lambda y: y.reshape(-1, *y.shape[2:]), out)
    if whole == n:
        return out
    # The checks of the remainder report the step after the last one.
    last = jnp.int32(whole // batch_size)
    tail = sow_if(None, batched, _mapped(lambda x: x[whole:], xs), step=last)
    return _mapped(lambda y, z: jnp.concatenate([y, z]), out, tail)


def _one_by_one(f: Callable[[Any], Any], xs: Any, kind: str, checkpoints: Any) -> Any:
    return scan(lambda _, x: (None, f(x)), None, xs, kind=kind, checkpoints=checkpoints)[1]


def _mapped(fn: Callable[..., Any], tree: Any, *trees: Any) -> Any:
    return jtu.tree_map(lambda x, *rest: fn(x, *rest) if is_array(x) else x, tree, *trees)
