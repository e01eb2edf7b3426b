"""`PReLU`: against Equinox, its types, its slopes and its errors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vernal import nn


@pytest.mark.parametrize(
    "alpha_shape, shape",
    [((), ()), ((), (3, 2)), ((2,), (2,)), ((2,), (3, 2)), ((3, 1, 1), (3, 2, 2)), ((1,), (4,))],
)
def test_prelu_agrees_with_equinox(alpha_shape, shape, getkey):
    alpha, x = jax.random.normal(getkey(), alpha_shape), jax.random.normal(getkey(), shape)
    with jax.numpy_rank_promotion("allow"):
        expected = eqx.nn.PReLU(alpha)(x)
    np.testing.assert_allclose(nn.PReLU(alpha)(x), expected, rtol=1e-6)


def test_a_number_becomes_a_slope_that_keeps_its_type_while_it_is_trained():
    layer = nn.PReLU(1)
    assert layer.negative_slope.dtype == jnp.float32 and not layer.negative_slope.weak_type
    assert nn.PReLU().negative_slope == 0.25
    assert nn.PReLU(jnp.array([1, 2])).negative_slope.dtype == jnp.float32
    assert nn.PReLU(jnp.ones(2, jnp.float16)).negative_slope.dtype == jnp.float16
    optimiser = optax.sgd(0.1)
    grads = jax.grad(lambda m: m(jnp.array(-2.0)))(layer)
    updates, _ = optimiser.update(grads, optimiser.init(layer))
    after = optax.apply_updates(layer, updates)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, layer)
    np.testing.assert_allclose(after.negative_slope, 1.2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_returned_as_it_came(dtype, getkey):
    x = jax.random.normal(getkey(), (50,)).astype(dtype)
    assert nn.PReLU()(x).dtype == dtype
    assert (nn.PReLU()(x) == nn.PReLU()(x.astype(jnp.float32)).astype(dtype)).all()


def test_integers_are_not_multiplied_by_a_slope_rounded_to_zero():
    assert nn.PReLU()(jnp.array([-4, 4])).tolist() == [-1.0, 4.0]


@pytest.mark.parametrize("shape", [(2,), (), (3, 2)])
def test_slopes_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"(?s)`PReLU` was given .*expected: \(\.\.\., 3\)"):
        nn.PReLU(jnp.ones(3))(jnp.ones(shape))
