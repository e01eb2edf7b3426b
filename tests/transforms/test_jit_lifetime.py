"""What `filter_jit` keeps alive: nothing of a function that is gone.

Lives are counted, not memory: weak references, the executables that XLA holds, and the objects that Python's
collector knows. `benchmarks/leaks.py` does the same for 10,000 functions and looks at the memory of the process.
"""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_jit

X = jnp.arange(3.0)
CYCLES = 25


def executables() -> int:
    return len(X.device.client.live_executables())


def objects() -> int:
    """How many there are besides those in JAX's caches, which are bounded, but by thousands."""
    jax.clear_caches()
    gc.collect()
    return len(gc.get_objects())


class Scaled(vernal.Module):
    """A model with static data, which is part of what a program is compiled for."""

    weight: jax.Array
    size: int = vernal.field(static=True)

    @filter_jit
    def method(self, x):
        return self.weight * x * self.size


def call_a_function(i):
    f = filter_jit(lambda model, x: model.weight * x + i)
    np.testing.assert_array_equal(f(Scaled(X, i), X), X * X + i)
    return weakref.ref(f)


def call_a_module_that_is_returned(i):
    f = filter_jit(lambda model: (vernal.tree_at(lambda m: m.weight, model, X + i), str(i)))
    model, text = f(Scaled(X, i))
    np.testing.assert_array_equal(model.weight, X + i)
    assert text == str(i)
    return weakref.ref(f)


def compile_ahead_of_time(i):
    f = filter_jit(lambda x: x * i)
    np.testing.assert_array_equal(f.lower(X).compile()(X), X * i)
    return weakref.ref(f)


def fail_in_a_trace(i):
    @filter_jit
    def f(x):
        raise RuntimeError(f"number {i}")

    with pytest.raises(RuntimeError, match=f"number {i}"):
        f(X)
    return weakref.ref(f)


def fail_in_a_check(i):
    f = filter_jit(lambda x: vernal.runtime.error_if(x, x > i, f"number {i}"))
    with pytest.raises(vernal.runtime.RuntimeCheckError, match=f"number {i}"):
        f(X + i + 1)
    return weakref.ref(f)


def differentiate(i):
    f = filter_jit(vernal.filter_grad(lambda x: (x * x).sum() * i))
    np.testing.assert_array_equal(f(X), 2 * X * i)
    return weakref.ref(f)


CALLS = [
    call_a_function,
    call_a_module_that_is_returned,
    compile_ahead_of_time,
    fail_in_a_trace,
    fail_in_a_check,
]


@pytest.mark.parametrize("call", CALLS)
def test_functions_that_are_made_called_and_dropped_leave_nothing_behind(call):
    # What is made once, however many functions there are, is made here.
    for i in range(5):
        call(i)
    gc.collect()
    compiled, known = executables(), objects()
    refs = [call(i) for i in range(5, 5 + CYCLES)]
    gc.collect()
    assert [ref() for ref in refs] == [None] * CYCLES
    assert executables() <= compiled + 3
    # The references themselves, and a little that does not grow with the number of functions.
    assert objects() - known < 4 * CYCLES


def test_programs_of_functions_that_travel_with_their_arguments_are_bounded(monkeypatch):
    monkeypatch.setattr(vernal.transforms._programs, "_MOST_SHARED", 8)
    for i in range(10):
        differentiate(i)
    gc.collect()
    compiled = executables()
    for i in range(10, 10 + CYCLES):
        differentiate(i)
    gc.collect()
    assert executables() <= compiled + 3


def test_the_models_of_a_method_die_while_its_programs_stay():
    model = Scaled(X, 3)
    np.testing.assert_array_equal(model.method(X), X * X * 3)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None
    traces = Scaled.method.trace_count
    Scaled(X, 3).method(X)
    assert Scaled.method.trace_count == traces


def test_neither_arguments_nor_results_are_kept():
    f = filter_jit(lambda model, x: (model, x + 1))
    model, x = Scaled(jnp.ones(7), 1), jnp.ones(5)
    out = f(model, x)
    refs = [weakref.ref(y) for y in (model, model.weight, x, out[0], out[0].weight, out[1])]
    del model, x, out
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


def test_empty_caches_hold_no_program():
    f = filter_jit(lambda x: x * 7)
    f(X)
    compiled = executables()
    vernal.clear_caches()
    jax.clear_caches()
    gc.collect()
    assert executables() < compiled
    np.testing.assert_array_equal(f(X), X * 7)
    assert f.trace_count == 2
