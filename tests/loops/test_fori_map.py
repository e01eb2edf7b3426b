"""`fori_loop` and `map`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.loops import fori_loop, map
from vernal.runtime import RuntimeCheckError, error_if

KINDS = "lax", "checkpointed", "bounded"


def body(i, carry):
    fn, x = carry
    return fn, fn(x) * (1.0 + jnp.asarray(i, float))


def plain(lower, upper, x):
    return jax.lax.fori_loop(
        lower, upper, lambda i, x: jnp.sin(x) * (1.0 + jnp.asarray(i, float)), x
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [(0, 4), (2, 3), (-3, 2), (3, 3), (5, 1)])
@pytest.mark.sample(3)
def test_known_bounds_agree_with_jax(kind, bounds):
    def ours(x):
        return fori_loop(*bounds, body, (jnp.sin, x), kind=kind)[1]

    x = jnp.array([0.3, 0.7])
    np.testing.assert_allclose(ours(x), plain(*bounds, x), rtol=1e-6)
    got, want = (jax.jacrev(f)(x) for f in (ours, lambda x: plain(*bounds, x)))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    got, want = (jax.jacfwd(f)(x) for f in (ours, lambda x: plain(*bounds, x)))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sample(3)
def test_bounds_that_are_arrays_agree_with_jax(kind):
    options = {"max_steps": 9} if kind == "bounded" else {}

    @jax.jit
    def ours(lower, upper, x):
        return fori_loop(lower, upper, body, (jnp.sin, x), kind=kind, **options)[1]

    x = jnp.array(0.3)
    lowers, uppers = jnp.array([0, 2, -3, 3, 5]), jnp.array([4, 3, 2, 3, 1])
    for lower, upper in zip(lowers, uppers, strict=True):
        np.testing.assert_allclose(ours(lower, upper, x), plain(lower, upper, x), rtol=1e-6)
    batch = jax.vmap(ours, in_axes=(0, 0, None))(lowers, uppers, x)
    np.testing.assert_allclose(
        batch, [plain(*b, x) for b in zip(lowers, uppers, strict=True)], rtol=1e-6
    )
    if kind != "lax":
        got = jax.vmap(jax.grad(ours, 2), in_axes=(0, 0, None))(lowers, uppers, x)
        pairs = zip(lowers.tolist(), uppers.tolist(), strict=True)
        want = [jax.grad(plain, 2)(lower, upper, x) for lower, upper in pairs]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_greatest_number_of_steps_holds():
    assert fori_loop(0, jnp.array(9), lambda i, n: n + 1, 0, max_steps=4) == 4


@pytest.mark.parametrize("bounds", [(0, 3), (0, jnp.array(3)), (jnp.array(0), 3)])
def test_the_integers_are_those_of_jax(bounds):
    seen = []

    def look(i, x):
        seen.append((i.shape, i.dtype, i.weak_type))
        return x

    fori_loop(*bounds, look, 0.0)
    jax.lax.fori_loop(*bounds, look, 0.0)
    assert seen[0][:2] == seen[1][:2] == ((), jnp.int32)
    if type(bounds[0]) is int:
        assert seen[0] == seen[1]


def test_bounds_of_different_dtypes_have_room():
    lower, upper = jnp.array(-2, jnp.int8), jnp.array(200, jnp.uint8)
    assert fori_loop(lower, upper, lambda i, n: n + 1, 0) == 202
    assert fori_loop(-2, upper, lambda i, n: n + 1, 0) == 202
    assert fori_loop(np.int8(-2), np.uint8(200), lambda i, n: n + 1, 0) == 202


def test_unrolling_is_that_of_jax():
    def run(x):
        return fori_loop(0, 6, lambda i, x: jnp.sin(x), x, unroll=3)

    assert "unroll=3" in str(jax.make_jaxpr(run)(1.0))


@pytest.mark.parametrize("batch_size", [None, 1, 3, 7, 10])
@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
@pytest.mark.sample(3)
def test_map_agrees_with_jax_and_vmap(kind, batch_size, getkey):
    x, key = jax.random.normal(getkey(), (7, 2)), jax.random.split(getkey(), 7)
    w = jax.random.normal(getkey(), (2,))

    def f(given, w):
        fn, (x, key) = given
        return {"y": fn(w * x), "key": key, "fn": fn, "number": 3}

    def ours(x, w):
        xs = jnp.sin, (x, key)
        return map(lambda given: f(given, w), xs, batch_size=batch_size, kind=kind)

    out = ours(x, w)
    want = jnp.sin(w[None] * x)
    np.testing.assert_allclose(out["y"], want, rtol=1e-6)
    assert out["fn"] is jnp.sin and jnp.all(out["key"] == key)
    np.testing.assert_array_equal(out["number"], [3] * 7)
    got = jax.jit(jax.grad(lambda x, w: jnp.sum(ours(x, w)["y"] ** 2), (0, 1)))(x, w)
    want = jax.grad(lambda x, w: jnp.sum(jnp.sin(w[None] * x) ** 2), (0, 1))(x, w)
    assert vernal.tree_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_map_calls_modules_and_empty_stacks():
    linear = vernal.nn.Linear(2, 3, key=jax.random.key(0))
    assert map(linear, jnp.ones((0, 2))).shape == (0, 3)
    assert map(linear, jnp.ones((0, 2)), batch_size=2).shape == (0, 3)
    np.testing.assert_allclose(
        map(linear, jnp.ones((5, 2)), batch_size=2), jnp.stack([linear(jnp.ones(2))] * 5), rtol=1e-6
    )


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
def test_a_check_of_map_tells_the_element(kind):
    def run(x):
        return map(lambda x: error_if(x, x == 4, "four"), x, batch_size=3, kind=kind)

    for start, text in (
        (0, r"index \(1,\) \(1 of 3\)\n  at step 1\n"),
        # Of the seven elements the last one is not in a whole batch.
        (-2, r"index \(0,\) \(1 of 1\)\n  at step 2\n"),
    ):
        with pytest.raises(RuntimeCheckError, match=rf"^four\n  at batch {text}"):
            jax.block_until_ready(vernal.filter_jit(run)(jnp.arange(7.0) + start))
