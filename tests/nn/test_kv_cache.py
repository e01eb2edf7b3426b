"""Caches of keys and values: reading a prompt at once is the same as token by token, and as no cache at all."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn
from vernal.runtime import RuntimeCheckError

LENGTH, WINDOW, FEATURES = 11, 4, 8


def layer_and_input(key, kv_heads, dtype, batch=()):
    @jax.jit
    def make(key):
        settings = {"qk_size": 4, "num_key_value_heads": kv_heads, "dtype": dtype}
        xs = jax.random.normal(key, (*batch, LENGTH, FEATURES), dtype)
        return nn.MultiheadAttention(4, FEATURES, **settings, key=key), xs

    return make(key)


def every_combination():
    """Of groups, rotary positions, a ring and half precision. Two with groups and rotary positions are fast."""
    for flags in itertools.product([False, True], repeat=4):
        names = ("groups", "rotary", "ring", "bfloat16")
        name = " ".join(name for name, on in zip(names, flags, strict=True) if on) or "none"
        grouped, rotate, ring, half = flags
        marks = () if grouped and rotate and ring != half else pytest.mark.slow
        yield pytest.param(*flags, id=name, marks=marks)


@pytest.mark.parametrize(("grouped", "rotate", "ring", "half"), list(every_combination()))
def test_a_prompt_at_once_is_token_by_token(grouped, rotate, ring, half, getkey):
    dtype = jnp.bfloat16 if half else jnp.float32
    layer, xs = layer_and_input(getkey(), 2 if grouped else 4, dtype)
    rotary = nn.RotaryPositionalEmbedding(4) if rotate else None

    @jax.jit
    def all_ways(layer, xs):
        def read(x, cache):
            return layer(x, x, x, cache=cache, rotary=rotary)

        def in_parts(*borders):
            cache, out = layer.make_cache(WINDOW if ring else LENGTH, ring=ring), []
            for first, last in zip((0, *borders), (*borders, LENGTH), strict=True):
                y, cache = read(xs[first:last], cache)
                out.append(y)
            return jnp.concatenate(out), cache

        def one_by_one():
            def step(cache, x):
                y, cache = read(x[None], cache)
                return cache, y[0]

            cache, out = jax.lax.scan(
                step, layer.make_cache(WINDOW if ring else LENGTH, ring=ring), xs
            )
            return out, cache

        window = WINDOW if ring else None
        without = layer(xs, xs, xs, causal=True, window=window, rotary=rotary)
        # The first part is longer than a ring; the second is not, and takes some of its places.
        return without, in_parts(), in_parts(9), one_by_one()

    without, (whole, filled), *others = all_ways(layer, xs)
    assert_near(whole, without, 1e-5 if dtype == jnp.float32 else 0.03)
    assert whole.dtype == dtype
    for out, cache in ((whole, filled), *others):
        assert cache.keys.dtype == dtype and cache.length == LENGTH
        assert_near(out, whole, 1e-5)
        assert_near(cache.keys, filled.keys, 1e-5)


def assert_near(got, expected, tolerance):
    assert got.dtype == expected.dtype
    got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_a_long_prompt_is_read_by_blocks_along_the_ring(getkey, monkeypatch):
    monkeypatch.setattr("vernal.nn._attention.block_rows", lambda *_: 2)
    layer, xs = layer_and_input(getkey(), 2, jnp.float32)
    rotary = nn.RotaryPositionalEmbedding(4)

    @jax.jit
    def both(xs):
        cache = layer.make_cache(WINDOW, ring=True)
        first, cache = layer(xs[:2], xs[:2], xs[:2], cache=cache, rotary=rotary)
        rest, _ = layer(xs[2:], xs[2:], xs[2:], cache=cache, rotary=rotary)
        whole = layer(xs, xs, xs, causal=True, window=WINDOW, rotary=rotary)
        return jnp.concatenate([first, rest]), whole

    np.testing.assert_allclose(*both(xs), atol=1e-5)


def test_batch_axes_are_those_of_vmap_also_of_different_lengths(getkey):
    layer, xs = layer_and_input(getkey(), 2, jnp.float32, (3,))
    rotary = nn.RotaryPositionalEmbedding(4)

    @jax.jit
    def both(xs):
        def read(x, cache):
            return layer(x, x, x, cache=cache, rotary=rotary)

        results = []
        for ring in (False, True):
            start = layer.make_cache(6, batch=(3,), ring=ring)
            start = jax.vmap(_longer)(start, jnp.arange(3, dtype=jnp.int32))
            results.append((read(xs[:, :4], start), jax.vmap(read)(xs[:, :4], start)))
        return results

    for whole, mapped in both(xs):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), whole, mapped)


def _longer(cache, n):
    """The cache after `n` more tokens, of zeros, where `n` is known only at run time."""
    return jax.lax.fori_loop(
        0, n, lambda _, c: c.append(jnp.zeros((1, 2, 4)), jnp.zeros((1, 2, 2))), cache
    )


def test_the_memory_of_a_donated_cache_is_used_again():
    cache = nn.KVCache(64, 2, 8)
    token = jnp.ones((1, 2, 8))
    step = jax.jit(lambda cache: cache.append(token, token), donate_argnums=0)
    analysis = step.lower(cache).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= cache.keys.nbytes + cache.values.nbytes
    assert analysis.temp_size_in_bytes < cache.keys.nbytes


@pytest.mark.slow
def test_gradients_go_through_a_cache(getkey):
    layer, xs = layer_and_input(getkey(), 2, jnp.float32)

    @jax.jit
    def both(layer, xs):
        def without(layer, xs):
            return (layer(xs, xs, xs, causal=True) ** 2).sum()

        def within(layer, xs):
            first, cache = layer(xs[:5], xs[:5], xs[:5], cache=layer.make_cache(LENGTH))
            rest, _ = layer(xs[5:], xs[5:], xs[5:], cache=cache)
            return (first**2).sum() + (rest**2).sum()

        return jax.grad(without, (0, 1))(layer, xs), jax.grad(within, (0, 1))(layer, xs)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *both(layer, xs)
    )


def test_more_tokens_than_places_are_refused():
    cache = nn.KVCache(3, 1, 2)
    two, four = jnp.ones((2, 1, 2)), jnp.ones((4, 1, 2))
    with pytest.raises(ValueError, match="(?s)more tokens were appended.*at most 3.*4 tok"):
        cache.append(four, four)
    with pytest.raises(RuntimeCheckError, match="(?s)the cache is full.*at most 3 tokens"):
        cache.append(two, two).append(two, two)
    kept = nn.KVCache(3, 1, 2, ring=True).append(two, two).append(2 * four, 2 * four)
    assert kept.length == 6 and kept.positions.tolist() == [3, 4, 5] and (kept.keys == 2).all()


def test_tokens_of_the_wrong_shape_are_refused():
    cache, right = nn.KVCache(3, 1, 2, value_size=4, batch=(5,)), jnp.zeros((5, 2, 1, 2))
    with pytest.raises(ValueError, match="(?s)argument `keys`.*num_heads=1, size=2"):
        cache.append(right[..., :1], right)
    with pytest.raises(ValueError, match="(?s)argument `values`.*num_heads=1, value_size=4"):
        cache.append(right, right)
    with pytest.raises(ValueError, match="(?s)argument `max_length`.*at least 1"):
        nn.KVCache(0, 1, 2)
    with pytest.raises(ValueError, match="(?s)`KVCache` must be floating-point"):
        inspect.unwrap(nn.KVCache)(1, 1, 2, dtype=int)


def test_what_does_not_go_with_a_cache_is_refused(getkey):
    layer, xs = layer_and_input(getkey(), 2, jnp.float32)

    def read(cache, keys=xs[:2], **conditions):
        return layer(xs[:2], keys, keys, cache=cache, **conditions)

    plain, ring = layer.make_cache(4), layer.make_cache(4, ring=True)
    for cache, conditions, words in (
        (plain, {"segments": jnp.zeros(2, int)}, "`segments` cannot be combined with a cache"),
        (plain, {"query_positions": jnp.arange(2)}, "`query_positions` cannot"),
        (plain, {"keys": xs[:3]}, "2 queries for 3 keys cannot"),
        (
            ring,
            {"mask": jnp.ones((2, 4), bool)},
            "`mask` cannot be combined with a ring cache",
        ),
        (ring, {"bias": jnp.ones((2, 4)), "causal": False}, "`bias` and `causal=False` cannot"),
        (ring, {"window": 5}, "a window of 5, where 4 tokens are kept, cannot"),
    ):
        with pytest.raises(ValueError, match=words):
            read(cache, **conditions)


def test_masks_are_about_the_places_of_a_cache(getkey):
    """Prompts of different lengths, filled up with tokens in front that nobody sees."""
    layer, xs = layer_and_input(getkey(), 2, jnp.float32)
    hidden = jnp.arange(LENGTH) >= 3

    @jax.jit
    def both(xs):
        cache = layer.make_cache(LENGTH)
        padded, cache = layer(xs[:8], xs[:8], xs[:8], mask=hidden[None], cache=cache)
        rest, _ = layer(xs[8:], xs[8:], xs[8:], mask=hidden[None], cache=cache)
        return jnp.concatenate([padded[3:], rest]), layer(xs[3:], xs[3:], xs[3:], causal=True)

    np.testing.assert_allclose(*both(xs), atol=1e-5)
