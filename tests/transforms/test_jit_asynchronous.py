"""A call of `filter_jit` returns before the device is done.

No clock decides here, only the question whether a result is ready, asked at once of a product that takes the device
some tenths of a second. The first call compiles, the second one is asked.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_jit
from vernal.runtime import error_if

PRODUCTS = 1_000


def long_product(x):
    """A high power of `x`."""
    return jax.lax.fori_loop(0, PRODUCTS, lambda _, y: y @ x, x)


class Net(vernal.Module):
    weight: jax.Array
    name: str = "a net"

    def __call__(self, x):
        return long_product(self.weight) * x


def net():
    return Net(jnp.eye(256) * 0.999)


EXPECTED = np.eye(256) * 0.999 ** (PRODUCTS + 1)


def check(out):
    assert not out.is_ready()
    np.testing.assert_allclose(out, EXPECTED, rtol=1e-3)


def test_a_long_product_returns_before_it_is_done():
    f = filter_jit(lambda net, x: net(x))
    model = net()
    f(model, 1.0)
    check(f(model, 1.0))


def test_a_model_that_is_returned_is_not_waited_for():
    @filter_jit
    def step(net):
        return vernal.tree_at(lambda n: n.weight, net, long_product(net.weight)), "text"

    model = net()
    step(model)
    after, text = step(model)
    assert text == "text"
    assert after.name == "a net"
    check(after.weight)


def test_a_step_is_called_with_a_model_that_is_not_ready():
    @filter_jit
    def step(net):
        return vernal.tree_at(lambda n: n.weight, net, long_product(net.weight))

    @filter_jit
    def double(net):
        return vernal.tree_at(lambda n: n.weight, net, net.weight * 2)

    model = net()
    double(step(model))
    after = step(model)
    doubled = double(after)
    assert not doubled.weight.is_ready()
    check(after.weight)
    np.testing.assert_allclose(doubled.weight, 2 * EXPECTED, rtol=1e-3)


@pytest.mark.parametrize("donate", ["all", "all-except-first"])
def test_donation_does_not_wait_either(donate):
    f = filter_jit(lambda x, net: net(x), donate=donate)
    f(jnp.ones(()), net())
    model = net()
    check(f(jnp.ones(()), model))


def test_methods_and_compiled_programs_do_not_wait():
    class Compiled(Net):
        @filter_jit
        def method(self, x):
            return long_product(self.weight) * x

    model = Compiled(net().weight)
    model.method(1.0)
    check(model.method(1.0))
    compiled = filter_jit(long_product).lower(model.weight).compile()
    check(compiled(model.weight))


def test_only_a_check_is_waited_for():
    f = filter_jit(lambda net, x: error_if(net(x), x > 2, "larger than two"))
    model = net()
    assert f(model, jnp.ones(())).is_ready()
    assert f(model, jnp.ones(())).is_ready()
    with pytest.raises(vernal.runtime.RuntimeCheckError, match="larger than two"):
        f(model, jnp.full((), 3.0))
