"""`kind="bounded"`: a while loop as nested scans, which JAX differentiates in forward and reverse mode.

A loop of at most `base**k` steps is a scan of `base` loops of at most `base**(k - 1)` steps, each
of which is skipped if the loop has ended. Each is also checkpointed: its steps are computed again
when the gradient needs them, so that at most `base` carries are kept at each of the `k` levels,
and every step is computed at most `k + 1` times.
"""

from collections.abc import Callable
from typing import Any

import jax

from ..primitives import unvmap_any
from ._lax import Count
from ._linear import with_transpose
from ._machines import Inputs, Outputs
from ._program import Arrays, Program

DEFAULT_BASE = 16
State = tuple[Any, Arrays, Arrays]


def bounded_while(program: Program, max_steps: int, base: int) -> tuple[Arrays, Arrays]:
    """Runs a loop while its condition holds, at most `max_steps` times (at least 1), in scans of `base` steps (at
    least 2); returns the final `(carry, buffers)`."""
    functions = program.functions
    z = Inputs(program.consts, program.carry, program.buffers, [])

    def bounded_loop(z: Inputs) -> Outputs:
        return scans(functions.cond, functions.step, z, max_steps, base)

    once_only = functions.once_only
    out = with_transpose(functions.cond, functions.step, bounded_loop, z, once_only=once_only)
    return out.carry, out.buffers


def scans(
    cond: Callable[..., Any], step: Callable[..., Any], z: Inputs, max_steps: int, base: int
) -> Outputs:
    """The loop, given its functions and its inputs."""
    count = Count(max_steps)

    def once(state: State) -> State:
        index, carry, buffers = state
        carry, buffers, _ = step(z.consts, carry, buffers, count.number(index), [], False)
        return count.after(index), carry, buffers

    def repeat(run: Callable[[State], State], times: int) -> Callable[[State], State]:
        # Inside a scan the compiler cannot merge the second computation with the first.
        run = jax.checkpoint(run, prevent_cse=False)

        def body(state: State, _: None) -> tuple[State, None]:
            index, carry, buffers = state
            going = cond(z.consts, carry, buffers, count.number(index))
            alive = unvmap_any(going) & count.is_left(index)
            return jax.lax.cond(alive, run, lambda state: state, state), None

        return lambda state: jax.lax.scan(body, state, length=times)[0]

    run, steps = once, 1
    while steps * base < max_steps:
        run, steps = repeat(run, base), steps * base
    run = repeat(run, -(-max_steps // steps))
    _, carry, buffers = run((count.start, z.carry, z.buffers))
    return Outputs(carry, buffers, [])
