"""`nextafter` and `prevbefore`."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from vernal.primitives import nextafter, prevbefore

DTYPES = ["float16", "bfloat16", "float32", "float64"]
UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def floats(dtype: str, seed: int) -> np.ndarray:
    """Random bit patterns, and every special value."""
    dtype = np.dtype(dtype)
    bits = UNSIGNED[dtype.itemsize]
    random = np.random.default_rng(seed).integers(
        0, np.iinfo(bits).max, size=4000, dtype=bits, endpoint=True
    )
    kind = ml_dtypes.finfo(dtype)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, kind.max, -kind.max]
    special += [kind.smallest_normal, -kind.smallest_normal, kind.smallest_subnormal]
    return np.concatenate([random.view(dtype), np.asarray(special, dtype)])


def expected(x: np.ndarray, toward: float) -> np.ndarray:
    """NumPy's answer, but for the denormal numbers, which count as zero."""
    tiny = ml_dtypes.finfo(x.dtype).smallest_normal
    zero = np.abs(x) < tiny
    x = np.where(zero, np.zeros_like(x), x)
    if x.dtype == ml_dtypes.bfloat16:
        # A bfloat16 is the upper half of a float32.
        step = np.where((x > 0) == (toward > 0), 1, -1).astype(np.int16)
        stays = np.isnan(x) | (x == np.asarray(toward, x.dtype))
        out = np.where(stays, x, (x.view(np.int16) + step).view(x.dtype))
    else:
        out = np.nextafter(x, np.asarray(toward, x.dtype))
    out = np.where(np.abs(out) < tiny, np.zeros_like(out), out)
    return np.where(zero, np.copysign(tiny, np.asarray(toward, x.dtype)).astype(x.dtype), out)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_agree_with_numpy_on_random_bit_patterns(dtype, compiled, getkey):
    x = floats(dtype, seed=getkey.seed % 2**32)
    with jax.enable_x64(dtype == "float64"):
        for fn, toward in ((nextafter, np.inf), (prevbefore, -np.inf)):
            out = (jax.jit(fn) if compiled else fn)(jnp.asarray(x))
            assert out.dtype == x.dtype
            with np.errstate(all="ignore"):
                # Exact for all four, where comparing would not know the NaN of a bfloat16.
                want = expected(x, toward)
                np.testing.assert_array_equal(np.asarray(out, "float64"), want.astype("float64"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_undoes_the_other(dtype, getkey):
    x = floats(dtype, seed=getkey.seed % 2**32)
    kind = ml_dtypes.finfo(x.dtype)
    # NumPy warns of NaNs.
    with np.errstate(all="ignore"):
        x = x[(np.abs(x) >= kind.smallest_normal) & (np.abs(x) < kind.max)]
    with jax.enable_x64(dtype == "float64"):
        np.testing.assert_array_equal(np.asarray(prevbefore(nextafter(jnp.asarray(x)))), x)
        np.testing.assert_array_equal(np.asarray(nextafter(prevbefore(jnp.asarray(x)))), x)


def test_zero_is_between_the_smallest_normal_numbers():
    tiny = jnp.finfo(jnp.float32).smallest_normal
    assert nextafter(0.0) == tiny and prevbefore(0.0) == -tiny
    assert nextafter(-tiny) == 0 and prevbefore(tiny) == 0
    assert nextafter(-0.0) == tiny and prevbefore(-0.0) == -tiny


@pytest.mark.parametrize("fn", [nextafter, prevbefore])
def test_the_derivative_is_one(fn, getkey):
    x = jax.random.normal(getkey(), (3,))
    y, t = jax.jvp(fn, (x,), (2 * x,))
    np.testing.assert_array_equal(t, 2 * x)
    np.testing.assert_array_equal(y, fn(x))
    for transform in (jax.vmap, lambda f: jax.jit(jax.vmap(f))):
        np.testing.assert_array_equal(transform(jax.grad(lambda x: 3 * fn(x)))(x), 3 * jnp.ones(3))
        np.testing.assert_array_equal(transform(jax.grad(jax.grad(lambda x: fn(x) ** 2)))(x), 2.0)


def test_they_keep_an_array_on_its_devices(getkey):
    mesh = jax.make_mesh((8,), ("data",))
    x = jax.random.normal(getkey(), (16, 2))
    with jax.set_mesh(mesh):
        spread = jax.device_put(x, jax.P("data"))
        out = jax.jit(nextafter)(spread)
        assert out.sharding.spec == jax.P("data", None)
        np.testing.assert_array_equal(out, nextafter(x))
        over = jax.jit(jax.shard_map(prevbefore, out_specs=jax.P("data")))(spread)
        np.testing.assert_array_equal(over, prevbefore(x))


@pytest.mark.parametrize("x", [1, True, jnp.arange(2), jnp.complex64(1)], ids=str)
def test_other_numbers_are_refused(x):
    with pytest.raises(TypeError, match="nextafter needs floating-point numbers"):
        nextafter(x)
    with pytest.raises(TypeError, match="prevbefore needs floating-point numbers"):
        prevbefore(x)
