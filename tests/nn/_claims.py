"""Claims about all rows of a table of layers, at the price of few compilations.

Compiling is what such a table spends its time with. So a claim is a function of a `Case` that returns two things which
must agree; `Claims` makes a test of each, and computes all claims about one row by one program in each precision.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal


@dataclasses.dataclass(frozen=True)
class Case:
    """A row, made and with inputs, in one precision.

    Attributes:
        row: the row.
        layer: its layer.
        ensemble: three layers of it, stacked; the second is `layer`.
        xs: examples, in a batch of shape (2, 3).
        keys: a random key for each.
        seed: for further random numbers.
    """

    row: Any
    seed: tuple[int, int]
    layer: Any
    ensemble: Any
    xs: jax.Array
    keys: jax.Array

    @property
    def x(self):
        return self.xs[0, 0]

    @property
    def key(self):
        return self.keys[0, 0]

    @functools.cached_property
    def y(self):
        return self.layer(self.x, key=self.key)


def cast(tree: Any, dtype: Any) -> Any:
    """A tree with all its floating-point arrays in one precision."""
    arrays, rest = vernal.partition(tree, vernal.is_inexact_array)
    return vernal.combine(jax.tree.map(lambda a: a.astype(dtype), arrays), rest)


class Claims:
    """A decorator that makes tests of claims about rows.

    Args:
        rows: by name; each has `make`, the layer from a key, and `examples`, inputs from a NumPy generator and a batch
            shape.
    """

    def __init__(self, rows: Mapping[str, Any]):
        self.rows = rows
        self.claims: dict[str, list[Callable[[Case], Any]]] = {"float32": [], "float64": []}
        self.case = functools.cache(self._case)
        self.outcomes = functools.cache(self._outcomes)

    def _case(self, name: str, seed: int) -> Case:
        """The case of a row in single precision."""
        row = self.rows[name]
        seeds = seed, zlib.crc32(name.encode())
        # As few random numbers from JAX as possible: their programs are large.
        xs = jnp.asarray(row.examples(np.random.default_rng(seeds), (2, 3)))
        key, *keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), seeds[1]), 7)
        layer = jax.jit(row.make)(key)
        weights, rest = vernal.partition(layer, vernal.is_inexact_array)
        several = jax.tree.map(lambda a: np.stack([0.9 * a, a, 1.1 * a]).astype(a.dtype), weights)
        rest = jax.tree.map(lambda a: jnp.stack([a] * 3), rest)
        ensemble = jax.tree.map(jnp.asarray, vernal.combine(several, rest))
        return Case(row, seeds, layer, ensemble, xs, jnp.stack(keys).reshape(2, 3))

    def _outcomes(self, name: str, seed: int, dtype: str) -> tuple[Any, dict[str, Exception]]:
        """What every claim about a row returns, and the exceptions of those that failed while they were traced."""
        case = self.case(name, seed)
        problems: dict[str, Exception] = {}

        @jax.jit
        def program(given):
            traced = Case(case.row, case.seed, *given)
            found = {}
            for function in self.claims[dtype]:
                try:
                    found[function.__name__] = function(traced)
                except Exception as problem:
                    problems[function.__name__] = problem
            return found

        with jax.enable_x64(dtype == "float64"):
            given = cast((case.layer, case.ensemble, case.xs, case.keys), dtype)
            return jax.device_get(program(given)), problems

    def __call__(
        self,
        dtype: str = "float32",
        tolerance: float = 1e-5,
        about: Callable[[Any], bool] = lambda row: True,
    ) -> Callable[[Callable[[Case], Any]], Callable[..., None]]:
        """Makes a test, with the arguments `name` and `getkey`, of a function that returns two things.

        Args:
            dtype: of the weights and inputs.
            tolerance: relative and absolute.
            about: says which rows the claim is about.
        """

        def decorate(function):
            self.claims[dtype].append(function)
            names = [name for name, row in self.rows.items() if about(row)]

            @pytest.mark.parametrize("name", names)
            def test(name, getkey):
                found, problems = self.outcomes(name, getkey.seed, dtype)
                if function.__name__ in problems:
                    raise problems[function.__name__]
                first, second = found[function.__name__]
                assert jax.tree.structure(first) == jax.tree.structure(second)
                for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
                    assert a.shape == b.shape
                    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

            test.__name__ = function.__name__
            return test

        return decorate
