"""`kind="lax"`: the loops of JAX."""

from typing import Any

import jax
import jax.numpy as jnp

from ..primitives import unvmap_any
from ._program import Arrays, Program


def goes_on(program: Program, index: Any, carry: Arrays, buffers: Arrays, most: int | None) -> Any:
    """Whether any element of the batch takes another step: bool[], without a batch axis."""
    runs = unvmap_any(program.functions.cond(program.consts, carry, buffers))
    return runs if most is None else runs & (index < most)


def lax_while(program: Program, max_steps: int | None) -> tuple[Arrays, Arrays]:
    """Runs a loop while its condition holds, at most `max_steps` times if that is a number; returns the final
    `(carry, buffers)`. It has no reverse mode."""

    def cond(state: Any) -> Any:
        return goes_on(program, *state, most=max_steps)

    def body(state: Any) -> Any:
        index, carry, buffers = state
        carry, buffers, _ = program.functions.step(program.consts, carry, buffers, index, [], False)
        return None if index is None else index + 1, carry, buffers

    index = None if max_steps is None else jnp.int32(0)
    return jax.lax.while_loop(cond, body, (index, program.carry, program.buffers))[1:]


def lax_scan(
    program: Program, xs: Arrays, length: int, reverse: bool, unroll: int | bool
) -> tuple[Arrays, Arrays, Arrays]:
    """Runs `length` steps over the stacks `xs`, the last first if `reverse`; returns the final `(carry, buffers,
    ys)`."""

    def body(state: Any, x: Arrays) -> Any:
        carry, buffers, y = program.functions.step(
            program.consts, state[0], state[1], None, x, False
        )
        return (carry, buffers), y

    state = program.carry, program.buffers
    state, ys = jax.lax.scan(body, state, xs, length, reverse=reverse, unroll=unroll)
    return *state, ys
