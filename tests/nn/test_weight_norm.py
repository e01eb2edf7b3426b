"""Weight normalisation against Equinox's, and what it is by definition."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import nn, tree_at


@pytest.mark.parametrize("axis", [0, 1, -1, None])
@pytest.mark.sample(3)
def test_values_and_gradients_are_equinoxs(axis, getkey):
    layer = nn.Linear(3, 4, key=getkey())
    theirs = tree_at_eqx(eqx.nn.Linear(3, 4, key=getkey()), layer)
    # Equinox counts axes from the front only.
    ours, theirs = (
        nn.WeightNorm(layer, axis=axis),
        eqx.nn.WeightNorm(theirs, axis=axis if axis is None else axis % 2),
    )
    scale = jax.random.normal(getkey(), ours.g.shape)
    ours = tree_at(lambda m: m.g, ours, scale)
    theirs = eqx.tree_at(lambda m: m.g, theirs, scale.reshape(theirs.g.shape))
    x = jax.random.normal(getkey(), (3,))
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-6)
    grads, expected = (
        jax.grad(lambda m: (m(x) ** 2).sum())(ours),
        eqx.filter_grad(lambda m: (m(x) ** 2).sum())(theirs),
    )
    np.testing.assert_allclose(grads.g.ravel(), expected.g.ravel(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads.layer.weight, expected.layer.weight, rtol=1e-4, atol=1e-5)


def tree_at_eqx(theirs, ours):
    return eqx.tree_at(lambda m: (m.weight, m.bias), theirs, (ours.weight, ours.bias))


def test_the_length_of_the_layers_own_weight_does_not_matter(getkey):
    normed = nn.WeightNorm(nn.Conv2d(2, 3, 2, key=getkey()))
    x = jax.random.normal(getkey(), (2, 4, 4))
    longer = tree_at(lambda m: m.layer.weight, normed, 7 * normed.layer.weight)
    assert normed.g.shape == (3, 1, 1, 1)
    np.testing.assert_allclose(longer(x), normed(x), rtol=1e-4, atol=1e-5)


def test_two_of_the_same_layer_are_equal(getkey):
    layer = nn.Linear(3, 4, key=getkey())
    assert nn.WeightNorm(layer, axis=None) == nn.WeightNorm(layer, axis=None)


def test_a_key_is_handed_on(getkey):
    class Noisy(nn.Linear):
        def __call__(self, x, *, key):
            return super().__call__(x) + jax.random.normal(key)

    normed, key = nn.WeightNorm(Noisy(2, 2, key=getkey())), getkey()
    np.testing.assert_allclose(
        normed(jnp.ones(2), key=key), normed.layer(jnp.ones(2), key=key), rtol=1e-5
    )


def test_a_layer_without_such_a_weight_is_refused(getkey):
    with pytest.raises(ValueError, match="(?s)no array to normalise.*`kernel`"):
        nn.WeightNorm(nn.Linear(2, 2, key=getkey()), "kernel")
    with pytest.raises(ValueError, match="(?s)no array to normalise.*`weight` that has an axis 2"):
        nn.WeightNorm(nn.Linear(2, 2, key=getkey()), axis=2)


def test_the_length_follows_where_the_weight_is_initialised_anew(getkey):
    make = lambda key: nn.WeightNorm(nn.Linear(3, 3, key=key))  # noqa: E731 (twice the same)
    model = {"one": make(getkey()), "stack": nn.Stack(make, 2, key=getkey())}
    rules = {nn.Linear: jax.nn.initializers.normal(2.0)}
    key = getkey()
    new = nn.initialise(model, rules, key)
    for normed in (new["one"], *new["stack"]):
        np.testing.assert_allclose(normed.g, normed.norm(normed.layer.weight), rtol=1e-6)
    chosen = nn.initialise(model, rules | {"**.g": jax.nn.initializers.ones}, key)
    assert (chosen["one"].g == 1).all() and (chosen["stack"].layers.g == 1).all()
    biases = nn.initialise(model, {(nn.Linear, "bias"): jax.nn.initializers.zeros}, key)
    assert (biases["one"].g == model["one"].g).all()


def test_rows_of_zeros_are_zero_and_have_finite_gradients(getkey):
    linear = nn.Linear(3, 2, key=getkey())
    linear = tree_at(lambda m: m.weight, linear, linear.weight.at[0].set(0))
    norm, x = nn.WeightNorm(linear), jnp.ones(3)
    np.testing.assert_allclose(norm(x), linear(x), rtol=1e-6)
    longer = tree_at(lambda m: m.g, norm, jnp.ones((2, 1)))
    for one in (norm, longer):
        value, grads = jax.value_and_grad(lambda m: m(x).sum())(one)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, grads)))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("size", [20.0, 1e-4])
def test_lengths_of_half_precision_are_taken_in_single(dtype, size, getkey):
    # 1000 squares of 20 do not fit into float16, and one of 1e-4 is zero there.
    layer = nn.Linear(1000, 2, dtype=dtype, key=getkey())
    layer = tree_at("weight", layer, jnp.full((2, 1000), size, dtype))
    normed, x = nn.WeightNorm(layer), jnp.full(1000, 0.01, dtype)
    assert normed.g.dtype == dtype and normed(x).dtype == dtype
    np.testing.assert_allclose(normed.g.astype(float), size * 1000**0.5, rtol=0.01)
    np.testing.assert_allclose(normed(x).astype(float), layer(x).astype(float), rtol=0.02)


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e-21, 1e-10, 1e15, 1e25])
@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.sample(3)
def test_the_square_of_the_norm_may_be_beyond_the_dtype(size, axis, getkey):
    layer = nn.Linear(3, 4, key=getkey())
    # None so near to zero that XLA makes it zero when it is scaled.
    layer = tree_at("weight", layer, layer.weight + jnp.sign(layer.weight))
    x, more = jax.random.normal(getkey(), (3,)), 1 + jax.random.uniform(getkey(), (3,))
    expected = nn.WeightNorm(layer, axis=axis)
    normed = tree_at("layer.weight", expected, size * layer.weight)
    np.testing.assert_allclose(normed(x), expected(x), rtol=1e-5, atol=1e-6)
    fresh = nn.WeightNorm(tree_at("weight", layer, size * layer.weight), axis=axis)
    np.testing.assert_allclose(fresh.g / size, expected.g, rtol=1e-5)

    def loss(model):
        return (model(x) * jnp.arange(4.0)).sum() + (model(more) ** 2).sum()

    found, wanted = jax.grad(loss)(normed), jax.grad(loss)(expected)
    np.testing.assert_allclose(found.g, wanted.g, rtol=1e-4, atol=1e-5)
    # The direction does not depend on the length: the slope is the smaller the longer the weight is.
    slopes = np.asarray(found.layer.weight, np.float64) * size
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose(slopes, wanted.layer.weight, rtol=1e-3, atol=1e-5)
    # Backwards through the length itself, too.
    lengths = jax.grad(lambda w: expected.norm(w).sum())
    np.testing.assert_allclose(lengths(size * layer.weight), lengths(layer.weight), rtol=1e-4)


@pytest.mark.parametrize("size", [1e-35, 1e-30, 1e37])
def test_a_weight_and_its_length_may_be_extreme_together(size, getkey):
    layer = nn.Linear(3, 2, key=getkey())
    normed = nn.WeightNorm(tree_at("weight", layer, size * layer.weight))
    used = jax.jit(normed.normalised)(normed.layer.weight)
    np.testing.assert_allclose(used, normed.layer.weight, rtol=1e-5)


@pytest.mark.parametrize(("size", "dtype"), [(6e4, "float16"), (3e38, "float32")])
def test_a_length_beyond_the_dtype_is_refused(size, dtype, getkey):
    layer = nn.Linear(2, 2, dtype=dtype, key=getkey())
    wrong = tree_at("weight", layer, jnp.full((2, 2), size, dtype))
    with pytest.raises(ValueError, match=f"(?s)too large for its dtype.*{dtype}"):
        nn.WeightNorm(wrong)
    nn.WeightNorm(tree_at("weight", layer, jnp.full((2, 2), jnp.inf, dtype)))


def test_lengths_of_another_shape_are_refused(getkey):
    normed = nn.WeightNorm(nn.Linear(3, 3, key=getkey()))
    for path, wrong in (("g", jnp.ones((1, 3))), ("layer.weight", jnp.ones((5, 3)))):
        with pytest.raises(ValueError, match="(?s)`WeightNorm` has the wrong shape.*`g`"):
            tree_at(path, normed, wrong)(jnp.ones(3))
