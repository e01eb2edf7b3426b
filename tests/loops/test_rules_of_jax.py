"""Functions with a rule of `jax.custom_jvp` in the steps of our loops.

JAX 0.10 forgets such a rule in a scan of its own that is differentiated twice.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from vernal import filter_cond, filter_custom_jvp, filter_custom_vjp, loops
from vernal.primitives import create_vprim


@jax.custom_jvp
def sine(x):
    # Without its rule a constant.
    return lax.stop_gradient(jnp.sin(x))


@jax.custom_jvp
def cosine(x):
    return lax.stop_gradient(jnp.cos(x))


@sine.defjvp
def _(primals, tangents):
    return sine(*primals), cosine(*primals) * tangents[0]


@cosine.defjvp
def _(primals, tangents):
    return cosine(*primals), -sine(*primals) * tangents[0]


@filter_custom_jvp
def with_jvp(x):
    return lax.stop_gradient(jnp.sin(x))


@with_jvp.def_jvp
def _(primals, tangents):
    return with_jvp(*primals), cosine(*primals) * tangents[0]


@filter_custom_vjp
def with_vjp(x):
    return lax.stop_gradient(jnp.sin(x))


@with_vjp.def_fwd
def _(perturbed, x):
    # In forward mode this is differentiated as it is.
    return sine(x), x


@with_vjp.def_bwd
def _(x, grad_out, perturbed, _):
    return cosine(x) * grad_out


def _vprim_jvp(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return vprim_p.bind(x), [cosine(x) * x_dot]


vprim_p = create_vprim(
    "opaque",
    lambda x: [lax.stop_gradient(jnp.sin(x))],
    lambda x: [x],
    _vprim_jvp,
    lambda cts, x: [None],
)


def once(fn):
    return lambda y: lax.scan(lambda c, _: (fn(c), None), y, None, length=1)[0]


INSIDE = {
    "by itself": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda fn: lambda y: lax.cond(y > -9, fn, jnp.tanh, y),
    "filter_cond": lambda fn: lambda y: filter_cond(y > -9, fn, jnp.tanh, y),
    "scan": once,
    "vmap": lambda fn: lambda y: jax.vmap(fn)(jnp.stack([y, y]))[1],
    "jit in a scan": lambda fn: once(jax.jit(fn)),
}
LOOPS = {
    "scan": lambda step, x: loops.scan(lambda y, _: (step(y), None), x, length=2)[0],
    "checkpointed scan": lambda step, x: loops.scan(
        lambda y, _: (step(y), None), x, length=2, kind="checkpointed"
    )[0],
    "fori_loop": lambda step, x: loops.fori_loop(0, 2, lambda _, y: step(y), x),
    "bounded": lambda step, x: loops.fori_loop(
        jnp.int32(0), jnp.int32(2), lambda _, y: step(y), x, kind="bounded", max_steps=4
    ),
}


def derivatives(loop, fn):
    """Of second and third order, reverse over reverse and forward over reverse."""

    def run(x):
        return LOOPS[loop](lambda y: fn(y) * x, x)

    gradient = jax.grad(jax.grad(run))
    return jax.jit(lambda x: [gradient(x), jax.grad(gradient)(x), jax.hessian(run)(x)])(0.8)


@pytest.mark.slow
@pytest.mark.parametrize("inside", INSIDE)
def test_a_rule_of_jax_is_kept_in_a_scan(inside):
    got, want = (derivatives("scan", fn) for fn in (INSIDE[inside](sine), jnp.sin))
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("loop", [loop for loop in LOOPS if loop != "scan"])
def test_a_rule_of_jax_is_kept_in_every_loop(loop):
    np.testing.assert_allclose(derivatives(loop, sine), derivatives(loop, jnp.sin), rtol=1e-4)


IN_RULES = {
    "filter_custom_jvp": with_jvp,
    "filter_custom_vjp": with_vjp,
    "create_vprim": lambda x: vprim_p.bind(x)[0],
    "filter_custom_jvp under vmap": lambda x: jax.vmap(with_jvp)(jnp.stack([x, x]))[1],
    "filter_custom_vjp under vmap": lambda x: jax.vmap(with_vjp)(jnp.stack([x, x]))[1],
    "create_vprim under vmap": lambda x: jax.vmap(vprim_p.bind)(jnp.stack([x, x]))[0][1],
}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("fn", IN_RULES.values(), ids=IN_RULES)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_rule_of_jax_is_kept_that_only_a_rule_of_ours_calls(loop, fn):
    def reverse(fn):
        gradient = jax.grad(jax.grad(lambda x: LOOPS[loop](lambda y: fn(y) * x, x)))
        return jax.jit(lambda x: [gradient(x), jax.grad(gradient)(x)])(0.8)

    np.testing.assert_allclose(reverse(fn), reverse(jnp.sin), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in IN_RULES if "vjp" not in name])
@pytest.mark.parametrize("loop", LOOPS)
def test_it_is_kept_in_forward_mode_too(loop, name):
    def third(fn):
        hessian = jax.hessian(lambda x: LOOPS[loop](lambda y: fn(y) * x, x))
        return jax.jit(lambda x: [hessian(x), jax.jacfwd(hessian)(x)])(0.8)

    np.testing.assert_allclose(third(IN_RULES[name]), third(jnp.sin), rtol=1e-4)


def test_softplus_at_zero_in_a_scan():
    # What it computes has a maximum in it; its second derivative there is 1/4.
    second = jax.hessian(lambda y: loops.fori_loop(0, 1, lambda _, z: jax.nn.softplus(z), y))
    np.testing.assert_allclose(jax.jit(second)(0.0), 0.25)
    second = jax.grad(jax.grad(lambda y: loops.fori_loop(0, 1, lambda _, z: jax.nn.softplus(z), y)))
    np.testing.assert_allclose(jax.jit(second)(0.0), 0.25)
