"""Weak types and dtypes are those of Equinox, with 32 and 64 bits, where implicit promotion is refused (see
`tests/conftest.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ._same import same_as_equinox

KINDS = "lax", "checkpointed", "bounded"

# (Made when they are needed: their types depend on a setting.)
CARRIES = {
    "numbers": lambda: ((0, 1.0, 1j, True), lambda c: (c[0] + 1, c[1] * 2, c[2] * 2, ~c[3])),
    "a number that is replaced": lambda: ((0, 1.0), lambda c: (c[0] + 1, 3.0)),
    "arrays": lambda: (
        (np.int32(0), np.ones(2, np.float32), jnp.array(1.0), jnp.ones((), "float32")),
        lambda c: (c[0] + 1, c[1] * 2, c[2], c[3]),
    ),
    "none": lambda: ((0, None, ()), lambda c: (c[0] + 1, None, ())),
}


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.sample(6)
def test_the_carry_of_a_loop(carry, wide):

    @same_as_equinox
    def loops(eqx):
        init, body = CARRIES[carry]()
        loop = eqx.internal.while_loop
        out = [loop(lambda c: c[0] < 3, body, init, kind=kind, max_steps=8) for kind in KINDS]
        compiled = jax.jit(lambda c: loop(lambda c: c[0] < 3, body, c, kind="lax"))
        batch = jax.vmap(lambda c: loop(lambda c: c[0] < 3, body, c, kind="lax"), axis_size=2)
        return (
            out,
            compiled(init),
            batch(jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 2), init)),
        )

    with jax.enable_x64(wide):
        loops()


@same_as_equinox
def test_a_number_that_a_step_makes_strong(eqx):
    def body(carry):
        return carry[0] + 1, carry[1] * jnp.float32(2)

    return [
        eqx.internal.while_loop(lambda c: c[0] < 3, body, (0, 1.0), kind=kind, max_steps=8)
        for kind in KINDS
    ]


@pytest.mark.parametrize("wide", [False, True], ids=["32 bits", "64 bits"])
def test_the_carry_and_the_results_of_a_scan(wide):
    @same_as_equinox
    def scans(eqx):
        def step(carry, x):
            return (carry[0] + 1, carry[1] * 2.0), (carry, x, 1.0, 3)

        xs = jnp.arange(3, dtype="float32")
        return [eqx.internal.scan(step, (0, 1.0), xs, kind=kind) for kind in KINDS[:2]]

    with jax.enable_x64(wide):
        scans()


@same_as_equinox
def test_what_follows_a_loop_may_be_mixed_with_any_dtype(eqx):
    # Dense interpolation of Diffrax does this.
    steps, _ = eqx.internal.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1]), (0, 1.0), kind="lax"
    )
    return steps * jnp.ones((), "float32"), jnp.arange(4, dtype="int8") + steps


@same_as_equinox
def test_derivatives_of_a_loop(eqx):
    def power(x, kind):
        def body(carry):
            return carry[0] + 1, carry[1] * x

        loop = eqx.internal.while_loop
        return loop(lambda c: c[0] < 3, body, (0, 1.0), kind=kind, max_steps=8)[1]

    xs = 2.0, jnp.float32(2)
    out = [[power(x, kind), jax.grad(power)(x, kind)] for kind in KINDS[1:] for x in xs]
    return out, [jax.jvp(lambda x: power(x, "lax"), (x,), (x,)) for x in xs]


@same_as_equinox
def test_updates(eqx):
    one, weak, half = jnp.float32(1), jnp.array(1.0), jnp.ones(2, jnp.bfloat16)
    pairs = (1.0, 2.0), (weak, 2.0), (weak, weak), (one, weak), (weak, one), (half, 1.0), (1, 2)
    pairs += (np.float32(1), 1.0), (jnp.ones(2), jnp.array(1.0)), (weak, None), ({"a": one}, None)
    return [eqx.apply_updates(p, u) for p, u in pairs]


@same_as_equinox
def test_updates_of_another_dtype(eqx):
    with jax.numpy_dtype_promotion("standard"):
        return eqx.apply_updates(jnp.ones(2, jnp.bfloat16), jnp.ones(2))


NUMBERS = 1, 1.0, True, 1j, jnp.array(1.0), jnp.array(1), np.float32(1), np.ones(2), jnp.float32(1)


@same_as_equinox
def test_results_of_compiled_functions(eqx):
    same, twice = eqx.filter_jit(lambda x: x), eqx.filter_jit(lambda x: x * 2)
    return [(same(x), twice(x)) for x in NUMBERS]


@same_as_equinox
def test_derivatives(eqx):
    floats = jnp.array(1.0), jnp.float32(1), np.float32(1), jnp.ones((), jnp.bfloat16)

    def f(x):
        return x * 2.0

    pullbacks = [eqx.filter_vjp(f, x)[1](jnp.ones((), x.dtype)) for x in floats]
    jacobians = [
        jacobian(f)(x) for jacobian in (eqx.filter_jacfwd, eqx.filter_jacrev) for x in floats
    ]
    forward = eqx.filter_jvp(lambda x, y: (x * y, y, 1), (floats[0], 2.0), (floats[0], None))
    return [eqx.filter_value_and_grad(f)(x) for x in floats], pullbacks, jacobians, forward


@same_as_equinox
def test_integers_change_by_zeros_in_forward_mode(eqx):
    def f(x, n):
        return x**n, x.astype(int), np.arange(n), None

    jacobian = eqx.filter_jacfwd(f)
    return jacobian(jnp.arange(3.0), 2), eqx.filter_jit(jacobian)(jnp.arange(3.0), 2)


@same_as_equinox
def test_other_transformations(eqx):
    weak = jnp.array(1.0)

    def f(x):
        return x, x * 2, 1, 1.0

    return (
        [eqx.filter_eval_shape(f, x) for x in (weak, 1.0, np.float32(1))],
        [eqx.filter_checkpoint(f)(x) for x in (weak, 1.0, np.float32(1), 1)],
        eqx.filter_vmap(f)(jnp.arange(2.0)),
        [eqx.filter_jit(lambda x: eqx.error_if(x, jnp.array(False), "no"))(x) for x in (weak, 1)],
    )


@same_as_equinox
def test_values_of_states(eqx):
    class Layer(eqx.Module):
        index: eqx.nn.StateIndex

        def __init__(self, value):
            self.index = eqx.nn.StateIndex(value)

    out = []
    for value in (1.0, 1, jnp.array(1.0), jnp.float32(1), (1.0, jnp.ones(2))):
        layer, state = eqx.nn.make_with_state(Layer)(value)
        new = state.set(layer.index, jax.tree.map(lambda x: x * 2, value))
        out.append((new.get(layer.index), new, state.__class__.__name__))
    return out
