import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn
from vernal.sharding import make_mesh

BASE = {"in_channels": 4, "out_channels": 6, "kernel_size": 3}

# Settings of a convolution over two dimensions. The peer is built with the same.
CASES = {
    "plain": {},
    "rectangular kernel": {"kernel_size": (2, 3)},
    "strides": {"stride": (2, 1)},
    "padding": {"padding": 1},
    "padding by dimension": {"padding": (2, 0)},
    "padding by side": {"padding": ((0, 1), (2, 0))},
    "padding that crops": {"padding": (-1, 0)},
    "dilation": {"dilation": (1, 2)},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "out_channels": 8},
    "no bias": {"use_bias": False},
    "same": {"padding": "SAME", "stride": (2, 3), "kernel_size": (4, 2)},
    "same lower": {"padding": "SAME_LOWER", "stride": (2, 3), "kernel_size": (4, 2)},
    "valid": {"padding": "valid", "stride": 2},
    "reflect": {"padding": 2, "padding_mode": "REFLECT"},
    "replicate": {"padding": ((1, 2), (0, 3)), "padding_mode": "replicate"},
    "circular": {"padding": (1, 2), "padding_mode": "CIRCULAR", "dilation": 2},
    "circular same": {"padding": "SAME", "padding_mode": "CIRCULAR", "stride": 2},
    "reflect same lower": {"padding": "SAME_LOWER", "padding_mode": "REFLECT", "kernel_size": 4},
    "everything": {
        "kernel_size": (2, 3),
        "stride": (2, 1),
        "padding": ((2, 1), (0, 3)),
        "dilation": (2, 1),
        "groups": 2,
        "padding_mode": "REPLICATE",
    },
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES.keys())
@pytest.mark.sample(3)
def test_weights_values_and_gradients_are_equinox_s(getkey, settings):
    key = getkey()
    ours = nn.Conv2d(**(BASE | settings), key=key)
    theirs = eqx.nn.Conv2d(**(BASE | settings), key=key)
    assert jnp.array_equal(ours.weight, theirs.weight)
    if ours.bias is not None:
        assert jnp.array_equal(ours.bias, theirs.bias)
    x = jax.random.normal(getkey(), (4, 7, 8))

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


@pytest.mark.parametrize("n", [0, 1, 2, 3])
@pytest.mark.sample(3)
def test_any_number_of_dimensions(getkey, n):
    key = getkey()
    ours, theirs = (lib.Conv(n, 2, 3, 2, key=key) for lib in (nn, eqx.nn))
    x = jax.random.normal(getkey(), (2,) + (4,) * n)
    assert jnp.allclose(ours(x), theirs(x), atol=1e-5)
    assert ours.bias.shape == (3,) + (1,) * n


@pytest.mark.parametrize(("n", "name"), [(1, "Conv1d"), (2, "Conv2d"), (3, "Conv3d")])
def test_the_named_dimensions_are_the_general_layer(getkey, n, name):
    key = getkey()
    positional = (2, 2, 2, 2, 1, 2, 2, False, "CIRCULAR", jnp.float32)
    fixed, general = getattr(nn, name)(*positional, key=key), nn.Conv(n, *positional, key=key)
    assert isinstance(fixed, nn.Conv)
    assert fixed.num_spatial_dims == n
    x = jax.random.normal(getkey(), (2,) + (3,) * n)
    assert jnp.array_equal(fixed(x), general(x))
    peer = getattr(eqx.nn, name)(*positional, key=key)
    assert jnp.allclose(fixed(x), peer(x), atol=1e-5)


def test_a_convolution_is_the_sum_it_is_defined_as(getkey):
    layer = nn.Conv1d(2, 3, 3, stride=2, padding=(1,), dilation=2, key=getkey())
    x = jax.random.normal(getkey(), (2, 9))
    padded = np.pad(np.asarray(x), ((0, 0), (1, 1)))
    weight = np.asarray(layer.weight)
    expected = np.stack(
        [(weight * padded[None, :, i : i + 5 : 2]).sum((1, 2)) for i in range(0, 7, 2)], axis=1
    )
    assert np.allclose(layer(x), expected + np.asarray(layer.bias), atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_the_size_of_the_output_is_the_documented_one(getkey, kernel, stride, dilation):
    def out(size, padding):
        def build_and_call(key):
            return nn.Conv1d(1, 1, kernel, stride, padding, dilation, key=key)(jnp.ones((1, size)))

        return jax.eval_shape(build_and_call, getkey()).shape[1]

    for size in (5, 6, 9):
        for before, after in [(0, 0), (1, 1), (0, 2)]:
            expected = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
            assert out(size, ((before, after),)) == expected
        assert out(size, "SAME") == out(size, "SAME_LOWER") == -(-size // stride)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
@pytest.mark.parametrize("name", ["Conv1d", "ConvTranspose1d"])
@pytest.mark.sample(3)
def test_the_dtype_is_kept(getkey, dtype, name):
    key = getkey()
    layer, peer = (getattr(lib, name)(2, 3, 2, dtype=dtype, key=key) for lib in (nn, eqx.nn))
    assert jnp.array_equal(layer.weight, peer.weight)
    x = jax.random.normal(getkey(), (2, 5), dtype)
    assert layer(x).dtype == dtype
    assert jnp.array_equal(layer(x), peer(x))


def test_jax_takes_the_layer_as_it_is(getkey):
    layer = nn.Conv2d(3, 2, 3, padding=1, padding_mode="CIRCULAR", key=getkey())
    x = jax.random.normal(getkey(), (4, 3, 5, 5))
    expected = jnp.stack([layer(image) for image in x])
    assert jnp.allclose(jax.jit(jax.vmap(layer))(x), expected, atol=1e-5)
    assert jnp.allclose(jax.vmap(jax.jit(layer))(x), expected, atol=1e-5)
    assert jnp.allclose(layer(np.asarray(x[0])), expected[0], atol=1e-5)
    assert [leaf.shape for leaf in jax.tree.leaves(layer)] == [(2, 3, 3, 3), (2, 1, 1)]


@pytest.mark.parametrize("shape", [(8, 8, 3), (8, 8), (10, 8, 8, 3)])
def test_wrong_shapes_are_refused(getkey, shape):
    with pytest.raises(ValueError, match="was given an input of the wrong shape") as error:
        nn.Conv2d(3, 2, 3, key=getkey())(jnp.ones(shape))
    assert "expected: (..., in_channels=3, height, width)" in str(error.value)


def test_an_input_of_another_dtype_is_refused(getkey):
    layer = nn.Conv1d(1, 1, 3, key=getkey())
    with pytest.raises(
        TypeError, match=r"whose dtype is not that of its weights(.|\n)*x.astype\(jnp.float32"
    ):
        layer(jnp.ones((1, 5), jnp.uint8))


@pytest.mark.parametrize("name", ["Conv1d", "MaxPool1d", "AvgPool1d"])
def test_an_input_smaller_than_the_kernel_is_refused(getkey, name):
    layer = nn.Conv1d(1, 1, 4, key=getkey()) if name == "Conv1d" else getattr(nn, name)(4)
    with pytest.raises(
        ValueError, match="input smaller than its kernel, so that nothing would come out"
    ):
        layer(jnp.ones((1, 3)))


WRONG = [
    ({"in_channels": 0}, "was given a wrong size"),
    ({"out_channels": -1}, "was given a wrong size"),
    ({"groups": 0}, "was given a wrong size"),
    ({"kernel_size": 0}, "was given wrong sizes for its 2 spatial dimensions"),
    ({"kernel_size": (3,)}, "was given wrong sizes for its 2 spatial dimensions"),
    ({"stride": 0}, "was given wrong sizes for its 2 spatial dimensions"),
    ({"stride": (1, 1, 1)}, "was given wrong sizes for its 2 spatial dimensions"),
    ({"dilation": (1, 0)}, "was given wrong sizes for its 2 spatial dimensions"),
    ({"padding": (1, 1, 1)}, "was given a padding that does not fit its 2 spatial dimensions"),
    ({"padding": ((1, 1),)}, "was given a padding that does not fit its 2 spatial dimensions"),
    ({"padding": "FULL"}, r"a padding that does not fit its 2(.|\n)*'SAME', 'SAME_LOWER', 'VALID'"),
    ({"groups": 4}, r"channels of `.*` cannot be divided into its groups(.|\n)*out_channels=6"),
    ({"groups": 3}, r"channels of `.*` cannot be divided into its groups(.|\n)*in_channels=4"),
    ({"padding_mode": "MIRROR"}, "was given an unknown padding mode"),
    (
        {"padding": -1, "padding_mode": "REFLECT"},
        "takes negative padding, which crops, only with",
    ),
    ({"dtype": jnp.int32}, "must be floating-point or complex numbers"),
]


@pytest.mark.parametrize("name", ["Conv2d", "ConvTranspose2d"])
@pytest.mark.parametrize(("settings", "text"), WRONG)
def test_wrong_settings_are_refused(getkey, name, settings, text):
    with pytest.raises(ValueError, match=text) as error:
        getattr(nn, name)(**(BASE | settings), key=getkey())
    assert f"`{name}`" in str(error.value)


@pytest.mark.parametrize("padding", [2, (0, 2), ((2, 0), (0, 0)), ((0, 0), (0, 7)), "SAME"])
def test_an_input_is_mirrored_once_and_not_at_each_end_again(getkey, padding):
    layer = nn.Conv2d(
        1, 1, 5 if padding == "SAME" else 1, padding=padding, padding_mode="REFLECT", key=getkey()
    )
    layer(jnp.ones((1, 3, 8)))
    with pytest.raises(ValueError, match=r"(?s)`Conv2d`.*mode='REFLECT'.*larger than its padding"):
        layer(jnp.ones((1, 2, 2)))


@pytest.mark.parametrize("mode", ["REFLECT", "REPLICATE", "CIRCULAR"])
def test_nothing_is_padded_with_values_that_are_not_there(getkey, mode):
    layer = nn.Conv1d(1, 1, 3, padding=2, padding_mode=mode, key=getkey())
    with pytest.raises(ValueError, match=rf"(?s)too small for its padding.*{mode}.*sizes \(0,\)"):
        layer(jnp.ones((1, 0)))
    plain = nn.Conv1d(1, 1, 1, padding_mode=mode, key=getkey())
    with pytest.raises(ValueError, match="smaller than its kernel"):
        plain(jnp.ones((1, 0)))


def test_groups_have_the_same_derivative_on_one_device_as_where_there_are_several(
    getkey, monkeypatch
):
    layer = nn.Conv1d(4, 6, 3, groups=2, key=getkey())
    x = jax.random.normal(getkey(), (5, 4, 9))

    def both():
        # A new function each time: JAX remembers what it has traced.
        def gradient(layer, x):
            return jax.grad(lambda layer, x: jnp.sum(layer(x) ** 2), (0, 1))(layer, x)

        return str(jax.make_jaxpr(gradient)(layer, x)), gradient(layer, x)

    several, wanted = both()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    one, got = both()
    # XLA's own is faster, but adds up replicas.
    assert "batch_group_count=2" in one and "batch_group_count=2" not in several
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2])
def test_an_ensemble_has_the_same_derivative_on_a_mesh(getkey, layer, groups):
    ensemble = jax.vmap(lambda key: layer(2, 4, 3, groups=groups, key=key))(
        jax.random.split(getkey(), 3)
    )
    xs = jax.random.normal(getkey(), (3, 8, 2, 5, 5))

    @jax.jit
    def gradient(ensemble, xs):
        return jax.grad(lambda e: jnp.sum(jax.vmap(lambda m, x: m(x))(e, xs) ** 2))(ensemble)

    # Replicated over one axis: XLA adds up the replicas where `vmap` has made groups of the members.
    mesh = make_mesh(data=4, model=2, automatic=True)
    split = jax.device_put(xs, jax.NamedSharding(mesh, jax.P(None, "data")))
    got, wanted = gradient(ensemble, split), gradient(ensemble, xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
