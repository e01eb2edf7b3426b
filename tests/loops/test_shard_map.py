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
CASES = [(name, kind) for name, (_, _, kinds) in LOOPS.items() for kind in kinds]
BY_BOTH = pytest.mark.parametrize("mesh_kind", MESHES)


def has_reverse(name, kind):
    return kind != "lax" or name in ("scanned", "mapped")


def over_devices(fn, mesh, ins, outs):
    """`fn` of one device's `x` and `m`, and `w`."""

    def local(x, m, w):
        out = fn(x[0], m[0], w)
        return jax.tree.map(lambda y, spec: y[None] if spec else y, out, outs)

    spread = jax.shard_map(local, mesh=mesh, in_specs=(*ins, P()), out_specs=outs)

    @jax.jit
    def run(x, w):
        x, m = (jax.device_put(a, jax.NamedSharding(mesh, P("data"))) for a in (x, BOUNDS))
        return spread(x, m, jax.device_put(w, jax.NamedSharding(mesh, P())))

    return run


def spread(fn, mesh, outs=P("data")):
    return over_devices(fn, mesh, (P("data"), P("data")), outs)


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


@BY_BOTH
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_value_and_forward_derivative(name, kind, mesh_kind):
    loop, unrolled, _ = LOOPS[name]
    mesh = mesh_of(mesh_kind)
    one = functools.partial(loop, kind)

    def pushed(x, m, w):
        dx, dw = DX[jax.lax.axis_index("data")], DW
        return jax.jvp(lambda x, w: one(x, m, w), (x, w), (dx, dw))

    inside = spread(pushed, mesh, (P("data"), P("data")))(X, W)
    outside = jax.jit(lambda x, w: jax.jvp(total(one, mesh), (x, w), (DX, DW)))(X, W)
    want = jax.jvp(expected(unrolled), (X, W), (DX, DW))
    assert_close([y.sum() for y in inside], want)
    assert_close(outside, want)


@BY_BOTH
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradient_inside_and_outside(name, kind, mesh_kind):
    """Inside, the gradient of what the devices share is the sum over them, as JAX has it for any operation."""
    loop, unrolled, _ = LOOPS[name]
    mesh = mesh_of(mesh_kind)
    one = functools.partial(loop, kind)
    inside = spread(jax.grad(one, (0, 2)), mesh, (P("data"), P()))
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
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_second_derivative(name, kind, over):
    loop, unrolled, _ = LOOPS[name]
    fn = total(functools.partial(loop, kind), mesh_of("auto"))
    got = jax.jit(product_of_hessian(fn, over))
    if not has_reverse(name, kind):
        with no_reverse():
            got(X, W)
        return
    assert_close(got(X, W), product_of_hessian(expected(unrolled), over)(X, W))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_second_derivative_inside(name, kind):
    loop, unrolled, _ = LOOPS[name]

    def one(x, m, w):
        def of_both(x, w):
            return loop(kind, x, m, w)

        gradient = jax.grad(of_both, (0, 1))
        dots = DX[jax.lax.axis_index("data")], DW
        return jax.jvp(gradient, (x, w), dots)[1]

    got = spread(one, mesh_of("auto"), (P("data"), P()))
    if not has_reverse(name, kind):
        with no_reverse():
            got(X, W)
        return
    want = product_of_hessian(expected(unrolled), "forward over reverse")(X, W)
    assert_close(got(X, W), want)


@pytest.mark.parametrize(("name", "kind"), CASES)
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
    inside = spread(jax.grad(one, (0, 2)), mesh, (P("data"), P()))
    if has_reverse(name, kind):
        assert_close(inside(X, W), jax.grad(want, (0, 1))(X, W))
        assert_close(jax.jit(jax.grad(fn, (0, 1)))(X, W), jax.grad(want, (0, 1))(X, W))
    else:
        with no_reverse():
            inside(X, W)
