"""Callbacks with arguments and results of any kind."""

import inspect
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_debug_callback, filter_io_callback, filter_pure_callback


def like(*shape, dtype: Any = jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def host(x, scale, *, how):
    return {"value": np.asarray(x) * scale, "how": how, "none": None}


def test_a_pure_callback_takes_and_returns_any_object():
    x = jnp.arange(3.0)
    marker = object()
    wanted = {"value": like(3), "how": marker, "none": None}

    def call(x):
        return filter_pure_callback(host, x, 2.0, how=marker, result_shape_dtypes=wanted)

    for run in (call, vernal.filter_jit(call)):
        out = run(x)
        np.testing.assert_array_equal(out["value"], 2 * x)
        assert out["how"] is marker and out["none"] is None


def test_it_agrees_with_equinox(getkey):
    x = jax.random.normal(getkey(), (3,))
    args = {"result_shape_dtypes": (like(3), "a", like(dtype=jnp.int32))}

    def fn(x, tag):
        return np.sin(x), tag, np.int32(3)

    ours = filter_pure_callback(fn, x, "a", **args)
    theirs = eqx.filter_pure_callback(fn, x, "a", **args)
    assert ours[1] == theirs[1]
    np.testing.assert_array_equal(ours[0], theirs[0])
    assert ours[2].dtype == theirs[2].dtype


def test_arrays_in_result_shape_dtypes_stand_for_their_shapes():
    out = filter_pure_callback(
        lambda x: x, jnp.ones(2), result_shape_dtypes=np.zeros(2, np.float32)
    )
    np.testing.assert_array_equal(out, np.ones(2))


def test_numbers_and_double_precision_become_what_jax_would_make_of_them():
    assert filter_pure_callback(lambda: 1.5, result_shape_dtypes=like()) == 1.5
    out = filter_pure_callback(lambda: np.float64(1.5), result_shape_dtypes=like())
    assert out.dtype == jnp.float32
    assert filter_pure_callback(lambda: True, result_shape_dtypes=like(dtype=bool)).dtype == bool


class Host(vernal.Module):
    offset: jax.Array
    name: str

    def method(self, x):
        assert not vernal.show.is_traced(self.offset)
        return np.asarray(x + self.offset), self.name


def test_a_method_of_a_traced_module_gets_its_values():
    @vernal.filter_jit
    def run(module, x):
        return filter_pure_callback(module.method, x, result_shape_dtypes=(like(2), "host"))

    out, name = run(Host(jnp.array(1.0), "host"), jnp.ones(2))
    np.testing.assert_array_equal(out, 2 * np.ones(2))
    assert name == "host"


@pytest.mark.parametrize(
    "method", ["sequential", "sequential_unrolled", "expand_dims", "broadcast_all"]
)
def test_vmap_methods(method):
    def double(x, y, tag):
        return np.asarray(x) * 2 + 0 * np.asarray(y), tag

    def call(x, y):
        wanted = (like(2), "t")
        return filter_pure_callback(
            double, x, y, "t", result_shape_dtypes=wanted, vmap_method=method
        )

    x = jnp.arange(6.0).reshape(3, 2)
    out, tag = vernal.filter_vmap(call, in_axes=(0, None))(x, jnp.ones(2))
    np.testing.assert_array_equal(out, 2 * x)
    assert tag == "t"


def test_an_io_callback_has_side_effects():
    for ordered in (False, True):
        seen = []

        def record(x, tag, seen=seen):
            seen.append((float(x), tag))

        @vernal.filter_jit
        def run(x, ordered=ordered, record=record):
            for i in range(3):
                filter_io_callback(record, x + i, i, result_shape_dtypes=None, ordered=ordered)
            return x

        run(jnp.array(1.0)).block_until_ready()
        jax.effects_barrier()
        assert sorted(seen) == [(1.0, 0), (2.0, 1), (3.0, 2)]
        if ordered:
            assert seen == sorted(seen)
    count = iter(range(10))
    out = filter_io_callback(
        lambda: (np.int32(next(count)), "n"), result_shape_dtypes=(like(dtype=jnp.int32), "n")
    )
    assert out[0] == 0 and out[1] == "n"


def test_a_debug_callback_sees_values_under_every_transformation():
    seen = []

    def look(tag, tree, *, more):
        seen.append((tag, float(tree["x"]), more))

    def fn(x):
        filter_debug_callback(look, "x", {"x": x, "f": jnp.sin}, more=None)
        return x**2

    fn(jnp.array(1.0))
    jax.jit(fn)(jnp.array(2.0))
    jax.grad(fn)(jnp.array(3.0))
    jax.vmap(fn)(jnp.array([4.0, 5.0]))
    jax.effects_barrier()
    assert sorted(seen) == [("x", float(i), None) for i in range(1, 6)]


def test_an_ordered_debug_callback_keeps_the_order():
    seen = []

    @jax.jit
    def fn(x):
        for i in range(4):
            filter_debug_callback(lambda n, x: seen.append(n), i, x, ordered=True)

    fn(jnp.ones(()))
    jax.effects_barrier()
    assert seen == [0, 1, 2, 3]


MISMATCHES = {
    "static": (lambda: "a", "b", "result: expected 'b', got 'a'"),
    "shape": (lambda: [np.ones(3, np.float32)], [like(2)], "result[0]: expected f32[2]"),
    "dtype": (lambda: 1, like(), "result: expected f32[](struct), got i32[](numpy)"),
    "structure": (lambda: (1.0, 2.0), [like(), like()], "result: expected list"),
    "missing": (lambda: {}, {"k": like()}, "result['k']: expected f32[](struct), got nothing"),
    "not an array": (lambda: "text", like(), "result: expected f32[](struct), got 'text'"),
    "objects": (lambda: np.array(["a"]), like(1), "result: expected f32[1](struct)"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("case", MISMATCHES)
def test_a_wrong_result_is_told_by_path(case, jit):
    fn, wanted, text = MISMATCHES[case]

    def both(x):
        return fn(), np.float32(0)

    for callback in (filter_pure_callback, filter_io_callback):

        def run(x, callback=callback):
            # Something must come of it, lest JAX drop the call.
            return callback(both, x, result_shape_dtypes=(wanted, like()))[1]

        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready((jax.jit(run) if jit else run)(jnp.ones(())))
            jax.effects_barrier()
        assert "the result of the callback `both` does not match result_shape_dtypes" in str(
            caught.value
        )
        assert text.replace("result", "result[0]", 1) in str(caught.value)


def test_a_wrong_batched_result_is_told_by_path():
    def call(x):
        return filter_pure_callback(
            lambda x: np.ones((3, 5), np.float32),
            x,
            result_shape_dtypes=like(2),
            vmap_method="expand_dims",
        )

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"result: expected f32\[2\]"):
        jax.block_until_ready(jax.vmap(call)(jnp.ones((3, 2))))


@pytest.mark.parametrize("jit", [False, True])
def test_an_exception_of_the_callback_surfaces(jit):
    def fails(x):
        raise ZeroDivisionError("says the user")

    def run(x):
        return filter_pure_callback(fails, x, result_shape_dtypes=like())

    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError: says the user"):
        jax.block_until_ready((jax.jit(run) if jit else run)(jnp.ones(())))


def test_what_cannot_be_called_is_refused():
    # Unwrapped: the type checker that the tests run under would answer first.
    with pytest.raises(TypeError, match="filter_pure_callback needs a function"):
        inspect.unwrap(filter_pure_callback)(1.0, result_shape_dtypes=None)
    with pytest.raises(TypeError, match="filter_io_callback needs a function"):
        inspect.unwrap(filter_io_callback)(1.0, result_shape_dtypes=None)
    with pytest.raises(TypeError, match="filter_debug_callback needs a function"):
        inspect.unwrap(filter_debug_callback)(1.0)
