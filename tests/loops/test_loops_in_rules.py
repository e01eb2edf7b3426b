"""Loops in a rule of the user's: one loop carries a value and its tangent."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import loops

LOOPS = {
    "scan lax": lambda step, c: loops.scan(lambda c, _: (step(c), None), c, None, length=3)[0],
    "scan checkpointed": lambda step, c: loops.scan(
        lambda c, _: (step(c), None), c, None, length=3, kind="checkpointed"
    )[0],
    "fori checkpointed": lambda step, c: loops.fori_loop(
        0, 3, lambda _, c: step(c), c, kind="checkpointed"
    ),
    **{
        f"while {kind} {max_steps}": lambda step, c, kind=kind, max_steps=max_steps: (
            loops.while_loop(
                lambda s: s[0] < 3,
                lambda s: (s[0] + 1, step(s[1])),
                (0, c),
                kind=kind,
                max_steps=max_steps,
            )[1]
        )
        for kind, max_steps in [("checkpointed", 4), ("checkpointed", None), ("bounded", 4)]
    },
}


def unrolled(step, c):
    for _ in range(3):
        c = step(c)
    return c


def with_a_rule(decorate, loop):
    """`x -> sin(x) * y` three times, whose rule runs one loop over pairs of a value and its tangent."""

    @decorate
    def f(x, y):
        return loop(lambda x: jnp.sin(x) * y, x)

    def rule(primals, tangents):
        (x, y), (dx, dy) = primals, tangents

        def step(c):
            x, dot = c
            return jnp.sin(x) * y, jnp.cos(x) * y * dot + jnp.sin(x) * dy

        return loop(step, (x, dx))

    (f.def_jvp if hasattr(f, "def_jvp") else f.defjvp)(rule)
    return f


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(
    "decorate", [vernal.filter_custom_jvp, jax.custom_jvp], ids=["ours", "jax"]
)
@pytest.mark.sample(6)
def test_a_loop_that_carries_a_value_and_its_tangent(decorate, name):
    f = with_a_rule(decorate, LOOPS[name])

    def right(x, y):
        return unrolled(lambda x: jnp.sin(x) * y, x)

    with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
        x, y = jnp.array(0.5), jnp.array(0.7)

        def along(g):
            return lambda x, y: jax.jvp(g, (x, y), (0.3 * y, x))[1]

        first = [lambda g: g, lambda g: jax.grad(g, (0, 1)), along, lambda g: jax.grad(along(g))]
        for derivative in [*first, lambda g: along(jax.grad(g)), lambda g: jax.grad(jax.grad(g))]:
            got, wanted = (jax.jit(derivative(g))(x, y) for g in (f, right))
            np.testing.assert_allclose(got, wanted, rtol=1e-10)
        xs = jnp.array([0.5, -0.2, 1.5])
        got, wanted = (jax.jit(jax.vmap(jax.grad(g), (0, None)))(xs, y) for g in (f, right))
        np.testing.assert_allclose(got, wanted, rtol=1e-10)
        got, wanted = (jax.linearize(g, x, y)[1](1.0, 2.0) for g in (f, right))
        np.testing.assert_allclose(got, wanted, rtol=1e-10)
        # What JAX computes again, it takes apart by rules of its own operations.
        if "lax" in name:
            got, wanted = (jax.grad(jax.checkpoint(g))(x, y) for g in (f, right))
            np.testing.assert_allclose(got, wanted, rtol=1e-10)
        else:
            with pytest.raises(ValueError, match="Linearization failed to produce known values"):
                jax.grad(jax.checkpoint(f))(x, y)
