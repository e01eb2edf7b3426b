"""`capture`: what was computed on the way, from inside programs, with its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vernal.harvest import capture, planted, reap, sow

X = jnp.array([0.3, -0.7, 1.1])


def step(slot, x):
    """Changes a slot, and captures what depends on it."""
    y = capture(jnp.sin(x) + planted(slot), "y")
    return sow(slot, planted(slot) + 1, y)


def loop(slot, x):
    return lax.scan(lambda x, _: (jax.jit(step)(slot, x), None), x, None, length=3, reverse=True)[0]


def by_hand(slot, x):
    ys = []
    for i in range(3):
        x = jnp.sin(x) + slot + i
        ys.append(x)
    # In a reversed loop the last step comes first.
    return x, jnp.stack(ys[::-1])


def test_slots_and_captures_in_one_loop():
    slot = jnp.array(0.5)
    y, slot_after, caught = jax.jit(reap(loop, ["y", "never"]))(slot, X)
    expected, ys = by_hand(slot, X)
    assert caught.keys() == {"y"} and slot_after == 3.5
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    np.testing.assert_allclose(caught["y"], ys, rtol=1e-6)
    of_loop = jax.jacrev(lambda x: reap(loop, ["y"])(slot, x)[2]["y"])(X)
    np.testing.assert_allclose(of_loop, jax.jacfwd(lambda x: by_hand(slot, x)[1])(X), rtol=1e-5)


def test_axes_of_loops_come_before_those_of_maps():
    def sine(x):
        return capture(jnp.sin(x), "y")

    def steps(f, x):
        return lax.scan(lambda x, _: (f(x), None), x, None, length=3)[0]

    xs = jnp.stack([X, 2 * X])
    once = jnp.sin(xs)
    expected = jnp.stack([once, jnp.sin(once), jnp.sin(jnp.sin(once))])
    for fn in (
        lambda _, xs: jax.vmap(lambda x: steps(sine, x))(xs),
        lambda _, xs: steps(jax.vmap(sine), xs),
    ):
        np.testing.assert_allclose(reap(fn, ["y"])((), xs)[2]["y"], expected, rtol=1e-6)


def test_without_reap_it_is_the_identity_with_its_derivatives():
    def f(x):
        return capture({"a": x, "b": "text"}, "tree")["a"] ** 2

    assert f(3.0) == 9 and capture("text", "no array") == "text"
    for transform in (jax.jit, jax.checkpoint, lambda f: f):
        assert jax.grad(transform(f))(3.0) == 6
        assert jax.jvp(transform(f), (3.0,), (2.0,)) == (9, 12)
    np.testing.assert_allclose(jax.vmap(f)(X), X**2)


def test_the_last_value_of_a_label_counts_whatever_its_shape():
    def f(_, x):
        x = capture(x, "x")
        return capture({"sum": x.sum(), "by": "hand"}, "x")["sum"]

    y, _, caught = reap(f, ["x"])((), X)
    assert caught["x"] == {"sum": y, "by": "hand"}


def test_an_axis_of_length_nothing_can_be_mapped():
    def f(_, xs):
        return jax.vmap(lambda x: capture(X, "x") + capture(x, "y"))(xs)

    y, _, caught = reap(f, ["x", "y"])((), jnp.zeros((0, 3)))
    assert y.shape == caught["x"].shape == caught["y"].shape == (0, 3)
