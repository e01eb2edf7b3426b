"""Layers of half precision give Equinox's numbers, and load its files."""

import io

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.compat import equinox as compat

from ._same import same_as_equinox

KEY = jax.random.key(0)


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_spectral_norm_of_half_precision(dtype):
    def made(eqx):
        layer = eqx.nn.Linear(8, 3, dtype=dtype, key=KEY)
        return eqx.nn.make_with_state(eqx.nn.SpectralNorm)(layer, "weight", key=KEY)

    theirs, ours = made(equinox), made(compat)
    arrays = [jax.tree.leaves(equinox.filter(one, equinox.is_array)) for one in (ours, theirs)]
    for a, b in zip(*arrays, strict=True):
        assert a.dtype == b.dtype == dtype
        # Equinox iterates in half precision.
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=0.02)
    file = io.BytesIO()
    equinox.tree_serialise_leaves(file, theirs)
    file.seek(0)
    layer, state = compat.tree_deserialise_leaves(file, ours)
    y, state = layer(jnp.ones(8, dtype), state)
    assert y.dtype == dtype
    theirs = theirs[0](jnp.ones(8, dtype), theirs[1])[0]
    np.testing.assert_allclose(np.float32(y), np.float32(theirs), rtol=0.02)
