"""`assert_max_traces` counts traces, and says what has changed."""

import functools
import inspect
import re
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import vernal
from vernal.debug import assert_max_traces, get_num_traces

ONE = jnp.array(1.0)


def limited(n: Any = 1) -> Any:
    def add(a, b=2, *, c=3):
        return a

    return vernal.filter_jit(assert_max_traces(add, max_traces=n))


def test_one_trace_serves_many_calls():
    f = limited()
    f(ONE)
    f(2 * ONE)
    assert get_num_traces(f) == 1


@pytest.mark.parametrize(
    "first, second, expected",
    [
        (((ONE,), {}), ((jnp.ones(3),), {}), "a: weak_f32[] -> f32[3]"),
        (((ONE, 1), {}), ((ONE, 2), {}), "b: 1 -> 2"),
        (((ONE,), {"c": 1}), ((ONE,), {"c": 1.0}), "c: 1 -> 1.0"),
        (((ONE,), {}), ((ONE,), {"c": 1}), "c: not given -> 1"),
        (((ONE,), {"c": 1}), ((ONE,), {}), "c: 1 -> not given"),
        (((ONE,), {}), ((jnp.float32(1),), {}), "a: weak_f32[] -> f32[]"),
        (
            (({"w": ONE, "v": [ONE]},), {}),
            (({"w": ONE, "v": [ONE.astype(jnp.int32)]},), {}),
            "a['v'][0]: weak_f32[] -> i32[]",
        ),
        (((ONE, lambda: 1), {}), ((ONE, lambda: 2), {}), "b: <lambda at test_max_traces.py:"),
    ],
    ids=["shape", "number", "type", "given", "not_given", "weak", "nested", "function"],
)
def test_one_too_many_says_what_has_changed(first, second, expected):
    f = limited()
    f(*first[0], **first[1])
    with pytest.raises(RuntimeError, match=r"`add` was traced 2 times") as raised:
        f(*second[0], **second[1])
    assert f"got: {expected}" in str(raised.value)
    assert "at most 1" in str(raised.value)


def test_two_functions_of_one_name_are_told_apart():
    f = limited()
    f(ONE, lambda: 1)
    with pytest.raises(RuntimeError, match=r"b: <lambda at .*:\d+> -> <lambda at .*:\d+>"):
        f(ONE, lambda: 2)


def test_the_call_that_is_most_alike_is_compared_with():
    f = limited(3)
    f(ONE, 1, c="a")
    f(ONE, 2, c="b")
    f(ONE, 3, c="c")
    with pytest.raises(RuntimeError, match=r"got: c: 'b' -> 'd'\n"):
        f(ONE, 2, c="d")


def test_a_trace_without_a_change_is_told_as_such():
    f = assert_max_traces(lambda x: x, max_traces=1)
    f(ONE)
    with pytest.raises(RuntimeError, match="arguments that are all as before"):
        f(ONE)


def test_no_trace_may_be_allowed():
    with pytest.raises(RuntimeError, match=r"traced 1 times"):
        assert_max_traces(lambda x: x, max_traces=0)(ONE)


def test_any_number_may_be_allowed():
    f = limited(None)
    for n in range(5):
        f(ONE, n)
    assert get_num_traces(f) == 5


def test_a_change_of_sharding_is_a_change():
    mesh = jax.make_mesh((8,), ("data",))
    f = jax.jit(assert_max_traces(lambda x: x, max_traces=1))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(8.0), jax.P("data"))
        f(x)
        f(x + 1)
        with pytest.raises(RuntimeError, match=r"x: .*'data'.* -> .*\S"):
            f(jax.device_put(x, jax.P(None)))


def test_it_is_a_decorator_for_methods_and_keeps_names():
    class Model(vernal.Module):
        w: jax.Array

        @vernal.filter_jit
        @assert_max_traces(max_traces=1)
        def __call__(self, x):
            "Multiplies."
            return self.w * x

        @assert_max_traces(max_traces=1)
        def twice(self, x):
            return 2 * self.w * x

    model = Model(ONE)
    assert model(ONE) == 1 and model.twice(ONE) == 2
    assert Model.__call__.__doc__ == "Multiplies."
    assert list(inspect.signature(Model.twice).parameters) == ["self", "x"]
    with pytest.raises(RuntimeError, match=re.escape("self.w: weak_f32[] -> f32[2]")):
        Model(jnp.ones(2))(ONE)
    assert get_num_traces(model.twice) == 1


def test_the_arrays_of_a_module_are_arguments():
    class Scale(vernal.Module):
        w: jax.Array

        def __call__(self, x):
            return self.w * x

    f = assert_max_traces(Scale(ONE), max_traces=None)
    assert len(jax.tree.leaves(f)) == 1
    assert vernal.filter_jit(f)(ONE) == 1
    g = jax.tree.map(lambda w: w * jnp.ones(3), f)
    vernal.filter_jit(g)(ONE)
    # Copies count together.
    assert get_num_traces(f) == get_num_traces(g) == 2


def test_copies_count_together_and_two_wrappers_do_not():
    def f(x):
        return x

    a, b = assert_max_traces(f, max_traces=1), assert_max_traces(f, max_traces=1)
    vernal.filter_jit(lambda g, x: g(x))(a, ONE)
    jax.jit(b)(ONE)
    assert get_num_traces(a) == get_num_traces(b) == 1


def test_wrapped_functions_are_seen_through():
    f = assert_max_traces(lambda x: x, max_traces=None)

    @functools.wraps(f)
    def g(x):
        return f(x)

    jax.jit(jax.jit(g))(ONE)
    assert get_num_traces(vernal.filter_jit(jax.jit(g))) == 1
    with pytest.raises(ValueError, match="the traces of this function are not counted"):
        get_num_traces(lambda x: x)


def test_eight_threads_count_right():
    f = assert_max_traces(lambda x: x, max_traces=None)
    threads = [threading.Thread(target=lambda: [f(i) for i in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert get_num_traces(f) == 400


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="assert_max_traces needs a function"):
        inspect.unwrap(assert_max_traces)(3, max_traces=1)
    with pytest.raises(ValueError, match="the number of traces cannot be negative"):
        assert_max_traces(lambda x: x, max_traces=-1)
    with pytest.raises(TypeError, match="missing 1 required"):
        limited()()
