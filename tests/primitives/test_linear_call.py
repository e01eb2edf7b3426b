"""`linear_call`: a derivative given in both directions, against the same recurrence in plain JAX.

The recurrence is computed by a `while_loop`, which JAX cannot differentiate in reverse, pushed forward by a scan, and
pulled back by another scan in reverse: whatever derivative comes out right has gone through the functions given.
"""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vernal.primitives import (
    create_vprim,
    filter_primitive_bind,
    filter_primitive_def,
    filter_primitive_jvp,
    filter_primitive_transpose,
    linear_call,
    materialise_zeros,
)
from vernal.transforms import ZeroTangent

STEPS = 3
CALLS = {"forward": 0, "transposed": 0}


def push(residuals, tangents):
    CALLS["forward"] += 1
    w, before, after = residuals
    dw, dx0, du = tangents

    def step(dx, inputs):
        x, y, du = inputs
        dy = (1 - y**2) * (w @ dx + dw @ x + du)
        return dy, dy

    return jax.lax.scan(step, dx0, (before, after, du))[1]


def pull(residuals, cotangent):
    CALLS["transposed"] += 1
    w, before, after = residuals

    def step(carry, inputs):
        lam, dw = carry
        x, y, ct = inputs
        g = (1 - y**2) * (lam + ct)
        return (w.T @ g, dw + jnp.outer(g, x)), g

    zero = jnp.zeros_like(cotangent[0])
    (lam, dw), du = jax.lax.scan(step, (zero, 0 * w), (before, after, cotangent), reverse=True)
    return dw, lam, du


def states(w, x0, u):
    """x <- tanh(w x + u) for every u: all the states, by a loop that has no reverse mode."""

    def body(carry):
        i, x, out = carry
        x = jnp.tanh(w @ x + u[i])
        return i + 1, x, out.at[i].set(x)

    start = jnp.zeros((), jnp.int32), x0, 0 * u + 0 * x0[None]
    return jax.lax.while_loop(lambda carry: carry[0] < u.shape[0], body, start)[2]


def rule_of(recurrence):
    def rule(primals, tangents):
        after = recurrence(*primals)
        before = jnp.concatenate([primals[1][None], after[:-1]])
        tangents = tuple(map(materialise_zeros, primals, tangents))
        return after, linear_call(push, pull, (primals[0], before, after), tangents)

    return rule


def recurrence(w, x0, u):
    return filter_primitive_bind(recurrence_p, w, x0, u)


def no_transpose(inputs, cotangents):
    raise AssertionError("only what is linear is transposed")


recurrence_p = create_vprim(
    "recurrence",
    filter_primitive_def(states),
    filter_primitive_def(lambda *args: jax.eval_shape(states, *args)),
    filter_primitive_jvp(rule_of(recurrence)),
    filter_primitive_transpose(no_transpose),
)

custom_jvp_recurrence = jax.custom_jvp(states)
custom_jvp_recurrence.defjvp(rule_of(custom_jvp_recurrence))


def plain(w, x0, u):
    def step(x, u):
        y = jnp.tanh(w @ x + u)
        return y, y

    return jax.lax.scan(step, x0, u)[1]


def loss_of(states):
    def loss(w, x0, u):
        weights = jnp.arange(1.0, STEPS + 1)[:, None]
        return jnp.sum(weights * jnp.sin(states(w, x0, u)))

    return loss


def arguments(key, *batched):
    """(w, x0, u), each with a leading axis of 2 if its letter is among `batched`."""
    shapes = {"w": (2, 2), "x": (2,), "u": (STEPS, 2)}
    keys = jax.random.split(key, 3)
    return tuple(
        jax.random.normal(k, ((2,) if name in batched else ()) + shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    )


def directions(args):
    return tuple(jnp.cos(3 * x + 1) for x in args)


ALL = (0, 1, 2)

# Each takes a scalar function of (w, x0, u), and gives a function of (w, x0, u).
DERIVATIVES = {
    "grad": lambda f: jax.grad(f, ALL),
    "vjp": lambda f: lambda *args: jax.vjp(f, *args)[1](jnp.ones(())),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, directions(args)),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*directions(args)),
    "grad of one": lambda f: jax.grad(f, 1),
    "hessian": lambda f: jax.hessian(f, (0, 1)),
    "jvp of vjp": lambda f: lambda *args: jax.jvp(jax.grad(f, ALL), args, directions(args))[1],
    "vjp of jvp": lambda f: jax.grad(lambda *args: jax.jvp(f, args, directions(args))[1], ALL),
    "grad of grad": lambda f: jax.grad(
        lambda *args: sum(jnp.sum(jnp.sin(g)) for g in jax.grad(f, ALL)(*args)), ALL
    ),
    "jvp of jvp": lambda f: (
        lambda *args: jax.jvp(
            lambda *args: jax.jvp(f, args, directions(args))[1], args, directions(args)
        )
    ),
    "grad of hessian": lambda f: jax.grad(lambda *args: jnp.sum(jax.hessian(f, 1)(*args) ** 2)),
}


def in_scan(f):
    """The function as the body of a scan that it is a part of."""

    def scanned(w, x0, u):
        def body(total, scale):
            return total + scale * f(w, x0 * scale, u + total), None

        return jax.lax.scan(body, jnp.zeros(()), jnp.array([0.5, 1.5]))[0]

    return scanned


def in_cond(f):
    return lambda w, x0, u: jax.lax.cond(x0[0] > -100, f, lambda w, x0, u: jnp.zeros(()), w, x0, u)


CONTEXTS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": in_scan,
    "cond": in_cond,
    "checkpoint": jax.checkpoint,
    "checkpoint in scan": lambda f: in_scan(jax.checkpoint(f)),
    "scan in jit in checkpoint": lambda f: jax.checkpoint(jax.jit(in_scan(f))),
}


def assert_close(got, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), got, expected)


def cases(quick, slow):
    """Combinations of two tables."""
    found = [(row, column, ()) for row, columns in quick.items() for column in columns]
    found += [(row, col, pytest.mark.slow) for row, columns in slow.items() for col in columns]
    return [pytest.param(row, col, marks=mark, id=f"{row}, {col}") for row, col, mark in found]


@pytest.mark.parametrize(
    "context, derivative",
    cases(
        quick={
            "plain": DERIVATIVES,
            "jit": ["grad"],
            "scan": ["grad", "jvp of vjp", "grad of grad"],
            "cond": ["grad", "vjp of jvp"],
            "checkpoint": ["grad", "jvp of vjp"],
            "checkpoint in scan": ["grad"],
        },
        slow={
            "scan": ["linearize", "hessian", "vjp of jvp", "jvp of jvp", "grad of hessian"],
            "cond": ["grad of grad"],
            "checkpoint": ["hessian"],
            "checkpoint in scan": ["vjp of jvp", "grad of grad"],
            "scan in jit in checkpoint": ["vjp", "jvp of vjp", "grad of hessian"],
        },
    ),
)
@pytest.mark.sample(6)
def test_every_derivative_in_every_context_is_that_of_plain_jax(context, derivative, getkey):
    args = arguments(getkey())
    of, inside = DERIVATIVES[derivative], CONTEXTS[context]
    with jax.checking_leaks():
        got = jax.jit(of(inside(loss_of(recurrence))))(*args)
    assert_close(got, jax.jit(of(inside(loss_of(plain))))(*args))


@pytest.mark.parametrize("derivative", ["grad", "linearize", "jvp of vjp", "vjp of jvp"])
@pytest.mark.sample(6)
def test_a_rule_of_custom_jvp_has_every_derivative(derivative, getkey):
    args, of = arguments(getkey()), DERIVATIVES[derivative]
    with jax.checking_leaks():
        got = jax.jit(of(in_scan(loss_of(custom_jvp_recurrence))))(*args)
    assert_close(got, jax.jit(of(in_scan(loss_of(plain))))(*args))


@pytest.mark.parametrize(
    "batched, derivative",
    cases(
        quick={
            "w": ["grad"],
            "x": ["linearize", "jvp of vjp"],
            "wx": ["vjp of jvp"],
            "wxu": ["hessian"],
        },
        slow={
            "w": ["jvp of vjp", "grad of hessian"],
            "x": ["grad of grad"],
            "u": ["grad", "vjp of jvp"],
            "xu": ["hessian", "jvp of jvp"],
        },
    ),
)
@pytest.mark.sample(3)
def test_every_derivative_can_be_mapped_over_any_arguments(batched, derivative, getkey):
    args = arguments(getkey(), *batched)
    axes = tuple(0 if name in batched else None for name in "wxu")
    of = DERIVATIVES[derivative]
    got = jax.jit(jax.vmap(of(loss_of(recurrence)), axes))(*args)
    assert_close(got, jax.jit(jax.vmap(of(loss_of(plain)), axes))(*args))


@pytest.mark.parametrize(
    "batched, derivative",
    cases(
        quick={"w": ["grad", "jvp"], "x": ["jvp of vjp", "vjp of jvp"], "xu": ["grad"]},
        slow={
            "w": ["hessian", "jvp of vjp"],
            "x": ["linearize", "grad of hessian"],
            "u": ["vjp of jvp", "grad of grad"],
        },
    ),
)
@pytest.mark.sample(3)
def test_a_mapped_function_has_every_derivative(batched, derivative, getkey):
    """vmap inside, where cotangents of what is not mapped have to be summed."""
    args = arguments(getkey(), *batched)
    axes = tuple(0 if name in batched else None for name in "wxu")

    def summed(states):
        return lambda *args: jnp.sum(jax.vmap(loss_of(states), axes)(*args))

    of = DERIVATIVES[derivative]
    got = jax.jit(of(summed(recurrence)))(*args)
    assert_close(got, jax.jit(of(summed(plain)))(*args))


def test_maps_nest_with_axes_anywhere(getkey):
    w, x0, u = arguments(getkey())
    w = jnp.stack([w, 2 * w, 3 * w], axis=1)
    u = jnp.stack([u, -u], axis=-1)

    def grads(states):
        inner = jax.vmap(jax.grad(loss_of(states), ALL), in_axes=(None, None, -1), out_axes=-1)
        return jax.vmap(inner, in_axes=(1, None, None))(w, x0, u)

    def grad_of_maps(states):
        def total(w, x0, u):
            inner = jax.vmap(loss_of(states), in_axes=(None, None, -1))
            return jnp.sum(jax.vmap(inner, in_axes=(1, None, None))(w, x0, u))

        return jax.grad(total, ALL)(w, x0, u)

    assert_close(grads(recurrence), grads(plain))
    assert_close(grad_of_maps(recurrence), grad_of_maps(plain))


def test_without_jit_each_direction_calls_its_own_function(getkey):
    args = arguments(getkey())
    f = loss_of(recurrence)
    jax.grad(f)(*args)
    before = dict(CALLS)
    jax.grad(f)(*args)
    # The function pushed forward is the same object as before, and was not traced again.
    assert CALLS == before | {"transposed": before["transposed"] + 1}
    jax.jvp(f, args, directions(args))
    assert CALLS["transposed"] == before["transposed"] + 1
    assert_close(jax.grad(f, ALL)(*args), jax.grad(loss_of(plain), ALL)(*args))


def test_forward_mode_goes_through_while_loops(getkey):
    args = arguments(getkey())

    def repeated(states):
        def body(x0):
            return states(args[0], x0, args[2])[-1]

        return lambda x0: jax.lax.while_loop(lambda x: x[0] > 5, body, body(x0))

    got = jax.jvp(repeated(recurrence), (args[1],), (jnp.ones(2),))
    assert_close(got, jax.jvp(repeated(plain), (args[1],), (jnp.ones(2),)))


# A function simple enough to see each cotangent: (r, (s, t)) -> (r * s, t).
def pair(r, tangents):
    return r * tangents[0], tangents[1]


def test_what_is_not_used_arrives_as_a_zero_and_may_be_returned_as_one():
    seen = []

    def back(r, cts):
        seen.append(cts)
        return r * cts[0], cts[1]

    def first(s, t):
        return linear_call(pair, back, jnp.array(3.0), (s, t))[0]

    one = jnp.ones(())
    assert_close(jax.grad(first, (0, 1))(one, one), (3.0, 0.0))
    assert seen == [(seen[0][0], ZeroTangent((), jnp.float32))]
    # The same, mapped: the zero has the shape of one element.
    many = jnp.ones(2)
    got = jax.grad(lambda s, t: jnp.sum(jax.vmap(first)(s, t)), (0, 1))(many, many)
    assert_close(got, (3 * many, 0 * many))
    assert seen[1][1] == ZeroTangent((), jnp.float32)


def test_none_stands_for_a_cotangent_that_is_zero():
    def f(s, t):
        return linear_call(pair, lambda r, cts: (None, cts[1]), jnp.array(3.0), (s, t))[0]

    one = jnp.ones(())
    assert_close(jax.grad(f, (0, 1))(one, one), (0.0, 0.0))
    got = jax.vmap(jax.grad(f, (0, 1)), in_axes=(0, None))(jnp.ones(2), one)
    assert_close(got, (jnp.zeros(2), jnp.zeros(2)))


def test_no_transposition_happens_where_no_cotangent_arrives():
    def never(r, cts):
        raise AssertionError

    def f(s):
        return s**2 + 0 * jax.lax.stop_gradient(linear_call(pair, never, jnp.ones(()), (s, s))[0])

    assert jax.grad(f)(jnp.ones(())) == 2.0


def test_a_tangent_that_is_known_is_no_concern_of_the_transpose():
    """Only one of two tangents depends on the input; the other is an array of zeros."""

    def back(r, cts):
        return r * cts[0], cts[1]

    def f(s):
        return sum(linear_call(pair, back, jnp.array(3.0), (s, jnp.zeros(()))))

    assert jax.grad(f)(jnp.ones(())) == 3.0
    assert jax.linear_transpose(f, jnp.ones(()))(jnp.ones(())) == (3.0,)


def test_residuals_may_be_integers_keys_and_trees():
    def forward(r, t):
        noise = jax.random.normal(r["key"], t.shape)
        return noise * t[::-1] * r["count"].astype(t.dtype)

    def back(r, ct):
        noise = jax.random.normal(r["key"], ct.shape)
        return (noise * ct)[::-1] * r["count"].astype(ct.dtype)

    def f(key, count, x):
        return linear_call(forward, back, {"key": key, "count": count, "none": None}, x**2)

    def reference(key, count, x):
        return forward({"key": key, "count": count}, x**2)

    keys, x = jax.random.split(jax.random.key(0), 2), jnp.array([1.0, 2.0, 3.0])
    counts = jnp.array([2, 5])
    for of in (jax.jacrev, jax.jacfwd, lambda f, i: jax.hessian(f, i)):
        got = jax.vmap(of(f, 2), in_axes=(0, 0, None))(keys, counts, x)
        assert_close(got, jax.vmap(of(reference, 2), in_axes=(0, 0, None))(keys, counts, x))


def test_axis_names_of_a_surrounding_map_are_known():
    def forward(r, t):
        return t - jax.lax.pmean(t, "batch")

    def f(x):
        return linear_call(forward, forward, (), jnp.sin(x))

    def reference(x):
        return forward((), jnp.sin(x))

    x, ct = jnp.arange(3.0), jnp.array([1.0, -2.0, 5.0])
    mapped = [jax.vmap(fn, axis_name="batch") for fn in (f, reference)]
    got, expected = (jax.vjp(fn, x)[1](ct) for fn in mapped)
    assert_close(got, expected)
    got, expected = (jax.jvp(fn, (x,), (ct,)) for fn in mapped)
    assert_close(got, expected)


def test_a_map_over_a_mesh_axis_keeps_its_name():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def forward(r, t):
        return jax.lax.with_sharding_constraint(r * t, P(None))

    def total(a, x):
        def fn(a, x):
            return jnp.sum(linear_call(forward, lambda r, ct: r * ct, a, jnp.sin(x)))

        return jnp.sum(jax.vmap(fn, in_axes=(0, None), spmd_axis_name="data")(a, x))

    a, x = jnp.arange(16.0).reshape(8, 2), jnp.array([1.0, 2.0])
    with jax.set_mesh(mesh):
        assert_close(jax.jit(jax.grad(total, 1))(a, x), a.sum(0) * jnp.cos(x))


def batch_loss(states):
    def loss(w, x0, u):
        return jnp.sum(jax.vmap(loss_of(states), in_axes=(None, 0, None))(w, x0, u))

    return loss


@pytest.mark.parametrize("derivative", ["grad", "jvp of vjp", "vjp of jvp"])
@pytest.mark.sample(3)
def test_a_sharded_batch_stays_where_it_is(derivative, getkey):
    mesh = jax.make_mesh((8,), ("data",))
    w, _, u = arguments(getkey())
    x0 = jax.random.normal(getkey(), (8, 2))
    of = DERIVATIVES[derivative]
    expected = of(batch_loss(plain))(w, x0, u)
    with jax.set_mesh(mesh):
        x0 = jax.device_put(x0, P("data"))
        got = jax.jit(of(batch_loss(recurrence)))(w, x0, u)
        if derivative == "grad":
            assert jax.typeof(got[1]).sharding.spec == P("data", None)
            assert jax.typeof(got[0]).sharding.spec == P(None, None)
            text = jax.jit(of(batch_loss(recurrence))).lower(w, x0, u).compile().as_text()
            assert "all-gather" not in text
    assert_close(jax.device_get(got), jax.device_get(expected))


def test_a_cotangent_is_placed_as_its_tangent_is():
    """A transposed function that forgets about the mesh is no reason to fail."""
    mesh = jax.make_mesh((8,), ("data",))

    def back(r, ct):
        return jax.sharding.reshard(ct, P(None, None))

    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 2)), P("data"))

        def f(x):
            return jnp.sum(linear_call(lambda r, t: 2 * t, back, (), x) + x)

        assert jax.typeof(jax.jit(jax.grad(f))(x)).sharding.spec == P("data", None)


@pytest.mark.parametrize("derivative", ["grad", "jvp of vjp", "vjp of jvp"])
@pytest.mark.sample(3)
def test_inside_shard_map_cotangents_are_summed_over_devices(derivative, getkey):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    w, _, u = arguments(getkey())
    x0 = jax.random.normal(getkey(), (8, 2))

    def loss(states):
        def per_device(w, x0, u):
            return jax.lax.psum(loss_of(states)(w, x0[0], u), "data")

        specs = (P(), P("data"), P())
        return jax.shard_map(per_device, mesh=mesh, in_specs=specs, out_specs=P())

    of = DERIVATIVES[derivative]
    got = jax.jit(of(loss(recurrence)))(w, x0, u)
    assert_close(got, jax.jit(of(loss(plain)))(w, x0, u))


def test_effects_of_the_function_are_kept():
    said = []

    def forward(r, t):
        jax.debug.callback(lambda: said.append("forward"))
        return 2 * t

    @jax.jit
    def f(x):
        linear_call(forward, forward, (), x)
        return x

    f(jnp.ones(()))
    jax.effects_barrier()
    assert said == ["forward"]


@pytest.mark.parametrize("context", ["plain", "vmap"])
def test_wrong_cotangents_are_refused_by_path(context):
    def back(r, cts):
        return cts[0], jnp.zeros(3)

    def f(s):
        return linear_call(pair, back, jnp.array(3.0), (s, s))[0]

    x = jnp.ones(())
    if context == "vmap":
        f, x = (lambda g: lambda x: jnp.sum(jax.vmap(g)(x)))(f), jnp.ones(2)
    with pytest.raises(TypeError, match="did not return the cotangents"):
        jax.grad(f)(x)


@pytest.mark.parametrize("wrong", [jnp.ones(()), (1, 2, 3), (jnp.ones(()), "text")])
def test_cotangents_in_another_structure_are_refused(wrong):
    def f(s):
        return linear_call(pair, lambda r, cts: wrong, jnp.array(3.0), (s, s))[0]

    with pytest.raises(TypeError, match="did not return the cotangents"):
        jax.grad(f)(jnp.ones(()))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap])
def test_residuals_are_transposed_where_the_function_is_linear_in_them(wrap):
    # The transpose that is given is a wrong one, to tell them apart.
    @wrap
    def f(r):
        return linear_call(lambda r, t: r["a"] * t, lambda r, ct: 9 * ct, {"a": r}, 2.0)

    (back,) = jax.linear_transpose(f, jnp.arange(3.0))(jnp.array([5.0, 6.0, 7.0]))
    np.testing.assert_array_equal(back, [10.0, 12.0, 14.0])


def test_residuals_cannot_be_transposed_where_the_function_is_not_linear_in_them():
    def f(r, t):
        return linear_call(lambda r, t: jnp.sin(r) * t, lambda r, ct: jnp.sin(r) * ct, r, t)

    one = jnp.ones(())
    with pytest.raises(ValueError, match="cannot be transposed with respect to these residuals"):
        jax.linear_transpose(lambda r: f(r, one), one)(one)
    with pytest.raises(ValueError, match="cannot be transposed with respect to these residuals"):
        jax.linear_transpose(lambda both: f(both, both), one)(one)


def test_a_forward_function_that_holds_a_tracer_is_refused():
    def f(a, x):
        return linear_call(lambda r, t: a * t, lambda r, ct: ct, (), x)

    with pytest.raises(ValueError, match="closes over a traced value"):
        jax.jit(f)(jnp.ones(()), jnp.ones(()))


def test_only_floating_point_numbers_have_tangents():
    with pytest.raises(TypeError, match=r"argument `tangents`, at \['n'\]"):
        linear_call(lambda r, t: t, lambda r, t: t, (), {"n": jnp.arange(3)})
    with pytest.raises(TypeError, match="result of `.*<lambda>`"):
        linear_call(lambda r, t: jnp.arange(3), lambda r, t: t, (), jnp.ones(3))


def test_complex_tangents_are_transposed_without_conjugation():
    z = jnp.array([1 + 2j, 3 - 1j])

    def f(x):
        return linear_call(lambda r, t: r * t, lambda r, ct: r * ct, z, x)

    expected = jax.vjp(lambda x: z * x, z)[1](z)
    assert_close(jax.vjp(f, z)[1](z), expected)


def test_low_precision_is_kept():
    x = jnp.ones(2, jnp.bfloat16)

    def f(r, x):
        return jnp.sum(linear_call(lambda r, t: r * t, lambda r, ct: r * ct, r, x))

    got = jax.grad(lambda x: jnp.sum(jax.vmap(f, in_axes=(0, None))(jnp.stack([x, x]), x)))(x)
    assert got.dtype == jnp.bfloat16
    assert_close(got.astype(jnp.float32), jnp.full(2, 4.0))


@pytest.mark.slow
def test_orders_of_differentiation_nest_without_end(getkey):
    """Three directions, each forward or reverse: all eight agree."""
    x0 = jnp.array([0.3, -0.2])
    w, _, u = arguments(getkey())

    def scalar(states):
        return lambda s: jnp.sum(states(w, s * x0, u)[-1])

    def forward(f):
        return lambda s: jax.jvp(f, (s,), (jnp.ones(()),))[1]

    for modes in itertools.product([forward, jax.grad], repeat=3):
        got, expected = scalar(recurrence), scalar(plain)
        for mode in modes:
            got, expected = mode(got), mode(expected)
        assert_close(jax.jit(got)(jnp.ones(())), jax.jit(expected)(jnp.ones(())))
