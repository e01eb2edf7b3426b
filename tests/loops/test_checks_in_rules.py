"""A check in the rule of a custom derivative counts where the function does: for active elements and taken branches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import vernal
from vernal import loops
from vernal.runtime import RuntimeCheckError, error_if

FLAT = 0.5


def opaque(x):
    """Without its rule, a zero derivative."""
    return lax.stop_gradient(jnp.sqrt(x))


@vernal.filter_custom_jvp
def by_jvp(x):
    return opaque(x)


@by_jvp.def_jvp
def _(primals, tangents):
    (x,), (x_dot,) = primals, tangents
    return by_jvp(x), error_if(x_dot, x < FLAT, "flat") / (2 * jnp.sqrt(x))


@vernal.filter_custom_vjp
def on_the_way_forward(x):
    return opaque(x)


@on_the_way_forward.def_fwd
def _(perturbed, x):
    y = jnp.sqrt(error_if(x, x < FLAT, "flat"))
    return y, y


@on_the_way_forward.def_bwd
def _(y, grad_out, perturbed, x):
    return grad_out / (2 * y)


@vernal.filter_custom_vjp
def on_the_way_back(x):
    return opaque(x)


@on_the_way_back.def_fwd
def _(perturbed, x):
    return jnp.sqrt(x), jnp.sqrt(x)


@on_the_way_back.def_bwd
def _(y, grad_out, perturbed, x):
    return error_if(grad_out, y**2 < FLAT, "flat") / (2 * y)


def mapped_on_the_way_back(x):
    return jnp.mean(jax.vmap(on_the_way_back)(jnp.stack([x, x])))


@jax.custom_vjp
def by_jax(x, index):
    return opaque(x)


def _back_by_jax(y, grad_out):
    return error_if(grad_out, y**2 < FLAT, "flat") / (2 * y), None


by_jax.defvjp(lambda x, index: (jnp.sqrt(x), jnp.sqrt(x)), _back_by_jax)


def with_an_integer(x):
    return by_jax(x, jnp.int32(1))


RULES = [by_jvp, on_the_way_forward, on_the_way_back, mapped_on_the_way_back, with_an_integer]
every_rule = pytest.mark.parametrize(
    "root", RULES, ids=["jvp", "forward", "back", "mapped", "jax.custom_vjp"]
)

# The first element makes no step, though its first would fail; the second one, whose third would.
XS, STEPS = jnp.array([0.2, 0.6, 1.8]), jnp.array([0, 1, 3])


def summed(root, kind):
    def run(x, steps):
        def body(carry):
            i, y, total = carry
            return i + 1, y - 0.4, total + root(y)

        carry = (0, x, 0.0)
        return loops.while_loop(lambda c: c[0] < steps, body, carry, kind=kind, max_steps=4)[2]

    return run


def derivative_of_summed(x, steps):
    ys = x - 0.4 * np.arange(3)
    return np.sum(1 / (2 * np.sqrt(ys[:steps])))


@every_rule
@pytest.mark.parametrize("kind", ["bounded", "checkpointed"])
@pytest.mark.sample(3)
def test_in_a_loop_elements_that_have_finished_do_not_count(root, kind):
    gradient = vernal.filter_jit(jax.vmap(jax.grad(summed(root, kind))))
    want = [derivative_of_summed(x, n) for x, n in zip(XS, STEPS, strict=True)]
    np.testing.assert_allclose(gradient(XS, STEPS), want, rtol=1e-6)
    with pytest.raises(RuntimeCheckError, match=r"flat\n  at batch ind\w+ \(1,.*\n  at step 1"):
        gradient(XS, jnp.array([0, 2, 3]))


@pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed"])
def test_nor_in_forward_mode(kind):
    run = summed(by_jvp, kind)

    @vernal.filter_jit
    @jax.vmap
    def derivative(x, steps):
        return jax.jvp(lambda x: run(x, steps), (x,), (1.0,))[1]

    want = [derivative_of_summed(x, n) for x, n in zip(XS, STEPS, strict=True)]
    np.testing.assert_allclose(derivative(XS, STEPS), want, rtol=1e-6)
    with pytest.raises(RuntimeCheckError, match=r"flat\n  at batch ind\w+ \(1,.*\n  at step 1"):
        derivative(XS, jnp.array([0, 2, 3]))


@every_rule
def test_in_a_branch_only_elements_that_take_it_count(root):
    def f(x, take):
        return vernal.filter_switch(take, [root, jnp.sin], x)

    gradient = vernal.filter_jit(jax.vmap(jax.grad(f)))
    want = [np.cos(XS[0]), *(1 / (2 * np.sqrt(XS[1:])))]
    np.testing.assert_allclose(gradient(XS, jnp.array([1, 0, 0])), want, rtol=1e-6)
    with pytest.raises(RuntimeCheckError, match=r"flat\n  at batch ind\w+ \(0,.*\n\n"):
        gradient(XS, jnp.array([0, 1, 1]))


@every_rule
def test_without_a_batch_they_count_as_they_are(root):
    gradient = vernal.filter_jit(jax.grad(summed(root, "checkpointed")))
    np.testing.assert_allclose(gradient(XS[2], 3), derivative_of_summed(XS[2], 3), rtol=1e-6)
    with pytest.raises(RuntimeCheckError, match=r"flat\n(  at batch.*\n)?  at step 1"):
        gradient(XS[1], 2)


@vernal.filter_custom_jvp
def scaled(x, *, factor):
    return factor * jnp.sin(x)


@scaled.def_jvp
def _(primals, tangents, *, factor):
    return scaled(*primals, factor=factor), factor * jnp.cos(*primals) * tangents[0]


@vernal.filter_custom_vjp
def limited(x, factor):
    return factor * jnp.sin(x)


@limited.def_fwd
def _(perturbed, x, factor):
    return limited(x, factor), None


@limited.def_bwd
def _(residuals, grad_out, perturbed, x, factor):
    return factor * jnp.cos(x) * grad_out


@pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed"])
@pytest.mark.parametrize("by_keyword", [True, False])
@pytest.mark.sample(3)
def test_an_array_that_is_not_differentiated_may_go_where_a_rule_has_no_tangent(kind, by_keyword):
    def step(x, factor):
        return scaled(x, factor=factor) if by_keyword else limited(x, factor)

    def looped(x, factor):
        if kind == "bounded":

            def body(carry):
                return carry[0] + 1, step(carry[1], factor)

            return loops.while_loop(lambda c: c[0] < 2, body, (0, x), max_steps=3, kind=kind)[1]
        return loops.scan(lambda x, _: (step(x, factor), None), x, None, 2, kind=kind)[0]

    x, factor = jnp.array(0.3), jnp.array(2.0)
    expected = 4.0 * jnp.cos(2.0 * jnp.sin(x)) * jnp.cos(x)
    np.testing.assert_allclose(jax.grad(looped)(x, factor), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="an argument that its rule does not handle"):
        jax.grad(looped, argnums=1)(x, factor)
