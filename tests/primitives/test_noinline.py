"""`noinline`: compiled once, however often it is called."""

import functools
import inspect
import threading

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.primitives import noinline, noinline_p, nondifferentiable
from vernal.runtime import RuntimeCheckError, error_if

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """A list that grows by one with every compilation."""
    found: list[str] = []

    def listen(event, duration, **kwargs):
        if event == COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def large(x, y):
    for i in range(4):
        x = x + 0.1 * jnp.sin(jnp.cos(x) @ x.T * y + i)
    return x


def chain(fn, calls):
    """A program that calls a function many times."""

    def program(x):
        for _ in range(calls):
            x = fn(x, x[0, 0])
        return jnp.sum(x)

    return program


def names(jaxpr) -> list[str]:
    """The operations of a program, at every depth."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = [eqn.primitive.name for eqn in jaxpr.eqns]
    for inner in jax.extend.core.subjaxprs(jaxpr):
        found += names(inner)
    return found


def hlo_lines(fn, *args) -> int:
    return jax.jit(fn).lower(*args).compile().as_text().count("\n")


# --- compilation


@pytest.mark.parametrize("derivative", [lambda f: f, jax.grad], ids=["value", "gradient"])
def test_many_calls_compile_about_as_much_as_one(derivative, compilations, getkey):
    x = jax.random.normal(getkey(), (3, 3))
    fn = noinline(large)
    compiled = {}
    for calls in (1, 8):
        compilations.clear()
        program = jax.jit(derivative(chain(fn, calls))).lower(x).compile()
        compiled[calls] = len(compilations)
        lines = program.as_text().count("\n")
        assert lines < 0.35 * hlo_lines(derivative(chain(large, calls)), x) or calls == 1
        np.testing.assert_allclose(program(x), derivative(chain(large, calls))(x), rtol=1e-3)
    # The program itself; in the first one also the function, and its derivative and transpose.
    assert compiled[8] == 1
    assert compiled[1] >= 2


# Not in a closure: what a function closes over is compared by value.
TRACES = []


def counted(x, y):
    TRACES.append(1)
    return large(x, y)


def test_the_function_is_traced_once_for_all_programs(getkey):
    TRACES.clear()
    x = jax.random.normal(getkey(), (3, 3))
    for calls in (2, 3):
        jax.jit(chain(noinline(counted), calls))(x)
        jax.make_jaxpr(jax.vmap(chain(noinline(counted), calls)))(x[None])
        jax.make_jaxpr(jax.grad(chain(noinline(counted), calls)))(x)
    assert len(TRACES) == 1


def scaled_sine(factor, x):
    return factor * jnp.sin(x)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda factor: functools.partial(scaled_sine, factor), 1),
        # Who made them could have put anything else between them: each is only itself.
        (lambda factor: lambda x: factor * jnp.sin(x), 2),
    ],
    ids=["partial", "closure"],
)
def test_partials_made_afresh_share_one_compilation_and_closures_do_not(make, count, compilations):
    x = jnp.ones(3)
    f = jax.jit(lambda x, y: noinline(make(x))(noinline(make(y))(x)))
    compilations.clear()
    lowered = f.lower(x, x)
    assert len(compilations) == count
    np.testing.assert_allclose(lowered.compile()(x, 2 * x), jnp.sin(2 * jnp.sin(x)), rtol=1e-6)


def test_the_wrapper_is_hashable_and_compares_by_the_function(getkey):
    x = jax.random.normal(getkey(), (3,))
    f = noinline(jnp.sin)
    assert hash(f) == hash(noinline(jnp.sin)) and f == noinline(jnp.sin)
    assert f != noinline(jnp.cos) and f != noinline(jnp.sin, "other")
    np.testing.assert_allclose(jax.jit(f)(x), jnp.sin(x), rtol=1e-6)
    np.testing.assert_allclose(vernal.filter_jit(f)(x), jnp.sin(x), rtol=1e-6)
    assert f.__name__ == "sin"
    assert noinline_p.name in names(jax.make_jaxpr(f)(x))


def test_it_has_a_name_in_the_program(getkey):
    f = noinline(lambda x: jnp.sin(x), name="the_step")
    assert "name=the_step" in str(jax.make_jaxpr(f)(1.0))
    assert (
        "the_step"
        in jax.jit(jax.shard_map(f, mesh=one_axis(), in_specs=P, out_specs=P))
        .lower(jax.device_put(jnp.ones(8), jax.NamedSharding(one_axis(), P)))
        .as_text()
    )


def test_clearing_the_caches_forgets_and_changes_nothing(compilations):
    f = noinline(lambda x: jnp.sin(x) + 1)
    x = np.ones(2, "float32")
    for _ in range(2):
        compilations.clear()
        np.testing.assert_allclose(jax.jit(lambda x: f(x))(x), np.sin(x) + 1, rtol=1e-6)
        assert len(compilations) == 2
        vernal.clear_caches()


# --- derivatives and maps

P = jax.P("data")
TRANSFORMS = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(lambda x, y: jnp.sum(f(x, y)), argnums=(0, 1)),
    "grad of one": lambda f: jax.grad(lambda x, y: jnp.sum(f(x, y)), argnums=1),
    "jvp": lambda f: lambda x, y: jax.jvp(f, (x, y), (jnp.cos(x), y)),
    "jvp of one": lambda f: lambda x, y: jax.jvp(lambda x: f(x, y), (x,), (jnp.cos(x),)),
    "vmap": lambda f: jax.vmap(f, in_axes=(1, None), out_axes=1),
    "jacfwd": lambda f: jax.jacfwd(f),
    "jacrev": lambda f: jax.jacrev(f),
    "hessian": lambda f: jax.hessian(f, argnums=(0, 1)),
    "jvp of vjp": lambda f: (
        lambda x, y: jax.jvp(lambda x: jax.vjp(f, x, y)[1](jnp.ones(x.shape)), (x,), (x,))
    ),
    "vjp of vjp": lambda f: jax.grad(
        lambda x, y: jnp.sum(jax.grad(lambda x: jnp.sum(f(x, y)))(x) ** 2), argnums=1
    ),
    "vmap of grad": lambda f: jax.vmap(
        jax.grad(lambda x, y: jnp.sum(f(x, y)), argnums=(0, 1)), in_axes=(0, None)
    ),
    "grad of vmap": lambda f: jax.grad(
        lambda x, y: jnp.sum(jax.vmap(f, in_axes=(0, None))(x, y) ** 2), argnums=(0, 1)
    ),
    "scan": lambda f: jax.grad(
        lambda x, y: jnp.sum(jax.lax.scan(lambda c, _: (f(c, y), None), x, None, length=3)[0])
    ),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x, y: jnp.sum(f(f(x, y), y)))),
    "linearize": lambda f: lambda x, y: jax.linearize(f, x, y)[1](x, y),
}


def small(x, y):
    return jnp.sin(x * y) + jnp.cumsum(x) * jnp.exp(-(y**2))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.sample(6)
def test_every_transformation_is_that_of_the_plain_function(transform, compiled, getkey):
    batched = transform in ("vmap", "vmap of grad", "grad of vmap")
    x = jax.random.normal(getkey(), (2, 2) if batched else (3,))
    y = jnp.array(0.7)
    want = TRANSFORMS[transform](small)(x, y)
    got = TRANSFORMS[transform](noinline(small))
    got = (jax.jit(got) if compiled else got)(x, y)
    assert vernal.tree_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_tangents_may_be_numbers():
    out, tangent = jax.jvp(noinline(jnp.sin), (1.0,), (2.0,))
    np.testing.assert_allclose([out, tangent], [np.sin(1.0), 2 * np.cos(1.0)], rtol=1e-6)


def test_the_backward_pass_does_not_compute_the_function_again(getkey):
    x = jax.random.normal(getkey(), (3,))
    fn = noinline(lambda x: jnp.exp(jnp.sin(x)))
    _, pull = jax.vjp(fn, x)
    _, push = jax.linearize(fn, x)
    for linear in (pull, push):
        assert not {"exp", "sin", "cos"} & set(names(jax.make_jaxpr(linear)(x)))


def test_unperturbed_arguments_stay_so(getkey):
    x = jax.random.normal(getkey(), (3,))
    fn = noinline(lambda x, y, n: (jnp.sin(x) * nondifferentiable(y), n + 1))
    grad = jax.grad(lambda x: jnp.sum(fn(x, 2 * x[::-1] * 0 + 1, 1)[0]))
    with pytest.raises(RuntimeError, match="Unexpected tangent"):
        grad(x)
    y, n = jnp.ones(3), jnp.arange(2)
    (out, m), (dot, _) = jax.jvp(lambda x: fn(x, y, n), (x,), (x,))
    np.testing.assert_allclose(dot, jnp.cos(x) * x, rtol=1e-6)
    np.testing.assert_array_equal(m, n + 1)


# --- arguments


class Model(vernal.Module):
    weight: jax.Array
    activation: object

    @noinline
    def __call__(self, x, *, tag):
        return self.activation(self.weight * x), tag


def test_arguments_and_results_are_any_objects(getkey):
    model = Model(jax.random.normal(getkey(), (3,)), jnp.tanh)
    x = jax.random.normal(getkey(), (3,))
    for call in (model, vernal.filter_jit(model)):
        out, tag = call(x, tag="text")
        assert tag == "text"
        np.testing.assert_allclose(out, jnp.tanh(model.weight * x), rtol=1e-6)
    grads = vernal.filter_grad(lambda m: jnp.sum(m(x, tag=None)[0]))(model)
    np.testing.assert_allclose(
        grads.weight, jax.grad(lambda w: jnp.sum(jnp.tanh(w * x)))(model.weight), rtol=1e-5
    )


def test_what_it_closes_over_is_an_argument(getkey):
    x, y = jax.random.normal(getkey(), (2, 3))

    def loss(y):
        return jnp.sum(noinline(lambda x: jnp.sin(x * y))(x))

    want = jnp.cos(x * y) * x
    with jax.checking_leaks():
        for grad in (jax.grad(loss), jax.jit(jax.grad(loss)), jax.grad(jax.jit(loss))):
            np.testing.assert_allclose(grad(y), want, rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda y: noinline(lambda: y * 2)())(x), 2 * x, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64"])
@pytest.mark.sample(3)
def test_arrays_of_every_kind_pass(dtype, getkey):
    x = (jax.random.normal(getkey(), (2, 3)) > 0).astype(dtype)
    keys = jax.random.split(getkey(), 2)

    def fn(x, k):
        return (x.T, jax.vmap(jax.random.split)(k), x[:0], jnp.zeros((), x.dtype))

    want, got = fn(x, keys), jax.jit(noinline(fn))(x, keys)
    assert vernal.tree_equal(got, want)


def test_double_precision_passes(getkey):
    with jax.enable_x64(True):
        x = jax.random.normal(getkey(), (3,), "float64")
        f = jax.jit(jax.grad(lambda x: jnp.sum(noinline(jnp.sin)(x))))
        np.testing.assert_allclose(f(x), np.cos(x), rtol=1e-14)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="noinline needs a function"):
        inspect.unwrap(noinline)(1)


# --- named axes, devices, effects


def one_axis():
    return jax.make_mesh((8,), ("data",))


def test_a_mapped_function_may_speak_of_its_axis(getkey):
    x = jax.random.normal(getkey(), (4,))

    def fn(x):
        return x / jax.lax.psum(x, "i") + jax.lax.axis_index("i").astype(float)

    want = x / jnp.sum(x) + jnp.arange(4.0)
    for f in (
        jax.vmap(noinline(fn), axis_name="i"),
        jax.jit(jax.vmap(noinline(fn), axis_name="i")),
    ):
        np.testing.assert_allclose(f(x), want, rtol=1e-5)
    nothing = noinline(lambda: jax.lax.axis_index("i"))
    got = jax.jit(jax.vmap(lambda x: nothing() + 0 * x.astype(int), axis_name="i"))(x)
    np.testing.assert_array_equal(got, jnp.arange(4))


def test_arrays_spread_over_devices_are_not_gathered(getkey):
    def fn(x):
        return jnp.sum(noinline(jnp.sin)(x) ** 2)

    def plain(x):
        return jnp.sum(jnp.sin(x) ** 2)

    x = jax.random.normal(getkey(), (8, 4))
    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            spread = jax.device_put(x, jax.NamedSharding(mesh, P))
            grad = jax.jit(jax.grad(fn))
            text = grad.lower(spread).compile().as_text()
            assert "all-gather" not in text and "callback" not in text
            assert grad(spread).sharding.spec == jax.P("data", None) or kind.name == "Auto"
            assert not grad(spread).sharding.is_fully_replicated
            np.testing.assert_allclose(grad(spread), jax.grad(plain)(x), rtol=1e-5)
            np.testing.assert_allclose(jax.jit(jax.vmap(fn))(spread), jax.vmap(plain)(x), rtol=1e-5)


def test_devices_may_speak_with_each_other_inside(getkey):
    x = jax.random.normal(getkey(), (8, 4))
    fn = noinline(lambda x: x / jax.lax.psum(x, "data"))
    with jax.set_mesh(one_axis()):
        spread = jax.device_put(x, P)
        f = jax.shard_map(fn, out_specs=P)
        np.testing.assert_allclose(jax.jit(f)(spread), x / x.sum(0, keepdims=True), rtol=1e-4)
        grad = jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(spread)
    want = jax.grad(lambda x: jnp.sum((x / x.sum(0, keepdims=True)) ** 2))(x)
    np.testing.assert_allclose(grad, want, rtol=1e-3, atol=1e-4)


def test_a_check_inside_raises_its_error():
    fn = noinline(lambda x: jnp.sqrt(error_if(x, x < 0, "x is negative")))
    root = vernal.filter_jit(lambda x: fn(fn(x)))
    assert root(jnp.array(16.0)) == 2.0
    with pytest.raises(RuntimeCheckError, match="x is negative"):
        root(jnp.array(-1.0))


def test_a_program_with_effects_keeps_them(capfd):
    fn = noinline(lambda x: (jax.debug.print("it is {}", x, ordered=True), x + 1)[1])
    jax.block_until_ready(jax.jit(lambda x: fn(fn(x)))(jnp.array(1)))
    jax.effects_barrier()
    assert capfd.readouterr().out.split("\n")[:2] == ["it is 1", "it is 2"]


def test_a_program_can_be_exported(getkey):
    x = jax.random.normal(getkey(), (3,))
    exported = jax.export.export(jax.jit(noinline(jnp.sin)))(x)
    np.testing.assert_allclose(exported.call(x), jnp.sin(x), rtol=1e-6)


def test_many_threads_do_not_wait_for_each_other(getkey):
    """With arrays so large that XLA would copy them on a thread of its own."""
    x = jax.random.normal(getkey(), (300, 300))
    fn = noinline(lambda x: jnp.sin(x) @ x / 300)
    program = jax.jit(lambda x: fn(fn(x)) + jax.lax.scan(lambda c, _: (fn(c), None), x, None, 3)[0])
    want = np.asarray(program(x))
    found = []
    threads = [
        threading.Thread(target=lambda: found.extend(np.asarray(program(x)) for _ in range(3)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    for got in found:
        np.testing.assert_array_equal(got, want)
