"""Every compilation is recorded, with its place, its times and its reason."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal.debug import record_compilations

PHASE = {
    "trace": "/jax/core/compile/jaxpr_trace_duration",
    "lower": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compile": "/jax/core/compile/backend_compile_duration",
}


def happened(phase, start, stop, function):
    """Tells JAX's listeners of a phase, as JAX does."""
    name = function if phase == "trace" else f"jit({function})"
    jax.monitoring.record_event_time_span(PHASE[phase], start, stop, fun_name=name)


def seen(log):
    return [(x.function, x.reason) for x in log.compilations]


def test_a_function_is_found_where_it_is_defined_with_all_its_reasons():
    @jax.jit
    def plum(x):
        return x + 1

    line = plum.__wrapped__.__code__.co_firstlineno
    with record_compilations() as log:
        plum(np.ones(2, np.float32))
        plum(np.ones(3, np.float32))
        plum(np.ones(3, np.float32))
    assert seen(log) == [("plum", "first call"), ("plum", "x: f32[2] -> f32[3]")]
    for compilation in log.compilations:
        assert compilation.place.endswith(f"test_compilations.py:{line}")
        assert [span.phase for span in compilation.spans] == ["trace", "lower", "compile"]
        assert all(0 <= span.start < span.stop for span in compilation.spans)
        assert compilation.seconds() == sum(compilation.seconds(phase) for phase in PHASE)
        assert compilation.thread == "MainThread"


def test_a_function_that_is_made_again_and_again_is_named_as_the_cause():
    with record_compilations() as log:
        for _ in range(2):
            jax.jit(lambda x: x * 3)(np.ones(2, np.float32))
    reasons = [reason for _, reason in seen(log)]
    assert reasons[0] == "first call"
    assert reasons[1] == "a new function each time: make and jit it once, outside of the loop"


def test_a_function_of_filter_jit_that_is_made_in_a_loop_is_named_as_the_cause():
    x = np.ones(2, np.float32)
    with record_compilations() as log:
        for i in range(3):
            loop = vernal.filter_jit(lambda x, n=i: n * x)
            loop(x)
        for other in (vernal.filter_jit(lambda x: x + 7), vernal.filter_jit(lambda x: x + 8)):
            other(x)
    again = "a new function each time: make and jit it once, outside of the loop"
    assert [reason for _, reason in seen(log)] == ["first call", again, again, *["first call"] * 2]
    assert f"{again} (2 times)" in " ".join(log.table(width=300).split())


def test_one_function_jitted_in_a_loop_is_compiled_once():
    def same(x):
        return x + 9

    with record_compilations() as log:
        for _ in range(3):
            vernal.filter_jit(same)(np.ones(2, np.float32))
    assert seen(log) == [("same", "first call")]


def test_another_device_needs_no_new_trace():
    fig = jax.jit(lambda x: x - 1)
    with record_compilations() as log:
        for device in jax.devices()[:2]:
            fig(jax.device_put(np.ones(2, np.float32), device))
    second = log.compilations[1]
    assert second.reason.startswith("not traced again: another device")
    assert second.place == log.compilations[0].place
    assert not second.has("trace") and second.seconds("trace") == 0


def test_an_operation_outside_of_jit_has_the_place_of_its_call():
    x = np.ones(13, np.float32)
    with record_compilations() as log:
        jnp.cumsum(x)
    (compilation,) = (x for x in log.compilations if "cumsum" in x.function)
    assert "test_compilations.py" in compilation.place
    assert compilation.reason == "JAX's own function, outside of `jit`"


def test_what_is_only_traced_is_no_compilation():
    with record_compilations() as log:
        jax.eval_shape(jax.jit(lambda x: x + 4), np.ones(2, np.float32))
    assert log.compilations == ()
    assert log.table().startswith("nothing was compiled") and str(log) == log.table()


def test_a_function_inside_of_another_one_is_no_compilation_of_its_own():
    inner = jax.jit(lambda x: x + 5)

    def outer(x):
        return inner(x) * 2

    with record_compilations() as log:
        jax.jit(outer)(np.ones(2, np.float32))
    assert seen(log) == [("outer", "first call")]


def test_a_function_of_filter_jit_has_the_place_of_its_call():
    @vernal.filter_jit
    def quince(x, n):
        return x * n

    with record_compilations() as log:
        quince(np.ones(2, np.float32), 2)
    (compilation,) = log.compilations
    assert compilation.function == "quince"
    assert "test_compilations.py" in compilation.place
    assert "same line" not in compilation.reason


def test_all_compilations_of_one_function_of_filter_jit_are_one_row_with_vernals_reasons():
    @vernal.filter_jit
    def medlar(x, n):
        return x * n

    with record_compilations() as log:
        medlar(np.ones(2, np.float32), 2)
        medlar(np.ones(2, np.float32), 3)
    assert [reason for _, reason in seen(log)] == ["first call", "n: 2 -> 3"]
    assert len({x.place for x in log.compilations}) == 1


def test_threads_are_told_apart():
    ready = threading.Barrier(2)

    def work():
        ready.wait()
        jax.jit(lambda x: x + 6)(np.ones(2, np.float32))

    with record_compilations() as log:
        threads = [threading.Thread(target=work, name=f"worker {i}") for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(x.thread for x in log.compilations) == ["worker 0", "worker 1"]
    assert all(x.has("trace") and x.has("compile") for x in log.compilations)


def test_time_is_not_counted_twice():
    with record_compilations() as log:
        now = time.time()
        happened("lower", now + 2, now + 3, "inside")
        happened("compile", now + 3, now + 5, "inside")
        happened("trace", now, now + 10, "outside")
        happened("lower", now + 10, now + 11, "outside")
        happened("compile", now + 11, now + 15, "outside")
    inside, outside = sorted(log.compilations, key=lambda x: x.function)
    assert inside.seconds() == pytest.approx(3)
    assert outside.seconds("trace") == pytest.approx(7)
    assert outside.seconds() == pytest.approx(12)


def test_what_jax_found_on_disk_is_said():
    with record_compilations() as log:
        for i in (0.0, 1.0, 2.0):
            if i == 1:
                jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
            happened("lower", i, i + 0.25, "damson")
            happened("compile", i + 0.25, i + 0.5, "damson")
    assert [x.from_disk for x in log.compilations] == [False, True, False]
    assert "found in JAX's cache on disk" in log.table()


def test_nothing_is_recorded_afterwards():
    with record_compilations() as log:
        pass
    happened("compile", 1.0, 2.0, "late")
    jax.monitoring.record_event_time_span("/another/event", 1.0, 2.0)
    assert log.compilations == ()


def test_recordings_may_overlap():
    with record_compilations() as outer:
        with record_compilations() as inner:
            happened("compile", 1.0, 2.0, "both")
        happened("compile", 2.0, 3.0, "one")
    assert [x.function for x in inner.compilations] == ["both"]
    assert [x.function for x in outer.compilations] == ["both", "one"]


def test_the_table_has_the_slowest_first_and_a_sum():
    with record_compilations() as log:
        happened("lower", 0.0, 0.5, "quick")
        happened("compile", 1.0, 2.0, "slow")
        happened("compile", 3.0, 14.0, "slow")
    lines = log.table(width=200).splitlines()
    assert lines[0].startswith("3 compilations of 2 functions: 12.5 s, in a run of ")
    names = [line.split()[0] for line in lines if line.strip()]
    assert names[1] == "function" and names[3:5] == ["slow", "quick"]
    assert lines[-1].split()[:5] == ["sum", "3", "0.000", "0.500", "12.0"]


def test_a_long_place_is_shown_by_its_end():
    with record_compilations() as log:
        happened("compile", 1.0, 2.0, "sorb")
    log.compilations[0].place = "/a/very/long/way/to/the/scripts/of/this/project/train.py:12"
    assert " …/project/train.py:12 " in log.table()
    assert "/a/very/long/way" in log.page()


def test_many_reasons_are_cut_short():
    with record_compilations() as log:
        sloe = jax.jit(lambda x: x + 7)
        for n in range(1, 8):
            sloe(np.ones(n, np.float32))
    assert "and 3 other reasons" in log.table()
    assert "and 3 other reasons" not in log.page()
