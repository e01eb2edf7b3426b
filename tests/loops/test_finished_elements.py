"""What a loop under `vmap` does for elements that have finished: nothing that anybody could see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import loops
from vernal.runtime import RuntimeCheckError, error_if

KINDS = ["lax", "checkpointed", "bounded"]
STEPS = jnp.array([0, 2, 5])


def early(x, i, n):
    """Holds for every step that counts."""
    return error_if(x, i >= n, "a step too many")


def in_custom_jvp(x, i, n):
    @vernal.filter_custom_jvp
    def checked(x, i, n):
        return early(x, i, n)

    @checked.def_jvp
    def _(primals, tangents):
        return checked(*primals), early(tangents[0], *primals[1:])

    return checked(x, i, n)


def in_loop(x, i, n):
    def body(carry):
        return carry[0] + 1, early(carry[1], i, n)

    return loops.while_loop(lambda c: c[0] < 2, body, (0, x), kind="checkpointed", max_steps=3)[1]


PLACES = {
    "body": early,
    "jit": jax.jit(early),
    "cond": lambda x, i, n: jax.lax.cond(x > 0, early, lambda x, i, n: x, x, i, n),
    "scan": lambda x, i, n: jax.lax.scan(lambda c, _: (early(c, i, n), None), x, length=2)[0],
    "while": lambda x, i, n: jax.lax.fori_loop(0, i % 2 + 1, lambda _, c: early(c, i, n), x),
    "checkpoint": jax.checkpoint(early),
    "loop": in_loop,
    "vmap": lambda x, i, n: jax.vmap(early, (0, None, None))(jnp.stack([x, x]), i, n)[0],
    "custom_jvp": in_custom_jvp,
}


def run(n, scale, kind, place):
    def body(carry):
        i, x = carry
        return i + 1, place(x * scale, i, n) * 1.5

    start = jnp.int32(0), jnp.float32(1)
    return loops.while_loop(lambda c: c[0] < n, body, start, kind=kind, max_steps=6)[1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(6)
def test_checks_see_only_elements_that_are_active(kind, place):
    def value(n):
        return run(n, jnp.float32(1), kind, PLACES[place])

    want = 1.5 ** np.asarray(STEPS, np.float32)
    np.testing.assert_allclose(vernal.filter_jit(jax.vmap(value))(STEPS), want)
    np.testing.assert_allclose(jax.vmap(value)(STEPS), want)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(6)
def test_derivatives_check_only_elements_that_are_active(kind, place):
    def slope(n):
        def value(scale):
            return run(n, scale, kind, PLACES[place])

        one = jnp.float32(1)
        # JAX's own loop has no reverse mode.
        forward = kind == "lax" or place == "while"
        return jax.jvp(value, (one,), (one,))[1] if forward else jax.grad(value)(one)

    steps = np.asarray(STEPS, np.float32)
    np.testing.assert_allclose(
        vernal.filter_jit(jax.vmap(slope))(STEPS), steps * 1.5**steps, rtol=1e-6
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(6)
def test_a_check_of_an_active_element_names_it(kind, place):
    def value(n):
        # The last element has two steps that do not count.
        return run(n, jnp.float32(1), kind, lambda x, i, n: PLACES[place](x, i, jnp.minimum(n, 3)))

    with pytest.raises(RuntimeCheckError, match=r"a step too many(\n  at batch ind.*2.* of \d)"):
        vernal.filter_jit(jax.vmap(value))(STEPS)
    with pytest.raises(RuntimeCheckError, match="a step too many"):
        vernal.filter_jit(value)(STEPS[2])


def falling(x, w, kind, max_steps=8):
    """Falls to 0, where the derivative of another step would be infinite."""
    return loops.while_loop(
        lambda c: c > 0,
        lambda c: jnp.where(c > 1, c - jnp.sqrt(c) / jnp.sqrt(c) * w, 0 * jnp.sqrt(c)),
        x,
        kind=kind,
        max_steps=max_steps,
    )


@pytest.mark.parametrize(
    ("kind", "max_steps"), [("checkpointed", 8), ("checkpointed", None), ("bounded", 8)]
)
@pytest.mark.sample(3)
def test_the_gradient_under_vmap_is_that_of_each_element_alone(kind, max_steps):
    x, w = jnp.array([0.0, 0.5, 1.0, 3.5]), jnp.float32(1)
    grad = jax.grad(lambda x, w: falling(x, w, kind, max_steps), (0, 1))
    alone = [grad(one, w) for one in x]
    together = jax.jit(jax.vmap(grad, (0, None)))(x, w)
    for i in range(2):
        want = np.array([float(g[i]) for g in alone])
        assert np.isfinite(want).all()
        np.testing.assert_allclose(together[i], want, rtol=1e-6)
    shared = jax.grad(lambda w: jnp.sum(jax.vmap(lambda x: falling(x, w, kind, max_steps))(x)))(w)
    np.testing.assert_allclose(shared, sum(g[1] for g in alone), rtol=1e-6)
    # Among other batches there is one without an active element.
    batches = jnp.stack([x, jnp.zeros(4), x[::-1]])
    nested = jax.vmap(jax.vmap(lambda x: grad(x, w)[0]))(batches)
    want = np.array([float(g[0]) for g in alone])
    np.testing.assert_allclose(nested, [want, [want[0]] * 4, want[::-1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "max_steps"),
    [
        *[("lax", most) for most in (2**30 - 1, 2**30, 2**31, 2**70)],
        *[("bounded", most) for most in (2**30 - 1, 2**31, 2**40)],
        *[("checkpointed", most) for most in (2**20, 2**31, 2**70)],
    ],
)
@pytest.mark.sample(3)
def test_any_number_of_steps_may_be_the_greatest(kind, max_steps):
    def value(x):
        def body(c):
            return (c[0] + 1, jnp.sin(c[1]) * x)

        return loops.while_loop(lambda c: c[0] < 3, body, (0, x), kind=kind, max_steps=max_steps)[1]

    x = jnp.float32(0.7)

    def unrolled(x):
        return jnp.sin(jnp.sin(jnp.sin(x) * x) * x) * x

    want = jax.jvp(unrolled, (x,), (x,))
    np.testing.assert_allclose(jax.jvp(value, (x,), (x,)), want, rtol=1e-6)
    if kind != "lax":
        np.testing.assert_allclose(jax.grad(value)(x) * x, want[1], rtol=1e-6)


@pytest.mark.parametrize("kind", ["lax", "bounded"])
@pytest.mark.parametrize("most", [1, 3, 4, 5, 8, 11, 16, 17])
def test_steps_are_counted_in_two_words(kind, most, monkeypatch):
    monkeypatch.setattr("vernal.loops._lax._WORD", 4)
    assert (
        loops.while_loop(lambda c: c < 100, lambda c: c + 1, 0, max_steps=most, kind=kind) == most
    )


@pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
def test_a_batch_may_be_empty(kind):
    def run(x):
        return loops.while_loop(lambda x: x < 3, lambda x: 2 * x, x, kind=kind, max_steps=4)

    def forward(x):
        return jax.jvp(run, (x,), (x,))

    fns = [run, forward] if kind == "lax" else [run, forward, jax.grad(run)]
    for fn in fns:
        out = jax.jit(jax.vmap(fn))(jnp.zeros((0,)))
        assert all(y.shape == (0,) for y in jax.tree.leaves(out))


def dividing(kind, max_steps):
    """Functions that take `n` steps, in which they divide by what is zero for an element that takes none."""

    def loop(cond, body, init, **options):
        return loops.while_loop(cond, body, init, kind=kind, max_steps=max_steps, **options)

    def closure(x, n):
        return loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * x / n), (0, x))[1]

    def root(x, n):
        unsafe = jnp.where(n == 0, 0.0, x)
        return loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * jnp.sqrt(unsafe)), (0, x))[1]

    def nested(x, n):
        def body(c):
            inner = loop(
                lambda d: d[0] < n - 1, lambda d: (d[0] + 1, d[1] * x / (n - 1)), (0, c[1])
            )
            return c[0] + 1, inner[1] / n

        return loop(lambda c: c[0] < n, body, (0, x))[1]

    def buffer(x, n):
        def body(c):
            i, b, y = c
            y = y / b[0]
            return i + 1, b.at[i + 1].set(y), y

        start = jnp.concatenate([jnp.stack([x * n]), jnp.zeros(4)])
        _, b, y = loop(lambda c: c[0] < n, body, (0, start, x), buffers=lambda c: c[1])
        return y + jnp.sum(b[1:])

    def buffer_outside(x, n):
        def body(c):
            i, b, y = c
            _, b, y = loop(
                lambda d: d[0] < n - 1,
                lambda d: (d[0] + 1, d[1], d[2] * x / d[1][0]),
                (0, b, y),
            )
            y = y / b[0]
            return i + 1, b.at[i + 1].set(y), y

        start = jnp.concatenate([jnp.stack([x * n]), jnp.zeros(4)])
        _, b, y = loop(lambda c: c[0] < n, body, (0, start, x), buffers=lambda c: c[1])
        return y + jnp.sum(b[1:])

    return {f.__name__: f for f in (closure, root, nested, buffer, buffer_outside)}


def along(fn):
    return lambda x, n: jax.jvp(lambda x: fn(x, n), (x,), (jnp.ones_like(x),))[1]


@pytest.mark.parametrize(
    "what",
    [
        "closure",
        "root",
        "buffer",
        pytest.param("nested", marks=pytest.mark.slow),
        pytest.param("buffer_outside", marks=pytest.mark.slow),
    ],
)
@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("kind", "max_steps"), [("checkpointed", 4), ("checkpointed", None), ("bounded", 4)]
)
def test_what_is_not_safe_for_an_element_without_steps(kind, max_steps, what):
    fn = dividing(kind, max_steps)[what]
    with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
        x, n = jnp.array([0.5, 0.5, 0.7, 0.9]), jnp.array([0, 2, 1, 0])
        grad = jax.grad(fn)
        for derivative in (fn, along(fn), grad, jax.grad(grad), along(grad), jax.grad(along(fn))):
            by_itself = jax.jit(derivative)
            alone = np.array([by_itself(*one) for one in zip(x, n, strict=True)])
            assert np.isfinite(alone).all()
            together = jax.jit(jax.vmap(derivative))(x, n)
            np.testing.assert_allclose(together, alone, rtol=1e-10, atol=1e-12)
            if derivative in (fn, grad):  # those of second order take long to compile
                pairs = x.reshape(2, 2), n.reshape(2, 2)
                nested = jax.jit(jax.vmap(jax.vmap(derivative)))(*pairs)
                np.testing.assert_allclose(nested.ravel(), alone, rtol=1e-10, atol=1e-12)
        by_itself = jax.jit(grad)
        alone = np.array([by_itself(*one) for one in zip(x, n, strict=True)])
        summed = jax.grad(lambda x: jnp.sum(jax.vmap(fn)(x, n)))(x)
        np.testing.assert_allclose(summed, alone, rtol=1e-10, atol=1e-12)


def test_what_all_elements_share_is_not_copied_for_those_without_steps():
    w = jnp.ones((7, 7))

    def fn(x, n):
        def body(c):
            return c[0] + 1, w @ c[1]

        return loops.while_loop(lambda c: c[0] < n, body, (0, x), kind="checkpointed", max_steps=4)

    program = str(jax.make_jaxpr(jax.vmap(fn))(jnp.ones((3, 7)), jnp.array([0, 1, 2])))
    assert "3,7,7" not in program
