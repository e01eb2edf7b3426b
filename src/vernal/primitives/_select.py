"""A select that is there only under `vmap`.

A loop runs while its condition holds, so inside the body the condition is known to hold and there
is nothing to select. Under `vmap` the loop runs until the last element is done, and finished elements
must keep their values. `select_if_vmap` selects in the second case and costs nothing in the first.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import (
    UndefinedPrimal,
    Zero,
    batch_axis_in_front,
    instantiate_zeros,
    new_primitive,
    same,
)
from ..show import diff_text, message, path_text, short, type_error
from ..transforms import placed_like, varying_alike
from ..trees import is_array_like
from ._finalise import register_impl_finalisation


def _new(pred: Any, new: Any, old: Any) -> Any:
    del pred, old
    return new


def _batch(axis: Any, args: Any, dims: Any) -> tuple[Any, int | None]:
    if all(dim is None for dim in dims):
        return select_if_vmap_p.bind(*args), None
    pred, new, old = args
    new, old = batch_axis_in_front(axis, new, dims[1]), batch_axis_in_front(axis, old, dims[2])
    if dims[0] is None:
        # Still nothing to select; an outer `vmap` may map `pred` later.
        return select_if_vmap_p.bind(pred, new, old), 0
    select = jax.vmap(
        jax.lax.select, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name
    )
    return select(pred, new, old), 0


def _jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    pred, new, old = primals
    _, new_dot, old_dot = tangents
    out = select_if_vmap_p.bind(pred, new, old)
    if isinstance(new_dot, Zero) and isinstance(old_dot, Zero):
        return out, Zero(jax.typeof(out).to_tangent_aval())
    dots = instantiate_zeros(new_dot), instantiate_zeros(old_dot)
    return out, select_if_vmap_p.bind(pred, *dots)


def _transpose(cotangent: Any, pred: Any, new: Any, old: Any) -> tuple[None, Any, Any]:
    of_new = of_old = None
    if isinstance(cotangent, Zero):
        return None, of_new, of_old
    zeros = instantiate_zeros(Zero(jax.typeof(cotangent)))
    if isinstance(new, UndefinedPrimal):
        of_new = select_if_vmap_p.bind(pred, cotangent, zeros)
    if isinstance(old, UndefinedPrimal):
        of_old = select_if_vmap_p.bind(pred, zeros, cotangent)
    return None, of_new, of_old


select_if_vmap_p = new_primitive("select_if_vmap", _new, _batch, jvp=_jvp, transpose=_transpose)
register_impl_finalisation(select_if_vmap_p)


def select_if_vmap(pred: Any, new: Any, old: Any) -> Any:
    """Selects between two trees if `vmap` maps `pred`; otherwise returns `new`.

    Use it where `pred` is known to hold unless it belongs to a batch, as in the body of a loop that
    runs while any element of the batch is active. The value of a `pred` that no `vmap` maps is
    ignored: the compiled program has `new`, without a select.

    Args:
        pred: bool[].
        new: a tree of arrays.
        old: a tree of the same structure, with arrays of the same shapes and dtypes. Leaves that are
            not arrays must equal their counterparts in `new`. An array that is sharded differently
            over explicit mesh axes is resharded like that in `new`.

    Returns:
        A tree like `new`. It is differentiable with respect to `new` and `old`.

    Raises:
        TypeError: if `pred` is not a bool, or the trees differ in structure, shape, dtype or in a
            leaf that is not an array.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import select_if_vmap
        >>> new, old = jnp.array([1, 2]), jnp.array([3, 4])
        >>> jax.vmap(select_if_vmap)(jnp.array([True, False]), new, old)
        Array([1, 4], dtype=int32)
        >>> select_if_vmap(jnp.array(False), new, old)
        Array([1, 2], dtype=int32)
    """
    pred = jnp.asarray(pred)
    if pred.shape or pred.dtype != bool:
        raise type_error(
            "the predicate of select_if_vmap must be a scalar bool",
            where="argument `pred`",
            expected="bool[], one for each element of the batch",
            got=short(pred),
            instead="`jnp.where` to choose for each element of an array",
        )
    paths, treedef = jtu.tree_flatten_with_path(new)
    if treedef != jtu.tree_structure(old):
        raise TypeError(_disagreement(new, old))
    pairs = zip(paths, jtu.tree_leaves(old), strict=True)
    return treedef.unflatten([_select(pred, new, old, path) for (path, new), old in pairs])


def _select(pred: Any, new: Any, old: Any, path: Any) -> Any:
    if not (is_array_like(new) and is_array_like(old)):
        if same(new, old):
            return new
        raise TypeError(_disagreement(new, old, path))
    new, old = jnp.asarray(new), jnp.asarray(old)
    if new.shape != old.shape or new.dtype != old.dtype:
        raise TypeError(_disagreement(new, old, path))
    old = placed_like(old, jax.typeof(new))
    return select_if_vmap_p.bind(*varying_alike([pred, new, old]))


def _disagreement(new: Any, old: Any, path: Any = ()) -> str:
    return message(
        "the trees that select_if_vmap chooses between do not match",
        where=path_text(path, root="new"),
        expected="equal structures, shapes, dtypes and non-arrays in `new` and `old`",
        got=diff_text(new, old, weak_type=False, root="new"),
        instead="cast arrays with `.astype`, and keep the structure",
    )
