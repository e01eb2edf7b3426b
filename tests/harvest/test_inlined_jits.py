"""Inner `jit`s that JAX inlines, in a function that is reaped: kept while it is traced, inlined when it is run."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import PartitionSpec as P

from vernal.harvest import capture, planted, reap, sow

# What says to JAX 0.12 that an inner `jit` is inlined at once, which `True` says to those before.
EARLY = getattr(getattr(jax, "Inline", None), "JAX_EARLY", True)
SLOT = jnp.array([1.0, 2.0])


def operations(fn, *args):
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns]
    return sorted(name for name in names if name != "stop_gradient")


def test_the_derivative_of_one_that_was_differentiated_before_is_not_computed_again():
    rules = []

    def rule(primals, tangents):
        rules.append(primals)
        return sine.bind(*primals), jnp.cos(primals[0]) * tangents[0]

    sine = Primitive("counted_sine")
    sine.def_abstract_eval(lambda x: x)
    ad.primitive_jvps[sine] = rule
    inner = jax.jit(sine.bind, inline=EARLY)

    def gradient():
        # New functions, or JAX would remember all of it.
        def layer(slot, x):
            return sow(slot, planted(slot) + 1, inner(x))

        def plain(x):
            return inner(x)

        ways = [lambda x: reap(layer)(SLOT, x)[0], plain]
        return [jax.make_jaxpr(jax.grad(way))(0.5) for way in ways]

    gradient()
    assert rules
    rules.clear()
    gradient()
    assert not rules


def test_the_program_is_that_of_the_plain_function_with_nothing_kept():
    inner = jax.jit(lambda x: jnp.sin(x) * 2, inline=EARLY)

    def layer(slot, x):
        return sow(slot, planted(slot) + 1, inner(inner(x)))

    def plain(slot, x):
        return inner(inner(x)), slot + 1

    found, expected = operations(reap(layer), SLOT, 0.5), operations(plain, SLOT, 0.5)
    assert found == expected
    assert "jit" not in found
    # Inside another one too, whose trace is the one outside.
    assert operations(reap(lambda s, x: reap(layer)(s, x)), SLOT, 0.5) == expected


def test_states_and_captures_inside_of_one_and_parts_of_slots_that_come_out():
    @jax.jit(inline=EARLY)
    def part(slots):
        return jnp.stack([slots, slots])[0], slots[::-1][0], slots[1].T

    @jax.jit(inline=EARLY)
    def layer(slot, x):
        return sow(slot, planted(slot) * x, capture(x + 1, "seen"))

    def model(slots, x):
        one = part(slots)[2]
        return layer(one, layer(one, x))

    slots = jnp.arange(6.0).reshape(2, 3) + 1
    y, new, seen = jax.jit(reap(model, ["seen"]))(slots, jnp.full(3, 2.0))
    np.testing.assert_array_equal(y, np.full(3, 4.0))
    np.testing.assert_array_equal(new, slots.at[1].multiply(2.0 * 3.0))
    np.testing.assert_array_equal(seen["seen"], y)


def test_one_that_says_where_its_result_lies_stays_an_operation_as_jax_has_it():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.NamedSharding(mesh, P("data"))

    @jax.jit(inline=EARLY, out_shardings=split)
    def layer(slot, x):
        return sow(slot, planted(slot) + 1, jnp.sin(x))

    y, slot = jax.jit(reap(layer))(SLOT, jnp.arange(4.0))
    assert y.sharding.is_equivalent_to(split, 1)
    np.testing.assert_array_equal(slot, SLOT + 1)
    (kept,) = (
        eqn
        for eqn in jax.make_jaxpr(reap(layer))(SLOT, jnp.arange(4.0)).jaxpr.eqns
        if eqn.primitive.name == "jit"
    )
    assert kept.params["inline"] is EARLY
    assert split in kept.params["out_shardings"]
