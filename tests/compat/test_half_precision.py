"""Layers of half precision give Equinox's numbers."""

import jax
import jax.numpy as jnp
import pytest

from ._same import same_as_equinox

@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_batch_norm_of_half_precision_in_inference(dtype):
    def run(eqx):
        make = eqx.nn.make_with_state(eqx.nn.BatchNorm)
        norm, state = make(2, "b", mode="batch", dtype=dtype)
        xs, axes = jnp.arange(8.0).reshape(4, 2).astype(dtype) ** 2, (0, None)
        asleep, given = [], []
        for _ in range(3):
            asleep.append(eqx.nn.inference_mode(norm)(jnp.ones(2, dtype), state)[0])
            y, state = jax.vmap(norm, axis_name="b", in_axes=axes, out_axes=axes)(xs, state)
            given.append(y)
        return asleep, given

    same_as_equinox(run)()
