"""Finalisation of jaxprs."""

import inspect

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import vernal
from vernal.primitives import (
    create_vprim,
    finalise_eval_jaxpr,
    finalise_fn,
    finalise_jaxpr,
    finalise_jaxpr_as_fn,
    finalise_make_jaxpr,
    linear_call,
    noinline,
    nonbatchable,
    nondifferentiable,
    nondifferentiable_backward,
    nontraceable,
    primitive_finalisations,
    register_impl_finalisation,
    select_if_vmap,
    unvmap_all,
    unvmap_any,
    unvmap_max,
    unvmap_min,
)


def names(jaxpr) -> set[str]:
    """The operations of a program, at every depth."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    return found.union(*map(names, jex.subjaxprs(jaxpr)))


TO_GO = {primitive.name for primitive in primitive_finalisations}


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0]))


@jax.custom_vjp
def with_vjp(x):
    return jnp.cos(unvmap_max(x) * x)


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda residuals, ct: (ct,))

CONSTANT = jnp.array([0.5, 2.0])

LEAVES = {
    "guards": lambda x: nontraceable(
        nondifferentiable_backward(nondifferentiable(nonbatchable(x)))
    ),
    "stop_gradient": lambda x: checkpoint_name(jax.lax.stop_gradient(x), "kept") + 1,
    "custom_jvp": lambda x: with_jvp(x),
    "custom_vjp": lambda x: with_vjp(x),
    "unvmap": lambda x: jnp.where(unvmap_any(x > 0) & unvmap_all(x > 1), x, unvmap_min(x)),
    "mapped": lambda x: jax.vmap(lambda y: y * unvmap_max(y))(x),
    "select": lambda x: select_if_vmap(x[0] > 0, x, 2 * x),
    "linear_call": lambda x: linear_call(lambda r, t: r * t, lambda r, t: r * t, x, x),
    "noinline": lambda x: noinline(lambda x: CONSTANT * with_jvp(x))(x),
    "derivative": lambda x: jax.grad(lambda x: noinline(jnp.sin)(x).sum())(x),
}


def around(fn):
    """The function at every depth where programs are."""
    return {
        "plain": fn,
        "jit": jax.jit(fn),
        "scan": lambda x: jax.lax.scan(lambda c, y: (fn(c), y), x, None, length=2)[0],
        "while": lambda x: jax.lax.while_loop(
            lambda c: unvmap_any(c[0] < 1), lambda c: fn(c) + 1, x
        ),
        "cond": lambda x: jax.lax.cond(x[0] > 0, fn, lambda x: 2 * fn(x), x),
        "checkpoint": jax.checkpoint(fn),
        "checkpoint of jit": jax.checkpoint(jax.jit(lambda x: fn(CONSTANT * x))),
        "vmap": lambda x: jax.vmap(jax.jit(fn), in_axes=None, axis_size=2)(x),
        "solve": lambda x: jax.lax.custom_linear_solve(
            lambda y: 2 * y, x, lambda _, b: fn(b) / 2, symmetric=True
        ),
    }


@pytest.mark.parametrize("place", around(jnp.sin))
@pytest.mark.sample(3)
def test_nothing_is_left_at_any_depth_and_values_stay(place, getkey):
    x = jax.random.normal(getkey(), (2,))
    for leaf in LEAVES.values():
        fn = around(leaf)[place]
        jaxpr = jax.make_jaxpr(fn)(x)
        final = finalise_jaxpr(jaxpr)
        assert not names(final) & TO_GO
        assert [a.shape for a in final.in_avals] == [a.shape for a in jaxpr.in_avals]
        np.testing.assert_allclose(jex.jaxpr_as_fun(final)(x)[0], fn(x), rtol=1e-6)


@pytest.mark.parametrize("leaf", LEAVES)
def test_the_forms_agree(leaf, getkey):
    fn, x = LEAVES[leaf], jax.random.normal(getkey(), (2,))
    closed = jax.make_jaxpr(fn)(x)
    want = [np.asarray(fn(x))]
    assert TO_GO & names(closed)
    np.testing.assert_allclose(finalise_eval_jaxpr(closed.jaxpr, closed.consts, x), want, rtol=1e-6)
    np.testing.assert_allclose(finalise_jaxpr_as_fn(closed)(x), want, rtol=1e-6)
    final, shape = finalise_make_jaxpr(fn, return_shape=True)(x)
    assert str(final) == str(finalise_jaxpr(closed)) == str(finalise_make_jaxpr(fn)(x))
    assert shape.shape == want[0].shape
    traced = jax.make_jaxpr(finalise_fn(fn))(x)
    np.testing.assert_allclose(jex.jaxpr_as_fun(traced)(x), want, rtol=1e-6)
    assert not names(traced) & TO_GO


def test_programs_inside_of_shard_map_are_finalised(getkey):
    x = jax.random.normal(getkey(), (8, 2))

    def body(x):
        inner = jax.lax.scan(lambda c, _: (with_jvp(nonbatchable(c)), None), x, None, length=2)[0]
        return jax.lax.psum(inner * unvmap_max(x), "data")

    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        x = jax.device_put(x, jax.P("data"))
        fn = jax.shard_map(body, out_specs=jax.P())
        assert not names(finalise_make_jaxpr(fn)(x)) & TO_GO
        assert not names(finalise_make_jaxpr(jax.jit(fn))(x)) & TO_GO
        # One after the other: two programs at once may take each other's threads.
        want = np.asarray(jax.jit(fn)(x))
        np.testing.assert_allclose(jax.jit(finalise_fn(fn))(x), want, rtol=1e-6)


def test_shardings_stay(getkey):
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        x = jax.device_put(jax.random.normal(getkey(), (8, 2)), jax.P("data"))

        def fn(x):
            return jax.lax.scan(lambda c, _: (with_jvp(c), None), x, None, length=2)[0]

        assert finalise_make_jaxpr(fn)(x).out_avals[0].sharding.spec == jax.P("data", None)
        assert jax.jit(finalise_fn(fn))(x).sharding.spec == jax.P("data", None)


def test_a_program_with_nothing_to_replace_is_left_as_it_is():
    closed = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 2))(
        1.0
    )
    assert finalise_jaxpr(closed) is closed


def test_settings_of_an_equation_stay():
    def fn(x):
        with jax.default_matmul_precision("highest"):
            return with_jvp(x) @ x.T

    final = finalise_make_jaxpr(fn)(jnp.ones((2, 2)))
    (dot,) = (eqn for eqn in final.eqns if eqn.primitive.name == "dot_general")
    assert "HIGHEST" in str(dot.params["precision"])


def test_a_finalised_function_takes_any_object_and_closes_over_tracers(getkey):
    x, y = jax.random.normal(getkey(), (2, 3))
    fn = finalise_fn(lambda f, x, *, tag: (f(nontraceable(x)), tag))
    out, tag = fn(jnp.sin, x, tag="text")
    assert tag == "text"
    np.testing.assert_allclose(out, jnp.sin(x), rtol=1e-6)

    def closing(y):
        return jnp.sum(finalise_fn(lambda x: nondifferentiable(x) * y)(x))

    np.testing.assert_allclose(jax.jit(jax.grad(closing))(y), x, rtol=1e-6)
    # Without its rule, which says one.
    np.testing.assert_allclose(jax.vmap(jax.grad(finalise_fn(with_jvp)))(x), jnp.cos(x), rtol=1e-6)
    assert finalise_fn(with_jvp).__name__ == "with_jvp"

    model = vernal.nn.Linear(3, 2, key=getkey())
    np.testing.assert_allclose(finalise_fn(model)(x), model(x), rtol=1e-6)


def test_a_primitive_that_is_registered_is_replaced():
    twice = jex.Primitive("twice")
    twice.def_impl(lambda x: nontraceable(x) + x)
    twice.def_abstract_eval(lambda x: x)

    def fn(x):
        return twice.bind(x)

    assert names(finalise_make_jaxpr(fn)(1.0)) == {"twice"}
    register_impl_finalisation(twice)
    try:
        assert names(finalise_make_jaxpr(fn)(1.0)) == {"add"}
        assert finalise_fn(fn)(2.0) == 4.0
    finally:
        del primitive_finalisations[twice]


def test_what_create_vprim_makes_is_registered():
    def rule(*args):
        return None

    cube = create_vprim("cube", lambda x: [x**3], lambda x: [x], rule, rule)

    def fn(x):
        return jax.vmap(lambda x: cube.bind(x)[0])(x)

    assert names(finalise_make_jaxpr(fn)(jnp.ones(2))) == {"integer_pow"}


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="finalise_fn needs a function"):
        inspect.unwrap(finalise_fn)(1)
    with pytest.raises(TypeError, match="finalise_make_jaxpr needs a function"):
        inspect.unwrap(finalise_make_jaxpr)(1)
