"""Eight threads that call one compiled function first, at the same time."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_jit
from vernal.runtime import RuntimeCheckError, error_if

THREADS = 8


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """What `work(0)`, ..., `work(7)` return or raise, each in a thread of its own, all begun together."""
    barrier = threading.Barrier(THREADS)
    results: list[Any] = [None] * THREADS

    def run(i: int) -> None:
        barrier.wait(timeout=60)
        try:
            results[i] = work(i)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=200)
        assert not thread.is_alive()
    return results


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """The names of the functions that XLA compiles."""
    names: list[str] = []

    def listen(event: str, duration: float, **about: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


class Model(vernal.Module):
    layers: list[jax.Array]
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer @ x)
        return x


def model(size: int) -> Model:
    return Model([jnp.full((size, size), 0.1)] * 3)


def expected(size: int) -> Any:
    x = np.ones(size, np.float32)
    for _ in range(3):
        x = np.tanh(np.full((size, size), 0.1, np.float32) @ x)
    return x


@pytest.mark.parametrize("attempt", range(3))
def test_a_first_call_in_eight_threads_compiles_once_and_is_right(compiled, attempt):
    inside = []

    @filter_jit
    def called_first(model, x, attempt):
        inside.append(threading.get_ident())
        return model(x), attempt

    results = at_once(lambda i: called_first(model(3), jnp.ones(3), attempt))
    for out, given in results:
        np.testing.assert_allclose(out, expected(3), rtol=1e-5)
        assert given == attempt
    assert len(inside) == called_first.trace_count == 1
    assert sum("called_first" in name for name in compiled) == 1


def test_each_shape_is_traced_once():
    inside = []

    @filter_jit
    def f(model, x):
        inside.append(x.shape)
        return model(x)

    results = at_once(lambda i: f(model(i // 2 + 1), jnp.ones(i // 2 + 1)))
    for i, out in enumerate(results):
        np.testing.assert_allclose(out, expected(i // 2 + 1), rtol=1e-5)
    assert sorted(inside) == [(1,), (2,), (3,), (4,)]


def test_each_static_value_is_traced_once():
    inside = []

    @filter_jit
    def f(x, n):
        inside.append(n)
        return x * n, n

    results = at_once(lambda i: f(jnp.ones(2), i % 4))
    assert [(float(out[0]), n) for out, n in results] == [(i % 4, i % 4) for i in range(THREADS)]
    assert sorted(inside) == [0, 1, 2, 3]


def test_a_check_that_fails_in_one_thread_is_raised_there_alone():
    @filter_jit
    def f(x):
        return error_if(x, x > 6, "larger than six") + 1

    results = at_once(lambda i: f(jnp.float32(i)))
    assert [float(out) for out in results[:7]] == [i + 1.0 for i in range(7)]
    assert isinstance(results[7], RuntimeCheckError)
    assert results[7].message == "larger than six"
    assert f.trace_count == 1


def test_an_exception_in_one_trace_does_not_reach_the_others():
    def f(x, n):
        if n == 5:
            raise RuntimeError("five")
        return x + n

    f = filter_jit(f)
    results = at_once(lambda i: f(jnp.zeros(1), i))
    assert isinstance(results[5], RuntimeError)
    assert [float(results[i][0]) for i in range(THREADS) if i != 5] == [0, 1, 2, 3, 4, 6, 7]


def test_a_first_call_that_calls_another_compiled_function_does_not_wait_for_itself():
    inner = filter_jit(lambda x: x * 2)
    outer = filter_jit(lambda x: inner(x) + 1)

    # Half of the threads begin inside, half outside.
    results = at_once(lambda i: (inner if i % 2 else outer)(jnp.full(1, float(i))))
    assert [float(out[0]) for out in results] == [
        i * 2.0 if i % 2 else i * 2.0 + 1 for i in range(THREADS)
    ]
    assert outer.trace_count == 1


def test_contexts_of_one_thread_do_not_reach_the_programs_of_another():
    seen = []

    @filter_jit
    def f(x):
        seen.append(jax.config.jax_default_matmul_precision)
        return x @ x

    def work(i):
        if i % 2:
            return f(jnp.ones((2, 2)))
        with jax.default_matmul_precision("float32"):
            return f(jnp.ones((2, 2)))

    for out in at_once(work):
        np.testing.assert_array_equal(out, np.full((2, 2), 2.0))
    assert sorted(map(str, seen)) == ["None", "float32"]


class Choice:
    """A static value that is compared in Python, and lets other threads run meanwhile."""

    def __init__(self, number: int):
        self.number = number

    def __eq__(self, other):
        time.sleep(0)
        return type(other) is Choice and self.number == other.number

    def __hash__(self):
        return self.number % 3


class Chooser(vernal.Module):
    w: jax.Array
    choice: Choice = vernal.field(static=True)
    held: tuple[Choice, dict[str, Callable[..., Any]]]

    def __call__(self):
        return self.w + self.choice.number


def test_structures_compared_in_python_in_many_threads():
    """Plain `jax.jit` may crash here: see CONTRIBUTING.md."""
    call = filter_jit(lambda model: model())
    w = jnp.ones(3)

    def ask(i):
        numbers = [(7 * k + i) % 25 for k in range(60)]
        models = [Chooser(w, Choice(n), (Choice(n), {"f": len})) for n in numbers]
        return [(float(call(model)[0]), 1.0 + n) for model, n in zip(models, numbers, strict=True)]

    for answers in at_once(ask):
        assert all(got == right for got, right in answers)
