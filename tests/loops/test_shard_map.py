"""Loops and branches inside `jax.shard_map`, with its check of what varies between the devices (the default).

Each case is a function of one device's part. What it should give is computed without `shard_map` and without loops: by
unrolling the steps of every device in Python.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import vernal
from vernal.harvest import planted, reap, sow
from vernal.loops import fori_loop, map, scan, while_loop
from vernal.runtime import RuntimeCheckError, error_if

P = jax.sharding.PartitionSpec
DEVICES = 4
BOUNDS = np.arange(DEVICES, dtype=np.int32)
X = jax.random.normal(jax.random.key(0), (DEVICES, 3))
W = jax.random.normal(jax.random.key(1), (3, 3)) / 2
DX = jax.random.normal(jax.random.key(2), X.shape)
DW = jax.random.normal(jax.random.key(3), W.shape)
KINDS = "lax", "checkpointed", "bounded"
MESHES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def mesh_of(kind, shape=(DEVICES,), names=("data",)):
    types = (MESHES[kind],) * len(names)
    return jax.make_mesh(shape, names, axis_types=types, devices=jax.devices()[:DEVICES])


# Each loop is a function of its kind, of what each device has for itself (`x` and a number of steps, `m`), and of what
# they share (`w`); beside it the same unrolled, where `m` is a Python number.


def zero_state(kind, x, m, w):
    """Nothing in the carry differs between the devices at the start; all but the counter does in the end."""

    def body(carry):
        h, total, n = carry
        h = jnp.tanh(w @ h + x)
        return h, total + h.sum(), n + 1

    h, total, n = while_loop(
        lambda c: c[2] < 3, body, (jnp.zeros(3), 0.0, 0), kind=kind, max_steps=4
    )
    assert not jax.typeof(n).manual_axis_type.varying
    return total + h[0]


def zero_state_unrolled(x, m, w):
    h, total = jnp.zeros(3), jnp.zeros(())
    for _ in range(3):
        h = jnp.tanh(w @ h + x)
        total = total + h.sum()
    return total + h[0]


def scanned(kind, x, m, w):
    """The input is captured, and what is scanned over is the same on all devices."""

    def step(carry, row):
        h, total = carry
        h = jnp.tanh(row * h.sum() + x)
        return (h, 0.5 * total + row[0]), (h, row)

    (h, total), (hs, rows) = scan(step, (jnp.zeros(3), 0.0), w, kind=kind)
    assert not jax.typeof(total).manual_axis_type.varying
    assert not jax.typeof(rows).manual_axis_type.varying
    return h.sum() + (hs**2).sum() + total * rows.sum() * x[0]


def scanned_unrolled(x, m, w):
    h, total, hs = jnp.zeros(3), jnp.zeros(()), []
    for row in w:
        h = jnp.tanh(row * h.sum() + x)
        total = 0.5 * total + row[0]
        hs.append(h)
    return h.sum() + (jnp.stack(hs) ** 2).sum() + total * w.sum() * x[0]


def nested(kind, x, m, w):
    """A loop in a loop, whose carry is made inside of the outer one."""

    def outer(i, total):
        def inner(carry):
            y, n = carry
            return jnp.sin(w @ y + x), n + 1

        y, _ = while_loop(lambda c: c[1] < 2, inner, (jnp.ones(3), 0), kind=kind, max_steps=2)
        return total + y.sum() * (i + 1.0)

    return fori_loop(0, 2, outer, 0.0, kind=kind)


def nested_unrolled(x, m, w):
    total = jnp.zeros(())
    for i in range(2):
        y = jnp.ones(3)
        for _ in range(2):
            y = jnp.sin(w @ y + x)
        total = total + y.sum() * (i + 1.0)
    return total


def own_bound(kind, x, m, w):
    """Every device takes another number of steps, the first one none."""

    def body(carry):
        h, n = carry
        return jnp.tanh(w @ h + 1.0), n + 1

    h, n = while_loop(lambda c: c[1] < m, body, (jnp.ones(3), 0), kind=kind, max_steps=4)
    assert jax.typeof(n).manual_axis_type.varying == {"data"}
    return (h * x).sum()


def own_bound_unrolled(x, m, w):
    h = jnp.ones(3)
    for _ in range(m):
        h = jnp.tanh(w @ h + 1.0)
    return (h * x).sum()


def own_bound_nested(kind, x, m, w):
    """The same by `fori_loop`, in a loop that all devices run equally long."""

    def outer(i, total):
        h = fori_loop(0, m, lambda j, h: jnp.tanh(w @ h) + x, x, kind=kind, max_steps=4)
        return total + (h * w[0]).sum()

    return fori_loop(0, 2, outer, 0.0, kind=kind)


def own_bound_nested_unrolled(x, m, w):
    h = x
    for _ in range(m):
        h = jnp.tanh(w @ h) + x
    return 2 * (h * w[0]).sum()


def buffered(kind, x, m, w):
    """A buffer of zeros, in which every device writes its own."""

    def body(carry):
        states, n = carry
        return states.at[n + 1].set(jnp.tanh(w @ states[n] + x)), n + 1

    states, _ = while_loop(
        lambda c: c[1] < 3,
        body,
        (jnp.zeros((4, 3)), 0),
        kind=kind,
        max_steps=4,
        buffers=lambda c: c[0],
    )
    return (states**2).sum()


def buffered_unrolled(x, m, w):
    h, total = jnp.zeros(3), jnp.zeros(())
    for _ in range(3):
        h = jnp.tanh(w @ h + x)
        total = total + (h**2).sum()
    return total


def mapped(kind, x, m, w):
    return map(lambda row: (row * x).sum() ** 2, w, kind=kind).sum()


def mapped_unrolled(x, m, w):
    return ((w @ x) ** 2).sum()


LOOPS = {
    "zero_state": (zero_state, zero_state_unrolled, KINDS),
    "scanned": (scanned, scanned_unrolled, KINDS[:2]),
    "nested": (nested, nested_unrolled, KINDS),
    "own_bound": (own_bound, own_bound_unrolled, KINDS),
    "own_bound_nested": (own_bound_nested, own_bound_nested_unrolled, KINDS),
    "buffered": (buffered, buffered_unrolled, KINDS),
    "mapped": (mapped, mapped_unrolled, KINDS[:2]),
}
SLOW = pytest.mark.slow, pytest.mark.sample(6)
BY_BOTH = pytest.mark.parametrize("mesh_kind", ["auto", pytest.param("explicit", marks=SLOW)])


def by_case(*quick):
    """Every loop of every kind, of which those that are not named here are left to the slow tests."""
    return pytest.mark.parametrize(
        ("name", "kind"),
        [
            pytest.param(name, kind, marks=[] if name in quick else SLOW)
            for name, (_, _, kinds) in LOOPS.items()
            for kind in kinds
        ],
    )


def has_reverse(name, kind):
    return kind != "lax" or name in ("scanned", "mapped")


EACH = P("data")


def spread(fn, mesh, outs=EACH):
    """A function of one device's `x` and `m`, and of `w`, as one of all `x`, and `w`."""

    def local(x, m, w):
        out = fn(x[0], m[0], w)
        return jax.tree.map(lambda y, spec: y[None] if spec else y, out, outs)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(EACH, EACH, P()), out_specs=outs)

    @jax.jit
    def run(x, w):
        x, m = (jax.device_put(a, jax.NamedSharding(mesh, P("data"))) for a in (x, BOUNDS))
        return mapped(x, m, jax.device_put(w, jax.NamedSharding(mesh, P())))

    return run


def total(fn, mesh):
    """The sum over the devices, as a function of whole arrays."""
    of_each = spread(fn, mesh)
    return lambda x, w: of_each(x, w).sum()


def expected(unrolled):
    def of_all(x, w):
        return sum(unrolled(x[i], int(BOUNDS[i]), w) for i in range(DEVICES))

    return of_all


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def no_reverse():
    return pytest.raises(ValueError, match="Reverse-mode differentiation does not work")


@pytest.mark.parametrize("mesh_kind", MESHES)
@by_case(*LOOPS)
@pytest.mark.sample(6)
def test_value_and_forward_derivative(name, kind, mesh_kind):
    loop, unrolled, _ = LOOPS[name]
    mesh = mesh_of(mesh_kind)
    one = functools.partial(loop, kind)

    def pushed(x, m, w):
        dx, dw = DX[jax.lax.axis_index("data")], DW
        return jax.jvp(lambda x, w: one(x, m, w), (x, w), (dx, dw))

    inside = spread(pushed, mesh, (EACH, EACH))(X, W)
    outside = jax.jit(lambda x, w: jax.jvp(total(one, mesh), (x, w), (DX, DW)))(X, W)
    want = jax.jvp(expected(unrolled), (X, W), (DX, DW))
    assert_close([y.sum() for y in inside], want)
    assert_close(outside, want)


@BY_BOTH
@by_case(*LOOPS)
@pytest.mark.sample(6)
def test_gradient_inside_and_outside(name, kind, mesh_kind):
    """Inside, the gradient of what the devices share is the sum over them, as JAX has it for any operation."""
    loop, unrolled, _ = LOOPS[name]
    mesh = mesh_of(mesh_kind)
    one = functools.partial(loop, kind)
    inside = spread(jax.grad(one, (0, 2)), mesh, (EACH, P()))
    outside = jax.jit(jax.grad(total(one, mesh), (0, 1)))
    if not has_reverse(name, kind):
        for gradient in (inside, outside):
            with no_reverse():
                gradient(X, W)
        return
    want = jax.grad(expected(unrolled), (0, 1))(X, W)
    assert_close(inside(X, W), want)
    assert_close(outside(X, W), want)


def product_of_hessian(fn, over):
    def along(x, w):
        return jax.jvp(fn, (x, w), (DX, DW))[1]

    if over == "reverse over forward":
        return jax.grad(along, (0, 1))
    gradient = jax.grad(fn, (0, 1))
    if over == "forward over reverse":
        return lambda x, w: jax.jvp(gradient, (x, w), (DX, DW))[1]

    def inner(x, w):
        dx, dw = gradient(x, w)
        return (dx * DX).sum() + (dw * DW).sum()

    return jax.grad(inner, (0, 1))


ORDERS = "reverse over forward", "forward over reverse", "reverse over reverse"


@pytest.mark.parametrize("over", ORDERS)
@by_case("own_bound")
@pytest.mark.sample(3)
def test_second_derivative(name, kind, over):
    loop, unrolled, _ = LOOPS[name]
    fn = total(functools.partial(loop, kind), mesh_of("auto"))
    got = jax.jit(product_of_hessian(fn, over))
    if not has_reverse(name, kind):
        with no_reverse():
            got(X, W)
        return
    assert_close(got(X, W), product_of_hessian(expected(unrolled), over)(X, W))


@by_case("own_bound")
def test_second_derivative_inside(name, kind):
    loop, unrolled, _ = LOOPS[name]

    def one(x, m, w):
        def of_both(x, w):
            return loop(kind, x, m, w)

        gradient = jax.grad(of_both, (0, 1))
        dots = DX[jax.lax.axis_index("data")], DW
        return jax.jvp(gradient, (x, w), dots)[1]

    got = spread(one, mesh_of("auto"), (EACH, P()))
    if not has_reverse(name, kind):
        with no_reverse():
            got(X, W)
        return
    want = product_of_hessian(expected(unrolled), "forward over reverse")(X, W)
    assert_close(got(X, W), want)


@by_case("zero_state", "own_bound")
@pytest.mark.sample(6)
def test_vmap_inside(name, kind):
    """Two examples on every device, each with a number of steps of its own."""
    loop, unrolled, _ = LOOPS[name]

    def one(x, m, w):
        both = jax.vmap(lambda x, m: loop(kind, x, m, w))
        return both(jnp.stack([x, 2 * x]), jnp.stack([m, 3 - m])).sum()

    def want(x, w):
        pairs = [(x[i], int(m)) for i, m in enumerate(BOUNDS)]
        pairs += [(2 * x[i], 3 - int(m)) for i, m in enumerate(BOUNDS)]
        return sum(unrolled(x, m, w) for x, m in pairs)

    mesh = mesh_of("auto")
    fn = total(one, mesh)
    assert_close(jax.jit(fn)(X, W), want(X, W))
    inside = spread(jax.grad(one, (0, 2)), mesh, (EACH, P()))
    if has_reverse(name, kind):
        assert_close(inside(X, W), jax.grad(want, (0, 1))(X, W))
        assert_close(jax.jit(jax.grad(fn, (0, 1)))(X, W), jax.grad(want, (0, 1))(X, W))
    else:
        with no_reverse():
            inside(X, W)


# What the devices decide by themselves.


@pytest.mark.parametrize("kind", KINDS[1:])
def test_devices_that_stop_by_themselves_are_summed_over_once_after_the_loop(kind):
    """A sum inside of the loop would wait for those that have left it."""
    fn = total(functools.partial(own_bound, kind), mesh_of("auto"))
    assert str(jax.make_jaxpr(jax.grad(fn, 1))(X, W)).count("psum") == 1


WAITING = (
    r"would wait for devices that take another branch or number of steps\n  where: {}\n(.|\n)*"
    r"`\w+` over 'data'(.|\n)*pmax"
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_where_devices_stop_by_themselves_is_refused(kind):
    def one(x, m, w):
        def body(carry):
            y, n = carry
            return jax.lax.pmean(y, "data") + x, n + 1

        return while_loop(lambda c: c[1] < m, body, (x, 0), kind=kind, max_steps=4)[0].sum()

    with pytest.raises(ValueError, match=WAITING.format("what `body` returns")):
        spread(one, mesh_of("auto"))(X, W)


def test_a_collective_in_a_loop_inside_is_found_too():
    def one(x, m, w):
        def step(y, _):
            return jax.lax.psum(y, "data") + x, None

        def body(carry):
            y, n = carry
            return scan(step, y, None, 2, kind="checkpointed")[0], n + 1

        return while_loop(lambda c: c[1] < m, body, (x, 0))[0].sum()

    with pytest.raises(ValueError, match=WAITING.format("what `body` returns")):
        spread(one, mesh_of("auto"))(X, W)


@pytest.mark.parametrize("kind", KINDS)
def test_devices_that_stop_together_may_wait_for_each_other(kind):
    def one(x, m, w):
        def cond(carry):
            return jax.lax.pmin(carry[1] - m, "data") < 0

        def body(carry):
            y, n = carry
            return jax.lax.pmean(jnp.tanh(w @ y), "data") + x, n + 1

        return while_loop(cond, body, (x, 0), kind=kind, max_steps=4)[0].sum()

    def want(x, w):
        y = x
        # As many steps as the last device wants.
        for _ in range(3):
            y = jnp.tanh(y @ w.T).mean(0)[None] + x
        return y.sum()

    fn = total(one, mesh_of("auto"))
    assert_close(jax.jit(fn)(X, W), want(X, W))
    if kind != "lax":
        assert_close(jax.jit(jax.grad(fn, (0, 1)))(X, W), jax.grad(want, (0, 1))(X, W))


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_over_another_axis_is_allowed(kind):
    """The condition differs along `a` alone, and along `b` there is a mean in each step."""
    mesh = mesh_of("auto", (2, 2), ("a", "b"))

    def local(x, w):
        def body(carry):
            y, n = carry
            return jax.lax.pmean(jnp.tanh(w @ y + x[0, 0]), "b"), n + 1

        start = jnp.ones(3), 0
        most = jax.lax.axis_index("a") * 2 + 1
        y, _ = while_loop(lambda c: c[1] < most, body, start, kind=kind, max_steps=4)
        return (y.sum() + (y * x[0, 0]).sum())[None, None]

    def of_all(x, w):
        out = jax.shard_map(local, mesh=mesh, in_specs=(P("a", "b"), P()), out_specs=P("a", "b"))(
            x, w
        )
        return out.sum()

    def want(x, w):
        total = jnp.zeros(())
        for a in range(2):
            y = jnp.ones(3)
            for _ in range(a * 2 + 1):
                y = (jnp.tanh(w @ y + x[a, 0]) + jnp.tanh(w @ y + x[a, 1])) / 2
            total = total + 2 * y.sum() + (y * x[a].sum(0)).sum()
        return total

    x = X.reshape(2, 2, 3)
    assert_close(jax.jit(of_all)(x, W), want(x, W))
    if kind != "lax":
        assert_close(jax.jit(jax.grad(of_all, (0, 1)))(x, W), jax.grad(want, (0, 1))(x, W))


class Box:
    """Nothing that JAX, or anybody, looks into."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_hidden_array_has_a_forward_derivative_and_its_gradient_is_refused(kind):
    def one(x, m, w):
        box = Box()
        box.w = w

        def body(carry):
            h, n = carry
            return jnp.tanh(box.w @ h + 1.0), n + 1

        h, _ = while_loop(lambda c: c[1] < m, body, (jnp.ones(3), 0), kind=kind, max_steps=4)
        return (h * x).sum()

    fn = total(one, mesh_of("auto"))
    got = jax.jit(lambda x, w: jax.jvp(fn, (x, w), (DX, DW)))(X, W)
    assert_close(got, jax.jvp(expected(own_bound_unrolled), (X, W), (DX, DW)))
    if kind != "lax":
        with pytest.raises(ValueError, match=r"no gradient here\n(.|\n)*`body`(.|\n)*in the carry"):
            jax.grad(fn, 1)(X, W)


class Layer(vernal.Module):
    w: jax.Array

    def __call__(self, h):
        return jnp.tanh(self.w @ h)


@jax.custom_jvp
def by_jvp(w, h):
    return jnp.tanh(w @ h)


@by_jvp.defjvp
def _(primals, tangents):
    (w, h), (dw, dh) = primals, tangents
    y = by_jvp(w, h)
    return y, (1 - y**2) * (dw @ h + w @ dh)


@jax.custom_vjp
def by_vjp(w, h):
    return jnp.tanh(w @ h)


by_vjp.defvjp(
    lambda w, h: (by_vjp(w, h), (w, h)),
    lambda inputs, ct: jax.vjp(lambda w, h: jnp.tanh(w @ h), *inputs)[1](ct),
)

HOLDERS = {
    "module": Layer,
    "method": lambda w: Layer(w).__call__,
    "jit": lambda w: jax.jit(lambda h: jnp.tanh(w @ h)),
    "filter_jit": lambda w: vernal.filter_jit(Layer(w)),
    "checkpoint": lambda w: jax.checkpoint(lambda h: jnp.tanh(w @ h)),
    "custom_jvp": lambda w: lambda h: by_jvp(w, h),
    "custom_vjp": lambda w: functools.partial(by_vjp, w),
}


@pytest.mark.parametrize("kind", [pytest.param("bounded", marks=pytest.mark.slow), "checkpointed"])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.sample(3)
def test_whatever_holds_a_shared_array_its_gradient_is_summed_over_after_the_loop(holder, kind):
    def one(x, m, w):
        step = HOLDERS[holder](w)

        def body(carry):
            h, n = carry
            return step(h), n + 1

        h, _ = while_loop(lambda c: c[1] < m, body, (jnp.ones(3), 0), kind=kind, max_steps=4)
        return (h * x).sum()

    def unrolled(x, m, w):
        h = jnp.ones(3)
        for _ in range(m):
            h = jnp.tanh(w @ h)
        return (h * x).sum()

    gradient = jax.grad(total(one, mesh_of("auto")), 1)
    assert str(jax.make_jaxpr(gradient)(X, W)).count("psum") == 1
    assert_close(jax.jit(gradient)(X, W), jax.grad(expected(unrolled), 1)(X, W))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_set_as_often_as_its_device_takes_steps(kind):
    def one(x, m, w):
        def run(count, x):
            def body(carry):
                h, n = carry
                return sow(count, planted(count) + 1.0, jnp.tanh(w @ h)), n + 1

            return while_loop(lambda c: c[1] < m, body, (x, 0), kind=kind, max_steps=4)[0]

        return reap(run)(jnp.zeros_like(x[0]), x)[1]

    assert_close(spread(one, mesh_of("auto"))(X, W), BOUNDS.astype(float))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_may_end_with_what_differs_less_than_its_start(kind):
    def one(x, m, w):
        def body(carry):
            y, n = carry
            return jnp.ones(3) * n, n + 1

        y, _ = while_loop(lambda c: c[1] < 3, body, (x, 0), kind=kind, max_steps=4)
        return y.sum()

    assert_close(spread(one, mesh_of("auto"))(X, W), np.full(DEVICES, 6.0))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_keep_giving_way_to_other_dtypes(kind):
    def one(x, m, w):
        def body(carry):
            y, n = carry
            return y * x.astype(jnp.bfloat16), n + 1

        y, n = while_loop(lambda c: c[1] < m, body, (1.0, 0), kind=kind, max_steps=4)
        assert y.dtype == jnp.bfloat16 and n.dtype == jnp.int32
        return y.astype(jnp.float32)

    got = spread(lambda x, m, w: one(x[0], m, w), mesh_of("auto"))(jnp.full((4, 3), 2.0), W)
    assert_close(got, 2.0**BOUNDS)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_linear_loop_is_transposed(kind):
    def one(x, m, w):
        def body(c):
            return 2 * c[0] + x, c[1] + 1

        start = jnp.zeros(3), 0
        return while_loop(lambda c: c[1] < 3, body, start, kind=kind, max_steps=4)[0].sum()

    fn = total(one, mesh_of("auto"))
    (got,) = jax.linear_transpose(lambda x: fn(x, W), X)(jnp.ones(()))
    assert_close(got, np.full(X.shape, 7.0))


def along_both(fn):
    def run(x, w):
        return jax.jvp(fn, (x, w), (DX, DW))

    return run


def misused(kind, x, m, w):
    """The last device, which alone comes so far, writes a place twice."""

    def body(carry):
        states, n = carry
        return states.at[jnp.minimum(n, 1)].set(x * w[0, 0]), n + 1

    states, _ = while_loop(
        lambda c: c[1] < m,
        body,
        (jnp.zeros((4, 3)), 0),
        kind=kind,
        max_steps=4,
        buffers=lambda c: c[0],
    )
    return states.sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_the_use_of_buffers_is_checked(kind):
    def one(loop, x, m, w):
        with vernal.loops.debug_buffers():
            return loop(kind, x, m, w)

    mesh = mesh_of("auto")
    fine = total(functools.partial(one, buffered), mesh)
    assert_close(jax.jit(fine)(X, W), expected(buffered_unrolled)(X, W))
    if kind != "lax":
        want = jax.grad(expected(buffered_unrolled), (0, 1))(X, W)
        assert_close(jax.jit(jax.grad(fine, (0, 1)))(X, W), want)
    with pytest.raises(RuntimeCheckError, match="an element of a buffer is written twice"):
        vernal.filter_jit(spread(functools.partial(one, misused), mesh))(X, W)


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_check_in_a_loop_fails_for_the_device_at_fault(kind, gradient):
    def one(x, m, w):
        def body(carry):
            h, n = carry
            h = error_if(jnp.tanh(w @ h + x), (n == 2) & (m == 3), "too far")
            return h, n + 1

        return while_loop(lambda c: c[1] < m, body, (jnp.ones(3), 0), kind=kind, max_steps=4)[
            0
        ].sum()

    mesh = mesh_of("auto")
    fn = spread(one, mesh)
    if gradient:
        if kind == "lax":
            fn = along_both(total(one, mesh))
        else:
            fn = jax.grad(total(one, mesh), (0, 1))
    with pytest.raises(RuntimeCheckError, match="too far\n  at step 2"):
        vernal.filter_jit(fn)(X, W)


# Branches.


def own_branch(x, m, w):
    """What is taken differs between the devices; each result varies in another way in each branch."""
    taken = vernal.filter_cond(
        m > 1,
        lambda x, y: (w @ x, jnp.sin(w).sum(), jnp.ones(())),
        lambda x, y: (x * y, jnp.zeros(()), y.sum() * x[0]),
        x,
        w[0],
    )
    assert all(jax.typeof(y).manual_axis_type.varying == {"data"} for y in taken)
    return (taken[0] ** 2).sum() + taken[1] + taken[2]


def own_branch_unrolled(x, m, w):
    if m > 1:
        return ((w @ x) ** 2).sum() + jnp.sin(w).sum() + 1.0
    return ((x * w[0]) ** 2).sum() + w[0].sum() * x[0]


def same_branch(x, m, w):
    """All devices take the same branch, and its results differ in what they vary over."""
    y, z = vernal.filter_switch(
        (w[0, 0] > 5).astype(int), [lambda v: (v @ x, v.sum()), lambda v: (v.sum(0), x[0])], w
    )
    alike = vernal.filter_cond(w[0, 0] > 5, jnp.sum, jnp.max, w)
    assert not jax.typeof(alike).manual_axis_type.varying
    return (y**2).sum() + z + alike * x[1]


def same_branch_unrolled(x, m, w):
    return ((w @ x) ** 2).sum() + w.sum() + jnp.max(w) * x[1]


def own_switch(x, m, w):
    branches = [lambda v: v.sum(), lambda v: (v @ x).sum(), lambda v: (x**2).sum() * v[0, 0]]
    return vernal.filter_switch(m, branches, w)


def own_switch_unrolled(x, m, w):
    return [w.sum(), (w @ x).sum(), (x**2).sum() * w[0, 0]][min(m, 2)]


BRANCHES = {
    "own_branch": (own_branch, own_branch_unrolled),
    "same_branch": (same_branch, same_branch_unrolled),
    "own_switch": (own_switch, own_switch_unrolled),
}


@BY_BOTH
@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.sample(3)
def test_branches(name, mesh_kind):
    one, unrolled = BRANCHES[name]
    mesh = mesh_of(mesh_kind)
    fn, want = total(one, mesh), expected(unrolled)
    both, dots = (0, 1), ((X, W), (DX, DW))
    assert_close(jax.jit(fn)(X, W), want(X, W))
    assert_close(jax.jit(lambda *args: jax.jvp(fn, *args))(*dots), jax.jvp(want, *dots))
    assert_close(jax.jit(jax.grad(fn, both))(X, W), jax.grad(want, both)(X, W))
    inside = spread(jax.grad(one, (0, 2)), mesh, (EACH, P()))
    assert_close(inside(X, W), jax.grad(want, both)(X, W))


@pytest.mark.slow
@pytest.mark.parametrize("over", ORDERS)
@pytest.mark.parametrize("name", BRANCHES)
def test_second_derivatives_of_branches(name, over):
    one, unrolled = BRANCHES[name]
    got = jax.jit(product_of_hessian(total(one, mesh_of("auto")), over))(X, W)
    assert_close(got, product_of_hessian(expected(unrolled), over)(X, W))


def test_branches_under_vmap():
    def one(x, m, w):
        both = jax.vmap(lambda x, m: own_branch(x, m, w))
        return both(jnp.stack([x, 2 * x]), jnp.stack([m, 3 - m])).sum()

    def want(x, w):
        total = jnp.zeros(())
        for i, m in enumerate(BOUNDS):
            total += own_branch_unrolled(x[i], m, w) + own_branch_unrolled(2 * x[i], 3 - m, w)
        return total

    got = jax.jit(jax.value_and_grad(total(one, mesh_of("auto")), (0, 1)))
    assert_close(got(X, W), jax.value_and_grad(want, (0, 1))(X, W))


def test_a_collective_in_a_branch_that_a_device_takes_by_itself_is_refused():
    def waits(x):
        return jax.lax.psum(x, "data")

    def in_cond(x, m, w):
        return vernal.filter_cond(m > 1, lambda x: x, waits, x).sum()

    def in_switch(x, m, w):
        return vernal.filter_switch(m, [waits, lambda x: x], x).sum()

    mesh = mesh_of("auto")
    with pytest.raises(ValueError, match=WAITING.format("false_fn of filter_cond")):
        spread(in_cond, mesh)(X, W)
    with pytest.raises(ValueError, match=WAITING.format(r"branches\[0\] of filter_switch")):
        spread(in_switch, mesh)(X, W)


def test_the_gradient_of_a_hidden_array_in_a_branch_is_refused():
    def one(x, m, w):
        box = Box()
        box.w = w

        def taken(x):
            return box.w @ x

        return vernal.filter_cond(m > 1, taken, lambda x: x, x).sum()

    fn = total(one, mesh_of("auto"))
    assert np.isfinite(jax.jvp(fn, (X, W), (DX, DW))[1])
    with pytest.raises(ValueError, match=r"no gradient here\n  where: `taken`"):
        jax.grad(fn, 1)(X, W)


def test_branches_of_different_structure_are_explained():
    def one(x, m, w):
        return vernal.filter_cond(m > 1, lambda x: x, lambda x: (x, x), x).sum()

    with pytest.raises(TypeError, match="the branches return results that do not match"):
        spread(one, mesh_of("auto"))(X, W)


def test_a_check_in_a_branch_fails_for_the_device_that_takes_it():
    def one(x, m, w, least):
        def fails(x):
            return error_if(x, x[0] > least, "not here")

        return vernal.filter_cond(m > 2, fails, lambda x: w @ x, x).sum()

    mesh, ones = mesh_of("auto"), jnp.ones((DEVICES, 3))
    fine = vernal.filter_jit(spread(functools.partial(one, least=2.0), mesh))
    assert np.isfinite(fine(ones, W)).all()
    with pytest.raises(RuntimeCheckError, match="not here"):
        vernal.filter_jit(spread(functools.partial(one, least=0.0), mesh))(ones, W)


@BY_BOTH
def test_a_recurrent_layer_in_filter_shard_map(mesh_kind, getkey):
    """Its parameters are shared, its sequences are not, and it starts from zeros."""
    layer = vernal.nn.GRU(3, 4, key=getkey())
    xs = jax.random.normal(getkey(), (8, 5, 3))
    mesh = mesh_of(mesh_kind)

    def loss(layer, xs):
        return jnp.mean(layer(xs)[0] ** 2)

    @vernal.filter_value_and_grad
    def local(layer, xs):
        return jax.lax.pmean(loss(layer, xs), "data")

    run = vernal.filter_shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    same, split = (jax.NamedSharding(mesh, P(*axes)) for axes in ((), ("data",)))
    got = vernal.filter_jit(run)(vernal.filter_shard(layer, same), vernal.filter_shard(xs, split))
    assert_close(got, vernal.filter_value_and_grad(loss)(layer, xs))
