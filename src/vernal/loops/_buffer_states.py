"""What has happened to each element of a buffer: nothing, a read, a write. Recorded only under `debug_buffers`.

The state of a buffer is an array of small integers that is sown (see `harvest`), because a read cannot return a new
state beside its value, and may be inside any transformation.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._ground import batch_axis_in_front, new_primitive
from ..harvest import planted, sow
from ..show import message
from ..transforms import batch_text, fail_if, gathered

_READ, _WRITTEN, _FAILED = 1, 2, np.iinfo(np.int8).max


def has_failed(state: Any) -> Any:
    """Whether a check on this state has failed, in a program that went on: bool[]."""
    return jnp.any(state == _FAILED)


def written_now(state: Any) -> Any:
    """The elements written so far; None without a state."""
    return None if state is None else planted(state) == _WRITTEN


def note_read(state: Any, known: Any, index: Any, value: Any) -> Any:
    """Records that an element is read, and ends the program if it was written in a later version of the buffer.

    Args:
        state: the state of the buffer, or None.
        known: the elements that were written when the buffer was made.
        index: the index that is read.
        value: what was read.

    Returns:
        The value.
    """
    if state is None:
        return value
    before = planted(state)
    old = (before[index] == _WRITTEN) & ~known[index]
    after = _union_p.bind(before, before.at[index].max(_READ, mode="clip"))
    # Only the states are used after the loop, so the check must reach them too.
    value, after = fail_if([value, after], jnp.any(old), explain=_OLD)
    return sow(state, after, value)


def note_write(state: Any, index: Any, value: Any, pred: Any) -> Any:
    """Records that an element is written, and ends the program if it was read or written before.

    Args:
        state: the state of the buffer, or None.
        index: the index that is written.
        value: what is written.
        pred: whether it is written, or None if it always is.

    Returns:
        The value.
    """
    if state is None or not state.size:
        return value
    before = planted(state)
    times = (
        jnp.zeros(before.shape, jnp.int32)
        .at[index]
        .add(1 if pred is None else pred.astype(jnp.int32))
    )
    wrong = (times > 1) | ((times > 0) & (before > 0))
    # Gathered, because the buffer may be split over a mesh and `place` is one number.
    place = jnp.argmax(gathered(wrong))
    shape = before.shape
    found = jnp.ravel(gathered(before))[place]

    def explain(failing: Any, place: Any, found: Any) -> str:
        place, found = (int(x[failing].flat[0]) for x in (place, found))
        index = tuple(map(int, np.unravel_index(place, shape)))
        return _explanation(index, found) + batch_text(failing)

    value, after = fail_if(
        [value, jnp.where(times > 0, jnp.int8(_WRITTEN), before)],
        jnp.any(wrong),
        place,
        found,
        explain=explain,
    )
    return sow(state, after, value)


def _explanation(index: tuple[int, ...], found: int) -> str:
    did = {_READ: "after it was read", _WRITTEN: "twice"}.get(found, "twice by a single write")
    return message(
        f"an element of a buffer is written {did}",
        where=f"buffer.at[index].set(value), at index {list(index)}",
        expected="an element that is written at most once, and read only after that",
        got=f"an element that is written {did}",
        instead="leave an array whose elements are overwritten out of `buffers`",
    )


_OLD = message(
    "an element of a buffer is read before it is written",
    where="buffer[index]",
    expected="a read from the buffer that the last `.set` returned",
    got="a read from an older version of the buffer, in whose place the derivative sees the newer one",
    instead="use the buffer that `.set` returns; leave an array whose elements are overwritten out of `buffers`",
)


def _union_batch(axis: Any, args: Any, dims: Any) -> tuple[Any, Any]:
    before, after = args
    if dims[0] is None:
        # The elements of a map in the body share the buffer.
        return _union_p.bind(before, after if dims[1] is None else after.max(dims[1])), None
    both = (batch_axis_in_front(axis, x, d) for x, d in zip(args, dims, strict=True))
    return _union_p.bind(*both), 0


# The state after a read: the second operand. Where a batch shares the buffer, it has the reads of all elements.
_union_p = new_primitive("union_of_reads", lambda before, after: after, _union_batch)
