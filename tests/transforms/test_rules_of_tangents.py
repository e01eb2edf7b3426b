"""A rule that calls a function with a rule of its own on a tangent: right in both modes, in any order.

Reverse mode transposes such a function. Its rule must survive that, or the next derivative is that of its value.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import loops
from vernal.transforms import materialise

MODES = {"reverse": jax.grad, "forward": jax.jacfwd}


@vernal.filter_custom_jvp
def scaled(x: Any, by: Any) -> Any:
    """x times a rounded number; derivatives pass straight through the rounding."""
    return x * jnp.round(by["q"])


@scaled.def_jvp
def _(primals, tangents):
    (x, by), (x_dot, by_dot) = primals, tangents
    x_dot, q_dot = (
        materialise(0 * y if t is None else t) for y, t in [(x, x_dot), (by["q"], by_dot["q"])]
    )
    return scaled(x, by), scaled(x_dot, by) + x * q_dot


@vernal.filter_custom_jvp
def square(x: Any, by: Any) -> Any:
    """The square of x, times the same number."""
    return x * x * jnp.round(by["q"])


@square.def_jvp
def _(primals, tangents):
    (x, by), (x_dot, by_dot) = primals, tangents
    x_dot, q_dot = (
        materialise(0 * y if t is None else t) for y, t in [(x, x_dot), (by["q"], by_dot["q"])]
    )
    return square(x, by), scaled(2 * x * x_dot, by) + x * x * q_dot


def ours(x, q):
    return square(x, {"q": q, "n": 3, "name": "any"})


def plain(x, q):
    """The same without rules."""
    still = jax.lax.stop_gradient(q)
    return x * x * (jnp.round(still) + q - still)


def steps(scan):
    def twice(f):
        return lambda x, q: scan(lambda c, y: (c + y * f(c, q), None), x, jnp.arange(1.0, 3.0))[0]

    return twice


CONTEXTS = {
    "alone": lambda f: f,
    "jit": lambda f: vernal.filter_jit(f),
    "checkpoint": lambda f: jax.checkpoint(f),
    "vmap": lambda f: lambda x, q: jnp.sum(jax.vmap(f, (0, None))(x * jnp.arange(1.0, 4.0), q)),
    "vmap of both": lambda f: (
        lambda x, q: jnp.sum(jax.vmap(f)(x * jnp.arange(1.0, 4.0), q + jnp.arange(3.0)))
    ),
    "cond": lambda f: lambda x, q: jax.lax.cond(x > 0, f, lambda x, q: x * q, x, q),
    "scan of jax": steps(jax.lax.scan),
    "scan of ours": steps(loops.scan),
    "itself": lambda f: lambda x, q: f(f(x, q), q * x),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("modes", list(itertools.product(MODES, repeat=3)), ids="-".join)
@pytest.mark.parametrize("order", list(itertools.product((0, 1), repeat=3)), ids=str)
@pytest.mark.sample(8)
def test_derivatives_of_three_orders(context, modes, order):
    found, wanted = CONTEXTS[context](ours), CONTEXTS[context](plain)
    with jax.enable_x64(True):
        at = jnp.asarray(1.3), jnp.asarray(2.2)
        np.testing.assert_allclose(found(*at), wanted(*at), rtol=1e-12)
        for mode, argument in zip(modes, order, strict=True):
            found, wanted = MODES[mode](found, argument), jax.jacfwd(wanted, argument)
            np.testing.assert_allclose(found(*at), wanted(*at), rtol=1e-12)


@vernal.filter_custom_vjp
def scaled_back(both: Any) -> Any:
    """`scaled`, with a rule for reverse mode."""
    return both[0] * jnp.round(both[1])


@scaled_back.def_fwd
def _(perturbed, both):
    del perturbed
    return scaled_back(both), both


@scaled_back.def_bwd
def _(both, ct, perturbed, *args):
    del perturbed, args
    return ct * jnp.round(both[1]), ct * both[0]


@vernal.filter_custom_jvp
def square_back(x: Any, q: Any) -> Any:
    """`square`, whose rule calls `scaled_back`."""
    return x * x * jnp.round(q)


@square_back.def_jvp
def _(primals, tangents):
    (x, q), (x_dot, q_dot) = primals, tangents
    x_dot, q_dot = (materialise(0 * x if t is None else t) for t in (x_dot, q_dot))
    return square_back(x, q), scaled_back((2 * x * x_dot, q)) + x * x * q_dot


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("order", list(itertools.product((0, 1), repeat=3)), ids=str)
@pytest.mark.sample(4)
def test_a_tangent_in_a_function_with_a_rule_for_reverse_mode(context, order):
    found, wanted = CONTEXTS[context](square_back), CONTEXTS[context](plain)
    with jax.enable_x64(True):
        at = jnp.asarray(1.3), jnp.asarray(2.2)
        for argument in order:
            found, wanted = jax.grad(found, argument), jax.grad(wanted, argument)
            np.testing.assert_allclose(found(*at), wanted(*at), rtol=1e-12)
        with pytest.raises(TypeError, match="`scaled_back` has no derivative in forward mode"):
            jax.jacfwd(jax.grad(square_back, 0), 1)(*at)


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("rule", [square, square_back], ids=["forward", "reverse"])
def test_a_loop_that_is_computed_again(rule, outside, kind):
    """The function counts as holding a check, so the loop gives it the number of its step. All that it returns for a
    tangent is unknown in the forward pass, but for that number."""

    def looped(f, x, q):
        within = (lambda g: g) if outside else jax.checkpoint
        step = within(lambda carry, _: (carry / 2 + f(carry, q), None))
        return loops.scan(step, x, None, length=3, kind=kind)[0]

    def ours(x, q):
        return looped(lambda x, q: rule(x, {"q": q} if rule is square else q), x, q)

    found = jax.grad(jax.checkpoint(ours) if outside else ours, 0)
    wanted = jax.grad(lambda x, q: looped(plain, x, q), 0)
    with jax.enable_x64(True):
        at = jnp.asarray(0.3), jnp.asarray(2.2)
        np.testing.assert_allclose(found(*at), wanted(*at), rtol=1e-12)
        np.testing.assert_allclose(jax.jit(found)(*at), wanted(*at), rtol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_complex_numbers_in_a_batch_of_derivatives(mode):
    def f(one, x, q):
        return jnp.real(one(jax.lax.complex(x, 2 * x), jax.lax.complex(q, 0 * q)))

    def rounded(x, by):
        q = jax.lax.complex(jnp.round(by["q"].real), 0 * by["q"].imag)
        return x * x * (q + by["q"] - jax.lax.stop_gradient(by["q"]))

    with jax.enable_x64(True):
        at = jnp.arange(1.0, 4.0), jnp.asarray(2.2) + jnp.arange(3.0)
        found, wanted = (
            jax.vmap(
                second(jax.grad(lambda x, q, g=g: f(lambda x, q: g(x, {"q": q}), x, q), 0), 1)
            )(*at)
            for second, g in [(MODES[mode], square), (jax.grad, rounded)]
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_rule_that_is_not_linear_is_refused_where_its_transpose_is_needed():
    @vernal.filter_custom_jvp
    def odd(x, q):
        return x * jnp.round(q)

    @odd.def_jvp
    def _(primals, tangents):
        (x, q), (x_dot, q_dot) = primals, tangents
        x_dot, q_dot = (0.0 if t is None else t for t in (x_dot, q_dot))
        return odd(x, q), odd(x_dot, q) + x**2 * q_dot

    @vernal.filter_custom_jvp
    def f(x, q):
        return x * jnp.round(q)

    @f.def_jvp
    def _(primals, tangents):
        (x, q), (x_dot, q_dot) = primals, tangents
        x_dot, q_dot = (0.0 if t is None else t for t in (x_dot, q_dot))
        return f(x, q), odd(x_dot, q) + x * q_dot

    assert jax.grad(f)(1.5, 2.2) == 2
    with pytest.raises(ValueError, match="`odd` cannot be transposed"):
        jax.grad(jax.grad(f, 0), 1)(1.5, 2.2)
