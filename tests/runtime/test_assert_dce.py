"""`assert_dce`: what a compiled program uses is at fault, what it does not is not."""

import inspect

import equinox.internal
import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal.runtime import RuntimeCheckError, assert_dce


def unused(x):
    y = assert_dce(jnp.exp(x), "the exponential is computed")
    return x + 0 * 1 if y is None else x


def used(x):
    return assert_dce(jnp.exp(x), "the exponential is computed")


def test_what_is_eliminated_is_no_error():
    assert vernal.filter_jit(unused)(jnp.array(1.0)) == 1
    assert jax.jit(unused)(1.0) == 1


def test_what_is_computed_is_an_error():
    with pytest.raises(RuntimeCheckError, match="^the exponential is computed\n"):
        vernal.filter_jit(used)(jnp.array(1.0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the exponential is computed"):
        jax.block_until_ready(jax.jit(used)(1.0))


def test_one_used_leaf_is_enough():
    def f(x):
        return assert_dce({"a": x, "b": jnp.exp(x), "c": "text"}, "used")["a"]

    with pytest.raises(RuntimeCheckError, match="^used"):
        vernal.filter_jit(f)(jnp.array(1.0))


def test_a_gradient_that_does_not_need_the_value_eliminates_it():
    def f(x):
        return 2 * assert_dce(x, "the value is computed")

    assert vernal.filter_jit(jax.grad(f))(jnp.array(1.0)) == 2


def test_outside_of_compiled_code_it_is_the_identity():
    x = jnp.array(1.0)
    assert assert_dce(x, "used") is x
    assert jax.grad(used)(x) == jnp.exp(x)
    assert (jax.vmap(used)(jnp.zeros(2)) == 1).all()


def test_it_agrees_with_equinox_on_what_is_eliminated():
    def run(assertion, use):
        def f(x):
            y = assertion(jnp.exp(x), msg="used")
            return y if use else x

        try:
            jax.block_until_ready(jax.jit(f)(1.0))
        except jax.errors.JaxRuntimeError:
            return "raised"
        return "passed"

    for use in (False, True):
        assert run(assert_dce, use) == run(equinox.internal.assert_dce, use)


def test_it_can_be_off_and_does_nothing_but_raise(monkeypatch):
    monkeypatch.setenv("VERNAL_ON_ERROR", "off")
    assert vernal.filter_jit(lambda x: used(x))(jnp.array(0.0)) == 1
    with pytest.raises(ValueError, match="assert_dce can only raise"):
        inspect.unwrap(assert_dce)(jnp.ones(2), "used", on_error="nan")


def test_without_an_array_there_is_nothing_to_watch():
    with pytest.raises(ValueError, match="assert_dce has no array to watch"):
        assert_dce("text", "used")
