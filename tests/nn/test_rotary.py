"""Rotary embeddings against Equinox's, and the property that they exist for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn


def test_it_is_equinoxs(getkey):
    x = jax.random.normal(getkey(), (7, 6))
    expected = eqx.nn.RotaryPositionalEmbedding(6)(x)
    np.testing.assert_allclose(nn.RotaryPositionalEmbedding(6)(x), expected, atol=1e-6)


def test_the_base_counts(getkey):
    x = jax.random.normal(getkey(), (7, 6))
    one, other = (nn.RotaryPositionalEmbedding(6, theta)(x) for theta in (10.0, 1e4))
    assert not np.allclose(one, other)


def test_products_depend_on_the_distance_only(getkey):
    rope, query, key = nn.RotaryPositionalEmbedding(8), *jax.random.normal(getkey(), (2, 1, 8))

    def product(i, j):
        return rope(query, positions=i)[0] @ rope(key, positions=j)[0]

    np.testing.assert_allclose(product(3, 5), product(40, 42), rtol=1e-4)
    assert not np.allclose(product(3, 5), product(3, 6), rtol=1e-2)


def test_positions_are_absolute(getkey):
    rope, x = nn.RotaryPositionalEmbedding(4), jax.random.normal(getkey(), (9, 4))
    whole = rope(x)
    np.testing.assert_allclose(rope(x[5:], positions=5), whole[5:], atol=1e-6)
    order = jnp.array([8, 2, 4])
    np.testing.assert_allclose(rope(x[order], positions=order), whole[order], atol=1e-6)


def test_far_positions_of_half_precision_are_exact():
    with jax.enable_x64(True):
        x = jnp.ones((1, 4))
        exact = nn.RotaryPositionalEmbedding(4)(x, positions=30_001)
    half = nn.RotaryPositionalEmbedding(4)(jnp.ones((1, 4), jnp.bfloat16), positions=30_001)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float64), exact, atol=0.02)


def test_a_dtype_of_its_own_keeps_that_of_the_input():
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert nn.RotaryPositionalEmbedding(4, dtype=jnp.float32)(x).dtype == jnp.bfloat16


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"(?s)rotated in pairs.*an even number.*3"):
        nn.RotaryPositionalEmbedding(3)
    with pytest.raises(ValueError, match=r"(?s)argument `x`.*embedding_size=4"):
        nn.RotaryPositionalEmbedding(4)(jnp.ones((2, 6)))
    with pytest.raises(ValueError, match="(?s)argument `positions`.*length=2"):
        nn.RotaryPositionalEmbedding(4)(jnp.ones((2, 4)), positions=jnp.arange(3))


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_an_integer_input_gives_floats(dtype):
    rope = nn.RotaryPositionalEmbedding(4)
    x = (np.arange(12).reshape(3, 4) % 5).astype(dtype)
    found = rope(jnp.asarray(x))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, rope(jnp.asarray(x.astype(np.float32))))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.float16, jnp.bfloat16])
def test_a_first_position_of_a_narrow_type_is_followed_by_all_others(dtype, getkey):
    rotary, x = nn.RotaryPositionalEmbedding(4), jax.random.normal(getkey(), (3000, 4))
    found = rotary(x, positions=jnp.array(100, dtype))
    np.testing.assert_array_equal(found, rotary(x, positions=jnp.arange(100, 3100)))
