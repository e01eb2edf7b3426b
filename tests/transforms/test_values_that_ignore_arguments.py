"""Scans hoist constant values, and keep the rules of those whose derivative is by an argument that they ignore."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vernal
from vernal import loops


@vernal.filter_custom_jvp
def by_jvp(x, y):
    """Zeros and ones, with the derivatives of `x * y` and `y`."""
    return jnp.zeros_like(x), jnp.ones_like(y)


@by_jvp.def_jvp
def jvp_rule(primals, tangents):
    (x, y), (x_dot, y_dot) = primals, tangents
    return by_jvp(x, y), (x_dot * y + x * y_dot, y_dot)


@vernal.filter_custom_vjp
def of_pair(pair):
    x, y = pair
    return jnp.zeros_like(x), jnp.ones_like(y)


@of_pair.def_fwd
def fwd(perturbed, pair):
    return of_pair(pair), pair


@of_pair.def_bwd
def bwd(residuals, grads, perturbed, pair):
    (x, y), (of_first, of_second) = residuals, grads
    return of_first * y, of_first * x + of_second


def by_vjp(x, y):
    return of_pair((x, y))


def free(x, y):
    return x * y, y


def by_lax(step, start, xs):
    return lax.scan(lambda c, x: (step(c, x), None), start, xs)[0]


def by_ours(kind):
    return lambda step, start, xs: loops.scan(
        lambda c, x: (step(c, x), None), start, xs, kind=kind
    )[0]


def mapped(step):
    return lambda c, x: jnp.sum(jax.vmap(step, (None, 0))(c, jnp.stack([x, 2 * x])))


SCANS = {
    "jax": by_lax,
    "lax": by_ours("lax"),
    "checkpointed": by_ours("checkpointed"),
    "jit in scan": lambda step, start, xs: by_lax(jax.jit(step), start, xs),
    "checkpoint in scan": lambda step, start, xs: by_lax(jax.checkpoint(step), start, xs),
    "vmap in scan": lambda step, start, xs: by_lax(mapped(step), start, xs),
    "scan in scan": lambda step, start, xs: by_lax(
        lambda c, x: by_lax(step, c, x * jnp.arange(1.0, 3.0)), start, xs
    ),
}
FORMS = {
    "reverse": lambda f, a, b: jax.grad(jax.grad(f, a), b),
    "forward over reverse": lambda f, a, b: jax.jacfwd(jax.grad(f, a), b),
    "forward": lambda f, a, b: jax.jacfwd(jax.jacfwd(f, a), b),
    "of the value": lambda f, a, b: jax.grad(lambda *at: jax.value_and_grad(f, a)(*at)[0], b),
}
CASES = [(rule, form) for rule in (by_jvp, by_vjp) for form in FORMS]
# A rule for reverse mode has no derivative in forward mode.
CASES.remove((by_vjp, "forward"))


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize(("rule", "form"), CASES)
@pytest.mark.sample(20)
def test_second_derivatives_in_a_scan(rule, form, scan):
    def total(of):
        def run(s, t):
            start, xs = jnp.zeros_like(s), jnp.asarray([0.5, 1.0, 2.0])
            return SCANS[scan](lambda c, x: c + sum(of(jnp.sin(s * x), jnp.exp(t))), start, xs)

        return run

    with jax.enable_x64():
        at = jnp.asarray(0.9), jnp.asarray(0.4)
        for a, b in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            found, wanted = (jax.jit(FORMS[form](total(of), a, b))(*at) for of in (rule, free))
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_rule_that_refuses_is_run_only_where_its_derivative_is_taken():
    @vernal.filter_custom_jvp
    def flat(x):
        return jnp.ones_like(x)

    @flat.def_jvp
    def rule(primals, tangents):
        raise NotImplementedError("no derivative")

    def total(s, t):
        return by_lax(lambda c, x: c + s**2 * flat(x * lax.stop_gradient(t)), s, jnp.arange(3.0))

    assert jax.grad(jax.grad(total))(2.0, 1.0) == 6.0
    moving = jax.grad(lambda t: by_lax(lambda c, x: c + flat(x * t), t, jnp.arange(3.0)))
    with pytest.raises(NotImplementedError, match="no derivative"):
        moving(1.0)


def test_a_rule_may_run_a_function_with_a_rule_over_a_value_and_its_tangent():
    @vernal.filter_custom_jvp
    def both(x, x_dot):
        return jnp.sin(x), jnp.cos(x) * x_dot

    @both.def_jvp
    def of_both(primals, tangents):
        return jax.jvp(lambda x, d: (jnp.sin(x), jnp.cos(x) * d), primals, tangents)

    @vernal.filter_custom_jvp
    def sine(x):
        return jnp.sin(x)

    @sine.def_jvp
    def of_sine(primals, tangents):
        return both(*primals, *tangents)

    for derivative in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        for wrap in (
            lambda f: f,
            lambda f: lambda x: by_lax(lambda c, y: c + f(x * y), x, x[None]),
        ):
            found, wanted = (
                jax.jit(derivative(wrap(f)))(jnp.asarray(0.7)) for f in (sine, jnp.sin)
            )
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
