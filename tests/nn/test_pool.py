import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn
from vernal.compat import equinox as compat

SETTINGS = [
    (kernel, stride, padding, use_ceil)
    for kernel, stride, padding, use_ceil in itertools.product(
        [1, 2, 3], [1, 2, 3], [0, 1, ((0, 2),)], [False, True]
    )
    if np.max(padding) < kernel
]


def windows_of(x, kernel, stride, padding, use_ceil, empty, beyond):
    """Every window of each row, by counting; `empty` is what pads it, and `beyond` is what is beyond that."""
    before, after = np.broadcast_to(np.asarray(padding), (1, 2))[0]
    size = x.shape[1]
    rest = (size + before + after - kernel) % stride
    count = (size + before + after - kernel) // stride + 1 + (use_ceil and rest > 0)
    starts = [i * stride for i in range(count) if i * stride < size + before or not use_ceil]
    padded = np.pad(x, ((0, 0), (before, after)), constant_values=empty)
    padded = np.pad(padded, ((0, 0), (0, stride)), constant_values=beyond)
    return np.stack([padded[:, i : i + kernel] for i in starts], axis=1)


@pytest.mark.parametrize("size", [5, 8])
def test_each_window_is_reduced(getkey, size):
    @jax.jit
    def pooled(x):
        return [(nn.AvgPool1d(*s)(x), nn.MaxPool1d(*s)(x)) for s in SETTINGS]

    x = jax.random.normal(getkey(), (2, size))
    for settings, (average, greatest) in zip(SETTINGS, pooled(x), strict=True):
        expected = np.nanmean(windows_of(np.asarray(x), *settings, 0, np.nan), axis=-1)
        np.testing.assert_allclose(average, expected, atol=1e-6, err_msg=str(settings))
        expected = windows_of(np.asarray(x), *settings, -np.inf, -np.inf).max(axis=-1)
        np.testing.assert_allclose(greatest, expected, err_msg=str(settings))


@pytest.mark.parametrize("kind", ["AvgPool", "MaxPool"])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.sample(3)
def test_values_and_gradients_are_equinox_s(getkey, kind, n):
    several = [(2,), (2, 2), (3, 2, 1), (3, 2, 1, True), (2, 2, 0, True), (3, 1, ((1, 2),) * n)]
    ours, theirs = (
        [getattr(lib, f"{kind}{n}d")(*settings) for settings in several]
        for lib in (compat.nn, eqx.nn)
    )
    assert isinstance(ours[0], getattr(nn, f"{kind}{n}d")) and isinstance(ours[0], nn.Pool)
    x = jax.random.normal(getkey(), (2,) + (5,) * n)

    @jax.jit
    def values_and_gradients(x):
        return [
            [(f(x), jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x)) for f in pair]
            for pair in zip(ours, theirs, strict=True)
        ]

    for settings, (our, their) in zip(several, values_and_gradients(x), strict=True):
        for a, b in zip(our, their, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=str(settings))


def test_an_extra_window_reaches_no_further_than_it_must():
    # Equinox refuses these two: it takes the padding to be a whole stride.
    x = jnp.arange(1.0, 8.0)[None]
    assert jnp.array_equal(nn.MaxPool1d(2, 3, use_ceil=True)(x), jnp.array([[2.0, 5.0, 7.0]]))
    # The fourth window would hold padding alone.
    x = jnp.arange(1.0, 6.0)[None]
    assert jnp.array_equal(nn.MaxPool1d(2, 2, 1, True)(x), jnp.array([[1.0, 3.0, 5.0]]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_])
def test_every_dtype_has_its_maximum_and_its_mean(dtype):
    x = jnp.array([[0, 3, 1, 200]]).astype(dtype)
    greatest = nn.MaxPool1d(2, padding=1)(x)
    assert greatest.dtype == dtype
    assert jnp.array_equal(greatest, eqx.nn.MaxPool1d(2, padding=1)(x))
    mean = nn.AvgPool1d(2)(x)
    assert mean.dtype == (dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.float32)


def test_means_of_bytes_do_not_overflow():
    x = jnp.full((1, 4), 200, jnp.uint8)
    assert jnp.array_equal(nn.AvgPool1d(2)(x), jnp.full((1, 3), 200.0))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_the_general_layer_takes_any_operation(getkey, dtype):
    x = jax.random.randint(getkey(), (2, 6, 5), -9, 9).astype(dtype)
    least = nn.Pool(float("inf"), jax.lax.min, 2, (2, 3), 1)
    assert jnp.array_equal(least(x), -nn.MaxPool2d((2, 3))(-x))
    product = nn.Pool(jnp.array(1.0), jax.lax.mul, 2, (1, 2), (1, 2))
    assert jnp.array_equal(product(x), x[:, :, 0:4:2] * x[:, :, 1:5:2])
    assert jax.tree.leaves(product) == []


def test_jax_takes_the_layer_as_it_is(getkey):
    x = jax.random.normal(getkey(), (4, 3, 6, 6))
    for layer in (nn.MaxPool2d(2, 2), nn.AvgPool2d(2, 2)):
        expected = jnp.stack([layer(image) for image in x])
        assert jnp.allclose(jax.jit(jax.vmap(layer))(x), expected, atol=1e-6)
        assert jax.tree.leaves(layer) == []
        grad = jax.jit(jax.vmap(jax.grad(lambda x, f=layer: f(x).sum())))(x)
        assert jnp.allclose(grad[0], jax.grad(lambda x, f=layer: f(x).sum())(x[0]), atol=1e-6)


@pytest.mark.parametrize("padding", [-1, 2, ((0, 3),)])
def test_a_padding_that_crops_or_holds_a_whole_window_is_refused(padding):
    with pytest.raises(ValueError, match="a negative padding, or one as large as its kernel"):
        nn.MaxPool1d(2, padding=padding)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (((2,),), "`MaxPool2d` was given wrong sizes for its 2 spatial dimensions"),
        ((0,), "`MaxPool2d` was given wrong sizes for its 2 spatial dimensions"),
        ((2, 0), "`MaxPool2d` was given wrong sizes for its 2 spatial dimensions"),
        (
            (2, 1, (1,)),
            "`MaxPool2d` was given a padding that does not fit its 2 spatial dimensions",
        ),
    ],
)
def test_wrong_settings_are_refused(settings, text):
    with pytest.raises(ValueError, match=text):
        nn.MaxPool2d(*settings)


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected: \(\.\.\., channels, height, width\)"):
        nn.AvgPool2d(2)(jnp.ones((8, 8)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_means_of_half_precision_are_summed_in_single(dtype):
    # In bfloat16, 256 + 1 is 256; in float16, 60000 + 60000 is infinite.
    x = jnp.full((1, 32, 32), 1.0234375, dtype)
    assert nn.AvgPool2d(32)(x).ravel() == x[0, 0, 0]
    large = jnp.full((1, 8), 6e4, dtype)
    y = nn.AvgPool1d(4, stride=4)(large)
    assert y.dtype == dtype and np.array_equal(y, large[:, :2])


def test_the_initial_value_is_no_parameter():
    x = jnp.array([[1.0, 3.0, 2.0]])
    for init in (jnp.array(-jnp.inf), np.float32(-np.inf)):
        layer = nn.Pool(init, jax.lax.max, 1, 2)
        assert layer.init == -np.inf and not jax.tree.leaves(layer)
        assert np.array_equal(layer(x), [[3, 3]]) and layer(x.astype(jnp.int32)).dtype == jnp.int32
    with pytest.raises(ValueError, match="(?s)`Pool` was not given a number.*argument `init`"):
        nn.Pool(jnp.zeros(2), jax.lax.max, 1, 2)
