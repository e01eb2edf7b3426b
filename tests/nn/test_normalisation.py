"""Layer, root-mean-square and group normalisation: against Equinox, against their definitions, and when misused."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn
from vernal.compat import equinox as compat
from vernal.trees import tree_at


def with_random_weights(layer, peer, rng):
    """Both layers with the same random weight and bias, where they have any."""
    for name in ("weight", "bias"):
        old = getattr(layer, name)
        assert (old is None) == (getattr(peer, name) is None)
        if old is None:
            continue
        assert old.shape == getattr(peer, name).shape and old.dtype == getattr(peer, name).dtype
        new = jnp.asarray(rng.normal(size=old.shape), old.dtype)
        layer = tree_at(lambda m, name=name: getattr(m, name), layer, new)
        peer = eqx.tree_at(lambda m, name=name: getattr(m, name), peer, new)
    return layer, peer


def close(a, b, **tolerance):
    assert a.dtype == b.dtype and a.shape == b.shape
    wide = np.complex64 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float32
    np.testing.assert_allclose(np.asarray(a, wide), np.asarray(b, wide), **tolerance)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eps": 0.1},
        {"use_weight": False},
        {"use_bias": False},
        {"use_weight": False, "use_bias": False},
        {"dtype": jnp.bfloat16},
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_layer_and_rms_norm_agree_with_equinox(name, options, getkey):
    rng = np.random.default_rng(getkey.seed)

    @jax.jit
    def outputs():
        return [pair(shape) for shape in (3, (3,), [2, 3], (), (1,), (4, 1, 2))]

    def pair(shape):
        layer, peer = getattr(nn, name)(shape, **options), getattr(eqx.nn, name)(shape, **options)
        initial = [[m.weight, m.bias] for m in (layer, peer)]
        layer, peer = with_random_weights(layer, peer, rng)
        assert layer.shape == peer.shape and layer.eps == peer.eps
        x = jnp.asarray(rng.normal(1, 3, layer.shape), jnp.float32)
        with jax.numpy_dtype_promotion("standard"):
            expected = peer(x)
        return initial, layer(x), expected

    for initial, y, expected in outputs():
        for a, b in zip(*map(jax.tree.leaves, initial), strict=True):
            assert (a == b).all()
        close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "groups, channels, spatial, options",
    [
        (1, 4, (), {}),
        (2, 4, (), {}),
        (2, 4, (5,), {}),
        (4, 4, (3, 2), {}),
        (3, 6, (2, 2, 2), {"eps": 0.1}),
        (2, 6, (3,), {"channelwise_affine": False}),
        (2, None, (3,), {"channelwise_affine": False}),
        (2, 4, (3,), {"dtype": jnp.bfloat16}),
    ],
)
def test_group_norm_agrees_with_equinox(groups, channels, spatial, options, getkey):
    layer, peer = (
        nn.GroupNorm(groups, channels, **options),
        eqx.nn.GroupNorm(groups, channels, **options),
    )
    rng = np.random.default_rng(getkey.seed)
    layer, peer = with_random_weights(layer, peer, rng)
    x = jnp.asarray(rng.normal(1, 3, (channels or 6, *spatial)), jnp.float32)

    @jax.jit
    def outputs(x):
        with jax.numpy_dtype_promotion("standard"):
            expected = peer(x)
        return layer(x), expected

    close(*outputs(x), rtol=1e-5, atol=1e-5)


ALL = [nn.LayerNorm((4, 6)), nn.RMSNorm((4, 6)), nn.GroupNorm(2, 4, num_spatial_dims=1)]


@pytest.mark.parametrize("layer", ALL, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_inputs_are_normalised_in_float32_and_returned_as_they_came(
    layer, dtype, getkey
):
    # The squares of these overflow float16, and their sum would lose all digits in bfloat16.
    x = (1000 * jax.random.normal(getkey(), (4, 6)) + 3000).astype(dtype)
    y = layer(x)
    assert y.dtype == dtype
    assert (y == layer(x.astype(jnp.float32)).astype(dtype)).all()


@pytest.mark.parametrize("layer", ALL, ids=lambda m: type(m).__name__)
def test_integer_inputs_give_floats_rather_than_rounded_results(layer, getkey):
    x = jax.random.randint(getkey(), (4, 6), 0, 10)
    close(layer(x), layer(x.astype(jnp.float32)))


@pytest.mark.parametrize("layer", ALL, ids=lambda m: type(m).__name__)
def test_complex_inputs_have_unit_mean_square_afterwards(layer, getkey):
    a, b = jax.random.normal(getkey(), (2, 4, 6))
    y = layer(jax.lax.complex(a, 5 * b))
    groups = y.reshape(getattr(layer, "groups", 1), -1)
    np.testing.assert_allclose((jnp.abs(groups) ** 2).mean(axis=1), 1, rtol=1e-4)


def test_layer_norm_has_mean_zero_and_variance_one(getkey):
    y = nn.LayerNorm(1000)(jax.random.normal(getkey(), (1000,)) * 7 + 2)
    np.testing.assert_allclose((y.mean(), y.var()), (0, 1), atol=1e-4)


@pytest.mark.parametrize("layer", ALL, ids=lambda m: type(m).__name__)
@pytest.mark.sample(3)
def test_a_constant_input_has_finite_gradients(layer):
    for x in (jnp.zeros((4, 6)), jnp.full((4, 6), 5.0)):
        assert jnp.isfinite(jax.grad(lambda x: (layer(x) ** 2).sum())(x)).all()


@pytest.mark.parametrize("layer", ALL, ids=lambda m: type(m).__name__)
def test_a_batch_that_is_sharded_over_an_explicit_mesh_stays_so(layer, getkey):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = jax.random.normal(getkey(), (8, 4, 6))
    expected = jax.vmap(layer)(x)
    with jax.set_mesh(mesh):
        ys = jax.jit(lambda x: (layer(x), jax.vmap(layer)(x)))(jax.device_put(x, jax.P("data")))
    for y in ys:
        assert jax.typeof(y).sharding.spec == jax.P("data", None, None)
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_a_wrong_shape_is_refused_by_name(name):
    with pytest.raises(
        ValueError, match=rf"(?s)`{name}` was given .*expected: \(\.\.\., 3\).*got: \(4,\)"
    ):
        getattr(nn, name)(3)(jnp.ones(4))


@pytest.mark.parametrize("x", [jnp.ones((6, 2)), jnp.ones(()), jnp.ones((5,))], ids=str)
def test_group_norm_refuses_other_channels(x):
    with pytest.raises(
        ValueError, match=r"(?s)`GroupNorm` was given .*expected: \(channels=4"
    ) as error:
        nn.GroupNorm(2, 4)(x)
    assert "instead" not in str(error.value)
    with pytest.raises(ValueError, match="expected: .a multiple of 4"):
        nn.GroupNorm(4, channelwise_affine=False)(x)


def test_group_norm_of_any_shape_says_what_a_batch_needs():
    with pytest.raises(ValueError, match=r"num_spatial_dims=1\).*jax\.vmap\(layer\)\(x\)"):
        nn.GroupNorm(2, 4)(jnp.ones((7, 4, 3)))
    with pytest.raises(ValueError, match=r"num_spatial_dims=0\).*jax\.vmap\(layer\)\(x\)"):
        nn.GroupNorm(2, channelwise_affine=False)(jnp.ones((7, 4)))


@pytest.mark.parametrize("shape", [(4, 3), (3,), (7, 3, 2, 2)])
def test_group_norm_of_images_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"expected: \(\.\.\., channels=4, height, width\)"):
        nn.GroupNorm(2, 4, num_spatial_dims=2)(jnp.ones(shape))


def test_group_norm_refuses_channels_that_its_groups_do_not_divide():
    with pytest.raises(ValueError, match=r"(?s)cannot be divided.*that 2 divides.*channels=3"):
        nn.GroupNorm(2, 3)


def test_group_norm_needs_to_know_its_channels():
    with pytest.raises(ValueError, match=r"(?s)the number of its weights.*channelwise_affine=True"):
        nn.GroupNorm(2)


def test_sizes_and_types_of_weights_are_checked():
    with pytest.raises(ValueError, match=r"(?s)`LayerNorm` was given a wrong size.*`shape`"):
        nn.LayerNorm(-1)
    with pytest.raises(ValueError, match=r"(?s)`GroupNorm` was given a wrong size.*`groups`"):
        nn.GroupNorm(0, 4)
    with pytest.raises(ValueError, match="(?s)wrong size.*`num_spatial_dims`"):
        nn.GroupNorm(2, 4, num_spatial_dims=-1)
    for make in (nn.LayerNorm, nn.RMSNorm):
        with pytest.raises(
            ValueError, match=f"weights of `{make.__name__}` must be floating-point"
        ):
            make(3, dtype=jnp.int32)


def test_the_old_spelling_is_an_ordinary_type_error():
    with pytest.raises(TypeError, match="elementwise_affine"):
        nn.LayerNorm(3, elementwise_affine=False)  # pyright: ignore[reportCallIssue]


GROUPS = functools.partial(nn.GroupNorm, 2, 4)
INSTANCES = functools.partial(nn.InstanceNorm, 4)


@pytest.mark.parametrize(
    ("make", "shape", "of_batch"),
    [
        (GROUPS, (4, 4), 0),
        (GROUPS, (4, 8, 4), 0),
        (GROUPS, (4, 4, 8, 8), 2),
        (INSTANCES, (4, 4, 8, 8), 2),
        (INSTANCES, (4, 8, 4, 3), 1),
    ],
)
@pytest.mark.sample(3)
def test_an_input_that_may_be_an_example_or_a_batch_is_refused(make, shape, of_batch, getkey):
    x, of_example = jax.random.normal(getkey(), shape), len(shape) - 1
    text = rf"(?s)is ambiguous: the first axis.*dims={of_example}\) if.*dims={of_batch} if it is a batch"
    with pytest.raises(ValueError, match=text):
        make()(x)
    # Said how many there are, both readings are to be had, and differ.
    whole, batch = (make(num_spatial_dims=n)(x) for n in (of_example, of_batch))
    assert not np.allclose(whole, batch, atol=1e-2)
    # Compat has Equinox's rule.
    if make is GROUPS:
        np.testing.assert_allclose(compat.nn.GroupNorm(2, 4)(x), whole, atol=1e-6)


def test_positions_in_the_last_axis_are_no_channels(getkey):
    x = jax.random.normal(getkey(), (4, 4))
    np.testing.assert_allclose(INSTANCES()(x), INSTANCES(num_spatial_dims=1)(x))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e9, 1e13, 1e16, 1e18])
@pytest.mark.sample(3)
def test_gradients_of_large_inputs_are_those_of_small_ones(scale):
    x = jnp.array([[1.0, -2.0, 3.0, 0.5], [2.0, 1.0, -1.0, 4.0]])
    weight = jnp.array([[1.0, -2.0, 0.5, 3.0], [0.3, 1.0, -1.0, 2.0]])
    layers = {
        "layer": nn.LayerNorm(4, eps=0.0),
        "rms": nn.RMSNorm(4, eps=0.0),
        "group": nn.GroupNorm(2, 4, eps=0.0, num_spatial_dims=0),
        "batch": nn.BatchNorm(4, eps=0.0),
        "instance": nn.InstanceNorm(2, eps=0.0, num_spatial_dims=1),
    }
    for name, layer in layers.items():

        def loss(x, layer=layer):
            return jnp.sum(nn.apply(layer, x, train=True)[0] * weight)

        np.testing.assert_allclose(
            jax.grad(loss)(scale * x) * scale, jax.grad(loss)(x), rtol=1e-4, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("scale", [1.0, 1e9, 1e11])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.sample(3)
def test_second_derivatives_of_large_inputs_are_those_of_small_ones(kind, scale, getkey):
    x, weight = jax.random.normal(getkey(), (2, 4, 4))
    layer = kind(4, eps=0.0)

    def loss(x):
        # In a scan, and with axes of one length.
        return jnp.sum(jax.lax.scan(lambda c, row: (c, layer(row)), 0, x)[1] * weight)

    right = jax.hessian(lambda x: jnp.sum(layer(x) * weight))(x)
    got = jax.hessian(loss)(scale * x) * scale * scale
    np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-4 * float(abs(right).max()))


@pytest.mark.parametrize("scale", [1e18, 1e19, 1e25])
def test_squares_that_overflow_are_never_zeros(scale):
    x = scale * jnp.array([[1.0, -2.0, 3.0, 0.5], [2.0, 1.0, -1.0, 4.0]])
    layers = {
        "layer": nn.LayerNorm(4),
        "rms": nn.RMSNorm(4),
        "group": nn.GroupNorm(2, 4, num_spatial_dims=0),
        "batch": nn.BatchNorm(4),
        "instance": nn.InstanceNorm(2, num_spatial_dims=1),
    }
    for name, layer in layers.items():
        got, changed = nn.apply(layer, x, train=True)
        right, _ = nn.apply(layer, x / scale, train=True)
        # NaN says that it was too much.
        assert jnp.all(jnp.isnan(got) | (abs(got - right) < 1e-3)), name
        if name == "batch" and scale > 1e18:
            assert not jnp.any(nn.apply(changed, x / scale, train=False)[0] == 0)
