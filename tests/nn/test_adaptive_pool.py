"""Adaptive pools: against their definition, and in compat against Equinox. (PyTorch's are in `test_torch.py`.)"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn
from vernal.compat import equinox as compat


@pytest.mark.parametrize("kind", ["AdaptiveAvgPool", "AdaptiveMaxPool"])
@pytest.mark.parametrize(
    ("n", "target"), [(1, 1), (1, 3), (1, 7), (2, (3, 5)), (2, 4), (3, (1, 2, 7))]
)
@pytest.mark.sample(3)
def test_values_and_gradients_are_equinox_s(getkey, kind, n, target):
    ours, theirs = (getattr(lib, f"{kind}{n}d")(target) for lib in (compat.nn, eqx.nn))
    assert isinstance(ours, compat.nn.AdaptivePool) and isinstance(ours, nn.AdaptivePool)
    assert ours.disjoint and ours != getattr(nn, f"{kind}{n}d")(target)
    x = jax.random.normal(getkey(), (2,) + (7,) * n)

    @jax.jit
    def values_and_gradients(x):
        return [(f(x), jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x)) for f in (ours, theirs)]

    (y, grad), (their_y, their_grad) = values_and_gradients(x)
    assert y.shape == (2, *ours.target_shape)
    np.testing.assert_allclose(y, their_y, atol=1e-6)
    np.testing.assert_allclose(grad, their_grad, atol=1e-5)


def test_the_base_class_is_equinox_s(getkey):
    x = jax.random.normal(getkey(), (3, 7, 7))
    ours, theirs = (lib.AdaptivePool((3, 5), 2, jnp.median) for lib in (compat.nn, eqx.nn))
    np.testing.assert_allclose(ours(x), theirs(x), atol=1e-6)


@pytest.mark.parametrize(("n", "parts"), [(8, 3), (7, 5), (10, 4), (3, 8), (1, 4), (6, 3)])
@pytest.mark.sample(3)
def test_parts_go_from_the_floor_to_the_ceiling(n, parts, getkey):
    x = jax.random.normal(getkey(), (2, n))
    bounds = [(i * n // parts, -(-(i + 1) * n // parts)) for i in range(parts)]
    for layer, operation in (
        (nn.AdaptiveAvgPool1d(parts), np.mean),
        (nn.AdaptiveMaxPool1d(parts), np.max),
        (nn.AdaptivePool(parts, 1, jnp.median), np.median),
    ):
        expected = [operation(np.asarray(x[:, a:b]), axis=1) for a, b in bounds]
        np.testing.assert_allclose(layer(x), np.stack(expected, 1), rtol=1e-5, atol=1e-6)


def test_two_axes_of_one_length_are_not_mixed_up():
    x = jnp.arange(25.0).reshape(1, 5, 5)
    y = nn.AdaptiveAvgPool2d((5, 2))(x)
    assert y.tolist() == [[[5.0 * r + 1, 5 * r + 3] for r in range(5)]]


def test_the_first_disjoint_parts_are_the_longer_ones(getkey):
    x = jax.random.normal(getkey(), (1, 8, 5))
    rows = [slice(0, 3), slice(3, 6), slice(6, 8)]
    columns = [slice(0, 3), slice(3, 5)]
    expected = [[float(x[0, r, c].mean()) for c in columns] for r in rows]
    assert np.allclose(nn.AdaptiveAvgPool2d((3, 2), disjoint=True)(x)[0], expected, atol=1e-6)


def test_the_operation_reduces_one_dimension_at_a_time(getkey):
    seen = []

    def total(x):
        seen.append(x.shape)
        return x.sum()

    x = jax.random.normal(getkey(), (2, 4, 6))
    out = nn.AdaptivePool((2, 1), 2, total)(x)
    assert jnp.allclose(out, x.reshape(2, 2, 2, 6).sum(axis=(2, 3))[..., None], atol=1e-5)
    assert seen == [(2,), (6,)]


def test_jax_takes_the_layer_as_it_is(getkey):
    layer = nn.AdaptiveMaxPool2d(2)
    x = jax.random.normal(getkey(), (4, 3, 5, 6))
    expected = jnp.stack([layer(image) for image in x])
    assert jnp.array_equal(jax.jit(jax.vmap(layer))(x), expected)
    assert jax.tree.leaves(layer) == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32])
def test_dtypes_are_those_of_the_operation(dtype):
    x = jnp.arange(6).astype(dtype)[None]
    assert nn.AdaptiveMaxPool1d(2)(x).dtype == dtype
    assert nn.AdaptiveAvgPool1d(2)(x).dtype == jnp.mean(x).dtype


def test_more_disjoint_parts_than_entries_are_refused():
    with pytest.raises(
        ValueError, match=r"(?s)an input that is too small.*\(5,\).*smaller `target"
    ):
        nn.AdaptiveAvgPool1d(5, disjoint=True)(jnp.ones((1, 3)))


def test_an_axis_without_entries_is_refused():
    with pytest.raises(
        ValueError, match=r"(?s)an input that is too small.*\(1, 1\).*a larger input"
    ):
        nn.AdaptiveAvgPool2d(2)(jnp.ones((1, 3, 0)))


@pytest.mark.parametrize("target", [0, (3,), (3, 3, 3)])
def test_wrong_targets_are_refused(target):
    with pytest.raises(
        ValueError, match="`AdaptiveMaxPool2d` was given wrong sizes for its 2 spatial"
    ):
        nn.AdaptiveMaxPool2d(target)


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"expected: \(\.\.\., channels, length\)"):
        nn.AdaptiveAvgPool1d(2)(jnp.ones(8))
