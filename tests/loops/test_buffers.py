"""Buffers: written once, in place, by loops of every kind, also inside one another."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import vernal
from vernal.loops import Buffer, MaybeBuffer, buffer_at_set, fori_loop, scan, while_loop

KINDS = "lax", "checkpointed", "bounded"
REVERSE = "checkpointed", "bounded"


def history(x, w, stop, kind, max_steps=6):
    """The states of a recurrence that looks back at two of them."""

    def body(carry):
        states, n = carry
        new = jnp.sin(w * states[n]) + states[n // 2]
        return states.at[n + 1].set(new), n + 1

    states = jnp.zeros((8, *x.shape)).at[0].set(x)
    return while_loop(
        lambda c: c[1] < stop,
        body,
        (states, 0),
        kind=kind,
        max_steps=max_steps,
        buffers=lambda carry: carry[0],
    )[0]


def unrolled(x, w, stop):
    states = [x]
    for n in range(stop):
        states.append(jnp.sin(w * states[n]) + states[n // 2])
    return jnp.stack(states + [0 * x] * (7 - stop))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_values_and_derivatives_agree_with_the_unrolled_loop(kind, getkey):
    x, w = jax.random.normal(getkey(), (2, 3))
    weights = jax.random.normal(getkey(), (8, 3))

    def loss(states):
        return jnp.sum(weights * states**2)

    args = (x, w), (jnp.cos(x), jnp.sin(w))
    forward = jax.jit(lambda stop: jax.jvp(lambda x, w: history(x, w, stop, kind), *args))
    if kind != "lax":
        reverse = jax.jit(jax.grad(lambda x, w, stop: loss(history(x, w, stop, kind)), (0, 1)))
    for stop in (0, 1, 4, 6):
        reference = functools.partial(unrolled, stop=stop)
        want = jax.jvp(reference, *args)
        np.testing.assert_allclose(forward(stop), want, rtol=1e-5, atol=1e-6)
        if kind != "lax":
            pull = jax.vjp(reference, x, w)[1]
            grad = pull(2 * weights * want[0])
            np.testing.assert_allclose(reverse(x, w, stop), grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", REVERSE)
def test_every_element_of_a_batch_writes_for_itself(kind, getkey):
    x = jax.random.normal(getkey(), (5, 2))
    w = jax.random.normal(getkey(), (2,))
    stops = jnp.array([0, 6, 2, 1, 5])

    def total(states):
        return jnp.sum(jnp.cos(states) * jnp.arange(16.0).reshape(8, 2))

    def batch(x, w):
        states = jax.vmap(lambda x, stop: history(x, w, stop, kind))(x, stops)
        return jnp.sum(jax.vmap(total)(states)), states

    def alone(x, w):
        states = jnp.stack([unrolled(x[i], w, n) for i, n in enumerate(stops.tolist())])
        return jnp.sum(jax.vmap(total)(states)), states

    (_, states), grads = jax.jit(jax.value_and_grad(batch, (0, 1), has_aux=True))(x, w)
    (_, want), want_grads = jax.value_and_grad(alone, (0, 1), has_aux=True)(x, w)
    np.testing.assert_allclose(states, want, rtol=1e-5)
    for ours, theirs in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", REVERSE)
def test_second_derivatives(kind, getkey):
    x, w = jax.random.normal(getkey(), (2, 2))

    def ours(w):
        return jnp.sum(history(x, w, 4, kind) ** 2)

    def theirs(w):
        return jnp.sum(unrolled(x, w, 4) ** 2)

    np.testing.assert_allclose(jax.hessian(ours)(w), jax.hessian(theirs)(w), rtol=1e-4, atol=1e-5)


def nested(x, kind):
    """Loops inside a loop that fill its buffer, in rows, of which each starts from the last."""

    def row(states, n, x):
        def body(carry):
            states, own, m = carry
            new = jnp.sin(own[m]) * x + states[n - 1, m]
            return states.at[n, m].set(new), own.at[m + 1].set(new), m + 1

        own = jnp.zeros(4).at[0].set(x)
        return while_loop(
            lambda c: c[2] < n,
            body,
            (states, own, 0),
            kind=kind,
            max_steps=3,
            buffers=lambda carry: (carry[0], carry[1]),
        )

    def body(carry):
        states, total, n = carry
        states, own, m = row(states, n, x + total)
        return states, total + own[m], n + 1

    return while_loop(
        lambda c: c[2] < 4,
        body,
        (jnp.zeros((5, 3)), 0.0, 1),
        kind=kind,
        max_steps=5,
        buffers=lambda carry: carry[0],
    )


def nested_unrolled(x):
    states, total = [[jnp.zeros(())] * 3 for _ in range(5)], 0.0
    for n in range(1, 4):
        last = y = x + total
        for m in range(n):
            last = jnp.sin(last) * y + states[n - 1][m]
            states[n][m] = last
        total = total + last
    return jnp.array(states), total, 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_a_loop_inside_fills_the_buffer_of_the_loop_outside(kind):
    x = jnp.array(0.7)
    for ours, theirs in zip(nested(x, kind), nested_unrolled(x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    batch = jax.vmap(lambda x: nested(x, kind)[0])(jnp.array([0.2, 0.7]))
    np.testing.assert_allclose(batch[1], nested(x, kind)[0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", REVERSE)
def test_derivatives_of_loops_that_share_a_buffer(kind):
    def loss(states, total, n):
        return jnp.sum(jnp.cos(states) * jnp.arange(15.0).reshape(5, 3)) + total**2

    x = jnp.array(0.7)
    ours, theirs = (lambda x: loss(*nested(x, kind))), (lambda x: loss(*nested_unrolled(x)))
    np.testing.assert_allclose(jax.grad(ours)(x), jax.grad(theirs)(x), rtol=1e-5)
    np.testing.assert_allclose(
        jax.jvp(ours, (x,), (x,))[1], jax.jvp(theirs, (x,), (x,))[1], rtol=1e-5
    )
    second = jax.grad(jax.grad(ours))(x), jax.grad(jax.grad(theirs))(x)
    np.testing.assert_allclose(*second, rtol=1e-4)


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_a_buffer_that_a_loop_inside_does_not_select_is_carried(kind):
    def run(x):
        def outer(i, states):
            def inner(carry, j):
                return carry.at[2 * i + j].set(x * i + j.astype(float)), None

            assert isinstance(states, Buffer)
            states, _ = scan(inner, states, jnp.arange(2), kind=kind)
            assert isinstance(states, Buffer)
            return states

        return fori_loop(0, 3, outer, jnp.zeros(6), kind=kind, buffers=lambda states: states)

    def want(x):
        return jnp.array([x * i + j for i in range(3) for j in range(2)])

    np.testing.assert_allclose(run(jnp.array(1.5)), want(jnp.array(1.5)))
    derivatives = jax.jacrev(run)(jnp.array(1.5)), jax.jacfwd(run)(jnp.array(1.5))
    for derivative in derivatives:
        np.testing.assert_allclose(derivative, jax.jacrev(want)(jnp.array(1.5)))


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_a_buffer_passes_through_the_loops_and_branches_of_jax(kind):
    def body(carry, x):
        states, n = carry
        states, _ = jax.lax.scan(lambda s, y: (s.at[n].set(x * y), None), states, jnp.ones(1))
        states = jax.lax.cond(n > 1, lambda s: s.at[n + 3].set(x), lambda s: s, states)
        return (states, n + 1), states[n]

    def run(xs):
        init = jnp.zeros(6), 0
        (states, _), ys = scan(body, init, xs, kind=kind, buffers=lambda c: c[0])
        return states, ys

    xs = jnp.array([1.0, 2.0, 3.0])
    states, ys = run(xs)
    np.testing.assert_allclose(states, [1, 2, 3, 0, 0, 3])
    np.testing.assert_allclose(ys, xs)
    jacobian = jax.jacrev(lambda xs: run(xs)[0])(xs)
    np.testing.assert_allclose(jacobian, jnp.eye(6, 3).at[5, 2].set(1))


@pytest.mark.parametrize("kind", REVERSE)
def test_a_write_may_depend_on_a_condition(kind):
    def run(xs):
        def body(i, carry):
            kept, n = carry
            wanted = xs[i] > 0
            return kept.at[n].set(xs[i] ** 2, pred=wanted), n + wanted.astype(int)

        return fori_loop(0, 5, body, (jnp.zeros(5), 0), kind=kind, buffers=lambda c: c[0])[0]

    xs = jnp.array([1.0, -1.0, 2.0, -2.0, 3.0])
    np.testing.assert_allclose(run(xs), [1, 4, 9, 0, 0])
    weights = jnp.arange(1.0, 6.0)
    got = jax.grad(lambda xs: weights @ run(xs))(xs)
    np.testing.assert_allclose(got, [2, 0, 8, 0, 18])
    batch = jax.grad(lambda xs: jnp.sum(jax.vmap(run)(xs) @ weights))(jnp.stack([xs, -xs]))
    np.testing.assert_allclose(batch, [[2, 0, 8, 0, 18], [0, 2, 0, 8, 0]])


@pytest.mark.parametrize("kind", REVERSE)
def test_buffers_hold_any_shape_dtype_and_index(kind):
    keys = jax.random.split(jax.random.key(0), 4)

    def run(x):
        def body(i, carry):
            tree, keys_out, flags = carry
            tree = {
                "rows": tree["rows"].at[i, :2].set(x),
                "columns": tree["columns"].at[..., i].set(2.0),
                "many": tree["many"].at[jnp.array([0, 1]) + 2 * i].set(x * x),
                "one": tree["one"].at[()].set(3 * x[0], pred=i == 1),
            }
            return tree, keys_out.at[i].set(keys[i]), flags.at[i].set(i == 2)

        tree = {
            "rows": jnp.zeros((4, 3)),
            "columns": jnp.zeros((2, 4), jnp.bfloat16),
            "many": jnp.zeros(8),
            "one": jnp.zeros(()),
        }
        init = tree, jax.random.split(jax.random.key(1), 4), jnp.zeros(4, bool)
        return fori_loop(0, 4, body, init, kind=kind, buffers=lambda c: (c[0], [c[1], c[2]]))

    x = jnp.array([1.0, 2.0])
    tree, keys_out, flags = run(x)
    np.testing.assert_allclose(tree["rows"], [[1, 2, 0]] * 4)
    np.testing.assert_allclose(tree["columns"].astype(float), 2 * np.ones((2, 4)))
    np.testing.assert_allclose(tree["many"], [1, 4] * 4)
    assert tree["one"] == 3 and jnp.all(keys_out == keys)
    assert flags.tolist() == [False, False, True, False]
    assert run(x)[0]["columns"].dtype == jnp.bfloat16
    grad = jax.grad(lambda x: jnp.sum(run(x)[0]["many"]) + run(x)[0]["one"])(x)
    np.testing.assert_allclose(grad, [8 * 1 + 3, 8 * 2])


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_a_write_out_of_bounds_is_dropped(kind):
    def run(x):
        def body(c):
            return c[0].at[2 * c[1]].set(x), c[1] + 1

        init = jnp.zeros(3), 0
        return while_loop(lambda c: c[1] < 4, body, init, kind=kind, buffers=lambda c: c[0])[0]

    np.testing.assert_allclose(run(jnp.array(5.0)), [5, 0, 5])
    np.testing.assert_allclose(jax.vmap(run)(jnp.array([5.0])), [[5, 0, 5]])
    if kind != "lax":
        assert jax.grad(lambda x: jnp.sum(run(x)))(jnp.array(5.0)) == 2


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
@pytest.mark.parametrize("differentiate", [False, True])
def test_a_buffer_is_never_copied(kind, differentiate):
    size = 12345

    def run(x, init):
        def body(carry):
            states, x, n = carry
            return states.at[n + 1].set(jnp.sin(x) + states[n // 2]), jnp.cos(x), n + 1

        return while_loop(
            lambda c: c[2] < 99,
            body,
            (init, x, 0),
            kind=kind,
            max_steps=100,
            buffers=lambda c: c[0],
        )[0]

    def loss(x, init):
        return jnp.sum(run(x, init))

    args = jnp.array(0.5), jnp.zeros(size)
    derivative = (lambda *xs: jax.jvp(run, xs, xs)) if kind == "lax" else jax.grad(loss)
    text = jax.jit(derivative if differentiate else run).lower(*args).compile().as_text()
    # What is outside the loops happens once.
    inside = [part for part in text.split("\n\n") if not part.startswith("ENTRY")]
    assert any("dynamic-update-slice(" in part for part in inside)
    whole = [line for part in inside for line in part.splitlines() if f" = f32[{size}]" in line]
    assert not [line for line in whole if re.search(r" (copy|select|add|multiply)\(", line)]


def test_a_buffer_says_what_it_is():
    seen = []

    def body(carry):
        buffer, n = carry
        assert isinstance(buffer, Buffer)
        seen.append((buffer.shape, buffer.dtype, buffer.ndim, buffer.size, repr(buffer)))
        return buffer, n + 1

    init = jnp.zeros((2, 3)), 0
    while_loop(lambda c: (c[1] < 2) & (c[0][0, 0] < 1), body, init, buffers=lambda c: c[0])
    assert seen == [((2, 3), jnp.float32, 2, 6, "Buffer(f32[2,3])")]


REFUSED = {
    "+": (lambda b: b + 1, "does not support `__add__`"),
    "1 -": (lambda b: 1 - b, "does not support `__rsub__`"),
    "==": (lambda b: b == b, "does not support `__eq__`"),
    "neg": (lambda b: -b, "does not support `__neg__`"),
    "iterate": (lambda b: list(b), "does not support `__iter__`"),
    "length": (lambda b: len(b), "does not support `__len__`"),
    "bool": (lambda b: bool(b), "does not support `__bool__`"),
    "sum": (lambda b: b.sum(), r"(?s)does not support `\.sum`.*instead: read elements"),
    "add": (lambda b: b.at[0].add(1.0), r"does not support `\.at\[\.\.\.\]\.add`"),
    "numpy": (lambda b: np.asarray(b), "does not support `__array__`"),
    "assign": (lambda b: b.__setitem__(0, 1.0), "does not support `__setitem__`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_buffer_cannot_do_it_says(case):
    call, text = REFUSED[case]
    with pytest.raises(TypeError, match=text):
        call(Buffer(jnp.zeros(3)))


def test_an_array_function_refuses_a_buffer():
    with pytest.raises(TypeError, match="does not support `__jax_array__`"):
        jnp.sin(Buffer(jnp.zeros(3)))


def test_an_unknown_attribute_is_none_of_a_buffers():
    assert not hasattr(Buffer(jnp.zeros(3)), "colour")
    with pytest.raises(AttributeError, match="'Buffer' object has no attribute 'colour'"):
        _ = Buffer(jnp.zeros(3)).colour
    with pytest.raises(AttributeError, match="'_At' object has no attribute '__colour__'"):
        _ = Buffer(jnp.zeros(3)).at.__colour__


def test_what_does_not_fit_into_a_buffer_is_refused():
    buffer = Buffer(jnp.zeros((3, 2), jnp.float32))
    for value in (jnp.zeros(3), jnp.zeros((1, 2)), jnp.array(1j), np.zeros((2, 2))):
        with pytest.raises(TypeError, match="(?s)does not fit.*expected: f32.2.*got: "):
            buffer.at[0].set(value)
    for value in (1, 1.0, True, np.ones(2, np.int8), jnp.ones(1, jnp.bfloat16)):
        written = buffer.at[0].set(value).contents
        assert written.dtype == jnp.float32
        np.testing.assert_array_equal(written, [[1, 1], [0, 0], [0, 0]])


def test_one_function_writes_to_both():
    x = jnp.array([1.0, 2.0])
    for pred, want in ((True, [0, 5]), (False, [0, 0]), (jnp.array(True), [0, 5])):
        np.testing.assert_array_equal(buffer_at_set(jnp.zeros(2), 1, 5.0, pred=pred), want)
        written = buffer_at_set(Buffer(jnp.zeros(2)), 1, 5.0, pred=pred)
        assert isinstance(written, Buffer)
        np.testing.assert_array_equal(written.contents, want)
    got = jax.vmap(lambda x: buffer_at_set(jnp.zeros(2), 0, x, pred=x > 1))(x)
    np.testing.assert_array_equal(got, [[0, 0], [2, 0]])


def test_an_annotation_for_both():
    kind = MaybeBuffer[Float[Array, "n 2"]]
    assert isinstance(jnp.zeros((3, 2)), kind) and isinstance(Buffer(jnp.zeros((3, 2))), kind)
    assert not isinstance(jnp.zeros(3), kind) and not isinstance(Buffer(jnp.zeros(3)), kind)
    assert isinstance(Buffer(3), MaybeBuffer[int]) and not isinstance("text", MaybeBuffer[int])
    assert isinstance(None, MaybeBuffer[int | None])

    class State(vernal.Module):
        ts: MaybeBuffer[Float[Array, " n"]]
        n: int

    @jax.jit
    def run(state):
        return while_loop(
            lambda s: s.n < 3,
            lambda s: State(buffer_at_set(s.ts, s.n, s.n * 1.5), s.n + 1),
            state,
            buffers=lambda s: s.ts,
        )

    np.testing.assert_allclose(run(State(jnp.zeros(4), jnp.array(0))).ts, [0, 1.5, 3, 0])
