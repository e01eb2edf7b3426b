"""`while_loop`: any carry, any functions, `vmap`, and what of a loop is compiled."""

import dataclasses

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import error_if
from vernal.loops import while_loop

KINDS = "lax", "checkpointed", "bounded"


class Rule(vernal.Module):
    """A step of a loop that is a module, and whose method is the condition."""

    weight: jax.Array
    activation: object
    limit: jax.Array

    def __call__(self, carry):
        x, n = carry
        return self.activation(self.weight @ x), n + 1

    def goes_on(self, carry):
        return carry[1] < self.limit


def rule(key, limit):
    return Rule(jax.random.normal(key, (3, 3)), jnp.tanh, jnp.array(limit))


@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_jax_and_with_equinox(kind, getkey):
    model, x = rule(getkey(), 5), jax.random.normal(getkey(), (3,))
    init = x, jnp.array(0)
    want = jax.lax.while_loop(model.goes_on, lambda c: model(c), init)
    theirs = eqxi.while_loop(model.goes_on, model, init, kind=kind, max_steps=20)
    got = while_loop(model.goes_on, model, init, kind=kind, max_steps=20)
    for ours, a, b in zip(got, want, theirs, strict=True):
        np.testing.assert_allclose(ours, a, rtol=1e-6)
        np.testing.assert_allclose(ours, b, rtol=1e-6)
        assert ours.dtype == a.dtype


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_it_needs_no_limit(kind):
    x, n = while_loop(lambda c: c[0] < 100, lambda c: (2 * c[0], c[1] + 1), (1, 0), kind=kind)
    assert (x, n) == (128, 7)
    grad = jax.grad(lambda x: while_loop(lambda x: x < 100, lambda x: x * x, x, kind=kind))
    if kind == "checkpointed":
        np.testing.assert_allclose(grad(2.0), 8 * 2.0**7, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_steps", [0, 1, 3])
def test_it_stops_after_the_greatest_number_of_steps(kind, max_steps):
    def run(x):
        return while_loop(lambda x: True, lambda x: 3 * x, x, kind=kind, max_steps=max_steps)

    assert run(jnp.array(2.0)) == 2 * 3**max_steps
    if kind != "lax":
        assert jax.grad(run)(jnp.array(2.0)) == 3**max_steps


@pytest.mark.parametrize("base", [2, 3, 16])
@pytest.mark.parametrize("max_steps", [1, 2, 9, 17])
@pytest.mark.sample(6)
def test_a_bounded_loop_takes_any_base(base, max_steps):
    def run(x, stop):
        return while_loop(
            lambda c: c[1] < stop,
            lambda c: (jnp.sin(c[0]) + c[0], c[1] + 1),
            (x, 0),
            kind="bounded",
            max_steps=max_steps,
            base=base,
        )

    def unrolled(x, stop):
        for _ in range(stop):
            x = jnp.sin(x) + x
        return x

    x = jnp.array(0.3)
    grad = jax.jit(jax.grad(lambda x, stop: run(x, stop)[0]))
    for stop in {0, max_steps // 2, max_steps, max_steps + 5}:
        steps = min(stop, max_steps)
        assert run(x, stop)[1] == steps
        np.testing.assert_allclose(grad(x, stop), jax.grad(unrolled)(x, steps), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_every_element_of_a_batch_stops_by_itself(kind, getkey):
    weight = jax.random.normal(getkey(), (2, 2)) / 2

    def run(x, stop):
        def body(carry):
            x, n, key = carry
            return jnp.tanh(weight @ x), n + 1, jax.random.split(key, 1)[0]

        init = x, 0, jax.random.key(7)
        return while_loop(lambda c: c[1] < stop, body, init, kind=kind, max_steps=8)

    stops = jnp.array([0, 3, 1, 8, 20])
    xs = jax.random.normal(getkey(), (5, 2))
    xs_out, steps, keys = jax.jit(jax.vmap(run))(xs, stops)
    np.testing.assert_array_equal(steps, jnp.minimum(stops, 8))
    for i, stop in enumerate(stops):
        alone = run(xs[i], stop)
        np.testing.assert_allclose(xs_out[i], alone[0], rtol=1e-6)
        assert keys[i] == alone[2]
    # Batches of batches, of which only one decides.
    twice = jax.vmap(jax.vmap(run, in_axes=(0, None)), in_axes=(None, 0))(xs[:2], stops[:3])
    np.testing.assert_array_equal(twice[1], [[0, 0], [3, 3], [1, 1]])
    np.testing.assert_allclose(twice[0][2, 1], run(xs[1], 1)[0], rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_without_vmap_nothing_is_selected(kind):
    def run(x):
        return while_loop(lambda x: x[0] < 9, lambda x: 2 * x, x, kind=kind, max_steps=9)

    x = jnp.ones((3,))
    assert " select(" not in jax.jit(run).lower(x).compile().as_text()
    assert " select(" in jax.jit(jax.vmap(run)).lower(x[:, None]).compile().as_text()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unmapped_condition_selects_nothing_under_vmap(kind):
    def run(x):
        init = x, jnp.array(0)
        body, cond = (lambda c: (2 * c[0], c[1] + 1)), (lambda c: c[1] < 4)
        return while_loop(cond, body, init, kind=kind, max_steps=9)[0]

    x = jnp.ones((3, 2))
    assert " select(" not in jax.jit(jax.vmap(run)).lower(x).compile().as_text()
    np.testing.assert_array_equal(jax.vmap(run)(x), 16 * x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_traced_once(kind):
    traced = []

    def body(x):
        traced.append("body")
        return x + 1.0

    def cond(x):
        traced.append("cond")
        return x < 5

    init = jnp.zeros((), jnp.float32)
    assert while_loop(cond, body, init, kind=kind, max_steps=9) == 5
    assert traced == ["body", "cond"]
    if kind != "lax":
        # The derivative has the traced functions.
        jax.grad(lambda x: while_loop(cond, body, x, kind=kind, max_steps=9))(init)
        assert traced == ["body", "cond"]


@pytest.mark.parametrize("kind", KINDS)
def test_functions_need_no_hash(kind):
    class Callable:
        __hash__ = None  # type: ignore[assignment] (how Python spells "unhashable")

        def __init__(self, fn):
            self.fn = fn

        def __call__(self, x):
            return self.fn(x)

    body, cond = Callable(lambda x: 2 * x), Callable(lambda x: x < 50)
    assert while_loop(cond, body, 1, kind=kind, max_steps=9) == 64


@pytest.mark.parametrize("kind", ["checkpointed", "bounded"])
def test_gradients_reach_what_the_body_closes_over(kind, getkey):
    x, model = jax.random.normal(getkey(), (3,)), rule(getkey(), 3)
    scale, ints = jnp.array([0.5, 1.0, 2.0]), jnp.array([1, 2, 3])
    # Small: where `tanh` saturates, its derivative is the rounding of whichever `tanh` was compiled.
    x, model = x / 4, dataclasses.replace(model, weight=model.weight / 4)

    def ours(model, scale, x):
        def body(carry):
            y, n = model(carry)
            return y * scale + ints.astype(y.dtype) / 8, n

        def cond(carry):
            return carry[1] < model.limit + (0 * scale[0]).astype(int)

        return jnp.sum(while_loop(cond, body, (x, 0), kind=kind, max_steps=5)[0] ** 2)

    def unrolled(model, scale, x):
        for _ in range(3):
            x = model((x, 0))[0] * scale + ints.astype(x.dtype) / 8
        return jnp.sum(x**2)

    want = vernal.filter_grad(lambda args: unrolled(*args))((model, scale, x))
    for transform in (lambda f: f, vernal.filter_jit):
        got = transform(vernal.filter_grad(lambda args: ours(*args)))((model, scale, x))
        assert vernal.tree_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_no_tracer_leaks(kind):
    def run(x, w):
        return while_loop(lambda c: c < 20 * w, lambda c: c * w + x, x, kind=kind, max_steps=7)

    x, w = jnp.array(2.0), jnp.array(3.0)
    with jax.checking_leaks():
        jax.jit(run)(x, w)
        jax.jvp(run, (x, w), (x, w))
        jax.vmap(run)(x[None], w[None])
        if kind != "lax":
            jax.jit(jax.grad(lambda x, w: jax.vmap(run)(x[None], w[None])[0]))(x, w)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_in_a_loop(kind):
    def inner(x, n):
        body, cond = (lambda c: (jnp.sin(c[0]) + c[0], c[1] + 1)), (lambda c: c[1] < n)
        return while_loop(cond, body, (x, 0), kind=kind, max_steps=4)[0]

    def outer(x, stop):
        body, cond = (lambda c: (inner(c[0], c[1]), c[1] + 1)), (lambda c: c[1] < stop)
        return while_loop(cond, body, (x, 0), kind=kind, max_steps=5)[0]

    def unrolled(x, stop):
        for n in range(stop):
            for _ in range(n):
                x = jnp.sin(x) + x
        return x

    x = jnp.array(0.1)
    for stop in (0, 3, 4):
        np.testing.assert_allclose(outer(x, stop), unrolled(x, stop), rtol=1e-6)
    derivative = jax.jacfwd if kind == "lax" else jax.grad
    np.testing.assert_allclose(derivative(outer)(x, 4), jax.grad(unrolled)(x, 4), rtol=1e-5)


def test_the_compiled_loop_of_jax_is_ours():
    # No more than what JAX makes of the same loop: one loop, and nothing carried but the carry.
    def cond(c):
        return c[1] < 7

    def body(c):
        return jnp.sin(c[0]), c[1] + 1

    init = jnp.ones(3), jnp.int32(0)
    ours = jax.jit(lambda c: while_loop(cond, body, c)).lower(init).compile()
    jaxs = jax.jit(lambda c: jax.lax.while_loop(cond, body, c)).lower(init).compile()
    count = [
        sum(c.as_text().count(op) for op in ("fusion(", "while(", "copy(")) for c in (ours, jaxs)
    ]
    assert count[0] <= count[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_of_a_condition_counts_for_the_steps_that_may_be_made(kind):
    def run(x):
        def cond(c):
            return error_if(x, c[0] >= 3, "asked once more") > -9

        def body(c):
            return c[0] + 1, c[1] * 2

        return while_loop(cond, body, (0, x), kind=kind, max_steps=3)[1]

    assert vernal.filter_jit(run)(jnp.array(3.5)) == 28
    assert vernal.filter_jit(jax.vmap(run))(jnp.array([3.5, 2.0])).tolist() == [28, 16]
    if kind != "lax":
        assert vernal.filter_jit(jax.value_and_grad(run))(jnp.array(3.5)) == (28, 8)


@pytest.mark.slow
def test_a_bounded_loop_of_very_many_steps_has_a_second_derivative():
    def run(w, max_steps):
        step = lambda c: (c[0] + 1, jnp.sin(c[1] * w))  # noqa: E731
        return while_loop(lambda c: c[0] < 5, step, (0, w), kind="bounded", max_steps=max_steps)[1]

    for order in (jax.grad, lambda f: jax.grad(jax.grad(f))):
        got, right = (jax.jit(order(lambda w, n=n: run(w, n)))(0.5) for n in (2**2000, 6))
        np.testing.assert_allclose(got, right, rtol=1e-5)
