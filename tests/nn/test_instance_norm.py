"""`InstanceNorm`: against its definition, at the edges, and when misused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn


@pytest.mark.parametrize("spatial", [(5,), (3, 3), (2, 1, 4)])
@pytest.mark.sample(3)
def test_each_channel_is_normalised_by_itself(spatial, getkey):
    x = np.asarray(3 + 2 * jax.random.normal(getkey(), (3, *spatial)))
    rows = x.reshape(3, -1)
    expected = (rows - rows.mean(1, keepdims=True)) / np.sqrt(rows.var(1, keepdims=True) + 0.1)
    n = len(spatial)
    for layer in (nn.InstanceNorm, functools.partial(nn.GroupNorm, 3)):
        y = layer(3, eps=0.1, num_spatial_dims=n)(x)
        np.testing.assert_allclose(y, expected.reshape(x.shape), rtol=1e-5, atol=1e-5)


def test_a_batch_is_a_loop_where_all_axes_have_one_length(getkey):
    x = jax.random.normal(getkey(), (3, 3, 3, 3))
    layer = nn.InstanceNorm(3, num_spatial_dims=2)
    expected = jnp.stack([layer(image) for image in x])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(layer)(x), expected, rtol=1e-5, atol=1e-5)


def test_a_constant_input_gives_the_bias_and_finite_gradients():
    layer, x = nn.InstanceNorm(2), jnp.full((2, 5), 3.0)
    assert (layer(x) == 0).all()
    grads = jax.jit(jax.grad(lambda layer, x: (layer(x) ** 2).sum(), argnums=(0, 1)))(layer, x)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_single(dtype):
    x = (256 * jnp.arange(1, 7).reshape(2, 3)).astype(dtype)  # Their squares are no float16.
    y = nn.InstanceNorm(2)(x)
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(jnp.float32), [[-1.2247, 0, 1.2247]] * 2, atol=0.01)


def test_integers_give_floats():
    y = nn.InstanceNorm(1)(jnp.array([[1, 3]]))
    np.testing.assert_allclose(y, [[-1, 1]], atol=1e-4)


def test_training_and_inference_are_the_same(getkey):
    layer, x = nn.InstanceNorm(2), jax.random.normal(getkey(), (2, 5))
    assert (nn.inference_mode(layer)(x) == layer(x)).all()


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"(?s)`InstanceNorm`.*expected: \(channels=4, any, any\)"):
        nn.InstanceNorm(4)(jnp.ones((3, 6, 5)))
    with pytest.raises(ValueError, match=r"expected: \(channels=4, any\)"):
        nn.InstanceNorm(4)(jnp.ones(4))
    with pytest.raises(ValueError, match=r"(?s)\(channels=4, any, any\).*num_spatial_dims=2.*vmap"):
        nn.InstanceNorm(4)(jnp.ones((10, 4, 6, 5)))
    with pytest.raises(ValueError, match=r"expected: \(\.\.\., channels=4, height, width\)"):
        nn.InstanceNorm(4, num_spatial_dims=2)(jnp.ones((4, 6)))


def test_a_single_position_is_refused():
    with pytest.raises(ValueError, match="variance of a single position is zero"):
        nn.InstanceNorm(4)(jnp.ones((4, 1, 1)))


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match=r"(?s)`InstanceNorm`.*`channels`.*at least 1"):
        nn.InstanceNorm(0)
    with pytest.raises(ValueError, match=r"(?s)`num_spatial_dims`.*at least 1"):
        nn.InstanceNorm(4, num_spatial_dims=0)
    with pytest.raises(ValueError, match="weights of `InstanceNorm` must be floating-point"):
        nn.InstanceNorm(4, dtype=jnp.int32)
