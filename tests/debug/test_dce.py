"""`store_dce` and `inspect_dce` tell what a compiled program computes, and leave it as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.debug import inspect_dce, store_dce

ONE = jnp.array(1.0)


@pytest.fixture(autouse=True)
def forget():
    vernal.clear_caches()


def inspected(capsys, name=None) -> str:
    capsys.readouterr()
    inspect_dce(name)
    return capsys.readouterr().out


HEAD = "Found 1 call to `vernal.debug.store_dce`.\nEntry 0:\n"


def test_what_is_not_used_is_removed(capsys):
    @jax.jit
    def f(x):
        a, _, _ = store_dce((jnp.sin(x), jnp.cos(x), jnp.zeros((2, 3)) * x), "f")
        return a

    assert f(ONE) == jnp.sin(ONE)
    assert inspected(capsys, "f") == HEAD + "(f32[], <DCE'd>, <DCE'd>)\n"
    assert inspected(capsys) == "Found 0 calls to `vernal.debug.store_dce`.\n"


def test_removal_by_the_compiler_counts_not_that_by_jax(capsys):
    @jax.jit
    def f(x):
        a, b = store_dce((jnp.sin(x), jnp.cos(x)))
        # Only the compiler sees that this is zero.
        return a + jax.lax.cond(jnp.array(False), lambda: b, lambda: jnp.zeros(()))

    f(ONE)
    assert "(f32[], " in inspected(capsys)


def test_calls_of_one_name_are_told_apart(capsys):
    @jax.jit
    def f(x):
        a, _ = store_dce((jnp.sin(x), jnp.cos(x)))
        _, b = store_dce((jnp.sin(2 * x), jnp.cos(2 * x)))
        return a, b

    f(ONE)
    assert inspected(capsys) == (
        "Found 2 calls to `vernal.debug.store_dce`.\n"
        "Entry 0:\n(f32[], <DCE'd>)\nEntry 1:\n(<DCE'd>, f32[])\n"
    )


def test_a_program_of_which_nothing_is_left_is_seen(capsys):
    jax.jit(lambda x: (store_dce(jnp.sin(x)), x)[1])(ONE)
    assert inspected(capsys) == HEAD + "<DCE'd>\n"


def test_values_and_derivatives_are_as_without_it(capsys):
    x = jnp.array([-0.0, jnp.nan, jnp.inf, 2.0])
    np.testing.assert_array_equal(jnp.signbit(jax.jit(store_dce)(x)), jnp.signbit(x))
    np.testing.assert_array_equal(jax.jit(store_dce)(x), x)
    f = jax.jit(lambda x: jnp.sin(store_dce(x)))
    assert jax.grad(f)(ONE) == jnp.cos(ONE)
    assert jax.jvp(f, (ONE,), (ONE,))[1] == jnp.cos(ONE)
    np.testing.assert_array_equal(jax.vmap(f)(x[3:]), jnp.sin(x[3:]))


def test_a_value_whose_derivative_alone_is_needed_is_removed(capsys):
    f = jax.jit(lambda x: 2 * store_dce(x))
    assert jax.jit(jax.grad(f))(ONE) == 2
    assert inspected(capsys) == HEAD + "<DCE'd>\n"


def test_everything_but_arrays_is_left_alone(capsys):
    key = jax.random.key(0)

    @vernal.filter_jit
    def f(x, key):
        tree = {"x": x, "n": 3, "key": key, "text": "t", "flag": x > 0, "numpy": np.arange(2)}
        return store_dce(tree)

    out = f(ONE, key)
    assert out["n"] == 3 and out["text"] == "t" and out["flag"] and out["key"] == key
    np.testing.assert_array_equal(out["numpy"], [0, 1])
    text = inspected(capsys)
    assert "'text': 't'" in text and "key<fry>[]" in text and "<DCE'd>" not in text


def test_it_must_be_called_inside_of_jit():
    for run in (lambda: store_dce(ONE), lambda: jax.vmap(store_dce)(ONE[None])):
        with pytest.raises(RuntimeError, match="`store_dce` must be called in compiled code"):
            run()


def test_a_sharded_array_is_not_gathered(capsys):
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), jax.P("data"))
        f = jax.jit(lambda x: store_dce((x + 1, x + 2), "sharded")[0])
        assert f(x).sharding.spec == jax.P("data")
        assert "all-gather" not in f.lower(x).compile().as_text()
    assert inspected(capsys, "sharded").endswith("(f32[8], <DCE'd>)\n")
