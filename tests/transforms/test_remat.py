from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal


class Layer(vernal.Module):
    weight: jax.Array
    activation: Callable[..., Any]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activation(self.weight @ x)


def layer(getkey) -> Layer:
    return Layer(jax.random.normal(getkey(), (3, 3)), jnp.sin)


@pytest.mark.parametrize("prevent_cse", [True, False])
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_values_and_gradients_are_those_of_the_function(getkey, prevent_cse, policy):
    model, x = layer(getkey), jax.random.normal(getkey(), (3,))

    def loss(model: Layer, x: jax.Array, wrap: Callable[..., Any]) -> jax.Array:
        return jnp.sum(wrap(model)(wrap(lambda x: x**2)(x)))

    def checkpoint(f: Callable[..., Any]) -> Any:
        return vernal.filter_checkpoint(f, prevent_cse=prevent_cse, policy=policy)

    grad = vernal.filter_value_and_grad(loss, wrt=("model", "x"))
    expected = grad(model, x, lambda f: f)
    assert vernal.tree_allclose(grad(model, x, checkpoint), expected, rtol=1e-5, atol=1e-5)
    jitted = vernal.filter_jit(grad)(model, x, checkpoint)
    assert vernal.tree_allclose(jitted, expected, rtol=1e-5, atol=1e-5)


def residuals(fn: Callable[..., Any], *args: Any) -> int:
    """How many arrays the reverse pass keeps."""
    _, pull = vernal.filter_vjp(fn, *args)
    return len(jax.tree.leaves(pull))


def test_intermediate_results_are_not_kept_unless_the_policy_says_so(getkey):
    model, x = layer(getkey), jax.random.normal(getkey(), (3,))

    def f(model: Layer, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = model(x)
        return x

    checkpointed = vernal.filter_checkpoint(f)
    everything = vernal.filter_checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)
    assert residuals(checkpointed, model, x) < residuals(f, model, x)
    assert residuals(checkpointed, model, x) < residuals(everything, model, x)


def test_arguments_and_results_may_be_any_objects():
    marker = object()
    out = vernal.filter_checkpoint(lambda x, o, f: (f(x), o, f, None))(
        jnp.array(4.0), marker, jnp.sqrt
    )
    assert out[0] == 2.0
    assert out[1] is marker
    assert out[2] is jnp.sqrt
    assert out[3] is None


def test_static_arguments_stay_static():
    def power(x: jax.Array, n: int, flag: bool) -> jax.Array:
        return x ** (n if flag else 1)

    grad = jax.grad(lambda x: vernal.filter_checkpoint(power)(x, 3, flag=True))
    assert grad(jnp.array(2.0)) == 12.0


def test_it_works_under_vmap_scan_and_second_derivatives():
    f = vernal.filter_checkpoint(jnp.sin)
    x = jnp.array([0.3, 2.0])
    np.testing.assert_allclose(jax.vmap(jax.grad(jax.grad(f)))(x), -jnp.sin(x), rtol=1e-6)
    total, _ = jax.lax.scan(lambda c, x: (c + f(x), None), jnp.array(0.0), x)
    np.testing.assert_allclose(total, jnp.sum(jnp.sin(x)), rtol=1e-6)


def test_the_function_may_close_over_tracers():
    def outer(y: jax.Array) -> jax.Array:
        return vernal.filter_checkpoint(lambda x: x * y**2)(jnp.array(3.0))

    assert jax.jit(jax.grad(outer))(jnp.array(2.0)) == 12.0


@pytest.mark.parametrize("option", ["static_argnums", "static_argnames", "concrete"])
def test_options_of_jax_that_make_no_sense_are_refused(option):
    with pytest.raises(TypeError, match=f"filter_checkpoint has no option `{option}`"):
        vernal.filter_checkpoint(jnp.sin, **{option: 0})


def test_a_policy_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="the policy of filter_checkpoint must be a function"):
        vernal.filter_checkpoint(jnp.sin, policy="dots_saveable")  # pyright: ignore
