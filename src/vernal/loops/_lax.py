"""`kind="lax"`: the loops of JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from ..primitives import unvmap_any
from ._program import Arrays, Program


class Count:
    """Counts steps up to a number of any size, in two 32-bit integers where one is too small.

    Args:
        most: the greatest number of steps, or None.
        anyway: whether to count even if `most` is None.
    """

    def __init__(self, most: int | None, anyway: bool = False):
        if most is None and anyway:
            most = _WORD**2
        self.small = most is None or most < _WORD
        zero = jnp.int32(0)
        self.start: Any = None if most is None else zero if self.small else (zero, zero)
        # No loop runs long enough to count this far.
        self.most: Any = (
            most if most is None or self.small else (min(most // _WORD, _WORD), most % _WORD)
        )

    def after(self, index: Any) -> Any:
        """The count after one more step."""
        if self.small:
            return None if index is None else index + 1
        words, rest = index
        full = rest == _WORD - 1
        return words + full.astype(jnp.int32), jnp.where(full, 0, rest + 1)

    def number(self, index: Any) -> Any:
        """The count as i32[], at most the greatest int32; None if nothing is counted."""
        if self.small:
            return index
        words, rest = index
        most = jnp.iinfo(jnp.int32).max
        return jnp.where(words < most // _WORD, words * _WORD + rest, most)

    def is_left(self, index: Any) -> Any:
        """Whether one more step may be taken."""
        if index is None:
            return True
        if self.small:
            return index < self.most
        (words, rest), (most_words, most_rest) = index, self.most
        return (words < most_words) | ((words == most_words) & (rest < most_rest))


_WORD = 2**30


def lax_while(program: Program, max_steps: int | None) -> tuple[Arrays, Arrays]:
    """Runs a loop while its condition holds, at most `max_steps` times unless that is None; returns the final
    `(carry, buffers)`. It has no reverse mode."""
    count = Count(max_steps, program.functions.checked)

    def cond(state: Any) -> Any:
        index, carry, buffers = state
        step = count.number(index)
        going = program.functions.cond(program.consts, carry, buffers, step)
        return unvmap_any(going) & count.is_left(index)

    def body(state: Any) -> Any:
        index, carry, buffers = state
        step = count.number(index)
        carry, buffers, _ = program.functions.step(program.consts, carry, buffers, step, [], False)
        return count.after(index), carry, buffers

    return jax.lax.while_loop(cond, body, (count.start, program.carry, program.buffers))[1:]


def lax_scan(
    program: Program, xs: Arrays, length: int, reverse: bool, unroll: int | bool
) -> tuple[Arrays, Arrays, Arrays]:
    """Runs `length` steps over the stacks `xs`, the last first if `reverse`; returns the final `(carry, buffers,
    ys)`."""

    def body(state: Any, x: tuple[Arrays, Any]) -> Any:
        carry, buffers, y = program.functions.step(
            program.consts, state[0], state[1], x[1], x[0], False
        )
        return (carry, buffers), y

    steps = None
    if program.functions.checked:
        steps = jnp.arange(length, dtype=jnp.int32)
        steps = steps[::-1] if reverse else steps
    state = program.carry, program.buffers
    state, ys = jax.lax.scan(body, state, (xs, steps), length, reverse=reverse, unroll=unroll)
    return *state, ys
