"""Buffers: arrays that a loop fills one location at a time, without ever copying them.

The difficulty: a loop that saves something in every step carries a large array, and each step changes
a small part of it. Reverse mode saves the carry at checkpoints and computes steps again; with that
array in the carry, each checkpoint would hold all of it, and each step of a vmapped loop would
select all of it.

The plan: such an array is not an ordinary part of the carry but a `Buffer`, which can be written in
place, once at each location, and read where it has been written. Then

* the contents that a step has seen are still there after the loop, so a step that is computed again
  (a *replay*) is given the final buffer and skips its writes;
* a write is linear in the value, so its tangent is written to the tangent of the buffer, and its
  cotangent read from the cotangent of the buffer, also in place;
* a finished element of a batch writes back what is there already.

Glossary: *active*: whether this element of the batch still runs (None: always). *replay*: whether
the array holds the final contents.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from ..primitives import borrow_if_vmap, linear_call, select_if_vmap, unvmap_any
from ..show import short, type_error
from ..transforms import call_with_jvp, is_zero, zeros_like
from ..trees import Rest, is_array, split
from ._buffer_states import note_read, note_write, written_now

T = TypeVar("T")


class Active(NamedTuple):
    """Whether an element of a batch runs.

    Attributes:
        now: whether it makes this step.
        ever: whether it makes any step. An element that makes none reads what another one reads (see `borrow_if_vmap`).
    """

    now: Any
    ever: Any


def both(a: Active | None, b: Active | None) -> Active | None:
    """Whether an element runs in both of two loops; None means that it always runs."""
    if a is None or b is None:
        return b if a is None else a
    return Active(a.now & b.now, a.ever & b.ever)


class Buffer:
    """An array in the carry of a loop that is filled in place. `cond` and `body` get a buffer for each
    array that `buffers` selects.

    Read with `buffer[index]`, and write with `buffer.at[index].set(value, pred=True)`, which returns the
    new buffer. It also has `shape`, `dtype`, `ndim` and `size`. Write each location at most once, and
    read it only after it is written, or if it is never written. Otherwise the derivative is wrong, and
    only `debug_buffers` checks that.

    Loops make buffers. An inner loop may take one as a part of its carry.

    Args:
        array: the contents.
        active: whether writes and reads count, or None if they always do.
        replay: whether the array has its final contents, so that writes are skipped.
        state: what has happened to each location, if that is recorded.
        known: the locations that were written when this buffer was made, if that is recorded.
    """

    __slots__ = ("_active", "_array", "_known", "_replay", "_state")

    def __init__(
        self,
        array: Any,
        active: Active | None = None,
        replay: bool = False,
        state: Any = None,
        known: Any = None,
    ):
        self._array = array
        self._active = active
        self._replay = replay
        self._state = state
        self._known = known

    def holding(self, array: Any) -> "Buffer":
        """This buffer with other contents, and with the locations written so far."""
        return Buffer(array, self._active, self._replay, self._state, written_now(self._state))

    def inside(self, array: Any, active: Active | None, replay: bool) -> "Buffer":
        """This buffer as an inner loop sees it."""
        active, replay = both(self._active, active), self._replay or replay
        return Buffer(array, active, replay, self._state, written_now(self._state))

    @property
    def contents(self) -> Any:
        """The whole array."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._array.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the array."""
        return self._array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._array.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._array.size

    def __getitem__(self, index: Any) -> Any:
        value = note_read(self._state, self._known, index, self._array[index])
        return value if self._active is None else borrow_if_vmap(self._active.ever, [value])[0]

    @property
    def at(self) -> "_At":
        """`buffer.at[index].set(value)` writes, as for arrays."""
        return _At(self)

    def __repr__(self) -> str:
        return f"Buffer({short(self._array)})" if is_array(self._array) else "Buffer(...)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(jax.Array, name):
            raise AttributeError(f"'Buffer' object has no attribute {name!r}")
        raise _refusal(f".{name}")


def _refusal(operation: str) -> TypeError:
    return type_error(
        f"a loop buffer does not support `{operation}`",
        where="the `cond` or `body` of a loop, in a part of the carry that `buffers` selects",
        expected="buffer[i], buffer.at[i].set(x), and its shape, dtype, ndim, size",
        got=operation,
        instead="read elements with buffer[i], and compute with those; or leave the array out of `buffers`",
    )


def _refuse(name: str) -> Any:
    def refused(self: Buffer, *args: Any, **kwargs: Any) -> Any:
        raise _refusal(name)

    refused.__name__ = name
    return refused


_OPERATORS = """add radd sub rsub mul rmul matmul rmatmul truediv rtruediv floordiv rfloordiv mod rmod
divmod rdivmod pow rpow lshift rlshift rshift rrshift and rand or ror xor rxor neg pos abs invert lt
le gt ge eq ne bool int float complex index iter len contains setitem array jax_array""".split()
for _name in _OPERATORS:
    setattr(Buffer, f"__{_name}__", _refuse(f"__{_name}__"))
# Setting `__eq__` on a finished class does not change its hash.
Buffer.__hash__ = object.__hash__


def _again(array: Any, active: Any, state: Any, known: Any, replay: bool) -> Buffer:
    return Buffer(array, active, replay, state, known)


jtu.register_pytree_with_keys(
    Buffer,
    lambda b: (
        (
            (jtu.GetAttrKey("contents"), b._array),
            (jtu.GetAttrKey("active"), b._active),
            (jtu.GetAttrKey("state"), b._state),
            (jtu.GetAttrKey("known"), b._known),
        ),
        b._replay,
    ),
    lambda replay, children: _again(*children, replay=replay),  # pyright: ignore[reportCallIssue] (they are four)
    lambda b: ((b._array, b._active, b._state, b._known), b._replay),
)


class _At:
    """`buffer.at`, and with an index `buffer.at[index]`."""

    __slots__ = ("_buffer", "_index")

    def __init__(self, buffer: Buffer, index: Any = ...):
        self._buffer = buffer
        self._index = index

    def __getitem__(self, index: Any) -> "_At":
        return _At(self._buffer, index)

    def set(self, value: Any, *, pred: Any = True) -> Buffer:
        """The buffer with `value` written at the index, if `pred` holds.

        Args:
            value: what to write. Its shape must broadcast to the indexed shape, and its dtype
                promote to the buffer's.
            pred: bool[], or a Python bool: whether to write.

        Returns:
            The new buffer, to use from now on.

        Raises:
            TypeError: if the shape or dtype of `value` does not fit.
        """
        array, index = self._buffer.contents, self._index
        value = _fitting(value, array, index)
        mask = None if pred is True else jnp.asarray(pred), self._buffer._active
        value = note_write(self._buffer._state, index, value, mask[0])
        if self._buffer._replay:
            return self._buffer.holding(_written_already(array, index, value, mask))
        return self._buffer.holding(_written(array, index, _masked(mask, value, array[index])))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"'_At' object has no attribute {name!r}")
        raise _refusal(f".at[...].{name}")


def _fitting(value: Any, array: Any, index: Any) -> Any:
    """The value, with the shape and dtype of the elements that it replaces."""
    place = jax.eval_shape(lambda array: array[index], array)
    value = jnp.asarray(value)
    with jax.numpy_dtype_promotion("standard"):
        fits = value.dtype == array.dtype or jnp.result_type(value, array) == array.dtype
        can_broadcast = value.ndim <= place.ndim and all(
            n in (1, m) for n, m in zip(value.shape[::-1], place.shape[::-1], strict=False)
        )
    if not fits or not can_broadcast:
        raise type_error(
            "a value does not fit the elements of the buffer that it is written to",
            where="buffer.at[index].set(value)",
            expected=f"{short(place)}, or a value that can be promoted and broadcast to it",
            got=short(value),
            instead="create the buffer with the dtype and shape of the values it will hold",
        )
    if value.dtype != array.dtype:
        value = value.astype(array.dtype)
    if value.shape == place.shape:
        return value
    sharding = jax.typeof(array[index]).sharding
    return jnp.broadcast_to(
        value, place.shape, out_sharding=None if sharding.mesh.empty else sharding
    )


def _masked(mask: Any, value: Any, there: Any) -> Any:
    """The value where it is written, otherwise what is there."""
    pred, active = mask
    if pred is not None:
        value = jax.lax.select(pred, value, there)
    return value if active is None else select_if_vmap(active.now, value, there)


def _written(array: Any, index: Any, value: Any) -> Any:
    """The array with a value written. No location is written twice, not even by one write; only then
    is a write linear in the value."""
    return array.at[index].set(value, unique_indices=True)


def _written_already(array: Any, index: Any, value: Any, mask: Any) -> Any:
    """A write in a replay: the array stays unchanged, and the tangent is written.

    The transpose reads the cotangent and leaves zero in its place. JAX's transpose of a write does
    that in two independent operations, and to order them the compiler copies the whole cotangent in
    every step (a thousand times slower). So this has its own transpose, in which the zero is computed
    from the value that was read, and can only be written afterwards.
    """
    dynamic, rest = split(index)

    def put(residuals: Any, tangents: Any) -> Any:
        (mask, dynamic), (array, value) = residuals, tangents
        index = rest.fill(dynamic)
        return _written(array, index, _masked(mask, value, array[index]))

    def take(residuals: Any, cotangent: Any) -> Any:
        mask, dynamic = residuals
        if is_zero(cotangent):
            return None, None
        there = _read_once(cotangent, dynamic, rest)
        zero = jnp.where(jnp.isfinite(there), 0 * there, 0)
        left = _written(cotangent, rest.fill(dynamic), _masked(mask, zero, there))
        return left, _masked(mask, there, zero)

    def write(array: Any, value: Any, residuals: Any) -> Any:
        return array

    def rule(primals: Any, tangents: Any) -> Any:
        # With this rule again, so that the derivative of the derivative is right too.
        out = call_with_jvp(write, rule, *primals)
        if all(isinstance(dot, SymbolicZero) for dot in tangents[:2]):
            return out, SymbolicZero.from_primal_value(out)
        dots = [
            zeros_like(x) if isinstance(dot, SymbolicZero) else dot
            for x, dot in zip(primals[:2], tangents[:2], strict=True)
        ]
        return out, linear_call(put, take, primals[2], tuple(dots))

    return call_with_jvp(write, rule, array, value, (mask, dynamic))


def _read_once(array: Any, dynamic: list[Any], rest: Rest) -> Any:
    """The elements at an index, zero where that is out of bounds, in an operation that is not repeated.

    The compiler repeats a cheap operation at every use of its result, and so would read elements that
    may have been overwritten by then. It does not repeat a branch. The branch stays because its
    condition depends on the index: it is false only for the least integer, which is out of bounds
    anyway.
    """

    def read(array: Any, dynamic: list[Any]) -> Any:
        return array.at[rest.fill(dynamic)].get(mode="fill", fill_value=0)

    def nothing(array: Any, dynamic: list[Any]) -> Any:
        return zeros_like(read(array, dynamic))

    if not dynamic:
        return read(array, dynamic)
    index = dynamic[0].astype(jnp.int32)
    exists = unvmap_any(index > jnp.iinfo(jnp.int32).min)
    return jax.lax.cond(exists, read, nothing, array, dynamic)


def buffer_at_set(buffer: Any, item: Any, x: Any, *, pred: Any = True) -> Any:
    """`buffer.at[item].set(x)` where `pred` holds, for a buffer of a loop or an array.

    Args:
        buffer: a `Buffer`, or an array.
        item: the index.
        x: what to write there.
        pred: bool[], or a Python bool: whether to write.

    Returns:
        A `Buffer` or an array, like `buffer`. An index that is out of bounds writes nothing.

    Raises:
        TypeError: if the shape or dtype of `x` does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.loops import buffer_at_set
        >>> buffer_at_set(jnp.zeros(3), 1, 5.0, pred=jnp.array(True))
        Array([0., 5., 0.], dtype=float32)
    """
    if isinstance(buffer, Buffer):
        return buffer.at[item].set(x, pred=pred)
    mask = None if pred is True else jnp.asarray(pred), None
    return buffer.at[item].set(_masked(mask, _fitting(x, buffer, item), buffer[item]))


class _MaybeMeta(type):
    """Makes `isinstance(x, MaybeBuffer[T])` look at the contents of a buffer."""

    _kind: Any = object

    def __getitem__(cls, kind: Any) -> Any:
        return _MaybeMeta(f"MaybeBuffer[{getattr(kind, '__name__', kind)}]", (), {"_kind": kind})

    def __instancecheck__(cls, instance: Any) -> bool:
        held = instance.contents if isinstance(instance, Buffer) else instance
        return isinstance(held, cls._kind)


if TYPE_CHECKING:
    MaybeBuffer: TypeAlias = T | Buffer
else:

    class MaybeBuffer(metaclass=_MaybeMeta):
        """`MaybeBuffer[T]`: the annotation for a `T`, or a buffer of a loop that holds one.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxtyping import Array, Float
            >>> from vernal.loops import Buffer, MaybeBuffer
            >>> kind = MaybeBuffer[Float[Array, " n"]]
            >>> isinstance(jnp.zeros(3), kind), isinstance(Buffer(jnp.zeros(3)), kind)
            (True, True)
            >>> isinstance(Buffer(jnp.zeros((3, 2))), kind)
            False
        """
