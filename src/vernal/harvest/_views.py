"""Views: arrays in a program that are parts of slots.

`reap` follows the slots through a program. An array that is a slot, or was made from one by taking a part or
rearranging it, has a `View`, which reads this part of the slot, and puts a new value of the part back. So a model may
index, slice, reshape and transpose stacked layers before it calls them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._ground import pvary_p, reshard_p, stop_gradient_p
from ..transforms import explicit_mesh, placed_like, split_over

# A function from an array to a part of it, and one from the array and a new part to the new array.
Get = Callable[[Any], Any]
Put = Callable[[Any, Any], Any]


class View(NamedTuple):
    """A part of a slot.

    Attributes:
        slot: the number of the slot.
        steps: how to get from the slot to the part, and back.
    """

    slot: int
    steps: tuple[tuple[Get, Put], ...] = ()

    def then(self, get: Get, put: Put) -> "View":
        """The view of a part of this part."""
        return View(self.slot, (*self.steps, (get, put)))

    def get(self, slots: Sequence[Any]) -> Any:
        """Reads the part from the current values of all slots."""
        x = slots[self.slot]
        for get, _ in self.steps:
            x = get(x)
        return x

    def put(self, slots: list[Any], new: Any) -> None:
        """Sets the part, in the list of the current values of all slots."""
        wholes = [slots[self.slot]]
        for get, _ in self.steps[:-1]:
            wholes.append(get(wholes[-1]))
        for whole, (_, put) in zip(wholes[::-1], self.steps[::-1], strict=False):
            new = put(whole, new)
        slots[self.slot] = new


def element(view: View, index: Any) -> View:
    """The view of the entry with this index along the first axis."""

    def put(x: Any, new: Any) -> Any:
        changed = jax.lax.dynamic_update_index_in_dim(_together(x), new, index, 0)
        return placed_like(changed, jax.typeof(x))

    return view.then(
        lambda x: jax.lax.dynamic_index_in_dim(_together(x), index, 0, keepdims=False), put
    )


def _together(x: Any) -> Any:
    """The array, not split along its first axis over explicit axes of a mesh, because JAX cannot index it otherwise."""
    mesh = explicit_mesh(x)
    return x if mesh is None else split_over(x, mesh, [None, *jax.typeof(x).sharding.spec[1:]])


def _reshaped(eqn: Any, args: Sequence[Any]) -> tuple[Get, Put] | None:
    del args
    before, after = (v.aval.shape for v in (eqn.invars[0], eqn.outvars[0]))
    if np.prod(before) != np.prod(after):
        return None  # It was broadcast, not only given axes of size 1.
    if eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is not None:
        return None  # It was transposed too.
    return lambda x: jnp.reshape(x, after), lambda x, new: jnp.reshape(new, before)


def _transposed(eqn: Any, args: Sequence[Any]) -> tuple[Get, Put]:
    del args
    axes = eqn.params["permutation"]
    back = tuple(int(i) for i in np.argsort(axes))
    return lambda x: jnp.transpose(x, axes), lambda x, new: jnp.transpose(new, back)


def _cast(eqn: Any, args: Sequence[Any]) -> tuple[Get, Put]:
    del args
    before, after = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
    return lambda x: x.astype(after), lambda x, new: new.astype(before)


def _sliced(eqn: Any, args: Sequence[Any]) -> tuple[Get, Put] | None:
    del args
    starts, stops, strides = (
        eqn.params[f"{k}"] for k in ("start_indices", "limit_indices", "strides")
    )
    if strides is not None:
        return None
    return (
        lambda x: jax.lax.slice(x, starts, stops),
        lambda x, new: jax.lax.dynamic_update_slice(x, new, starts),
    )


def _dynamically_sliced(eqn: Any, args: Sequence[Any]) -> tuple[Get, Put]:
    starts, sizes = args[1:], eqn.params["slice_sizes"]
    return (
        lambda x: jax.lax.dynamic_slice(x, starts, sizes),
        lambda x, new: jax.lax.dynamic_update_slice(x, new, starts),
    )


_RULES: dict[Any, Callable[[Any, Sequence[Any]], tuple[Get, Put] | None]] = {
    lax.broadcast_in_dim_p: _reshaped,
    lax.convert_element_type_p: _cast,
    lax.dynamic_slice_p: _dynamically_sliced,
    lax.reshape_p: _reshaped,
    lax.slice_p: _sliced,
    lax.squeeze_p: _reshaped,
    lax.transpose_p: _transposed,
}
_IDENTITIES = {lax.copy_p, lax.sharding_constraint_p, pvary_p, reshard_p, stop_gradient_p}
# Operations that compute an index in the small compiled functions of `jax.numpy` and `jax.lax`.
_INDEXING = {
    lax.add_p,
    lax.clamp_p,
    lax.ge_p,
    lax.lt_p,
    lax.max_p,
    lax.min_p,
    lax.select_n_p,
    lax.sub_p,
}


def follow(eqn: Any, args: Sequence[Any], view: View) -> View | None:
    """The view of an equation's result, from that of its first argument; None if the result is not part of the slot."""
    primitive = eqn.primitive
    if primitive in _IDENTITIES:
        return view
    steps = _RULES[primitive](eqn, args) if primitive in _RULES else None
    return None if steps is None else view.then(*steps)


def only_takes_parts(jaxpr: Any) -> bool:
    """Whether a program only indexes and rearranges its argument."""
    return all(eqn.primitive in _RULES.keys() | _INDEXING for eqn in jaxpr.eqns)
