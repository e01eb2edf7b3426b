"""`kind="bounded"`: a while loop as scans inside scans, which JAX differentiates in both
directions.

A loop of at most `base**k` steps is a scan of `base` loops of at most `base**(k - 1)` steps, each
of which is skipped if the loop has ended. Each is also checkpointed: its steps are computed again
when the gradient needs them, so that at most `base` carries are kept at each of the `k` levels,
and every step is computed `k + 1` times at most.
"""

from collections.abc import Callable
from typing import Any

import jax

from ._lax import Count, goes_on
from ._linear import with_transpose
from ._machines import Inputs, Outputs
from ._program import Arrays, Program

State = tuple[Any, Arrays, Arrays]


def bounded_while(program: Program, max_steps: int, base: int) -> tuple[Arrays, Arrays]:
    """Runs a loop while its condition holds, at most `max_steps` times (at least 1), in scans of `base` steps (at
    least 2); returns the final `(carry, buffers)`."""
    functions = program.functions

    def run(z: Inputs) -> Outputs:
        given = program._replace(consts=z.consts, carry=z.carry, buffers=z.buffers)
        return Outputs(*_scans(given, max_steps, base), [])

    z = Inputs(program.consts, program.carry, program.buffers, [])
    out = with_transpose(functions.cond, functions.step, functions.traced_step, run, z)
    return out.carry, out.buffers


def _scans(program: Program, max_steps: int, base: int) -> tuple[Arrays, Arrays]:
    count = Count(max_steps)

    def step(state: State) -> State:
        index, carry, buffers = state
        made = count.number(index)
        carry, buffers, _ = program.functions.step(program.consts, carry, buffers, made, [], False)
        return count.after(index), carry, buffers

    def repeat(run: Callable[[State], State], times: int) -> Callable[[State], State]:
        # Inside a scan nothing can be merged with the second computation.
        run = jax.checkpoint(run, prevent_cse=False)

        def body(state: State, _: None) -> tuple[State, None]:
            alive = goes_on(program, count, *state)
            return jax.lax.cond(alive, run, lambda state: state, state), None

        return lambda state: jax.lax.scan(body, state, length=times)[0]

    run, steps = step, 1
    while steps * base < max_steps:
        run, steps = repeat(run, base), steps * base
    run = repeat(run, -(-max_steps // steps))
    return run((count.start, program.carry, program.buffers))[1:]
