"""`scan`: carries, slices and results of any kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import scan

KINDS = "lax", "checkpointed"


def cell(carry, x):
    h, n = carry
    h = jnp.tanh(h + x["a"] * n)
    return (h, n + 1.0), {"h": 2 * h, "b": x["b"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [0, 1, 7])
@pytest.mark.sample(6)
def test_it_agrees_with_jax(kind, reverse, length, getkey):
    xs = {"a": jax.random.normal(getkey(), (length, 2)), "b": jnp.arange(length)}
    init = jax.random.normal(getkey(), (2,)), 0.0

    def ours(init, a):
        return scan(cell, init, {**xs, "a": a}, reverse=reverse, kind=kind)

    def jaxs(init, a):
        return jax.lax.scan(cell, init, {**xs, "a": a}, reverse=reverse)

    args = init, xs["a"]
    assert vernal.tree_allclose(ours(*args), jaxs(*args), rtol=1e-6)

    def loss(fn):
        def of(init, a):
            (h, _), ys = fn(init, a)
            return jnp.sum(h**2) + jnp.sum(ys["h"] * jnp.cos(ys["h"]))

        return of

    got, want = (jax.jit(jax.grad(loss(fn), (0, 1)))(*args) for fn in (ours, jaxs))
    assert vernal.tree_allclose(got, want, rtol=1e-5, atol=1e-6)
    got, want = (jax.jvp(loss(fn), args, args) for fn in (ours, jaxs))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    got, want = (
        jax.vmap(fn, in_axes=((0, None), None))((jnp.ones((3, 2)), 0.0), xs["a"])
        for fn in (ours, jaxs)
    )
    assert vernal.tree_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("checkpoints", [1, 2, 5, 100, "all", None])
@pytest.mark.sample(3)
def test_any_number_of_checkpoints_gives_the_same(checkpoints, getkey):
    xs = jax.random.normal(getkey(), (6, 2))
    w = jax.random.normal(getkey(), (2, 2))

    def loss(run, xs, w):
        h, ys = run(lambda h, x: (jnp.tanh(w @ h + x),) * 2, jnp.ones(2), xs)
        return jnp.sum(h * ys[2])

    def ours(*args):
        return scan(*args, kind="checkpointed", checkpoints=checkpoints)

    got, want = (jax.grad(loss, (1, 2))(run, xs, w) for run in (ours, jax.lax.scan))
    assert vernal.tree_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_an_array_is_given_to_every_step_and_returned_once(kind):
    marker = object()

    def step(carry, x):
        fn, x, tag, number, nothing = x
        assert tag == "tag" and number == 3 and type(number) is int and nothing is None
        return carry + 1, {"y": fn(x), "fn": fn, "marker": marker, "number": 5, "nothing": None}

    xs = jnp.sin, np.arange(4, dtype=np.float32), "tag", 3, None
    n, ys = scan(step, 0, xs, kind=kind)
    assert n == 4 and ys["fn"] is jnp.sin and ys["marker"] is marker and ys["nothing"] is None
    np.testing.assert_allclose(ys["y"], jnp.sin(jnp.arange(4.0)), rtol=1e-6)
    # As in JAX, a number is an array, and so it is stacked.
    np.testing.assert_array_equal(ys["number"], [5] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_modules_are_sliced_and_stacked(kind):
    keys = jax.random.split(jax.random.key(0), 3)
    models = vernal.filter_vmap(lambda key: vernal.nn.Linear(2, 2, key=key))(keys)

    def step(x, given):
        model, key = given
        return model(x) + jax.random.normal(key, (2,)), (key, model)

    x, (out_keys, out) = scan(step, jnp.ones(2), (models, keys), kind=kind, reverse=True)
    want, (jax_keys, _) = jax.lax.scan(step, jnp.ones(2), (models, keys), reverse=True)
    np.testing.assert_allclose(x, want, rtol=1e-6)
    assert type(out) is type(models) and vernal.tree_equal(out, models)
    assert jnp.all(out_keys == keys) and jnp.all(jax_keys == keys)


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_is_enough(kind):
    x, ys = scan(lambda x, none: (2 * x, (x, none)), 1, length=4, kind=kind)
    assert x == 16 and ys[1] is None
    np.testing.assert_array_equal(ys[0], [1, 2, 4, 8])
    out = scan(lambda x, fn: (fn(x), None), jnp.array(1.0), jnp.sin, 2, kind=kind)
    np.testing.assert_allclose(out[0], jnp.sin(jnp.sin(1.0)))


def test_unrolling_is_that_of_jax():
    def run(x):
        return scan(lambda x, _: (jnp.sin(x), None), x, length=6, unroll=3)

    assert "unroll=3" in str(jax.make_jaxpr(run)(1.0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_in_a_scan(kind, getkey):
    w = jax.random.normal(getkey(), (2, 2)) / 2
    xs = jax.random.normal(getkey(), (3, 2, 2))

    def loss(run, w):
        def outer(h, x):
            h, ys = run(lambda h, x: (jnp.tanh(w @ h + x), h), h, x)
            return h, jnp.sum(ys)

        h, ys = run(outer, jnp.ones(2), xs)
        return jnp.sum(h) + ys @ jnp.arange(3.0)

    def ours(f, init, xs):
        return scan(f, init, xs, kind=kind)

    got, want = (
        jax.jit(jax.grad(loss, 1), static_argnums=0)(run, w) for run in (ours, jax.lax.scan)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_all_checkpoints_need_as_much_memory_as_steps():
    def memory(checkpoints):
        def loss(x):
            x, _ = scan(
                lambda x, _: (jnp.sin(x), None),
                x,
                length=100,
                kind="checkpointed",
                checkpoints=checkpoints,
            )
            return jnp.sum(x)

        x = jnp.ones(1000)
        analysis = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
        return analysis.temp_size_in_bytes / x.nbytes

    assert memory(5) < 15 < memory(None) < 40 < 95 < memory("all") < 110
