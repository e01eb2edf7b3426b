"""`reap`, `planted`, `sow`: a state-threading transformation, against a state that is threaded by hand."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from vernal.harvest import planted, reap, sow
from vernal.primitives import create_vprim, finalise_make_jaxpr, noinline

X = jnp.array([0.3, -0.7, 1.1])
SLOT = jnp.array([1.0, 2.0, 4.0])


def layer(slot, x):
    """Depends on its state, and on how often it was called: the order of calls matters."""
    old = planted(slot)
    return sow(slot, 0.5 * old + x, jnp.sin(x) * (1 + old.sum()))


# Operations that hide what they do with a state.
STALE = create_vprim("stale", lambda s, x: [planted(s) + x], lambda s, x: [x], id, id)
OTHERS_SCAN = Primitive("scan")
OTHERS_SCAN.def_abstract_eval(lambda s, x, jaxpr: x)


def by_hand(slot, x):
    """The same with the state threaded by hand, as `(y, slot)`. No derivative passes through the state."""
    old = lax.stop_gradient(slot)
    return jnp.sin(x) * (1 + old.sum()), lax.stop_gradient(0.5 * old + x)


def twice(slot, x):
    return layer(slot, layer(slot, x))


def twice_by_hand(slot, x):
    x, slot = by_hand(slot, x)
    return by_hand(slot, x)


def loop_by_hand(n, slot, x):
    for _ in range(n):
        x, slot = by_hand(slot, x)
    return x, slot


def over(slots, x, order=None):
    """Layers with a slot each, by hand."""
    new = list(slots)
    for i in order or range(len(slots)):
        x, new[i] = by_hand(new[i], x)
    return x, jnp.stack(new)


def custom_jvp(slot, x):
    @jax.custom_jvp
    def f(slot, x):
        return layer(slot, x)

    @f.defjvp
    def rule(primals, tangents):
        y = f(*primals)
        return y, 7 * tangents[1]

    return f(slot, x)


def custom_vjp(slot, x, n):
    @jax.custom_vjp
    def f(slot, x, n):
        return n * layer(slot, x)

    f.defvjp(lambda *args: (f(*args), args[1]), lambda x, ct: (None, 7 * ct + 0 * x, None))
    return f(slot, x, n)


STACK = jnp.arange(6.0).reshape(2, 3)
ONE = jnp.array(1)

CASES = {
    "twice": (twice, twice_by_hand, SLOT),
    "jit": (jax.jit(twice), twice_by_hand, SLOT),
    "jit called twice": (
        lambda s, x: jax.jit(layer)(s, jax.jit(layer)(s, x)),
        twice_by_hand,
        SLOT,
    ),
    "checkpoint": (
        jax.checkpoint(twice, policy=jax.checkpoint_policies.dots_saveable),
        twice_by_hand,
        SLOT,
    ),
    "checkpoint with settings": (
        lambda s, x: jax.checkpoint(lambda x, y: twice(s, x) * y[0], prevent_cse=(True, False))(
            x, jnp.ones(2)
        ),
        twice_by_hand,
        SLOT,
    ),
    "shared in a scan": (
        lambda s, x: lax.scan(lambda x, _: (layer(s, x), None), x, None, length=3)[0],
        lambda s, x: loop_by_hand(3, s, x),
        SLOT,
    ),
    "carried in a scan": (
        lambda s, x: lax.scan(lambda c, _: ((c[0], layer(*c)), None), (s, x), None, length=3)[0][1],
        lambda s, x: loop_by_hand(3, s, x),
        SLOT,
    ),
    "stacked in a scan": (
        lambda s, x: lax.scan(lambda x, s: (layer(s, x), None), x, s)[0],
        over,
        STACK,
    ),
    "stacked in a reversed scan": (
        lambda s, x: lax.scan(lambda x, s: (layer(s, x), None), x, s, reverse=True, unroll=2)[0],
        lambda s, x: over(s, x, [1, 0]),
        STACK,
    ),
    "stacked in two scans of checkpoints": (
        lambda s, x: lax.scan(
            lambda x, s: (
                lax.scan(lambda x, s: (jax.checkpoint(layer)(s, x), None), x, s)[0],
                None,
            ),
            x,
            s.reshape(2, 2, 3),
        )[0],
        over,
        jnp.arange(12.0).reshape(4, 3) / 9,
    ),
    "indexed": (
        lambda s, x: layer(s[0], layer(s[1], layer(s[1], x))),
        lambda s, x: over(s, x, [1, 1, 0]),
        STACK,
    ),
    "indexed by a number of the program, sliced, transposed": (
        lambda s, x: layer(
            s.T[:, -1],
            layer(lax.dynamic_index_in_dim(s[:1], ONE - 1, keepdims=False), layer(s[ONE], x)),
        ),
        lambda s, x: over(s, x, [1, 0, 1]),
        STACK,
    ),
    "fori_loop": (
        lambda s, x: lax.fori_loop(0, 2, lambda i, x: layer(s[i], x), x),
        over,
        STACK,
    ),
    "cond": (
        lambda s, x: lax.cond(x[0] > 0, lambda x: layer(s, x), lambda x: x, layer(s, x)),
        twice_by_hand,
        SLOT,
    ),
    "switch": (
        lambda s, x: lax.switch(
            ONE, [lambda s, x: x, lambda s, x: layer(s[0], x), lambda s, x: layer(s[1], x)], s, x
        ),
        lambda s, x: over(s, x, [0]),
        STACK,
    ),
    "custom_jvp": (
        lambda s, x: layer(s, custom_jvp(s, x)),
        lambda s, x: by_hand(*custom_by_hand(s, x)[::-1]),
        SLOT,
    ),
    "custom_vjp": (
        lambda s, x: layer(s, custom_vjp(s, x, ONE)),
        lambda s, x: by_hand(*custom_by_hand(s, x)[::-1]),
        SLOT,
    ),
    "vmap of models": (
        lambda s, x: jax.vmap(layer, in_axes=(0, None))(s, x).sum(0),
        lambda s, x: jax.tree.map(
            lambda y, d: y.sum(0) if d else y,
            jax.vmap(by_hand, in_axes=(0, None))(s, x),
            (True, False),
        ),
        STACK,
    ),
    "vmap of stacks along another axis": (
        lambda s, x: jax.vmap(
            lambda s, x: lax.scan(lambda x, s: (jax.jit(layer)(s, x), None), x, s)[0],
            in_axes=(2, None),
        )(s, x).sum(0),
        lambda s, x: (lambda y, s: (y.sum(0), jnp.moveaxis(s, 0, 2)))(
            *jax.vmap(over, in_axes=(2, None))(s, x)
        ),
        jnp.arange(24.0).reshape(3, 2, 1, 4).transpose(1, 0, 3, 2).reshape(2, 3, 4) / 20,
    ),
    "vmap of examples, with what they have in common": (
        lambda s, x: jax.vmap(
            lambda x: sow(s, lax.pmean(x, "batch") + planted(s), x * x), axis_name="batch"
        )(jnp.stack([x, 2 * x]))[1],
        lambda s, x: (4 * x * x, lax.stop_gradient(1.5 * x + s)),
        SLOT,
    ),
    "grad inside": (
        lambda s, x: jax.grad(lambda x: jax.jit(twice)(s, x).sum())(x),
        lambda s, x: (
            jax.grad(lambda x: twice_by_hand(s, x)[0].sum())(x),
            twice_by_hand(s, x)[1],
        ),
        SLOT,
    ),
    "grad of a scan inside": (
        lambda s, x: jax.grad(
            lambda x: lax.scan(lambda x, s: (jax.jit(layer)(s, x), None), x, s)[0].sum()
        )(x),
        lambda s, x: (jax.grad(lambda x: over(s, x)[0].sum())(x), over(s, x)[1]),
        STACK / 9,
    ),
    "jvp inside": (
        lambda s, x: jax.jvp(lambda x: twice(s, x), (x,), (x,))[1],
        lambda s, x: (
            jax.jvp(lambda x: twice_by_hand(s, x)[0], (x,), (x,))[1],
            twice_by_hand(s, x)[1],
        ),
        SLOT,
    ),
}


def custom_by_hand(slot, x):
    y, slot = by_hand(slot, x)
    # The derivative is 7.
    return lax.stop_gradient(y) + 7 * (x - lax.stop_gradient(x)), slot


def _loss(fn):
    def loss(slot, x):
        y, slot = fn(slot, x)
        return jnp.sum(y**2), (y, slot)

    return loss


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_values_state_and_derivatives_are_those_of_a_state_threaded_by_hand(case):
    fn, hand, slot = CASES[case]

    @jax.jit
    def everything(slot, x):
        def of(fn):
            grads, aux = jax.grad(_loss(fn), (0, 1), has_aux=True)(slot, x)
            mapped = jax.vmap(jax.grad(_loss(fn), has_aux=True), in_axes=(0, None))(
                jnp.stack([slot, 2 * slot]), x
            )
            return grads, aux, mapped

        return of(reap(fn)), of(hand)

    got, expected = everything(slot, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    # Not compiled as a whole.
    if case in ("stacked in a scan", "jit", "cond"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5),
            reap(fn)(slot, X),
            hand(slot, X),
        )


@pytest.mark.parametrize("case", ["stacked in a scan", "custom_jvp", "checkpoint", "jit"])
def test_forward_mode_and_second_derivatives_too(case):
    fn, hand, slot = CASES[case]

    @jax.jit
    def hessians(x):
        of = [lambda x, f=f: jnp.sum(f(slot, x)[0] ** 2) for f in (reap(fn), hand)]
        return [jax.hessian(f)(x) for f in of]

    np.testing.assert_allclose(*hessians(X), rtol=1e-4, atol=1e-5)


def test_a_while_loop_threads_the_state_through_condition_and_body():
    def fn(slot, x):
        def unfinished(carry):
            return (planted(slot).sum() < 20) & (carry[1] < 10)

        return lax.while_loop(unfinished, lambda c: (layer(slot, c[0]), c[1] + 1), (x, 0))

    def hand(slot, x):
        n = 0
        while slot.sum() < 20 and n < 10:
            (x, slot), n = by_hand(slot, x), n + 1
        return (x, n), slot

    got, expected = jax.jit(reap(fn))(SLOT, X + 5), hand(SLOT, X + 5)
    assert 1 < expected[0][1] < 10
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def test_collecting_inside_of_collecting_threads_both():
    def outer(slots, x):
        y, inner = reap(twice)(planted(slots[0]), x)
        return sow(slots, (inner, planted(slots[1]) + 1), y)

    y, (slot, count) = jax.jit(reap(outer))((SLOT, jnp.array(0)), X)
    expected, expected_slot = twice_by_hand(SLOT, X)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    np.testing.assert_allclose(slot, expected_slot, rtol=1e-6)
    assert count == 1


def test_shard_map_keeps_the_slots_of_each_device_and_what_they_share():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def fn(slots, x):
        def per_device(slots, x):
            shared, own = slots
            y = sow(shared, planted(shared) + lax.psum(x[0], "data"), x)
            return sow(own, planted(own) + x, y)

        return jax.shard_map(
            per_device, mesh=mesh, in_specs=((P(), P("data")), P("data")), out_specs=P("data")
        )(slots, x)

    x = jnp.arange(8.0)
    y, (shared, own) = jax.jit(reap(fn))((jnp.array(1.0), jnp.ones(8)), x)
    assert jnp.array_equal(y, x) and shared == 29 and jnp.array_equal(own, 1 + x)

    def disagreeing(slot, x):
        def per_device(slot, x):
            return sow(slot, x[0], x)

        return jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
            slot, x
        )

    with pytest.raises(ValueError, match="(?s)devices of `jax.shard_map` disagree.*'data'"):
        reap(disagreeing)(jnp.array(1.0), x)

    def in_two_parts(slot, x):
        return jax.shard_map(
            lambda a, b, x: sow(a, planted(b), x),
            mesh=mesh,
            in_specs=(P(), P(), P()),
            out_specs=P(),
        )(slot[0], slot[1], x)

    with pytest.raises(NotImplementedError, match="in two parts at once"):
        reap(in_two_parts)(jnp.ones((2, 3)), x)


def test_any_python_objects_are_arguments_and_results_and_what_is_not_recorded_stays():
    def fn(slots, x, name, scale=1):
        return {"y": sow(slots["a"], planted(slots["a"]) * scale, x), "name": name, "f": jnp.sin}

    key = jax.random.key(3)
    slots = {"a": jnp.ones(2), "key": key, "name": "slots"}
    out, new = reap(fn)(slots, X, "x", scale=3)
    assert out["name"] == "x" and out["f"] is jnp.sin and new["name"] == "slots"
    assert jnp.array_equal(new["a"], jnp.full(2, 3.0)) and new["key"] == key
    assert jnp.array_equal(out["y"], X)
    half = reap(lambda s, x: sow(s.astype(jnp.float16), x.astype(jnp.float16), x))(SLOT, X)[1]
    assert jnp.array_equal(half, X.astype(jnp.float16).astype(SLOT.dtype))


def test_keys_and_integers_are_slots_too_and_no_type_is_weak_afterwards():
    def fn(slots, xs):
        def step(total, x):
            key, count = planted(slots)
            key, new = jax.random.split(key)
            return sow(slots, (new, count + 1), total + x * jax.random.normal(key)), None

        return lax.scan(step, jnp.array(0.0), xs)[0]

    key = jax.random.key(3)
    y, (new, count) = jax.jit(reap(fn))((key, jnp.array(0)), X)
    expected = jnp.array(0.0)
    for x in X:
        now, key = jax.random.split(key)
        expected += x * jax.random.normal(now)
    assert count == 3 and new == key
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    _, weak = reap(lambda s, x: sow(s, 1.0, x))(jnp.array(2.0), X)
    assert weak == 1 and not weak.weak_type


def test_the_program_has_one_copy_of_everything_and_keeps_what_it_does_not_touch():
    def fn(slot, x):
        with jax.named_scope("outer"):
            x = jax.nn.relu(jax.checkpoint(jnp.cos)(x))
            return lax.scan(lambda x, _: (layer(slot, x), None), x, None, length=3)[0]

    jaxpr = jax.make_jaxpr(reap(fn))(SLOT, X)
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    assert names.count("scan") == names.count("remat2") == 1
    inner = next(eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan").params["jaxpr"]
    assert [eqn.primitive.name for eqn in inner.eqns].count("sin") == 1
    assert "custom_jvp_call" in str(jaxpr)
    scopes = {str(eqn.source_info.name_stack) for eqn in jaxpr.eqns}
    assert "outer" in scopes


def test_no_tracer_leaks():
    fn, _, slot = CASES["stacked in two scans of checkpoints"]
    with jax.checking_leaks():
        jax.jit(jax.grad(_loss(reap(fn)), has_aux=True))(slot, X)


def test_outside_of_it_reading_is_the_identity_and_recording_an_error():
    assert jnp.array_equal(jax.jit(jax.vmap(planted))(SLOT), SLOT)
    assert jnp.array_equal(jax.grad(lambda s: (s * planted(s)).sum())(SLOT), SLOT)
    assert not finalise_make_jaxpr(planted)(SLOT).eqns
    assert jax.eval_shape(layer, SLOT, X).shape == (3,)
    for fn in (layer, jax.jit(layer), jax.grad(lambda x: layer(SLOT, x).sum())):
        with pytest.raises(RuntimeError, match="(?s)would be lost.*nn.apply"):
            fn(*(SLOT, X)[-len(inspect.signature(fn).parameters) :])
    with (
        pytest.raises(RuntimeError, match="where: my_layer"),
        jax.named_scope("my_layer"),
    ):
        layer(SLOT, X)


def _linear(slot, x):
    return sow(slot, x, 2 * x).sum()


# What they return depends on nothing that `_linear` computes but its derivative.
DERIVATIVES = {
    "grad": lambda fn: jax.grad(fn, 1),
    "jvp": lambda fn: lambda slot, x: jax.jvp(lambda x: fn(slot, x), (x,), (x,))[1],
    "linearize": lambda fn: lambda slot, x: jax.linearize(lambda x: fn(slot, x), x)[1](x),
    "hessian": lambda fn: jax.hessian(lambda slot, x: fn(slot, x) ** 2, 1),
    "checkpoint": lambda fn: jax.grad(jax.checkpoint(fn), 1),
    "vmap": lambda fn: lambda slot, x: jax.vmap(jax.grad(fn, 1))(jnp.stack([slot] * 2), jnp.stack([x] * 2)),
    "scan": lambda fn: jax.grad(lambda slot, x: lax.scan(lambda c, _: (c + fn(slot, x), None), 0.0, None, 2)[0], 1),
}  # fmt: skip


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_a_state_is_not_dropped_where_only_the_derivative_is_wanted(derivative):
    with pytest.raises(RuntimeError, match="would be lost"):
        jax.jit(derivative(_linear))(SLOT, X)
    # One that may be lost is not part of the derivative.
    free = derivative(lambda slot, x: sow(slot, x, 2 * x, needed=False).sum())
    expected = derivative(lambda slot, x: 2 * x.sum())(SLOT, X)
    np.testing.assert_allclose(jax.jit(free)(SLOT, X), expected)
    taken = derivative(lambda slot, x: reap(_linear)(slot, x)[0])
    np.testing.assert_allclose(jax.jit(taken)(SLOT, X), expected)


@pytest.mark.parametrize(
    "fn, error, text",
    [
        (
            lambda s, x: sow(s, x[:2], x),
            ValueError,
            r"(?s)has another structure, shape or dtype.*f32\[3\]",
        ),
        (lambda s, x: sow(s, (x,), x), ValueError, "has another structure, shape or dtype"),
        (
            lambda s, x: sow(s, jnp.arange(3), x),
            ValueError,
            "has another structure, shape or dtype",
        ),
        (lambda s, x: sow(s, x, "x"), ValueError, "`through` must contain an array"),
        (lambda s, x: layer(s * 2, x), ValueError, "old value of a state was computed"),
        (lambda s, x: layer(s[::-1], x), ValueError, "old value of a state was computed"),
        (
            lambda s, x: jax.vmap(lambda x: sow(s, s + x, x))(x),
            ValueError,
            "(?s)elements of `jax.vmap` disagree.*differs between elements",
        ),
        (
            lambda s, x: jax.vmap(lambda x: sow(s, s + x, x), axis_name="i")(x),
            ValueError,
            "axis 'i'",
        ),
        (
            lambda s, x: jax.vmap(
                lambda s, x: lax.cond(x > 0, lambda x: sow(s, x, x), lambda x: x, x)
            )(s, x),
            ValueError,
            "(?s)was computed.*`cond` that chooses for each element",
        ),
        (
            lambda s, x: jax.vmap(
                lambda s, x: lax.while_loop(lambda x: x < 1, lambda x: sow(s, x, x + 1), x)
            )(s, x),
            NotImplementedError,
            "another number of steps for each",
        ),
        (
            lambda s, x: lax.while_loop(lambda x: sow(s, x, x)[0] > 0, lambda x: x - 1, x),
            NotImplementedError,
            "condition of a `while_loop`",
        ),
        (
            lambda s, x: jax.grad(lambda x: jax.checkpoint(layer)(s, x).sum())(x),
            NotImplementedError,
            "differentiated inside of the function",
        ),
        (
            lambda s, x: jax.grad(
                lambda x: lax.scan(lambda x, _: (layer(s, x), None), x, None, length=3)[0].sum()
            )(x),
            NotImplementedError,
            "with one state for all steps",
        ),
        (
            lambda s, x: lax.platform_dependent(x, cpu=lambda x: layer(s, x), default=jnp.sin),
            NotImplementedError,
            "platform_dependent",
        ),
        (
            lambda s, x: lax.custom_linear_solve(lambda x: x, x, lambda f, x: layer(s, x)),
            NotImplementedError,
            "the operation `custom_",
        ),
        (lambda s, x: noinline(layer)(s, x), NotImplementedError, "the operation `noinline`"),
        (lambda s, x: STALE.bind(s, x)[0], NotImplementedError, "the operation `stale`"),
        (
            lambda s, x: OTHERS_SCAN.bind(s, x, jaxpr=jax.make_jaxpr(layer)(s, x)),
            NotImplementedError,
            "the operation `scan`",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused(fn, error, text):
    with pytest.raises(error, match=text):
        jax.jit(reap(fn))(SLOT, X)


def test_a_rule_that_runs_the_function_again_on_the_way_back_is_refused():
    @jax.custom_vjp
    def f(slot, x):
        return layer(slot, x)

    f.defvjp(
        lambda slot, x: (f(slot, x), (slot, x)),
        lambda kept, ct: (None, jax.vjp(lambda x: layer(kept[0], x), kept[1])[1](ct)[0]),
    )
    assert reap(f)(SLOT, X)[0].shape == (3,)
    with pytest.raises(NotImplementedError, match="recomputes it in the backward pass"):
        jax.grad(_loss(reap(f)), 1, has_aux=True)(SLOT, X)


def test_what_is_not_a_function_is_refused():
    with pytest.raises(TypeError, match="reap"):
        inspect.unwrap(reap)(3)
