"""`error_if`: what it accepts, what it does outside of compiled code, and what `on_error` chooses."""

import inspect
import io
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_jit, loops
from vernal.runtime import RuntimeCheckError, error_if


def test_what_holds_returns_the_value():
    x = {"a": jnp.arange(3.0), "b": "text"}
    assert error_if(x, False, "no") is x
    assert error_if(x, np.False_, "no") is x
    out = error_if(x, jnp.array(False), "no")
    assert out["b"] == "text"
    assert out["a"] is x["a"]


@pytest.mark.parametrize("pred", [True, np.True_, jnp.array(True), np.array([False, True])])
def test_outside_of_compiled_code_the_error_is_raised_at_once(pred):
    with pytest.raises(RuntimeCheckError, match="^too big\n") as caught:
        error_if(jnp.ones(2), pred, "too big")
    assert caught.value.message == "too big"
    assert "test_error_if.py" in caught.value.place
    assert "error_if(jnp.ones(2), pred" in caught.value.place.splitlines()[-1]


def test_an_eager_vmap_lists_the_failing_indices():
    with pytest.raises(RuntimeCheckError, match=r"at batch indices \(0, 2\), \(1, 1\)") as caught:
        jax.vmap(jax.vmap(lambda x: error_if(x, x > 5, "big")))(jnp.array([[1, 2, 6], [4, 7, 0]]))
    assert caught.value.message == "big\n  at batch indices (0, 2), (1, 1) (2 of 6)"


def test_an_eager_gradient_raises_and_is_that_of_the_value():
    def f(x, limit):
        return jnp.sum(error_if(x, x > limit, "big") ** 2)

    x = jnp.array([1.0, 2.0])
    np.testing.assert_array_equal(jax.grad(f)(x, 3.0), 2 * x)
    with pytest.raises(RuntimeCheckError, match="^big"):
        jax.grad(f)(x, 1.0)


def test_without_an_array_there_is_nothing_to_thread_on_but_a_known_condition_is_judged():
    assert error_if("text", False, "no") == "text"
    assert error_if(1.0, jnp.array(False), "no") == 1.0
    with pytest.raises(RuntimeCheckError, match="^judged"):
        error_if(1.0, True, "judged")
    with pytest.raises(ValueError, match="error_if has no array to attach the check to"):
        jax.jit(lambda x: error_if(1.0, x > 0, "never"))(1.0)
    with pytest.raises(ValueError, match="no array"):
        error_if(1.0, True, "judged", on_error="nan")


@pytest.mark.parametrize("pred", [1, 0.0, None, jnp.array(1), jnp.array(0.5)])
def test_a_condition_that_is_not_bool_is_refused(pred):
    with pytest.raises(TypeError, match="the condition of an error must be a bool"):
        error_if(jnp.ones(2), pred, "no")


def test_a_message_that_is_not_a_string_is_refused():
    with pytest.raises(TypeError, match="the message of an error must be a string"):
        inspect.unwrap(error_if)(jnp.ones(2), False, 3)


def test_an_unknown_way_to_treat_an_error_is_refused(monkeypatch):
    with pytest.raises(
        ValueError, match="(?s)unknown value of `on_error`.*argument `on_error`.*'ignore'"
    ):
        inspect.unwrap(error_if)(jnp.ones(2), False, "no", on_error="ignore")
    monkeypatch.setenv("VERNAL_ON_ERROR", "ignore")
    with pytest.raises(
        ValueError, match="(?s)unknown value of `on_error`.*environment variable VERNAL_ON_ERROR"
    ):
        error_if(jnp.ones(2), False, "no")


def test_the_environment_is_read_when_it_is_called_and_an_argument_comes_first(monkeypatch):
    x = jnp.ones(2)
    monkeypatch.setenv("VERNAL_ON_ERROR", "off")
    assert error_if(x, True, "big") is x
    with pytest.raises(RuntimeCheckError):
        error_if(x, True, "big", on_error="raise")
    monkeypatch.setenv("VERNAL_ON_ERROR", "nan")
    assert jnp.isnan(error_if(x, True, "big")).all()
    monkeypatch.delenv("VERNAL_ON_ERROR")
    with pytest.raises(RuntimeCheckError):
        error_if(x, True, "big")


def test_nan_replaces_the_failing_elements_of_a_batch():
    def f(x):
        tree = (x, jnp.int32(3), jnp.array(False), jnp.int8(1))
        return error_if(tree, x > 1, "big", on_error="nan")

    x, i, b, small = vernal.filter_jit(jax.vmap(f))(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(x, [1, np.nan])
    np.testing.assert_array_equal(i, [3, np.iinfo(np.int32).max])
    np.testing.assert_array_equal(b, [False, True])
    np.testing.assert_array_equal(small, [1, 127])


def test_nan_leaves_the_derivative_alone():
    def f(x):
        return jnp.sum(error_if(x, x > 0, "big", on_error="nan") * 3)

    np.testing.assert_array_equal(jax.grad(f)(jnp.ones(2)), [3, 3])
    batch = jax.vmap(jax.grad(f))(jnp.array([[1.0, 1.0], [-1.0, -1.0]]))
    np.testing.assert_array_equal(batch, np.full((2, 2), 3))
    value, dot = jax.jvp(jax.vmap(f), (jnp.array([1.0, -1.0]),), (jnp.ones(2),))
    np.testing.assert_array_equal(value, [np.nan, -3])
    np.testing.assert_array_equal(dot, [3, 3])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_breakpoint_prints_the_error_stops_and_goes_on_with_nan(monkeypatch, capfd, compiled):
    def f(x):
        y = error_if(x, x > 0, "stop here", on_error="breakpoint")
        return y + 1

    f = vernal.filter_jit(f) if compiled else f
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\n"))
    assert f(jnp.array(-1.0)) == 0
    assert "jdb" not in capfd.readouterr().out
    assert jnp.isnan(f(jnp.array(1.0)))
    out, err = capfd.readouterr()
    assert err.startswith("stop here\n")
    assert "Entering jdb" in out


def test_checks_disappear_from_a_program_when_they_are_off():
    def f(x, on_error):
        return error_if(x, x > 0, "big", on_error=on_error)

    def count(on_error):
        return len(jax.make_jaxpr(lambda x: f(x, on_error))(1.0).eqns)

    assert count("off") == 1 < count("nan") < count("raise")


def scaled(v, limit=10.0):
    matrix = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    return matrix @ error_if(v, matrix[0, 0] > limit, "entry too large")


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint, vernal.filter_jit])
def test_a_linear_function_with_a_check_has_a_transpose(around):
    back = jax.linear_transpose(around(scaled), jnp.zeros(2))
    ct = jnp.array([1.0, 10.0])
    for run in (back, jax.jit(back), lambda ct: jax.vmap(back)(ct[None])):
        np.testing.assert_allclose(jnp.ravel(run(ct)[0]), [31.0, 42.0])
    with pytest.raises(RuntimeCheckError, match="entry too large"):
        vernal.filter_jit(
            lambda limit: jax.linear_transpose(lambda v: around(scaled)(v, limit), jnp.zeros(2))(ct)
        )(jnp.array(0.5))


def test_a_check_whose_condition_would_be_transposed_says_so():
    back = jax.linear_transpose(lambda v: error_if(v, jnp.any(v < 0), "negative"), jnp.zeros(2))
    with pytest.raises(ValueError, match="a check cannot be transposed: its condition depends"):
        back(jnp.ones(2))


def counting(kind, limit, steps=8, **options):
    """Adds 1 to x in every step; x may not exceed the limit."""

    def run(x):
        def body(carry):
            i, x = carry
            return i + 1, error_if(x + 1, x >= limit, "too large")

        return loops.while_loop(lambda c: c[0] < steps, body, (0, x), kind=kind, **options)[1]

    return run


KINDS = [
    ("lax", {}),
    ("lax", {"max_steps": 10}),
    ("bounded", {"max_steps": 10}),
    ("bounded", {"max_steps": 2**31}),
    ("checkpointed", {}),
    ("checkpointed", {"max_steps": 10}),
]


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.parametrize("derivative", [False, True])
@pytest.mark.sample(3)
def test_the_message_tells_the_step_and_the_element(kind, options, derivative):
    fn = counting(kind, 4, **options)
    if derivative:
        plain, fn = fn, lambda x: jax.jvp(plain, (x,), (x,))
    with pytest.raises(RuntimeCheckError, match="^too large\n  at step 4\n"):
        jax.block_until_ready(filter_jit(fn)(jnp.float32(0)))
    text = re.escape("too large\n  at batch index (1,) (1 of 3)\n  at step 3\n")
    with pytest.raises(RuntimeCheckError, match=f"^{text}"):
        jax.block_until_ready(filter_jit(jax.vmap(fn))(jnp.array([0.0, 1.0, -9.0])))


@pytest.mark.parametrize("kind, options", KINDS)
@pytest.mark.sample(3)
def test_the_message_of_a_condition_tells_which_step_it_is_about(kind, options):
    def fn(x):
        def cond(carry):
            i, x = carry
            return error_if(i, x >= 4, "too large") < 8

        def body(carry):
            i, x = carry
            return i + 1, x + 1

        return loops.while_loop(cond, body, (0, x), kind=kind, **options)[1]

    def tangent(x):
        return jax.jvp(fn, (x,), (x,))

    for f in fn, tangent:
        with pytest.raises(RuntimeCheckError, match="^too large\n  at step 4\n"):
            jax.block_until_ready(filter_jit(f)(jnp.float32(0)))
    text = re.escape("too large\n  at batch index (1,) (1 of 3)\n  at step 3\n")
    with pytest.raises(RuntimeCheckError, match=f"^{text}"):
        jax.block_until_ready(filter_jit(jax.vmap(fn))(jnp.array([0.0, 1.0, -9.0])))
    twice = jax.vmap(lambda x: loops.fori_loop(0, 2, lambda i, x: fn(x), x))
    text = re.escape(
        "too large\n  at batch index (1,) (1 of 2)\n  at step 1, in step 1 of the loop around it\n"
    )
    with pytest.raises(RuntimeCheckError, match=f"^{text}"):
        jax.block_until_ready(filter_jit(twice)(jnp.array([-50.0, -5.0])))


@pytest.mark.parametrize("kind", ["lax", "checkpointed"])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_message_tells_the_step_of_a_scan(kind, reverse):
    def run(xs):
        def body(total, x):
            return total + error_if(x, x == 3, "three"), None

        return loops.scan(body, 0.0, xs, kind=kind, reverse=reverse)[0]

    with pytest.raises(RuntimeCheckError, match=f"^three\n  at step {1 if reverse else 3}\n"):
        jax.block_until_ready(filter_jit(run)(jnp.arange(5.0)))


def test_the_message_tells_the_steps_of_nested_loops():
    def run(x):
        inner = counting("checkpointed", 4, steps=2)
        return loops.fori_loop(0, 4, lambda i, x: inner(x), x)

    text = "^too large\n  at step 0, in step 2 of the loop around it\n"
    with pytest.raises(RuntimeCheckError, match=text):
        jax.block_until_ready(filter_jit(run)(jnp.float32(0)))
    text = re.escape(
        "too large\n  at batch indices (0,), (2,) (2 of 3)\n  at step 0, in step 2 of the loop around it\n"
    )
    with pytest.raises(RuntimeCheckError, match=f"^{text}"):
        jax.block_until_ready(filter_jit(jax.vmap(run))(jnp.array([0.0, -9.0, 0.0])))
