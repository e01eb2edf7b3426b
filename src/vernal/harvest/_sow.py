"""Slots: arrays that a function reads and overwrites, as two operations in its program.

`planted` reads the latest value of a slot. `sow` sets it, and returns its other operand, which the function continues
with: this ties the operation to its place in the program. Without `reap`, `planted` is the identity, and running a
`sow` is an error. `reap` (see `_reap.py`) turns a program with both into one that returns the new values.

A slot is identified by where its value comes from, not by a name: the operand of `planted` and `sow` is the old value.
The batching rule of `vmap` therefore gives the new value the layout of the old one, and `reap` finds the array that is
meant by following the operand back through the program.

Neither has a derivative with respect to the slot. Both record the program that they were traced into: JAX assumes that
operations are pure, and may since have moved a `planted` out of its loop (see `_slots.py`).
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeVar

import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import current_program, current_scope, new_primitive, strong
from ..modules import note_of_place
from ..primitives import register_impl_finalisation
from ..show import diff_text, message, value_error
from ..trees import is_array_like, split

T = TypeVar("T")


def _planted(slot: Any, program: int) -> Any:
    del program
    return slot


def _planted_batch(axis: Any, args: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    del axis
    return planted_p.bind(*args, **params), dims[0]


planted_p = new_primitive("planted", _planted, _planted_batch)
register_impl_finalisation(planted_p)


def parts_of_sow(args: Any, n: int) -> tuple[list[Any], list[Any], list[Any]]:
    """The arguments of a `sow` (or what belongs to each) in three parts: the new values, the slots, and the rest."""
    return list(args[:n]), list(args[n : 2 * n]), list(args[2 * n :])


def _not_reaped(where: str, note: str) -> RuntimeError:
    error = RuntimeError(
        message(
            "the new value of a state would be lost",
            where=where,
            expected="a caller that keeps the new state of the layer",
            instead="y, model = vernal.nn.apply(model, x) for a whole model; y, state = layer(x, state) with "
            "vernal.nn.make_with_state; or vernal.nn.inference_mode(model), with which layers that have a field "
            "`inference` leave their state unchanged",
        )
    )
    if note:
        error.add_note(note)
    return error


def _through(*args: Any, n: int, where: str, note: str, needed: bool, program: int) -> list[Any]:
    del program
    if needed:
        raise _not_reaped(where, note)
    return parts_of_sow(args, n)[2]


def _sow_batch(
    axis: Any, args: Any, dims: Any, *, n: int, where: str, **params: Any
) -> tuple[Any, Any]:
    values, slots, rest = parts_of_sow(args, n)
    of_values, of_slots, of_rest = parts_of_sow(dims, n)
    for i, (value, slot) in enumerate(zip(of_values, of_slots, strict=True)):
        if slot is None and value is not None:
            raise value_error(
                "the elements of `jax.vmap` disagree about a state that they share",
                where=where,
                expected="one new value for all elements, or a separate state for each",
                got=f"a new value that differs along axis {axis.name!r}"
                if isinstance(axis.name, str)
                else "a new value that differs between elements",
                instead="give the layer and `jax.vmap` the same `axis_name`; or call the model on the whole batch, "
                "without `jax.vmap`; or map `vernal.nn.apply` itself, with one model for each element",
            )
        if slot is not None:
            if value is None:
                values[i] = jnp.broadcast_to(jnp.expand_dims(values[i], slot), jnp.shape(slots[i]))
            else:
                values[i] = jnp.moveaxis(values[i], value, slot)
    out = sow_p.bind(*values, *slots, *rest, n=n, where=where, **params)
    return out, of_rest


_reaping: contextvars.ContextVar[bool] = contextvars.ContextVar("reaping", default=False)


@contextlib.contextmanager
def reaping() -> Iterator[None]:
    """The context in which a program is traced whose new slot values are kept."""
    token = _reaping.set(True)
    try:
        yield
    finally:
        _reaping.reset(token)


def _sow_jvp(
    primals: Any, tangents: Any, *, n: int, where: str, note: str, needed: bool, **params: Any
) -> tuple[Any, Any]:
    # Here, not when it is run: if the derivative does not need the results, JAX drops the operation.
    if needed and not _reaping.get():
        raise _not_reaped(where, note)
    out = sow_p.bind(*primals, n=n, where=where, note=note, needed=needed, **params)
    return out, list(tangents[2 * n :])


sow_p = new_primitive(
    "sow",
    _through,
    _sow_batch,
    jvp=_sow_jvp,
    abstract=lambda *args, n, **params: list(args[2 * n :]),
    multiple_results=True,
)


def planted(slot: T) -> T:
    """The latest value of a slot: inside `reap` what was sown last, otherwise `slot` itself.

    Args:
        slot: a tree of arrays. (Leaves that are not arrays are returned as they are.)

    Returns:
        A tree of the same structure, shapes and dtypes. Its derivative with respect to `slot` is zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.harvest import planted
        >>> planted(jnp.array([1, 2]))
        Array([1, 2], dtype=int32)
    """
    arrays, rest = split(slot)
    return rest.fill([planted_p.bind(x, program=current_program()) for x in arrays])


def sow(
    slot: Any, value: Any, through: T, *, needed: bool = True, where: str = "vernal.harvest.sow"
) -> T:
    """Sets a slot, for everything that comes later in the function, and for the caller of `reap`.

    It also works inside `jax.jit`, `jax.lax.scan`, `jax.lax.cond`, `jax.checkpoint`, `jax.grad`, ... in the function.
    Under `jax.vmap` the slot is either mapped, and each element sets its own, or not mapped, and then the new value
    must be the same for all elements (a mean over the axis, for instance).

    Args:
        slot: a tree of arrays: one that was given to the function as a slot, or a part of one (indexed, sliced,
            reshaped, transposed or cast).
        value: the new value, with the same structure, shapes and dtypes. No derivative passes through it.
        through: a tree with at least one array in it: it ties the new value to a place in the program.
        needed: whether it is an error if the value is lost, such as outside of `reap`.
        where: what error messages name as the place outside of any `jax.named_scope`.

    Returns:
        `through`. Continue with this instead of the argument.

    Raises:
        ValueError: if `value` differs from `slot` in structure, shape or dtype; if there is no array in `through`;
            if the elements of `jax.vmap` disagree about a slot that is not mapped.
        RuntimeError: when it is run or differentiated outside of `reap`, if `needed`.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.harvest import planted, reap, sow
        >>> def average(count_and_sum, x):
        ...     count, total = planted(count_and_sum)
        ...     new = count + 1, total + x
        ...     return sow(count_and_sum, new, new[1] / new[0])
        >>> y, slots = reap(average)((jnp.array(1.0), jnp.array(2.0)), jnp.array(4.0))
        >>> y, slots
        (Array(3., dtype=float32), (Array(2., dtype=float32), Array(6., dtype=float32)))
    """
    where = current_scope() or where
    slot, value = _arrays_in(slot), _arrays_in(value)
    (old, structure), (new, new_structure) = split(slot), split(value)
    alike = all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(old, new, strict=False))
    if structure != new_structure or not alike:
        raise value_error(
            "the new value of a state has another structure, shape or dtype than the old one",
            where=where,
            expected="the same structure, shapes and dtypes as before",
            got=diff_text(slot, value, weak_type=False, root="value"),
            instead="cast it with `.astype`, and keep the structure and shapes",
        )
    arrays, rest = split(through)
    if not arrays:
        raise value_error(
            "`through` must contain an array, to which the new value of the state is tied",
            where=where,
            expected="a tree with at least one array, whose result the function uses afterwards",
            got=repr(through),
            instead="y = variable.update(value, y), with an array y that the layer goes on with"
            if where == "Variable.update"
            else "y = sow(slot, value, y), and then use y",
        )
    # A compiled program has left the layer when it fails. Inside `reap`, nothing is lost.
    note = note_of_place() if needed and not _reaping.get() else ""
    params = {"where": where, "note": note, "needed": needed, "program": current_program()}
    return rest.fill(sow_p.bind(*new, *old, *arrays, n=len(new), **params))


def _arrays_in(tree: Any) -> Any:
    """The tree with JAX arrays in place of numbers and NumPy arrays."""
    return jtu.tree_map(lambda x: strong(x) if is_array_like(x) else x, tree)
