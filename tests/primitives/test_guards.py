"""The guards: `nonbatchable`, `nondifferentiable`, `nondifferentiable_backward`, `nontraceable`."""

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.primitives import (
    nonbatchable,
    nondifferentiable,
    nondifferentiable_backward,
    nontraceable,
)
from vernal.runtime import RuntimeCheckError

GUARDS = {
    "nonbatchable": nonbatchable,
    "nondifferentiable": nondifferentiable,
    "nondifferentiable_backward": nondifferentiable_backward,
    "nontraceable": nontraceable,
}


@pytest.fixture(params=GUARDS)
def guard(request):
    return GUARDS[request.param]


@pytest.fixture
def mesh():
    with jax.set_mesh(jax.make_mesh((8,), ("data",))) as mesh:
        yield mesh


# --- what all of them do


def test_a_guard_is_the_identity_on_any_tree(guard, getkey):
    tree = {"a": jax.random.normal(getkey(), (3,)), "b": (jnp.arange(2), None, "text", jnp.sin)}
    tree["c"] = [np.ones(2), 1.5, jax.random.key(0), jnp.array(True)]
    out = guard(tree)
    assert vernal.tree_equal(out, tree)
    assert out["b"][3] is jnp.sin and out["c"][0] is tree["c"][0]
    tree["c"][0] = jnp.ones(2)
    assert vernal.tree_equal(vernal.filter_jit(guard)(tree), tree)


def test_a_guard_is_not_there_in_the_compiled_program(guard):
    plain = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).as_text()
    guarded = jax.jit(lambda x: guard(x) + 1).lower(jnp.ones(3)).as_text()
    assert guarded == plain


def test_a_guard_works_in_loops_and_on_meshes(guard, mesh, getkey):
    x = jax.device_put(jax.random.normal(getkey(), (8, 2)), jax.P("data"))

    @jax.jit
    def f(x):
        return jax.lax.scan(lambda c, _: (guard(c) * 2, guard(c)), x, None, length=2)

    out, every = f(x)
    np.testing.assert_array_equal(out, 4 * x)
    assert out.sharding.spec == jax.P("data", None)
    assert every.sharding.spec == jax.P(None, "data", None)
    assert "all-gather" not in f.lower(x).compile().as_text()
    over = jax.jit(jax.shard_map(guard, out_specs=jax.P("data")))(x)
    np.testing.assert_array_equal(over, x)


# --- nonbatchable


def test_a_mapped_value_is_refused(getkey):
    x = jax.random.normal(getkey(), (3,))
    for transform in (jax.vmap, lambda f: jax.jit(jax.vmap(f)), lambda f: jax.vmap(jax.jit(f))):
        with pytest.raises(ValueError, match="this operation cannot be vmap'd"):
            transform(nonbatchable)(x)
    with pytest.raises(ValueError, match="the state cannot be vmap'd"):
        jax.vmap(lambda x: nonbatchable(x, name="the state"))(x)
    with pytest.raises(ValueError, match=r"^go away\n  where: the state\b"):
        jax.vmap(lambda x: nonbatchable(x, name="the state", msg="go away"))(x)


def test_a_value_that_is_not_mapped_passes_and_has_its_derivative(getkey):
    n, x = jax.random.normal(getkey(), (2, 3))

    def f(n, x):
        return jnp.sum(jnp.sin(nonbatchable(n)) * x)

    def plain(n, x):
        return jnp.sum(jnp.sin(n) * x)

    for argnums in (0, 1):
        got = jax.vmap(jax.grad(f, argnums), in_axes=(None, 0))(n, x)
        want = jax.vmap(jax.grad(plain, argnums), in_axes=(None, 0))(n, x)
        np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(
        jax.jacfwd(jnp.sin)(n), jax.jacfwd(lambda n: jnp.sin(nonbatchable(n)))(n)
    )
    (transposed,) = jax.linear_transpose(nonbatchable, n)(x)
    np.testing.assert_array_equal(transposed, x)


CONSTANT = {
    "floats": jnp.full((3, 2), 1.5),
    "nan": jnp.full((3, 2), jnp.nan),
    "ints": jnp.full((3, 2), 7),
    "bools": jnp.ones((3, 2), bool),
    "complex": jnp.full((3, 2), 1 + 2j),
    "keys": jnp.stack([jax.random.key(3)] * 3),
    "empty": jnp.zeros((3, 0)),
}


@pytest.mark.parametrize("kind", CONSTANT)
@pytest.mark.sample(3)
def test_a_constant_batch_is_allowed_on_request(kind):
    x = CONSTANT[kind]
    f = jax.vmap(lambda x: nonbatchable(x, allow_constant_across_batch=True), out_axes=None)
    for call in (f, vernal.filter_jit(f)):
        # In text, because NaN is not equal to itself.
        assert str(call(x)) == str(x[0])


CHANGING = {
    "floats": jnp.array([[1.0, 2.0], [1.0, 2.5]]),
    "some nan": jnp.array([1.0, jnp.nan]),
    "bools": jnp.array([True, False]),
    "complex": jnp.array([1 + 2j, 1 + 3j]),
    "keys": jax.random.split(jax.random.key(0)),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_a_batch_that_changes_is_found_when_the_program_runs(kind):
    x = CHANGING[kind]
    f = jax.vmap(
        lambda x: nonbatchable(x, name="the seed", allow_constant_across_batch=True), out_axes=None
    )
    for call in (f, vernal.filter_jit(f)):
        with pytest.raises(RuntimeCheckError, match="the seed must be the same for every element"):
            jax.block_until_ready(call(x))


def test_both_axes_of_two_maps_are_checked():
    def f(x):
        return nonbatchable(x, allow_constant_across_batch=True)

    g = vernal.filter_jit(jax.vmap(jax.vmap(f, out_axes=None), out_axes=None))
    assert g(jnp.ones((2, 3))) == 1
    for x in (jnp.array([[1.0, 1.0], [2.0, 2.0]]), jnp.array([[1.0, 2.0], [1.0, 2.0]])):
        with pytest.raises(RuntimeCheckError, match="Nonconstant batch"):
            jax.block_until_ready(g(x))


def test_a_batch_spread_over_devices_is_checked_in_place(mesh):
    x = jax.device_put(jnp.ones((8, 4)), jax.P("data"))
    f = vernal.filter_jit(
        jax.vmap(lambda x: nonbatchable(x, allow_constant_across_batch=True), out_axes=None)
    )
    np.testing.assert_array_equal(f(x), jnp.ones(4))
    with pytest.raises(RuntimeCheckError, match="Nonconstant batch"):
        jax.block_until_ready(f(jax.device_put(jnp.arange(32.0).reshape(8, 4), jax.P("data"))))


# --- nondifferentiable


def test_a_tangent_is_refused_in_every_mode(getkey):
    x = jax.random.normal(getkey(), (3,))

    def f(x):
        return jnp.sum(nondifferentiable({"x": x}, name="the control")["x"])

    calls = {
        "grad": lambda: jax.grad(f)(x),
        "jvp": lambda: jax.jvp(f, (x,), (x,)),
        "jit": lambda: jax.jit(jax.grad(f))(x),
        "inside": lambda: jax.grad(jax.jit(f))(x),
        "vmap": lambda: jax.vmap(jax.grad(f))(x),
        "linearize": lambda: jax.linearize(f, x),
        "transpose": lambda: jax.linear_transpose(f, x)(1.0),
        "scan": lambda: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0])(
            1.0
        ),
        "checkpoint": lambda: jax.grad(jax.checkpoint(f))(x),
    }
    for call in calls.values():
        with pytest.raises(RuntimeError, match="the control cannot be differentiated"):
            call()
    with pytest.raises(RuntimeError, match=r"^not here\b"):
        jax.grad(lambda x: nondifferentiable(x, msg="not here"))(1.0)


def test_what_has_no_tangent_passes(getkey):
    x, y = jax.random.normal(getkey(), (2, 3))

    def f(x, y, n):
        return jnp.sum(x * nondifferentiable(y) * nondifferentiable(n).astype(float))

    np.testing.assert_allclose(jax.grad(f)(x, y, jnp.arange(3)), y * jnp.arange(3.0), rtol=1e-6)

    def stopped(x):
        return nondifferentiable(jax.lax.stop_gradient(x)) * x

    assert jax.grad(stopped)(2.0) == 2.0

    # An integer that a loop carries has a tangent, of a type without values.
    def loop(x):
        return jax.lax.scan(
            lambda c, _: ((c[0] * x, nondifferentiable(c[1]) + 1), None), (x, 0), None, 2
        )

    assert jax.jit(jax.grad(lambda x: loop(x)[0][0]))(2.0) == 12.0


@pytest.mark.parametrize("case", range(3))
def test_it_refuses_what_equinox_refuses(case):
    def outcome(guard):
        fn = [
            lambda x: guard(x),
            lambda x: guard(2.0) * x,
            lambda x: jax.lax.stop_gradient(guard(x)),
        ][case]
        try:
            return str(jax.grad(fn)(1.0))
        except RuntimeError as error:
            return str(error).split(".")[0]

    assert outcome(nondifferentiable) == outcome(eqxi.nondifferentiable)


# --- nondifferentiable_backward


def test_forward_mode_passes_and_reverse_mode_does_not(getkey):
    x, t = jax.random.normal(getkey(), (2, 3))

    def f(x):
        return jnp.sum(nondifferentiable_backward(x, "the solve") ** 2)

    np.testing.assert_allclose(jax.jvp(f, (x,), (t,))[1], 2 * jnp.sum(x * t), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(jax.jacfwd(f)))(x), 2 * jnp.eye(3), rtol=1e-6)
    for grad in (
        jax.grad(f),
        jax.jit(jax.grad(f)),
        jax.grad(jax.jit(f)),
        jax.grad(jax.jit(jax.grad(f))),
    ):
        with pytest.raises(
            RuntimeError, match="the solve cannot be differentiated in reverse mode"
        ):
            grad(x)
    with pytest.raises(RuntimeError, match=r"^not here\b"):
        jax.grad(lambda x: nondifferentiable_backward(x, msg="not here"))(1.0)


def test_a_cotangent_that_is_known_to_be_zero_passes():
    def f(x):
        y = nondifferentiable_backward(2 * x)
        return jax.lax.stop_gradient(y) + x

    assert jax.grad(f)(1.0) == 1.0


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cotangent_may_be_judged_by_its_value(compiled):
    def f(x, weight):
        return jnp.sum(weight * nondifferentiable_backward(x, "the solve", symbolic=False)) + x[0]

    grad = vernal.filter_jit(jax.grad(f)) if compiled else jax.grad(f)
    x = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(grad(x, jnp.zeros(2)), jnp.array([1.0, 0.0]))
    with pytest.raises(RuntimeCheckError, match="the solve cannot be differentiated in reverse"):
        jax.block_until_ready(grad(x, jnp.array([0.0, 1.0])))
    every = vernal.filter_jit(jax.vmap(jax.grad(f)))
    with pytest.raises(RuntimeCheckError, match="at batch index"):
        jax.block_until_ready(every(jnp.ones((3, 2)), jnp.zeros((3, 2)).at[1, 0].set(1.0)))


def test_a_cotangent_spread_over_devices_is_judged_in_place(mesh):
    x = jax.device_put(jnp.ones((8, 4)), jax.P("data"))

    @jax.jit
    def grad(x):
        return jax.grad(lambda x: 0.0 * jnp.sum(nondifferentiable_backward(x, symbolic=False)))(x)

    assert grad(x).sharding.spec == jax.P("data", None)
    assert "all-gather" not in grad.lower(x).compile().as_text()


# --- nontraceable


def test_every_transformation_but_compilation_is_refused(getkey):
    x = jax.random.normal(getkey(), (3,))

    def f(x):
        return nontraceable(x, name="the kernel")

    with pytest.raises(RuntimeError, match="Detected batching of the kernel"):
        jax.vmap(f)(x)
    with pytest.raises(RuntimeError, match="Detected differentiation of the kernel"):
        jax.jvp(f, (x,), (x,))
    with pytest.raises(RuntimeError, match="Detected differentiation of the kernel"):
        jax.grad(jax.jit(lambda x: f(x).sum()))(x)
    with pytest.raises(RuntimeError, match="Detected transposition of the kernel"):
        jax.linear_transpose(f, x)(x)
    np.testing.assert_array_equal(jax.jit(f)(x), x)
    assert jax.make_jaxpr(f)(x).eqns[0].params["name"] == "the kernel"
    # What it is not about may be transformed.
    np.testing.assert_array_equal(jax.vmap(lambda y: f(x) * y)(x), jnp.outer(x, x))
    np.testing.assert_array_equal(jax.grad(lambda y: jnp.sum(f(x) * y))(x), x)
