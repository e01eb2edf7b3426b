import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn

BASE = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}

CASES = {
    "plain": {},
    "strides": {"stride": (2, 3)},
    "output padding": {"stride": (2, 3), "output_padding": (1, 2)},
    "padding": {"padding": 1, "stride": 2},
    "padding by side": {"padding": ((0, 1), (2, 0)), "stride": 2, "output_padding": 1},
    "padding that adds": {"padding": -1},
    "dilation": {"dilation": (1, 2), "kernel_size": (2, 3)},
    "groups": {"groups": 2, "stride": 2},
    "no bias": {"use_bias": False},
    "valid": {"padding": "VALID", "stride": 3, "output_padding": 2},
    "same": {"padding": "SAME", "stride": (2, 3), "kernel_size": (4, 5)},
    "same lower": {"padding": "same_lower", "stride": (2, 3), "kernel_size": (5, 4)},
    "same with output padding": {"padding": "SAME", "stride": 3, "output_padding": (1, 2)},
    "same with gaps": {"padding": "SAME", "stride": (3, 4), "kernel_size": (1, 2)},
    "same lower with gaps": {"padding": "SAME_LOWER", "stride": (3, 4), "kernel_size": (1, 2)},
    "circular": {"padding": "SAME", "padding_mode": "CIRCULAR", "stride": (2, 3)},
    "circular lower": {
        "padding": "SAME_LOWER",
        "padding_mode": "CIRCULAR",
        "stride": (1, 3),
        "kernel_size": (4, 5),
        "dilation": 2,
    },
    "circular with gaps": {
        "padding": "SAME",
        "padding_mode": "CIRCULAR",
        "stride": (3, 4),
        "kernel_size": (1, 2),
    },
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
@pytest.mark.sample(3)
def test_weights_values_and_gradients_are_equinox_s(getkey, settings):
    key = getkey()
    ours = nn.ConvTranspose2d(**(BASE | settings), key=key)
    theirs = eqx.nn.ConvTranspose2d(**(BASE | settings), key=key)
    assert jnp.array_equal(ours.weight, theirs.weight)
    if ours.bias is not None:
        assert jnp.array_equal(ours.bias, theirs.bias)
    x = jax.random.normal(getkey(), (4, 4, 5))

    @jax.jit
    def values_and_gradients(ours, their_arrays, x):
        y, pull = jax.vjp(lambda m, x: m(x), ours, x)
        cotangent = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
        peer = eqx.combine(their_arrays, their_rest)
        their_y, their_pull = eqx.filter_vjp(lambda m, x: m(x), peer, x)
        return (y, pull(cotangent)), (their_y, their_pull(cotangent))

    their_arrays, their_rest = eqx.partition(theirs, eqx.is_array)
    found = values_and_gradients(ours, their_arrays, x)
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


TRANSPOSED = [
    (12, {"stride": 1}),
    (12, {"stride": 2, "padding": 1}),
    (13, {"stride": 3, "padding": 2, "dilation": 2}),
    (12, {"stride": 3, "padding": "SAME"}),
    (12, {"stride": 2, "padding": "SAME_LOWER", "kernel_size": 4}),
    (11, {"stride": 3, "padding": "SAME", "kernel_size": 4}),
    (12, {"stride": 3, "padding": "SAME", "kernel_size": 1}),
    (12, {"stride": 2, "padding": "SAME", "padding_mode": "CIRCULAR", "kernel_size": 4}),
    (12, {"stride": 3, "padding": "SAME_LOWER", "padding_mode": "CIRCULAR", "kernel_size": 5}),
    (12, {"stride": 1, "padding": "SAME", "padding_mode": "CIRCULAR", "dilation": 3}),
]


@pytest.mark.parametrize(("size", "settings"), TRANSPOSED)
@pytest.mark.sample(3)
def test_it_is_the_transpose_of_the_convolution(getkey, size, settings):
    settings = {"kernel_size": 3, "use_bias": False} | settings
    conv = nn.Conv(1, 2, 4, **settings, key=getkey())
    zeros = jnp.zeros((2, size))
    y = jax.random.normal(getkey(), conv(zeros).shape)
    (expected,) = jax.linear_transpose(conv, zeros)(y)

    same = settings.get("padding") in ("SAME", "SAME_LOWER")
    plain = jax.eval_shape(nn.ConvTranspose(1, 4, 2, **settings, key=getkey()), y).shape[1]
    extra = plain - size if same else size - plain
    transposed = nn.ConvTranspose(1, 4, 2, **settings, output_padding=extra, key=getkey())
    flipped = jnp.flip(jnp.swapaxes(conv.weight, 0, 1), axis=2)
    # Weights are replaced through the treedef, as any transformation would.
    transposed = jax.tree.map(lambda _: flipped, transposed)
    assert jnp.allclose(transposed(y), expected, atol=1e-5)


@pytest.mark.parametrize(("n", "name"), [(1, "1d"), (2, "2d"), (3, "3d")])
def test_positions_of_the_named_dimensions_are_equinox_s(getkey, n, name):
    key = getkey()
    positional = (2, 2, 2, 3, 2, 1, 1, 2, False, "ZEROS", jnp.float32)
    fixed, peer = (
        getattr(lib, f"ConvTranspose{name}")(*positional, key=key) for lib in (nn, eqx.nn)
    )
    general = nn.ConvTranspose(n, 2, 2, 2, 3, 1, 2, 1, 2, False, "ZEROS", jnp.float32, key=key)
    assert isinstance(fixed, nn.ConvTranspose)
    assert fixed.output_padding == (2,) * n
    x = jax.random.normal(getkey(), (2,) + (2,) * n)
    assert jnp.array_equal(fixed(x), general(x))
    assert jnp.allclose(fixed(x), peer(x), atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 2, 5])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_size_of_the_output_is_the_documented_one(getkey, kernel, stride, dilation):
    for extra in range(stride):

        def out(padding, extra=extra):
            def build_and_call(key):
                settings = (kernel, stride, padding, extra, dilation)
                return nn.ConvTranspose(1, 1, 1, *settings, key=key)(jnp.ones((1, 7)))

            return jax.eval_shape(build_and_call, getkey()).shape[1]

        assert out(((1, 2),)) == 6 * stride + dilation * (kernel - 1) + 1 - 3 + extra
        assert out("SAME") == out("SAME_LOWER") == 7 * stride - extra


def test_jax_takes_the_layer_as_it_is(getkey):
    layer = nn.ConvTranspose1d(3, 2, 3, 2, key=getkey())
    x = jax.random.normal(getkey(), (4, 3, 5))
    expected = jnp.stack([layer(row) for row in x])
    assert jnp.allclose(jax.jit(jax.vmap(layer))(x), expected, atol=1e-5)
    assert jnp.allclose(jax.vmap(jax.jit(layer))(x), expected, atol=1e-5)
    assert len(jax.tree.leaves(layer)) == 2


@pytest.mark.parametrize("output_padding", [2, 3])
def test_an_output_padding_as_large_as_the_stride_is_refused(getkey, output_padding):
    with pytest.raises(
        ValueError, match="the output padding of `ConvTranspose1d` must be smaller than its stride"
    ):
        nn.ConvTranspose1d(1, 1, 3, 2, output_padding, key=getkey())


@pytest.mark.parametrize(
    "settings",
    [
        {"padding_mode": "REFLECT"},
        {"padding_mode": "REPLICATE", "padding": "SAME"},
        {"padding_mode": "CIRCULAR"},
        {"padding_mode": "CIRCULAR", "padding": "VALID"},
        {"padding_mode": "CIRCULAR", "padding": "SAME", "stride": 2, "output_padding": 1},
    ],
)
def test_a_padding_that_has_no_transpose_here_is_refused(getkey, settings):
    with pytest.raises(
        NotImplementedError, match="`ConvTranspose1d` does not support this padding"
    ):
        nn.ConvTranspose1d(1, 1, 3, **settings, key=getkey())


def test_a_padding_that_cuts_off_everything_is_refused(getkey):
    layer = nn.ConvTranspose1d(1, 1, 2, padding=9, key=getkey())
    with pytest.raises(
        ValueError, match="`ConvTranspose1d` was given an input smaller than its kernel"
    ):
        layer(jnp.ones((1, 5)))


def test_a_wrong_shape_is_refused(getkey):
    with pytest.raises(
        ValueError, match=r"expected: \(\.\.\., in_channels=3, depth, height, width"
    ):
        nn.ConvTranspose3d(3, 2, 3, key=getkey())(jnp.ones((4, 4, 4)))
