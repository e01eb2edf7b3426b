"""The first weights of a layer are those of `jax.random.uniform`, however they are drawn."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn

KEY = jax.random.key(5)
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64]


def expected(key, shape, fan_in, dtype, index, count=2):
    """The numbers by JAX alone."""
    key = jax.random.split(key, count)[index]
    lim = 1 / math.sqrt(fan_in)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real, imag = (
            jax.random.uniform(k, shape, jnp.float32, -lim, lim) for k in jax.random.split(key)
        )
        return jax.lax.complex(real, imag)
    return jax.random.uniform(key, shape, dtype, -lim, lim)


def same(a, b):
    """To the last place: XLA may compile a product and a sum to one operation or to two."""
    assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
    rounding = 2 * float(jnp.finfo(a.dtype).eps) * float(jnp.abs(b).max())
    wide = (np.asarray(x).astype(np.complex128) for x in (a, b))
    np.testing.assert_allclose(*wide, rtol=0, atol=rounding)


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (64, 64), (64, 65), (256, 256), (1, 65537)])
def test_by_itself_and_in_a_program(sizes, dtype):
    def make(key):
        return nn.Linear(*sizes, dtype=dtype, key=key)

    for layer in (make(KEY), jax.jit(make)(KEY), jax.vmap(make)(KEY[None])):
        layer = jax.tree.map(lambda x: x.reshape(x.shape[-2:]) if x.ndim == 3 else x, layer)
        same(layer.weight, expected(KEY, sizes[::-1], sizes[0], dtype, 0))
        same(layer.bias.reshape(-1), expected(KEY, sizes[1:], sizes[0], dtype, 1))


def test_cells_and_convolutions():
    cell = nn.GRUCell(3, 5, key=KEY)
    for index, (name, shape) in enumerate(
        {"weight_ih": (15, 3), "weight_hh": (15, 5), "bias": (15,), "bias_n": (5,)}.items()
    ):
        same(getattr(cell, name), expected(KEY, shape, 5, jnp.float32, index, count=4))
    conv = nn.Conv2d(4, 6, 3, groups=2, key=KEY)
    same(conv.weight, expected(KEY, (6, 2, 3, 3), 18, jnp.float32, 0))
    same(conv.bias, expected(KEY, (6, 1, 1), 18, jnp.float32, 1))


def draws(key):
    return nn.Linear(7, 9, key=key).weight


@pytest.mark.parametrize(
    "key",
    [
        jax.random.PRNGKey(3),
        jax.random.key(3, impl="rbg"),
        jax.random.key(3, impl="unsafe_rbg"),
        jax.random.PRNGKey(3, impl="rbg"),
    ],
    ids=["raw", "rbg", "unsafe rbg", "raw rbg"],
)
def test_other_keys(key):
    if key.shape == (4,):
        with jax.default_prng_impl("rbg"):
            same(draws(key), expected(key, (9, 7), 7, jnp.float32, 0))
            same(draws(key), jax.jit(draws)(key))
        return
    same(draws(key), expected(key, (9, 7), 7, jnp.float32, 0))
    same(draws(key), jax.jit(draws)(key))


def test_draws_that_depend_on_their_size():
    with jax.threefry_partitionable(False):
        same(draws(KEY), expected(KEY, (9, 7), 7, jnp.float32, 0))
        same(draws(KEY), jax.jit(draws)(KEY))


def test_with_64_bits():
    with jax.enable_x64(True):
        same(draws(KEY), expected(KEY, (9, 7), 7, jnp.float64, 0))
        same(draws(KEY), jax.jit(draws)(KEY))


def test_layers_share_the_program_that_draws():
    from vernal.nn import _init

    _init._draw.clear_cache()
    nn.MLP(7, 9, 11, depth=3, key=KEY)
    assert _init._draw._cache_size() == 1


def test_a_key_is_used_once_and_nothing_is_sent_to_the_device():
    with jax.transfer_guard("disallow"):
        draws(KEY)
    with jax.debug_key_reuse(True):
        draws(jax.random.key(0))
        nn.GRUCell(3, 4, key=jax.random.key(1))
