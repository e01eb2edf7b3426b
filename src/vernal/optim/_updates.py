"""`apply_updates`: the last line of every training step.

Outside of a compiled function, a step over many small arrays would cost one dispatch per array. So concrete arrays are
added by one compiled call; while tracing, plain additions become part of the traced program.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import flatten_none_is_leaf, is_none, trace_state_clean
from ..modules import frozen_leaves
from ..show import diff_text, path_text, short, type_error, value_error
from ..trees import is_array_like, is_missing


def _kind(dtype: Any) -> int:
    """The rank of a dtype: 0 for integers and booleans, 1 for reals, 2 for complex numbers."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 2
    return 1 if jnp.issubdtype(dtype, jnp.floating) else 0


def _misfit(p: Any, u: Any) -> str | None:
    """Why `u` cannot be added to `p`, or None if it can."""
    if not (is_array_like(p) and is_array_like(u)):
        return "an array of numbers, and an update of its shape"
    p, u = jnp.asarray(p), jnp.asarray(u)
    if any(not jnp.issubdtype(x.dtype, jnp.number) for x in (p, u)):
        return "numbers (random keys and booleans have no updates: give None)"
    if _kind(u.dtype) > _kind(p.dtype):
        return f"an update that a {p.dtype} array can hold"
    if u.shape not in (p.shape, ()):
        return f"an update of shape {p.shape}"
    return None


def _refusal(p: Any, u: Any, where: str) -> TypeError | None:
    expected = _misfit(p, u)
    if expected is None:
        return None
    return type_error(
        "an update does not fit the value that it updates",
        where=where,
        expected=expected,
        got=f"{short(u)} for {short(p)}",
        instead="give None where nothing should change",
    )


def _sum(p: Any, u: Any) -> jax.Array:
    """`p + u`, computed in the wider dtype of the two, then cast to the dtype of `p`, and weak if `p` is."""
    refusal = _refusal(p, u, "apply_updates(model, updates)")
    if refusal is not None:
        raise refusal
    p, u = jnp.asarray(p), jnp.asarray(u)
    with jax.numpy_dtype_promotion("standard"):
        if not jax.typeof(p).weak_type:
            return (p + u).astype(p.dtype)
        # `astype` would make the type strong, and another type is compiled again. Setting all entries of a weak array
        # keeps it weak.
        strong = jax.lax.convert_element_type(p, p.dtype)
        return p.at[...].set((strong + u).astype(p.dtype))


@jax.jit
def _sums(ps: list[Any], us: list[Any]) -> list[jax.Array]:
    return list(map(_sum, ps, us))


def _add(ps: list[Any], us: list[Any]) -> list[jax.Array]:
    if not trace_state_clean():
        return list(map(_sum, ps, us))
    try:
        return _sums(ps, us)
    except (TypeError, ValueError):
        # One program cannot take arrays on different devices, as those of one model may be.
        return list(map(_sum, ps, us))


def _align(model: Any, updates: Any) -> list[Any]:
    """An update, or a marker for none, for every leaf of the model (None included); `updates` may mark a whole part."""
    steps, steps_def = jtu.tree_flatten(updates, is_leaf=is_missing)
    if steps_def == jtu.tree_structure(model, is_leaf=is_none):
        return steps
    try:
        parts = [flatten_none_is_leaf(part)[0] for part in steps_def.flatten_up_to(model)]
        bad = next(
            (u for u, p in zip(steps, parts, strict=True) if not (is_missing(u) or len(p) == 1)),
            None,
        )
        problem = None if bad is None else f"{short(bad)} for a whole part of the model"
    except (ValueError, TypeError, KeyError) as error:
        parts, problem = [], str(error)
    if problem is not None:
        raise value_error(
            "the updates do not have the structure of the model",
            where="apply_updates(model, updates)",
            expected="the structure of the model, with NoGradient or None where nothing should change",
            got=f"{diff_text(model, updates, leaves='ignore')}\n({problem})",
            instead="compute them from this model, for example with optax or jax.tree.map",
        )
    return [step for step, part in zip(steps, parts, strict=True) for _ in part]


def _refuse_frozen(model: Any, leaves: list[Any], moved: list[int]) -> None:
    """Refuses updates of frozen arrays: an optimiser state made from the whole model would apply weight decay there."""
    marks = iter(frozen_leaves(model))
    frozen = [leaf is not None and next(marks) for leaf in leaves]
    i = next((i for i in moved if frozen[i]), None)
    if i is not None:
        path = jtu.tree_flatten_with_path(model, is_leaf=is_none)[0][i][0]
        raise type_error(
            "an update was given for a frozen array",
            where=path_text(path, "updates"),
            expected="NoGradient() or None for buffers and for arrays frozen by `vernal.freeze`",
            got=f"an update of {short(leaves[i])}",
            instead="gradients from vernal.filter_grad, and optimiser states made from vernal.params(model); "
            "to change it anyway, vernal.unfreeze or vernal.tree_at",
        )


def apply_updates(model: Any, updates: Any) -> Any:
    """Adds updates to a model.

    Every sum has the type of the model's leaf, so that a compiled step is not compiled again: its dtype, also if that
    of the update is wider (a float32 update of bfloat16 weights), and its weak type (`jnp.array(1.0)`), which
    `optax.apply_updates` loses.

    Args:
        model: any pytree.
        updates: a tree of the same structure: the number or array to add to each leaf, or
            `vernal.NoGradient` or None for a leaf, or a whole part, that stays as it is.

    Returns:
        The updated model.

    Raises:
        ValueError: if the structures differ.
        TypeError: for an update that is neither a scalar nor of the shape of its leaf, whose dtype the leaf cannot
            hold (a float for an integer), or whose leaf is not an array of numbers; for an update of a frozen array
            (see `vernal.freeze`).

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> vernal.apply_updates({"w": jnp.ones(2), "name": "a"}, {"w": jnp.array([0.5, -0.5]), "name": None})
        {'name': 'a', 'w': Array([1.5, 0.5], dtype=float32)}
    """
    leaves, treedef = flatten_none_is_leaf(model)
    steps, steps_def = flatten_none_is_leaf(updates)
    if steps_def != treedef:
        steps = _align(model, updates)
    moved = [i for i, step in enumerate(steps) if not is_missing(step)]
    _refuse_frozen(model, leaves, moved)
    try:
        sums = _add([leaves[i] for i in moved], [steps[i] for i in moved])
    except TypeError:
        paths = [path for path, _ in jtu.tree_flatten_with_path(model, is_leaf=is_none)[0]]
        for i in moved:
            refusal = _refusal(leaves[i], steps[i], path_text(paths[i], "updates"))
            if refusal is not None:
                raise refusal from None
        raise
    for i, new in zip(moved, sums, strict=True):
        leaves[i] = new
    return treedef.unflatten(leaves)
