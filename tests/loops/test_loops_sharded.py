"""Loops over data that is sharded over explicit mesh axes: nothing is gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vernal.loops import fori_loop, map, scan, while_loop

P = jax.sharding.PartitionSpec
KINDS = "lax", "checkpointed", "bounded"
COLLECTIVES = "all-gather", "all-to-all", "collective-permute"


@pytest.fixture
def mesh():
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        yield mesh


def while_of(kind, x, w):
    def body(carry):
        x, n = carry
        return jnp.tanh(x @ w), n + 1

    return while_loop(lambda c: c[1] < 5, body, (x, 0), kind=kind, max_steps=6)[0]


def buffered(kind, x, w):
    def body(carry):
        states, x, n = carry
        x = jnp.tanh(x @ w) + states[n // 2]
        states = states.at[n + 1].set(x, pred=n < 3)
        return states.at[n + 6].set(w[0, 0], pred=n == 3), x, n + 1

    states = jnp.stack([jnp.zeros_like(x)] * 10)
    return while_loop(
        lambda c: c[2] < 5, body, (states, x, 0), kind=kind, max_steps=5, buffers=lambda c: c[0]
    )[1]


def scanned(kind, x, w):
    carry, ys = scan(lambda x, n: (jnp.tanh(x @ w) * n, x), x, jnp.arange(4.0), kind=kind)
    return carry + jnp.sum(ys, axis=0)


def counted(kind, x, w):
    return fori_loop(0, 4, lambda i, x: jnp.tanh(x @ w), x, kind=kind)


def mapped(kind, x, w):
    stack = jnp.stack([x, 2 * x, 3 * x])
    return jnp.sum(map(lambda x: jnp.tanh(x @ w), stack, kind=kind), axis=0)


def batched(kind, x, w):
    """Every element of the sharded batch stops by itself."""

    def one(x):
        def body(x):
            return jnp.tanh(x @ w) * 2

        return while_loop(lambda x: x[0] < 1, body, x, kind=kind, max_steps=6)

    return jax.vmap(one)(x)


LOOPS = {
    "while": (while_of, KINDS),
    "buffer": (buffered, KINDS),
    "fori": (counted, KINDS),
    "scan": (scanned, KINDS[:2]),
    "map": (mapped, KINDS[:2]),
    "vmap": (batched, KINDS),
}
CASES = [(name, kind) for name, (_, kinds) in LOOPS.items() for kind in kinds]


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.sample(6)
def test_a_sharded_carry_stays_sharded(name, kind, mesh, getkey):
    loop = LOOPS[name][0]
    x0 = jax.random.normal(jax.random.key(0), (16, 4))
    w = jax.random.normal(jax.random.key(1), (4, 4)) / 2
    x = jax.device_put(x0, jax.NamedSharding(mesh, P("data", None)))

    def forward(x, w):
        return loop(kind, x, w)

    def derivative(x, w):
        if kind == "lax" and name in ("while", "buffer", "vmap"):
            return jax.jvp(forward, (x, w), (x, w))[1]
        return jax.grad(lambda x, w: jnp.sum(forward(x, w) ** 2), (0, 1))(x, w)

    for fn in (forward, derivative):
        compiled = jax.jit(fn).lower(x, w).compile()
        assert not [c for c in COLLECTIVES if c in compiled.as_text()]
        out = jax.tree.leaves(compiled(x, w))
        assert out[0].sharding.spec == P("data", None)
        wants = jax.tree.leaves(fn(x0, w))
        for got, want in zip(out, wants, strict=True):
            # Which products are fused depends on the processor, and the small elements are differences of large ones.
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * max(1, np.abs(want).max()))


def test_a_carry_must_start_as_it_is_sharded_in_the_end(mesh):
    x = jax.device_put(jnp.ones((8,)), jax.NamedSharding(mesh, P("data")))
    with pytest.raises(ValueError, match=r"carry: expected float32\[8\], got float32\[8@data\]"):
        while_loop(lambda y: y[0] < 3, lambda y: y + x, jnp.zeros(8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_inside_shard_map(kind, mesh):
    x = jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, P("data")))

    def local(x):
        # Every device stops by itself.
        return while_loop(lambda c: jnp.sum(c) < 20, lambda c: 2 * c + 1, x, kind=kind, max_steps=9)

    run = jax.jit(jax.shard_map(local, in_specs=P("data"), out_specs=P("data")))
    want = [float(i) for i in range(8)]
    for i in range(8):
        while want[i] < 20:
            want[i] = 2 * want[i] + 1
    np.testing.assert_allclose(run(x), want)
    if kind != "lax":
        grad = jax.jit(jax.grad(lambda x: jnp.sum(run(x))))(x)
        np.testing.assert_allclose(grad, [(w + 1) / (i + 1) for i, w in enumerate(want)])


OF_KINDS = {
    "checkpointed": {"kind": "checkpointed", "max_steps": 10},
    "unbounded": {"kind": "checkpointed", "max_steps": None},
    "bounded": {"kind": "bounded", "max_steps": 10},
}


@pytest.mark.parametrize("options", OF_KINDS.values(), ids=OF_KINDS)
@pytest.mark.sample(3)
def test_third_derivatives_where_no_mesh_is_the_current_one(options):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x0 = jnp.linspace(0.3, 1.3, 8)
    x = jax.device_put(x0, jax.NamedSharding(mesh, P("data")))

    def looped(x):
        def body(carry):
            n, x = carry
            return n + 1, jnp.sin(x) * x

        return jnp.sum(while_loop(lambda c: c[0] < 3, body, (0, x), **options)[1])

    def unrolled(x):
        for _ in range(3):
            x = jnp.sin(x) * x
        return jnp.sum(x)

    def once_more(fn):
        return jax.grad(lambda x: jnp.sum(fn(x) ** 2))

    def along(fn):
        return lambda x: jax.jvp(fn, (x,), (x,))[1]

    for derivatives in (
        lambda f: once_more(once_more(jax.grad(f))),
        lambda f: jax.grad(along(along(f))),
        lambda f: along(once_more(jax.grad(f))),
        lambda f: once_more(jax.grad(along(f))),
    ):
        got = jax.jit(derivatives(looped))(x)
        assert got.sharding.spec == P("data")
        np.testing.assert_allclose(got, derivatives(unrolled)(x0), rtol=1e-3, atol=1e-4)
