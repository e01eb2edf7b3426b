"""`interpolate` and `Upsample`: against definitions, in all dtypes, at the edges, and when misused.

PyTorch's results are in `test_interpolate_torch.py`.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn._jaxprs import equations
from vernal import nn, saving

METHODS = ["nearest", "nearest-exact", "linear", "cubic"]
every = pytest.mark.parametrize("method", METHODS)


def test_each_axis_is_resized_by_itself():
    x = jnp.arange(9.0).reshape(3, 3)
    rows = [[0.0, 0.5, 1.0, 1.5, 2.0], [3.0, 3.5, 4.0, 4.5, 5.0], [6.0, 6.5, 7.0, 7.5, 8.0]]
    settings = {"method": "linear", "align_corners": True}
    assert nn.interpolate(x, (3, 5), **settings).tolist() == rows
    assert nn.interpolate(x, (5,), **settings).tolist() == rows
    assert nn.interpolate(x, (5, 3), **settings)[:, 0].tolist() == [0, 1.5, 3, 4.5, 6]
    assert nn.interpolate(x, (2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_axes_in_front_are_as_they_were(getkey):
    x = jax.random.normal(getkey(), (4, 4, 4, 4))
    y = nn.interpolate(x, (6, 3), method="cubic")
    one = nn.interpolate(x[1, 2], (6, 3), method="cubic")
    assert y.shape == (4, 4, 6, 3)
    np.testing.assert_allclose(y[1, 2], one, rtol=1e-5, atol=1e-6)


def test_the_nearest_entry_is_found_exactly():
    # In floating-point numbers 41 * (2 / 82) and 49 * (2 / 98) are less than 1.
    for new in (82, 98):
        y = nn.interpolate(jnp.arange(2), (new,))
        assert y.tolist() == [0] * (new // 2) + [1] * (new // 2)


@every
def test_a_linear_ramp_stays_one_where_it_is_not_cut_off(method):
    y = np.asarray(nn.interpolate(jnp.arange(8.0), (16,), method=method))
    middles = (np.arange(16) + 0.5) / 2 - 0.5
    error = 0.25 if method.startswith("nearest") else 0.05
    np.testing.assert_allclose(y[4:12], middles[4:12], atol=error)


@pytest.mark.parametrize("method", ["linear", "cubic"])
def test_an_average_over_cells_is_one(method):
    x = jnp.zeros(64).at[31].set(1.0)
    settings = {"method": method, "antialias": True}
    y = nn.interpolate(x, (4,), **settings)
    np.testing.assert_allclose(y.sum() * 16, 1, atol=0.15)
    ones = nn.interpolate(jnp.ones(64), (5,), **settings)
    np.testing.assert_allclose(ones, 1, rtol=1e-6)


@every
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_computed_in_single(method, dtype, getkey):
    x = jax.random.normal(getkey(), (2, 5)).astype(dtype)
    y = nn.interpolate(x, (13,), method=method)
    assert y.dtype == dtype
    expected = nn.interpolate(x.astype(jnp.float32), (13,), method=method)
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=0.02)
    # As many ones are added up as there are copies, more than the precision of a half can count.
    back = jax.grad(lambda x: nn.interpolate(x, (3000,)).astype(jnp.float32).sum())(
        jnp.ones(1, dtype)
    )
    assert back.dtype == dtype and back[0] == dtype(3000)


def test_integers_stay_what_they_are_only_among_the_nearest():
    labels = jnp.array([[2**30 + 1, 7]])
    for method in ("nearest", "nearest-exact"):
        y = nn.interpolate(labels, (4,), method=method)
        assert y.dtype == labels.dtype and y.tolist() == [[2**30 + 1, 2**30 + 1, 7, 7]]
    assert nn.interpolate(labels > 7, (4,)).tolist() == [[True, True, False, False]]
    assert nn.interpolate(labels, (4,), method="linear").dtype == jnp.float32
    assert nn.interpolate(labels, (2,), method="linear").dtype == jnp.float32


@every
def test_complex_numbers_are_two_real_ones(method, getkey):
    x = jax.random.normal(getkey(), (2, 5), jnp.complex64)
    y = nn.interpolate(x, (7,), method=method)
    np.testing.assert_allclose(y.real, nn.interpolate(x.real, (7,), method=method), atol=1e-6)
    np.testing.assert_allclose(y.imag, nn.interpolate(x.imag, (7,), method=method), atol=1e-6)


@every
def test_an_infinite_entry_stays_where_it_is(method):
    x = jnp.ones(9).at[4].set(jnp.inf)
    up = nn.interpolate(x, (18,), method=method)
    assert jnp.isfinite(up[:4]).all() and jnp.isfinite(up[-4:]).all()
    assert (nn.interpolate(x, (9,), method=method) == x).all()
    if not method.startswith("nearest"):
        kept = nn.interpolate(x, (17,), method=method, align_corners=True)
        assert (kept[::2] == x).all()


@every
def test_the_derivative_is_the_same_linear_map_in_both_directions(method, getkey):
    with jax.enable_x64(True):
        x, v = jax.random.normal(getkey(), (2, 3, 5)), jax.random.normal(getkey(), (2, 3, 5))

        def resize(x):
            return nn.interpolate(x, (4, 9), method=method)

        y, ahead = jax.jvp(resize, (x,), (v,))
        np.testing.assert_allclose(ahead, resize(v), atol=1e-12)
        w = jax.random.normal(getkey(), y.shape)
        (back,) = jax.jit(lambda x, w: jax.vjp(resize, x)[1](w))(x, w)
        np.testing.assert_allclose((back * v).sum(), (w * ahead).sum(), rtol=1e-9)
        curvature = jax.jit(jax.hessian(lambda x: (resize(x) ** 2).sum()))(x)
        np.testing.assert_allclose(
            jnp.tensordot(curvature, v, 3), jax.vjp(resize, x)[1](2 * ahead)[0], atol=1e-9
        )


@every
def test_neither_direction_scatters(method):
    def loss(x):
        return (nn.interpolate(x, (4, 9), method=method) ** 2).sum()

    found = {e.primitive.name for e in equations(jax.make_jaxpr(jax.grad(loss))(jnp.ones((3, 5))))}
    assert not any("scatter" in name for name in found)


def test_many_taps_are_one_operation():
    def shrink(x):
        return nn.interpolate(x, (10,), method="linear", antialias=True)

    x = jnp.arange(1000.0)
    program = jax.make_jaxpr(jax.grad(lambda x: shrink(x).sum()))(x)
    assert len(list(equations(program))) < 60
    np.testing.assert_allclose(shrink(x)[1:-1], 99.5 + 100 * np.arange(9)[:-1] + 50, rtol=1e-5)


def test_a_batch_may_have_a_symbolic_size():
    layer = nn.Upsample(scale=(2,), method="linear")
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 3, 4"), jnp.float32)
    run = saving.load_exported(saving.export(layer, x))
    given = jnp.arange(60.0).reshape(5, 3, 4)
    np.testing.assert_allclose(run(given), layer(given), rtol=1e-6)


def test_a_batch_of_nothing_gives_nothing():
    assert nn.Upsample(scale=(2, 2))(jnp.ones((0, 3, 4, 4))).shape == (0, 3, 8, 8)
    assert nn.interpolate(jnp.ones((0, 4)), (2,), method="cubic").shape == (0, 2)


def test_sizes_are_told_in_one_way():
    for settings, got in (({}, "neither"), ({"size": (2,), "scale": (2,)}, "both")):
        with pytest.raises(ValueError, match=rf"(?s)one of `size` and `scale`.*got: {got}"):
            nn.interpolate(jnp.ones(3), **settings)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("size", ()), ("size", (0,)), ("size", 4), ("size", (2.0,)), ("scale", 2), ("scale", (-1,))]
    + [("scale", (float("nan"),)), ("scale", (float("inf"),))],
)
def test_wrong_sizes_are_refused(argument, value):
    # Without the check of annotations, which would answer first.
    with pytest.raises(
        ValueError, match=rf"(?s)invalid `{argument}`.*instead: {argument}=\(2, 2\)"
    ):
        inspect.unwrap(nn.interpolate)(jnp.ones((2, 3)), **{argument: value})


@pytest.mark.parametrize("layer", [nn.interpolate, nn.Upsample])
def test_settings_that_do_not_go_together_are_refused(layer):
    def call(**settings):
        made = inspect.unwrap(nn.Upsample.__init__)
        if layer is nn.Upsample:
            return made(object.__new__(nn.Upsample), (2,), **settings)
        return inspect.unwrap(layer)(jnp.ones(3), (2,), **settings)

    with pytest.raises(ValueError, match=r"(?s)was given an unknown method.*'bilinear'.*trilinear"):
        call(method="bilinear")
    for settings in (
        {"align_corners": True},
        {"antialias": True, "method": "nearest-exact"},
        {"antialias": True, "align_corners": True, "method": "cubic"},
    ):
        with pytest.raises(ValueError, match=r"(?s)cannot be combined.*align_corners=.*antialias="):
            call(**settings)


def test_inputs_that_cannot_be_resized_are_refused():
    with pytest.raises(
        ValueError, match=r"(?s)more axes than its input has.*at least 2 axes.*\(3,\)"
    ):
        nn.interpolate(jnp.ones(3), (2, 2))
    with pytest.raises(ValueError, match=r"(?s)cannot resize an axis.*from \(0,\) to \(2,\)"):
        nn.interpolate(jnp.ones((3, 0)), (2,))
    with pytest.raises(ValueError, match=r"(?s)cannot resize an axis.*from \(1,\) to \(0,\)"):
        nn.interpolate(jnp.ones((3, 1)), scale=(0.5,))
    with pytest.raises(ValueError, match=r"(?s)`Upsample`.*\(\.\.\., channels, height, width\)"):
        nn.Upsample(scale=(2, 2))(jnp.ones((4, 4)))
