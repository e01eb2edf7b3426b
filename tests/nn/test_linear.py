import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.nn._jaxprs import equations
from vernal import nn

SIZES = [(5, 3), (0, 3), (3, 0), ("scalar", 3), (3, "scalar"), ("scalar", "scalar")]


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.complex64])
@pytest.mark.sample(3)
def test_the_same_key_gives_equinox_s_weights_and_values(getkey, dtype):
    rng = np.random.default_rng(getkey.seed)

    @jax.jit
    def made_and_called(key):
        found = []
        for n_in, n_out, use_bias in ((*sizes, b) for sizes in SIZES for b in (True, False)):
            layers = [lib.Linear(n_in, n_out, use_bias, dtype, key=key) for lib in (nn, eqx.nn)]
            x = rng.normal(size=() if n_in == "scalar" else n_in)
            x = jnp.asarray(x, layers[0].weight.dtype)
            assert layers[0].weight.dtype == (jnp.float32 if dtype is None else dtype)
            found.append([(m.weight, m.bias, m(x)) for m in layers])
        return found

    for ours, theirs in made_and_called(getkey()):
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_the_gradient_is_that_of_the_matrix_product(getkey):
    layer = nn.Linear(3, 2, key=getkey())
    x, y = jax.random.normal(getkey(), (3,)), jax.random.normal(getkey(), (2,))
    grad = jax.grad(lambda layer: jnp.vdot(y, layer(x)))(layer)
    assert jnp.allclose(grad.weight, jnp.outer(y, x))
    assert jnp.allclose(grad.bias, y)
    assert jax.tree.structure(grad) == jax.tree.structure(layer)


def test_the_dtype_follows_the_x64_switch(getkey):
    key = getkey()
    assert nn.Linear(2, 2, key=key).weight.dtype == jnp.float32
    with jax.enable_x64(True):
        assert nn.Linear(2, 2, key=key).weight.dtype == jnp.float64
        assert nn.Linear(2, 2, dtype=jnp.complex128, key=key).weight.dtype == jnp.complex128


def test_jax_takes_the_layer_as_it_is(getkey):
    layer = nn.Linear(3, 2, key=getkey())
    x = jax.random.normal(getkey(), (4, 3))
    expected = x @ layer.weight.T + layer.bias[None]
    assert jnp.allclose(jax.jit(jax.vmap(layer))(x), expected, atol=1e-6)
    assert jnp.allclose(jax.vmap(jax.jit(layer))(x), expected, atol=1e-6)
    assert jnp.allclose(layer(np.asarray(x[0])), expected[0], atol=1e-6)
    assert [leaf.shape for leaf in jax.tree.leaves(layer)] == [(2, 3), (2,)]
    assert jax.eval_shape(lambda k: nn.Linear(3, 2, key=k), getkey()).weight.shape == (2, 3)


def test_an_ensemble_is_made_and_called_by_vmap(getkey):
    keys = jax.random.split(getkey(), 5)
    layers = jax.vmap(lambda k: nn.Linear(3, 2, key=k))(keys)
    x = jax.random.normal(getkey(), (3,))
    out = jax.vmap(lambda layer: layer(x))(layers)
    assert jnp.allclose(out[4], nn.Linear(3, 2, key=keys[4])(x), atol=1e-6)


def test_a_scalar_layer_takes_a_number(getkey):
    layer = nn.Linear("scalar", 2, key=getkey())
    assert jnp.allclose(layer(2.0), layer(jnp.array(2.0)))


def test_a_negative_size_is_refused_by_name(getkey):
    with pytest.raises(
        ValueError, match=r"`Linear` was given a wrong size\n  where: argument `out_fe"
    ):
        nn.Linear(3, -1, key=getkey())


def test_an_integer_dtype_is_refused(getkey):
    with pytest.raises(
        ValueError, match="`Linear` must be floating-point or complex(.|\n)*got: int32"
    ):
        nn.Linear(3, 2, dtype=jnp.int32, key=getkey())


def test_a_wrong_shape_is_refused_with_the_one_that_was_expected(getkey):
    layer = nn.Linear(3, 2, key=getkey())
    with pytest.raises(ValueError, match="was given an input of the wrong shape") as error:
        layer(jnp.ones((3, 7)))
    assert str(error.value).splitlines() == [
        "`Linear` was given an input of the wrong shape",
        "  where: argument `x`",
        "  expected: (..., in_features=3)",
        "  got: (3, 7)",
    ]
    with pytest.raises(ValueError, match="was given an input of the wrong shape"):
        layer(jnp.ones(()))


def test_a_batch_is_one_matrix_product_without_a_transposition(getkey):
    jaxpr = jax.make_jaxpr(nn.Linear(3, 2, key=getkey()))(jnp.ones((5, 4, 3)))
    assert [e.primitive.name for e in equations(jaxpr) if e.primitive.name != "jit"] == [
        "dot_general",
        "broadcast_in_dim",
        "add",
    ]


def test_identity_ignores_what_it_is_built_with():
    x = object()
    assert nn.Identity(3, use_bias=False)(x) is x
    assert jax.tree.leaves(nn.Identity(jnp.ones(2))) == []
    assert jnp.array_equal(jax.jit(nn.Identity())(jnp.ones(2)), jnp.ones(2))


def test_operations_are_named_after_their_layer(getkey):
    def names(layer, x):
        return {str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(layer)(x).jaxpr.eqns}

    key = getkey()
    image = jnp.ones((1, 6, 6))
    for layer, x, name in [
        (nn.Linear(2, 3, key=key), jnp.ones(2), "Linear"),
        (nn.Conv2d(1, 1, 3, key=key), image, "Conv"),
        (nn.ConvTranspose2d(1, 1, 3, key=key), image, "ConvTranspose"),
        (nn.MaxPool2d(2), image, "Pool"),
    ]:
        assert names(layer, x) == {f"vernal.nn.{name}"}
    mlp = names(nn.MLP(2, 2, 2, 1, key=key), jnp.ones(2))
    assert all(name.startswith("vernal.nn.MLP") for name in mlp)
    adaptive = names(nn.AdaptiveAvgPool2d(2), image)
    assert all(name.startswith("vernal.nn.AdaptivePool") for name in adaptive)
