"""What is kept between the two halves of a `filter_custom_vjp` rule.

The difficulty: a traced program (a `jit` that is called in two places, the body of a scan) has one
`custom_vjp` in it, which JAX may run several times, each time with other inputs perturbed, before it
runs any of them backwards. JAX remembers one structure of the residuals: that of the last run. If
another run had other residuals, or something static beside them, its way back gets those of the
last, and fails, or gives a wrong gradient. Ours differ: what is perturbed is static, and rules keep
only what they need for it.

The plan: JAX sees residuals that look the same for every run, a list of leaves whose number depends
on no run, and we remember the rest for each of them. The first leaf is an empty array of shape
`(0, n)`: shapes are static and stay with their array wherever JAX takes it, so that the way back
reads from it the number of the run that it belongs to. The list is filled up with scalars.

Invariants: residuals that are inputs are named, not stored, since JAX stores inputs by reference and
remembers for the last run which ones they were. Under `vmap` it also remembers which of the leaves
have the mapped axis; so either all have it or none, except the first, which never has. No run holds
an array.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._hoisting import RestOf, flatten_hoisted

# JAX sees this many residuals, or twice or four times as many and so on where they are not enough.
_LEAST = 16


class _Run(NamedTuple):
    static: Any
    rest_of: RestOf
    # How many of the values are arrays of the tree; the others are hidden in its functions.
    visible: int
    # For every value the number of the input that it is, or None.
    inputs: tuple[int | None, ...]


def _mapped_alike(leaves: list[Any], inputs: Sequence[Any]) -> list[Any]:
    """The same leaves, which under `vmap` have the mapped axis if any of the inputs has it.

    Each is selected from two that are the same. Nothing of this is left in a compiled program.
    """
    if not inputs:
        return leaves
    which = functools.reduce(jnp.logical_or, [jnp.any(x != x) for x in inputs])
    return [x if x.dtype == jax.dtypes.float0 else jax.lax.select(which, x, x) for x in leaves]


class Residuals:
    """The residuals of one traced call, for any number of runs."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []

    def pack(self, tree: Any, static: Any, inputs: Sequence[Any], again: bool) -> list[Any]:
        """Makes leaves for JAX, always as many, of the residuals of one run.

        Args:
            tree: what the rule wants to keep.
            static: what else is needed on the way back. It must hold no array.
            inputs: arrays that are kept anyway.
            again: whether the call is part of a program, so that there may be more runs.
        """
        arrays, hidden, rest_of = flatten_hoisted(tree)
        values = [*arrays, *hidden]
        numbers = {id(x): i for i, x in enumerate(inputs)}
        known = tuple(numbers.get(id(x)) for x in values)
        stored = [x for x, number in zip(values, known, strict=True) if number is None]
        places = _LEAST
        while places < len(stored):
            places *= 2
        run = np.zeros((0, len(self.runs)), np.float32)
        self.runs.append(_Run(static, rest_of, len(arrays), known))
        leaves = [*stored, *[np.zeros((), np.float32)] * (places - len(stored))]
        return [run, *(_mapped_alike(leaves, inputs) if again else leaves)]

    def unpack(self, leaves: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
        """The `(tree, static)` that `pack` was given, from what it returned and the same inputs."""
        run = self.runs[leaves[0].shape[1]]
        stored = iter(leaves[1:])
        values = [next(stored) if number is None else inputs[number] for number in run.inputs]
        return run.rest_of(values[run.visible :]).fill(values[: run.visible]), run.static
