"""A constant that a function returns is an array, whatever transforms the function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal

CONSTANT = np.zeros(3, np.float32)


def f(x):
    return jnp.asarray(CONSTANT), jnp.asarray(2.0), x


WAYS = {
    "closure_convert": lambda x: vernal.filter_closure_convert(f, x)(x),
    "checkpoint": lambda x: vernal.filter_checkpoint(f)(x),
    "jvp": lambda x: vernal.filter_jvp(f, (x,), (x,))[0],
    "vjp": lambda x: vernal.filter_vjp(f, x)[0],
    "vmap": lambda x: vernal.filter_vmap(f, out_axes=(None, None, 0))(x),
    "jit": lambda x: vernal.filter_jit(f)(x),
    "reap": lambda x: vernal.harvest.reap(lambda _, x: f(x))((), x)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_constant_result_is_an_array(way):
    out = WAYS[way](jnp.ones(3))
    assert all(isinstance(x, jax.Array) for x in out)
    assert vernal.tree_equal(out, f(jnp.ones(3)))
    assert [x.weak_type for x in out] == [x.weak_type for x in f(jnp.ones(3))]
