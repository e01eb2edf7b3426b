"""State in loops that a batch runs with another number of steps for each of its elements."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal import loops
from vernal.harvest import planted, reap, sow, sow_if

STEPS = jnp.array([1, 3, 0])


def decay(slot, x):
    """One step, which counts itself in one array of the slot and adds up what it sees in the other."""
    count, total = planted(slot)
    return sow(slot, (count + 1, total + x), 0.5 * x)


def slots(shape=()):
    return jnp.zeros(shape, jnp.int32), jnp.ones(shape)


def while_loop(slot, x, steps, **options):
    def body(carry):
        return carry[0] + 1, decay(slot, carry[1])

    return loops.while_loop(lambda c: c[0] < steps, body, (jnp.int32(0), x), **options)[1]


def fori_loop(slot, x, steps):
    return loops.fori_loop(0, steps, lambda i, x: decay(slot, x), x)


def nested(slot, x, steps):
    """The state is sown in a compiled function, in a branch, in a loop, in the loop."""

    @jax.jit
    def inner(slot, x):
        return jax.lax.cond(x > 0, lambda: decay(slot, x), lambda: x)

    def body(carry):
        return carry[0] + 1, jax.lax.fori_loop(0, 1, lambda _, x: inner(slot, x), carry[1])

    return loops.while_loop(lambda c: c[0] < steps, body, (jnp.int32(0), x))[1]


LOOPS = {
    "lax": while_loop,
    "bounded": functools.partial(while_loop, kind="bounded", max_steps=4, base=2),
    "checkpointed": functools.partial(while_loop, kind="checkpointed", max_steps=4),
    "fori": fori_loop,
    "nested": nested,
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_an_element_that_is_done_changes_its_state_no_more(loop):
    @jax.jit
    def both_ways(xs):
        inside = reap(lambda slot: jax.vmap(loop)(slot, xs, STEPS))(slots((3,)))
        outside = jax.vmap(lambda slot, x, n: reap(loop)(slot, x, n))(slots((3,)), xs, STEPS)
        return inside, outside

    xs = np.float32([8, 8, 8])
    for ys, (count, total) in both_ways(xs):
        np.testing.assert_allclose(ys, [4, 1, 8])
        np.testing.assert_array_equal(count, STEPS)
        # 1 + 8 + 4 + 2
        np.testing.assert_allclose(total, [9, 15, 1])


def test_elements_that_share_a_state_cannot_be_done_at_different_times():
    shared = jax.vmap(while_loop, in_axes=(None, 0, 0))
    with pytest.raises(ValueError, match="the elements of `jax.vmap` disagree about a state"):
        reap(shared)(slots(), jnp.ones(3), STEPS)
    same = jax.vmap(lambda slot, x: x * while_loop(slot, jnp.float32(4), 2), in_axes=(None, 0))
    ys, (count, _) = reap(same)(slots(), jnp.arange(3.0))
    np.testing.assert_allclose(ys, [0, 1, 2])
    assert count == 2


def test_the_gradient_passes_through_what_is_recorded_under_a_condition():
    def loss(x, preds):
        def run(slot, pred, x):
            return sow_if(pred, lambda slot: decay(slot, x**2), slot)

        ys, (count, _) = reap(jax.vmap(run, in_axes=(0, 0, None)))(slots((2,)), preds, x)
        return ys.sum(), count

    gradient, count = jax.grad(loss, has_aux=True)(jnp.float32(3.0), jnp.array([True, False]))
    assert gradient == 6
    np.testing.assert_array_equal(count, [1, 0])


def test_what_can_not_be_called_is_refused():
    with pytest.raises(TypeError, match="sow_if"):
        inspect.unwrap(sow_if)(jnp.array(True), 1)


def counted(kind):
    def loop(slot, x):
        def body(carry):
            i, x = carry
            return i + 1, sow(slot, planted(slot) + 1, jnp.sin(x))

        return loops.while_loop(lambda c: c[0] < 3, body, (0, x), kind=kind, max_steps=4)[1]

    return loop


DERIVATIVES = {
    "grad": jax.grad,
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "jvp": lambda f, argnums: lambda s, x: jax.jvp(lambda x: f(s, x), (x,), (x,)),
    "vmap grad": lambda f, argnums: (
        lambda s, x: jax.vmap(lambda x: jax.grad(f, argnums)(s, x))(jnp.stack([x, x]))
    ),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.sample(3)
def test_the_derivative_of_a_loop_counts_no_step_twice(derivative):
    slot, x = jnp.array(0), jnp.float32(0.5)
    with pytest.raises(
        NotImplementedError, match=r"(?s)derivative of a checkpointed loop.*nn.keys\(model, key\)"
    ):
        reap(derivative(counted("checkpointed"), 1))(slot, x)
    if derivative is not DERIVATIVES["vmap grad"]:
        assert reap(derivative(counted("bounded"), 1))(slot, x)[1] == 3
    assert reap(counted("checkpointed"))(slot, x)[1] == 3


@pytest.mark.parametrize("kind", ["lax", "bounded", "checkpointed"])
def test_a_condition_may_change_no_state(kind):
    def loop(slot, x):
        def cond(x):
            return sow(slot, planted(slot) + 1, x) < 3

        return loops.while_loop(cond, lambda x: x + 1, x, kind=kind, max_steps=4)

    with pytest.raises(NotImplementedError, match="the condition of a loop cannot change state"):
        reap(loop)(jnp.array(0), jnp.float32(0))


def test_what_nobody_needs_is_lost_without_an_error():
    def count(slot, x):
        return sow(slot, planted(slot) + 1, x, needed=False)

    def loop(slot, x):
        return loops.while_loop(
            lambda c: c[0] < 3,
            lambda c: (c[0] + 1, count(slot, c[1])),
            (0, x),
            kind="bounded",
            max_steps=3,
        )[1]

    x = jnp.float32(2)
    for fn in (count, loop, jax.jit(loop), jax.grad(loop, argnums=1)):
        assert fn(jnp.array(0), x) in (1, 2)
    assert reap(loop)(jnp.array(0), x)[1] == 3
    # What is computed is no slot: its value is lost inside of `reap` as well.
    assert reap(lambda slot, x: count(2 * slot, x))(jnp.array(1), x) == (2, 1)


def test_needed_and_other_slots_in_one_loop():
    def both(a, b, x):
        x = sow(a, planted(a) + 1, x)
        return sow(b, planted(b) + 1, x, needed=False)

    def loop(slots, n):
        return loops.while_loop(
            lambda c: c[0] < n,
            lambda c: (c[0] + 1, both(*slots, c[1])),
            (0, jnp.zeros(())),
            kind="bounded",
            max_steps=4,
        )[1]

    slots, steps = (jnp.zeros(3), jnp.zeros(3)), jnp.array([0, 2, 3])
    _, (a, b) = jax.vmap(reap(loop))(slots, steps)
    np.testing.assert_array_equal([a, b], [steps, steps])
    with pytest.raises(RuntimeError, match="would be lost"):
        loop((jnp.array(0.0), jnp.array(0.0)), 2)


def test_shard_map_inside_of_a_condition_keeps_what_is_sown():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    def count(slot, x):
        return sow(slot, planted(slot) + 1, x)

    def fn(slot, x):
        spread = jax.shard_map(count, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return sow_if(None, spread, slot, x, step=jnp.int32(0))

    _, slot = jax.jit(reap(fn))(jnp.zeros(2), jnp.ones(2))
    np.testing.assert_array_equal(slot, [1, 1])
