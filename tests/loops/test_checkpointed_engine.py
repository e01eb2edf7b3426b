"""The engine of checkpointed loops, against the same loop unrolled in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vernal.loops._checkpointed import checkpointed
from vernal.primitives import select_if_vmap

WEIGHTS = ((0.3, -0.5, 0.2), (0.1, 0.4, -0.6), (-0.2, 0.5, 0.3))
START = (0.5, -1.0, 0.8)


def values(dtype=jnp.float32):
    return jnp.array(WEIGHTS, dtype), jnp.array(START, dtype)


def one(w, y):
    return y + jnp.tanh(w @ y) / 4


def loop(w, y, steps, max_steps, checkpoints=None):
    """`steps` steps of `one`, with a counter (an integer) and `steps` itself in the carry."""

    def cond(consts, carry, buffers, index):
        return carry[0] < carry[2]

    def step(consts, carry, buffers, index, x, replay):
        new = [carry[0] + 1, one(consts[0], carry[1]), carry[2]]
        return select_if_vmap(cond(consts, carry, buffers, index), new, carry), buffers, []

    carry = [jnp.int32(0), y, jnp.asarray(steps, jnp.int32)]
    out = checkpointed(
        cond, step, [w], carry, [], [], max_steps=max_steps, length=None, checkpoints=checkpoints
    )
    return out[0][1]


def unrolled(w, y, steps):
    for _ in range(steps):
        y = one(w, y)
    return y


def energy(fn):
    return lambda w, y: jnp.sum(jnp.array([1, 2, 3], y.dtype) * fn(w, y) ** 2)


def assert_close(got, expected, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = max(1.0, float(np.max(np.abs(b), initial=0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    "max_steps, checkpoints", [(1, None), (11, None), (11, 1), (11, 3), (11, 4), (None, None)]
)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.sample(3)
def test_values_and_gradients_are_those_of_the_unrolled_loop_wherever_it_stops(
    max_steps, checkpoints, x64
):
    with jax.enable_x64(x64):
        w, y = values(jnp.float64 if x64 else jnp.float32)

        @jax.jit
        def both(w, y, steps):
            fn = energy(lambda w, y: loop(w, y, steps, max_steps, checkpoints))
            return jax.value_and_grad(fn, (0, 1))(w, y)

        for steps in range((max_steps or 9) + 1):
            fn = energy(functools.partial(unrolled, steps=steps))
            expected = jax.value_and_grad(fn, (0, 1))(w, y)
            assert_close(both(w, y, steps), expected, 1e-12 if x64 else 1e-6)


def test_a_long_loop_without_a_bound_gives_up_states_and_recomputes_them():
    w, y = values()
    fn = energy(lambda w, y: loop(w, y, 500, None, 5))
    by_scan = energy(lambda w, y: jax.lax.scan(lambda y, _: (one(w, y), None), y, None, 500)[0])
    got, expected = (jax.jit(jax.grad(f, (0, 1)))(w, y) for f in (fn, by_scan))
    assert_close(got, expected, 1e-5)


ORDERS = {
    "jvp": lambda f: lambda y: jax.jvp(f, (y,), (y,)),
    "jvp of vjp": lambda f: lambda y: jax.jvp(jax.grad(f), (y,), (y,)),
    "vjp of jvp": lambda f: jax.grad(lambda y: jax.jvp(f, (y,), (y,))[1]),
    "hessian": lambda f: jax.hessian(f),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third, in reverse": lambda f: jax.grad(lambda y: jnp.sum(jax.hessian(f)(y) ** 2)),
    "vmap of grad": lambda f: lambda y: jax.vmap(jax.grad(f))(jnp.stack([y, 2 * y])),
    "grad of vmap": lambda f: (
        lambda y: jax.grad(lambda ys: jax.vmap(f)(ys).sum())(jnp.stack([y, 2 * y]))
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.sample(3)
def test_derivatives_of_any_order_in_any_direction(order):
    # Four checkpoints without a bound: gaps are doubled, and what is between is divided.
    with jax.enable_x64(True):
        w, y = values(jnp.float64)
        derivative = ORDERS[order]
        got = jax.jit(derivative(lambda y: energy(lambda w, y: loop(w, y, 5, None, 4))(w, y)))
        expected = derivative(lambda y: energy(lambda w, y: unrolled(w, y, 5))(w, y))
        assert_close(got(y), jax.jit(expected)(y), 1e-12)


def test_second_derivatives_with_respect_to_constants_and_carry_together():
    with jax.enable_x64(True):
        w, y = values(jnp.float64)
        got = jax.jit(jax.hessian(energy(lambda w, y: loop(w, y, 4, 6)), (0, 1)))(w, y)
        expected = jax.hessian(energy(lambda w, y: unrolled(w, y, 4)), (0, 1))(w, y)
        assert_close(got, expected, 1e-12)
        got = jax.jit(jax.jacrev(jax.grad(energy(lambda w, y: loop(w, y, 4, 6)), (0, 1)), (0, 1)))
        assert_close(got(w, y), expected, 1e-12)


@pytest.mark.parametrize("max_steps", [8, None])
def test_each_element_of_a_batch_stops_by_itself(max_steps):
    with jax.enable_x64(True):
        w, y = values(jnp.float64)
        counts, ys = np.array([0, 3, 8, 5]), jnp.stack([y, 2 * y, -y, y / 2])

        def grads(fn):
            return jax.grad(energy(fn), (0, 1))

        def mapped(counts, ys):
            return jax.vmap(lambda n, y: grads(lambda w, y: loop(w, y, n, max_steps, 3))(w, y))(
                counts, ys
            )

        expected = [
            grads(lambda w, y, n=n: unrolled(w, y, n))(w, y)
            for n, y in zip(counts, ys, strict=True)
        ]
        got = jax.jit(mapped)(jnp.asarray(counts), ys)
        assert_close(got, jax.tree.map(lambda *xs: jnp.stack(xs), *expected), 1e-12)
        dots = jax.jit(
            jax.vmap(lambda n, y: jax.jvp(lambda y: loop(w, y, n, max_steps, 3), (y,), (y,))[1])
        )(jnp.asarray(counts), ys)
        for n, y, dot in zip(counts, ys, dots, strict=True):
            assert_close(dot, jax.jvp(lambda y, n=n: unrolled(w, y, n), (y,), (y,))[1], 1e-12)


def test_the_number_of_steps_is_not_batched_and_nothing_is_selected_without_a_batch():
    w, y = values()
    text = str(jax.make_jaxpr(jax.grad(energy(lambda w, y: loop(w, y, 5, 8))))(w, y))
    assert "select_n" not in text.replace("select_if_vmap", "")


@pytest.mark.parametrize("wrapper", ["plain", "jit", "checkpoint", "scan", "twice"])
@pytest.mark.sample(3)
def test_it_runs_inside_other_transformations_without_leaking_tracers(wrapper):
    w, y = values()

    def inside(w, y, run):
        if wrapper == "jit":
            run = jax.jit(run)
        if wrapper == "checkpoint":
            run = jax.checkpoint(run)
        if wrapper == "scan":
            return jax.lax.scan(lambda y, _: (run(w, y), None), y, None, length=2)[0]
        return run(w, run(w, y)) if wrapper == "twice" else run(w, y)

    def of(run):
        return jax.value_and_grad(energy(lambda w, y: inside(w, y, run)), (0, 1))(w, y)

    with jax.checking_leaks():
        got = of(lambda w, y: loop(w, y, 3, 5))
    assert_close(got, of(lambda w, y: unrolled(w, y, 3)), 1e-6)


def test_a_loop_inside_a_loop():
    w, y = values()

    def nested(w, y):
        def step(consts, carry, buffers, index, x, replay):
            return [loop(consts[0], carry[0], 2, 3)], buffers, []

        return checkpointed(None, step, [w], [y], [], [], max_steps=None, length=3, checkpoints=2)[
            0
        ][0]

    got = jax.jit(jax.grad(energy(nested), (0, 1)))(w, y)
    assert_close(got, jax.grad(energy(lambda w, y: unrolled(w, y, 6)), (0, 1))(w, y), 1e-6)


def scanned(w, y, xs, run):
    """A scan that stacks up what it computes."""

    def step(consts, carry, buffers, index, x, replay):
        new = one(consts[0], carry[0]) * x[0]
        return [new, carry[1] + 1], buffers, [jnp.sum(new) * x[1], carry[1]]

    out, _, ys = run(
        None, step, [w], [y, jnp.int32(0)], [], list(xs), max_steps=None, length=4, checkpoints=None
    )
    return out, ys


def in_python(cond, step, consts, carry, buffers, xs, *, max_steps, length, checkpoints):
    ys = []
    for i in range(length):
        carry, buffers, y = step(consts, carry, buffers, jnp.int32(i), [x[i] for x in xs], False)
        ys.append(y)
    return carry, buffers, [jnp.stack(y) for y in zip(*ys, strict=True)]


@pytest.mark.parametrize("order", ["jvp", "vjp of jvp", "jvp of vjp", "reverse over reverse"])
@pytest.mark.sample(3)
def test_what_a_scan_reads_and_stacks_up_is_differentiated_in_any_order(order):
    with jax.enable_x64(True):
        w, y = values(jnp.float64)
        xs = jnp.linspace(0.5, 1.5, 12).reshape(4, 3), jnp.arange(4.0)

        def fn(run, args):
            (out, count), (sums, counts) = scanned(*args, run)
            return jnp.sum(out**2) + jnp.sum(sums**3)

        derivative = ORDERS[order]
        flat, unravel = ravel_pytree((w, y, xs))
        got, expected = (
            derivative(lambda flat, run=run: fn(run, unravel(flat)))
            for run in (checkpointed, in_python)
        )
        assert_close(jax.jit(got)(flat), expected(flat), 1e-11)
        assert_close(scanned(w, y, xs, checkpointed), scanned(w, y, xs, in_python), 1e-12)


@pytest.mark.parametrize("length", [0, 1])
def test_scans_of_no_steps_and_of_one(length):
    w, y = values()
    key = jax.random.key(0)

    def step(consts, carry, buffers, index, x, replay):
        return [one(consts[0], carry[0])], buffers, [x[0] + 1, key]

    def fn(y):
        out, _, (ys, keys) = checkpointed(
            None,
            step,
            [w],
            [y],
            [],
            [jnp.ones((length, 2))],
            max_steps=None,
            length=length,
            checkpoints=None,
        )
        assert ys.shape == (length, 2) and keys.shape == (length,) and keys.dtype == key.dtype
        return jnp.sum(out[0])

    assert_close(jax.grad(fn)(y), jax.grad(lambda y: unrolled(w, y, length).sum())(y), 1e-6)


def test_keys_in_the_carry_are_kept_and_split_again():
    w, y = values()

    def step(consts, carry, buffers, index, x, replay):
        key, y = carry
        key, now = jax.random.split(key)
        return [key, y * (1 + jax.random.uniform(now))], buffers, []

    def fn(y, run):
        carry = [jax.random.key(1), y]
        return run(None, step, [], carry, [], [], max_steps=None, length=9, checkpoints=2)[0][
            1
        ].sum()

    got = jax.jit(jax.grad(lambda y: fn(y, checkpointed)))(y)
    assert_close(got, jax.grad(lambda y: fn(y, in_python))(y), 1e-5)


def write_once(array, index, value, replay):
    """A buffer's write: in a replay the array has it already, and only tangents are written."""
    if not replay:
        return array.at[index].set(value)

    @jax.custom_jvp
    def write(array, value, index):
        return array

    @write.defjvp
    def _(primals, tangents):
        return write(*primals), tangents[0].at[primals[2]].set(tangents[1])

    return write(array, value, index)


def recurrence(start, length, run):
    """Fibonacci with a nonlinearity: each entry of the buffer from the two before."""

    def step(consts, carry, buffers, index, x, replay):
        (buffer,), (a,) = buffers, consts
        new = jnp.sin(buffer[index + 1]) + a * buffer[index]
        return [carry[0] + new], [write_once(buffer, index + 2, new, replay)], []

    buffer = jnp.zeros(length + 2, start.dtype).at[:2].set(start[:2])
    carry, (buffer,), _ = run(
        None,
        step,
        [start[2]],
        [start[0]],
        [buffer],
        [],
        max_steps=None,
        length=length,
        checkpoints=2,
    )
    return carry[0] + jnp.sum(buffer**2)


@pytest.mark.parametrize(
    "order", ["jvp", "jvp of vjp", "vjp of jvp", "hessian", "reverse over reverse"]
)
@pytest.mark.sample(3)
def test_buffers_are_read_and_written_in_any_order_of_differentiation(order):
    with jax.enable_x64(True):
        start = jnp.array([0.3, 0.8, 0.6])
        derivative = ORDERS[order]
        got = jax.jit(derivative(lambda x: recurrence(x, 7, checkpointed)))(start)
        assert_close(got, derivative(lambda x: recurrence(x, 7, in_python))(start), 1e-12)


def test_kept_states_and_buffers_are_written_in_place():
    """The time of a step must not grow with the number of slots or the size of a buffer."""
    size, slots = 5003, 17

    def fn(x):
        def cond(consts, carry, buffers, index):
            return carry[1] < 100

        def step(consts, carry, buffers, index, x, replay):
            new = jnp.sin(carry[0])
            written = write_once(buffers[0], index, jnp.sum(new), replay)
            return [new, carry[1] + 1], [written], []

        carry, (buffer,), _ = checkpointed(
            cond, step, [], [x, jnp.int32(0)], [jnp.zeros(size)], [],
            max_steps=None, length=None, checkpoints=slots - 1,
        )  # fmt: skip
        return jnp.sum(carry[0]) + jnp.sum(buffer**2)

    compiled = jax.jit(jax.grad(fn)).lower(jnp.ones(7, jnp.float32)).compile()
    # Every computation but the entry is in a loop.
    inside, _ = compiled.as_text().split("ENTRY")
    copies = [line for line in inside.split("\n") if " copy(" in line]
    assert not [line for line in copies if f"[{slots},7]" in line]
    assert compiled.memory_analysis().temp_size_in_bytes < 3.1 * 4 * size


def test_only_what_is_perturbed_is_differentiated():
    """A part of the carry that does not depend on the input may do what has no derivative."""
    w, y = values()

    @jax.custom_jvp
    def without_derivative(x):
        return x * 2

    @functools.partial(without_derivative.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        assert isinstance(tangents[0], jax.custom_derivatives.SymbolicZero)
        return without_derivative(primals[0]), tangents[0]

    def step(consts, carry, buffers, index, x, replay):
        constant, late, y = carry
        return [without_derivative(constant), y[0], one(consts[0], y) + constant], buffers, []

    def fn(y):
        carry = [jnp.float32(0.5), jnp.float32(0), y]
        out = checkpointed(
            None, step, [w], carry, [], [], max_steps=None, length=4, checkpoints=None
        )[0]
        return out[0] + out[1] + jnp.sum(out[2])

    def expected(y):
        constant, late = jnp.float32(0.5), jnp.float32(0)
        for _ in range(4):
            constant, late, y = constant * 2, y[0], one(w, y) + constant
        return constant + late + jnp.sum(y)

    assert_close(jax.value_and_grad(fn)(y), jax.value_and_grad(expected)(y), 1e-6)
    assert_close(jax.jvp(fn, (y,), (y,)), jax.jvp(expected, (y,), (y,)), 1e-6)
    hessian, expected = (jax.jit(jax.hessian(f))(y) for f in (fn, expected))
    assert_close(hessian, expected, 1e-6)


@pytest.mark.parametrize("max_steps", [900, None])
def test_memory_is_the_checkpoints_and_a_few_states(max_steps):
    size = 4096
    y = jnp.ones(size, jnp.float32) / 2

    def fn(y):
        def cond(consts, carry, buffers, index):
            return carry[0] < 900

        def step(consts, carry, buffers, index, x, replay):
            return [carry[0] + 1, carry[1] + jnp.sin(carry[1])], buffers, []

        return checkpointed(
            cond,
            step,
            [],
            [jnp.int32(0), y],
            [],
            [],
            max_steps=max_steps,
            length=None,
            checkpoints=None,
        )[0][1].sum()

    compiled = jax.jit(jax.grad(fn)).lower(y).compile()
    states = compiled.memory_analysis().temp_size_in_bytes / (4 * size)
    assert states < (42 if max_steps else 82) + 6


@pytest.mark.parametrize("max_steps", [6, None])
def test_a_sharded_carry_is_not_gathered(max_steps):
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.array(WEIGHTS), NamedSharding(mesh, P()))
        ys = jnp.arange(48.0, dtype=jnp.float32).reshape(16, 3) / 48
        sharded = jax.device_put(ys, NamedSharding(mesh, P("data")))

        def fn(w, y):
            return jnp.sum(loop(w, y, 5, max_steps, 3) ** 2)

        def grads(w, ys):
            of_w = jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, ys)))(w)
            return of_w, jax.vmap(jax.grad(fn, 1), (None, 0))(w, ys)

        compiled = jax.jit(grads).lower(w, sharded).compile()
        assert "all-gather" not in compiled.as_text()
        of_w, of_ys = compiled(w, sharded)
        assert of_ys.sharding.spec == P("data", None)
    expected = jax.grad(lambda w, ys: jnp.sum(unrolled(w, ys.T, 5) ** 2), (0, 1))(
        jnp.array(WEIGHTS), jnp.array(np.asarray(ys))
    )
    assert_close((np.asarray(of_w), np.asarray(of_ys)), jax.tree.map(np.asarray, expected), 1e-5)


def test_a_carry_that_is_sharded_itself_scans_and_differentiates_without_gathering():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        y = jax.device_put(jnp.arange(16.0, dtype=jnp.float32), NamedSharding(mesh, P("data")))

        def step(consts, carry, buffers, index, x, replay):
            new = carry[0] + jnp.sin(carry[0] * x[0])
            return [new], buffers, [new]

        def fn(y, xs):
            carry, _, ys = checkpointed(
                None, step, [], [y], [], [xs], max_steps=None, length=5, checkpoints=2
            )
            assert jax.typeof(ys[0]).sharding.spec == P(None, "data")
            return jnp.sum(carry[0]) + jnp.sum(ys[0] ** 2)

        xs = jnp.linspace(0.1, 1, 5)
        compiled = jax.jit(jax.grad(fn)).lower(y, xs).compile()
        assert "all-gather" not in compiled.as_text()
        got = compiled(y, xs)
        assert got.sharding.spec == P("data")
        by_scan = jax.grad(
            lambda y: (lambda out: jnp.sum(out[0]) + jnp.sum(out[1] ** 2))(
                jax.lax.scan(lambda y, x: (y + jnp.sin(y * x),) * 2, y, xs)
            )
        )(y)
        assert_close(np.asarray(got), np.asarray(by_scan), 1e-5)
        hessian_product = jax.jit(jax.grad(lambda y: jnp.sum(jax.grad(fn)(y, xs) * y)))
        assert hessian_product(y).sharding.spec == P("data")
