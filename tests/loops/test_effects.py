"""Loops that call Python, use a `jax.Ref`, or whose condition has no derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental import io_callback

import vernal
from vernal import loops, sharding
from vernal.primitives import nondifferentiable

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Source:
    """Gives 1, 2, 3, ..., as the lines of a file are read one after another."""

    def __init__(self):
        self.count = 0

    def __call__(self, _):
        self.count += 1
        return np.float32(self.count)


def by_jax(source, x, ordered):
    return io_callback(source, SCALAR, jax.lax.stop_gradient(x), ordered=ordered)


def by_vernal(source, x, ordered):
    return vernal.filter_io_callback(
        source, jax.lax.stop_gradient(x), result_shape_dtypes=SCALAR, ordered=ordered
    )


def looped(loop, kind, step):
    """Three steps."""

    def run(x):
        if loop == "scan":
            return loops.scan(lambda c, _: (step(c), None), x, None, length=3, kind=kind)[0]
        if loop == "fori":
            return loops.fori_loop(0, 3, lambda _, c: step(c), x, kind=kind)

        def body(carry):
            return carry[0] + 1, step(carry[1])

        return loops.while_loop(lambda c: c[0] < 3, body, (0, x), max_steps=4, kind=kind)[1]

    return run


def forward(f):
    return lambda x: jax.jvp(f, (x,), (x,))[1]


def second(f):
    return jax.grad(jax.grad(f))


KINDS = [
    (loop, kind)
    for loop in ("scan", "fori", "while")
    for kind in ("lax", "checkpointed", "bounded")
    if (loop, kind) != ("scan", "bounded")
]


@pytest.mark.parametrize("callback", [by_jax, by_vernal])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("loop", "kind"), KINDS)
def test_a_callback_with_effects_is_called_once_for_each_step(loop, kind, ordered, callback):
    source = Source()
    run = jax.jit(looped(loop, kind, lambda x: x * callback(source, x, ordered)))
    assert run(1.0) == 6.0
    assert source.count == 3


@pytest.mark.parametrize("callback", [by_jax, by_vernal])
@pytest.mark.parametrize("derivative", [jax.grad, forward, second])
@pytest.mark.parametrize(("loop", "kind"), KINDS)
@pytest.mark.sample(2)
def test_steps_that_call_python_with_effects_are_never_computed_again(
    loop, kind, derivative, callback
):
    source = Source()
    run = jax.jit(derivative(looped(loop, kind, lambda x: x * callback(source, x, True))))
    if kind != "lax":
        with pytest.raises(NotImplementedError, match=r"(?s)have effects.*calls `io_callback`"):
            run(1.0)
        assert source.count == 0
    elif loop == "while" and derivative is not forward:
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            run(1.0)
    else:
        # The step is linear. 3!, and not 4 * 5 * 6.
        assert run(1.0) == (0.0 if derivative is second else 6.0)
        assert source.count == 3


def nested(step):
    return lambda x: jax.lax.scan(lambda c, _: (step(c), None), x, None, length=2)[0]


def in_a_branch(step):
    return lambda x: vernal.filter_cond(x > -1, step, jnp.cos, x)


def in_a_rule(step):
    rule = vernal.filter_custom_jvp(step)
    rule.def_jvp(lambda primals, tangents: (rule(*primals), tangents[0]))
    return rule


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("inside", [nested, in_a_branch, in_a_rule, jax.checkpoint])
def test_effects_are_seen_inside_of_other_operations(inside, kind):
    source = Source()
    step = inside(lambda x: x * by_jax(source, x, True))
    with pytest.raises(NotImplementedError, match="a loop whose steps have effects"):
        jax.jit(jax.grad(looped("while", kind, step)))(1.0)
    assert source.count == 0


def test_effects_of_a_condition_are_those_of_the_loop():
    def cond(x):
        io_callback(lambda _: None, None, x)
        return x < 5

    for kind in ("checkpointed", "bounded"):
        run = functools.partial(loops.while_loop, cond, jnp.sin, kind=kind, max_steps=3)
        with pytest.raises(NotImplementedError, match="a loop whose steps have effects"):
            jax.grad(run)(1.0)


@pytest.mark.parametrize("derivative", [lambda f: f, jax.grad])
def test_a_ref_is_for_loops_that_compute_no_step_again(derivative):
    def run(x, kind):
        ref = jax.new_ref(jnp.zeros(()))

        def step(c):
            ref[...] += 1.0
            return jnp.sin(c) * ref[...]

        return looped("scan", kind, step)(x)

    def plain(x):
        for i in (1.0, 2.0, 3.0):
            x = jnp.sin(x) * i
        return x

    got = jax.jit(derivative(functools.partial(run, kind="lax")))(1.0)
    np.testing.assert_allclose(got, derivative(plain)(1.0), rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"(?s)have effects.*jax\.Ref"):
        jax.jit(derivative(functools.partial(run, kind="checkpointed")))(1.0)


def test_callbacks_without_effects_may_be_called_again():
    def step(x):
        jax.debug.callback(lambda _: None, x)
        return jnp.sin(x)

    for kind in ("checkpointed", "bounded"):
        got = jax.grad(looped("while", kind, step))(1.0)
        want = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(1.0)
        np.testing.assert_allclose(got, want, rtol=1e-6)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def asks_python(x):
    answer = jax.ShapeDtypeStruct((), bool)
    return jax.pure_callback(lambda x: np.asarray(x > 0.3), answer, x, vmap_method="sequential")


CONDITIONS = {
    "pure_callback": asks_python,
    "nondifferentiable": lambda x: nondifferentiable(x) > 0.3,
    "custom_vjp": lambda x: doubled(x) > 0.6,
}
DERIVATIVES = {
    "jvp": forward,
    "grad": jax.grad,
    "hessian": jax.hessian,
    "jvp of grad": lambda f: forward(jax.grad(f)),
    "grad in scan": lambda f: (
        lambda x: jax.lax.scan(lambda c, _: (c + jax.grad(f)(x), None), x, None, length=2)[0]
    ),
    "batch": lambda f: lambda x: jnp.sum(jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x]))),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize(
    ("kind", "max_steps"),
    [("lax", None), ("checkpointed", None), ("checkpointed", 9), ("bounded", 9)],
)
@pytest.mark.sample(12)
def test_a_condition_needs_no_derivative(kind, max_steps, condition, derivative):
    def shrink(x):
        return 0.6 * x * jnp.cos(x)

    def run(x):
        return loops.while_loop(CONDITIONS[condition], shrink, x, kind=kind, max_steps=max_steps)

    def plain(x, steps):
        for _ in range(steps):
            x = shrink(x)
        return x

    if kind == "lax" and derivative != "jvp":
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            DERIVATIVES[derivative](run)(1.0)
        return
    got = DERIVATIVES[derivative](run)(1.0)
    if derivative == "batch":
        want = sum(jax.grad(functools.partial(plain, steps=_steps(x)))(x) for x in (1.0, 2.0))
    else:
        want = DERIVATIVES[derivative](functools.partial(plain, steps=_steps(1.0)))(1.0)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def _steps(x):
    steps = 0
    while x > 0.3:
        x, steps = 0.6 * x * np.cos(x), steps + 1
    return steps


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_devices_may_agree_when_to_stop(kind):
    mesh = sharding.make_mesh(d=-1)

    def local(x):
        def going(carry):
            return jax.lax.pmax(jnp.abs(carry[0]), "d") > 0.3

        out = loops.while_loop(going, lambda c: 0.6 * c, x, kind=kind, max_steps=9)
        return jax.lax.psum(jnp.sum(out), "d")

    total = jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P())
    x = sharding.shard_batch(np.linspace(0.1, 1.0, 8, dtype=np.float32), mesh, "d")
    # The largest takes three steps, and so do all.
    np.testing.assert_allclose(jax.jit(jax.grad(total))(x), np.full(8, 0.6**3), rtol=1e-5)


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
@pytest.mark.parametrize("start", [1, np.int32(1)], ids=["Python", "NumPy"])
def test_a_python_number_may_be_an_argument_of_the_derivative(kind, start):
    def step(carry):
        return carry[0] * 2, carry[1] + 1

    def run(x, n):
        return loops.while_loop(lambda c: c[1] < 4, step, (x, n), kind=kind, max_steps=9)[0]

    assert jax.vjp(run, 1.5, start)[1](1.0)[0] == 8.0
    assert jax.grad(run, allow_int=True)(1.5, start) == 8.0
