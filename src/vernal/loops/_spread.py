"""Which parts of a loop depend on the inputs that are differentiated."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from ._machines import Inputs, Outputs, at
from ._perturbation import perturbed_outputs


class Spread(NamedTuple):
    """Where there are tangents: `seeds` in the inputs of the loop, `which` in the inputs of a step,
    `out` in its outputs."""

    seeds: Inputs
    which: Inputs
    out: Outputs


def spread_of(step: Callable[..., Any], z: Inputs, seeds: Inputs) -> Spread:
    """Follows the tangents through the carry until they reach no new part of it."""

    def outputs(*flat: Any) -> list[Any]:
        consts, carry, buffers, xs = z.like(flat)
        return Outputs(*step(consts, carry, buffers, jnp.int32(0), at(xs, 0), False)).flat

    which = seeds
    while True:
        flat = perturbed_outputs(outputs, z.flat, which.flat)
        carry, buffers = len(z.carry), len(z.buffers)
        new = which._replace(
            carry=[a or b for a, b in zip(which.carry, flat[:carry], strict=True)],
            buffers=[
                a or b for a, b in zip(which.buffers, flat[carry : carry + buffers], strict=True)
            ],
        )
        if new == which:
            out = Outputs(which.carry, which.buffers, flat[carry + buffers :])
            return Spread(seeds, which, out)
        which = new
