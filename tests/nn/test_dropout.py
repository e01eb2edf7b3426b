"""`Dropout` and `DropPath`: against Equinox, their statistics, their settings and their errors."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import nn, tree_at


@pytest.mark.parametrize("p", [0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64, jnp.int32])
def test_the_same_key_drops_the_same_elements_as_in_equinox(p, dtype, getkey):
    key, x = getkey(), (10 * jax.random.normal(getkey(), (5, 20))).astype(dtype)
    with jax.numpy_dtype_promotion("standard"):
        expected = eqx.nn.Dropout(p)(x, key=key)
    np.testing.assert_allclose(nn.Dropout(p)(x, key=key), expected, rtol=1e-6)


def test_half_precision_is_scaled_in_float32_and_returned_as_it_came(getkey):
    key, x = getkey(), jax.random.normal(getkey(), (100,)).astype(jnp.bfloat16)
    y = nn.Dropout(0.3)(x, key=key)
    assert y.dtype == jnp.bfloat16
    assert (y == nn.Dropout(0.3)(x.astype(jnp.float32), key=key).astype(jnp.bfloat16)).all()


def test_the_mean_stays(getkey):
    y = nn.Dropout(0.3)(jnp.ones(40_000), key=getkey())
    np.testing.assert_allclose(y.mean(), 1, atol=0.03)
    np.testing.assert_allclose((y == 0).mean(), 0.3, atol=0.02)


def test_inference_and_a_zero_probability_let_everything_through(getkey):
    x = jax.random.normal(getkey(), (3,))
    assert (nn.Dropout(0.5, inference=True)(x) == x).all()
    assert (nn.Dropout(0.5)(x, inference=True) == x).all()
    assert (nn.Dropout(0)(x) == x).all()
    trained = nn.Dropout(0.5, inference=True)(jnp.ones(100), inference=False, key=getkey())
    assert set(trained.tolist()) == {0.0, 2.0}


def test_the_settings_are_structure_and_can_be_replaced():
    layer = nn.Dropout()
    assert (layer.p, layer.inference) == (0.5, False)
    assert jax.tree.leaves(layer) == []
    layer = vernal.tree_at(lambda d: (d.p, d.inference), layer, (0.1, True))
    assert (layer.p, layer.inference) == (0.1, True)


def test_a_traced_probability_is_a_leaf_and_agrees_with_a_number(getkey):
    key, x = getkey(), jax.random.normal(getkey(), (50,))
    drop = jax.jit(lambda p: nn.Dropout(p)(x, key=key))
    for p in (0.0, 0.25, 1.0):
        np.testing.assert_allclose(drop(jnp.array(p)), nn.Dropout(p)(x, key=key), rtol=1e-6)


@pytest.mark.parametrize("p", [1.0, jnp.array(1.0)], ids=["number", "array"])
def test_dropping_everything_has_zero_gradients_rather_than_nan(p, getkey):
    key = getkey()
    grad = jax.grad(lambda x: nn.Dropout(p)(x, key=key).sum())(jnp.ones(3))
    assert (grad == 0).all()


# What drops in groups: the layer by `p`, a shape, and how many of its axes are one group.
GROUPED = {
    "channels": (lambda p: nn.Dropout(p, together=2), (6, 4, 4), 2),
    "channels of a batch of squares": (lambda p: nn.Dropout(p, together=2), (4, 4, 4, 4), 2),
    "everything": (lambda p: nn.Dropout(p, together=None), (3, 4), 2),
    "DropPath": (nn.DropPath, (3, 4), 2),
    "DropPath of a batch": (lambda p: nn.DropPath(p, together=1), (4, 4), 1),
    "DropPath of a scalar": (nn.DropPath, (), 0),
}
grouped = pytest.mark.parametrize(("make", "shape", "axes"), GROUPED.values(), ids=GROUPED)


@grouped
def test_a_group_is_dropped_or_kept_as_one(make, shape, axes, getkey):
    x = 1 + jnp.arange(np.prod(shape, dtype=int)).reshape(shape).astype(jnp.float32)
    drop = jax.jit(jax.vmap(lambda key: make(0.25)(x, key=key)))
    scales = (np.asarray(drop(jax.random.split(getkey(), 1000))) / np.asarray(x)).round(4)
    rows = scales.reshape(1000, -1, int(np.prod(shape[len(shape) - axes :], dtype=int)))
    assert (rows == rows[..., :1]).all()
    np.testing.assert_allclose(np.unique(rows), [0, 4 / 3], atol=1e-4)
    np.testing.assert_allclose((rows == 0).mean(), 0.25, atol=0.08)
    if rows.shape[1] > 1:
        assert (rows[:, 0, 0] != rows[:, 1, 0]).any()


@grouped
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
@pytest.mark.sample(3)
def test_the_ends_of_the_range_are_exact_and_their_gradients_finite(
    make, shape, axes, dtype, getkey
):
    x, key = jnp.ones(shape, dtype), getkey()
    assert make(0)(x) is x and make(0.5)(x, inference=True) is x
    assert not make(1)(x, key=key).any()
    drop = jax.jit(lambda p, x: make(p)(x, key=key))
    zero, one = drop(jnp.array(0.0), x), drop(jnp.array(1.0), x)
    assert (np.asarray(zero) == np.asarray(x)).all() and not one.any()
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    assert one.dtype == (dtype if inexact else jnp.float32)
    if inexact:
        for p, slope in ((0.0, 1.0), (1.0, 0.0)):
            grad = jax.grad(lambda x, p=p: drop(jnp.array(p), x).sum())(x)
            assert (grad == slope).all()


def test_a_probability_in_an_array_is_a_buffer():
    model = nn.Sequential([nn.Linear(2, 2, key=jax.random.key(0)), nn.DropPath(jnp.array(0.5))])

    def loss(model):
        return model(jnp.ones(2), key=jax.random.key(1)).sum()

    gradient = vernal.filter_grad(loss)(model)
    assert gradient.layers[0].weight.shape == (2, 2)
    assert gradient.layers[1].p == vernal.NoGradient()
    assert len(jax.tree.leaves(vernal.partition(model, vernal.trainable(model))[0])) == 2


def test_one_call_of_drop_path_is_one_draw(getkey):
    y = jax.vmap(lambda key: nn.DropPath(0.5)(jnp.ones((8, 3)), key=key))(
        jax.random.split(getkey(), 20)
    )
    assert set(y.mean(axis=(1, 2)).tolist()) == {0.0, 2.0}


def test_each_element_of_a_batch_is_dropped_with_its_own_key(getkey):
    keys = jax.random.split(getkey(), 4)
    layer, x = nn.Dropout(0.5), jnp.ones((4, 30))
    y = jax.vmap(lambda x, key: layer(x, key=key))(x, keys)
    for row, key in zip(y, keys, strict=True):
        assert (row == layer(jnp.ones(30), key=key)).all()
    together = layer(x, key=keys[0])
    assert not (together[0] == together[1]).all()


def test_an_explicit_mesh_is_kept(getkey):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    keys = jax.random.split(getkey(), 8)
    run = jax.jit(jax.vmap(lambda x, key: nn.Dropout(0.5)(x, key=key)))
    expected = run(jnp.ones((8, 6)), keys)
    with jax.set_mesh(mesh):
        y = run(*jax.device_put((jnp.ones((8, 6)), keys), jax.P("data")))
        assert jax.typeof(y).sharding.spec == jax.P("data", None)
    assert (np.asarray(y) == expected).all()


def test_a_missing_key_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"(?s)needs a random key.*inference_mode\(model\)"):
        nn.Dropout()(jnp.ones(3))


def test_drop_path_is_named_in_its_errors():
    with pytest.raises(RuntimeError, match="DropPath needs a random key"):
        nn.DropPath(0.5)(jnp.ones(3))
    with pytest.raises(ValueError, match=r"DropPath\(p=...\)"):
        nn.DropPath(2.0)


def test_more_axes_together_than_there_are_is_refused():
    with pytest.raises(
        ValueError, match=r"(?s)`Dropout` drops more axes together.*at least 2.*\(3,\)"
    ):
        nn.Dropout(0.5, together=2)(jnp.ones(3), key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"(?s)`DropPath`.*`together`.*at least 0"):
        nn.DropPath(0.5, together=-1)


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan")])
def test_a_probability_outside_its_range_is_refused(p):
    with pytest.raises(ValueError, match=r"(?s)between 0 and 1.*0 <= p <= 1"):
        nn.Dropout(p)


def test_the_old_spelling_is_an_ordinary_type_error():
    with pytest.raises(TypeError, match="deterministic"):
        nn.Dropout(0.5, deterministic=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="deterministic"):
        nn.Dropout(0.5)(jnp.ones(3), deterministic=True)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("p", [1.5, -0.1, float("nan"), jnp.array(2.0)])
def test_a_probability_that_surgery_put_out_of_its_range_is_refused_at_the_call(p, getkey):
    x, key = jnp.ones((3, 4)), getkey()
    text = r"(?s)between 0 and 1.*{}\(p=\.\.\.\).*0 <= p <= 1"
    for layer in (nn.Dropout(0.5), nn.DropPath(0.5)):
        wrong, where = tree_at("p", layer, p), text.format(type(layer).__name__)
        with pytest.raises(ValueError, match=where):
            wrong(x, key=key)
        with pytest.raises(ValueError, match=where):
            jax.jit(lambda x, wrong=wrong: wrong(x, key=key))(x)
        assert (wrong(x, inference=True) == x).all()
    for model, inputs in [
        (nn.MultiheadAttention(1, 4, dropout_p=0.5, key=key), (x, x, x)),
        (nn.LSTM(4, 4, 2, dropout_p=0.5, key=key), (x,)),
    ]:
        with pytest.raises(ValueError, match=text.format("Dropout")):
            tree_at("dropout.p", model, p)(*inputs, key=key)
    with pytest.raises(ValueError, match=text.format("Dropout")):
        nn.Dropout(p)


def test_whether_a_layer_is_in_inference_is_known_while_tracing(getkey):
    key, xs = getkey(), jax.random.normal(getkey(), (4, 3))
    text = "(?s)`{}` of `{}` must be True or False, known while.*got: bool.*filter_cond"
    spectral = nn.SpectralNorm(nn.Linear(3, 3, key=key), key=key)
    for layer in (nn.Dropout(0.5), nn.BatchNorm(3), spectral):
        by_call = jax.jit(
            lambda off, layer=layer: nn.apply(
                layer,
                xs,
                key=key,
                method=lambda layer, x: inspect.unwrap(type(layer).__call__)(
                    layer, x, inference=off
                ),
            )
        )
        by_flag = jax.jit(
            lambda off, layer=layer: nn.apply(
                inspect.unwrap(nn.inference_mode)(layer, off), xs, key=key
            )
        )
        for call, *names in (
            (by_call, "inference", type(layer).__name__),
            (by_flag, "value", "inference_mode"),
        ):
            with pytest.raises(TypeError, match=text.format(*names)):
                call(True)
        off, _ = nn.apply(inspect.unwrap(nn.inference_mode)(layer, np.True_), xs, key=key)
        assert (off == nn.apply(layer, xs, train=False)[0]).all()


def test_a_traced_probability_that_is_nan_comes_out(getkey):
    key, x = getkey(), jnp.ones(3)
    for layer in (nn.Dropout(0.5), nn.DropPath(0.5)):
        call = jax.jit(lambda p, layer=layer: tree_at("p", layer, p)(x, key=key))
        assert np.isnan(call(jnp.nan)).all() and np.array_equal(call(1.0), np.zeros(3))


@pytest.mark.parametrize("p", ["0.5", None, [0.5], jnp.array([0.1, 0.9])])
def test_a_probability_is_one_number(p, getkey):
    error = ValueError if isinstance(p, jax.Array) else TypeError
    with pytest.raises(error, match=r"(?s)one number.*Dropout\(p=...\)"):
        inspect.unwrap(nn.Dropout.__init__)(object.__new__(nn.Dropout), p)
    for layer in (nn.Dropout(0.5), nn.DropPath(0.5)):
        wrong = tree_at("p", layer, p, is_leaf=lambda x: x is None)
        with pytest.raises(error, match=rf"(?s)one number.*{type(layer).__name__}\(p=...\)"):
            wrong(jnp.ones(2), key=getkey())
