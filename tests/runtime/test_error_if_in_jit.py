"""`error_if` inside compiled code: every transformation, and what the caller sees."""

import concurrent.futures
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import vernal
from vernal import filter_jit
from vernal.runtime import RuntimeCheckError, error_if


def guarded(x, limit=2.0):
    return error_if(x, x > limit, "too big")


def failure_of(fn, *args):
    with pytest.raises(RuntimeCheckError) as caught:
        fn(*args)
    return caught.value


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * guarded(x), x), lambda x, ct: (2 * guarded(x) * ct,))

X = jnp.array([1.0, 2.0])
BIG = jnp.array([1.0, 3.0])

PROGRAMS = {
    "plain": guarded,
    "method of an inner jit": lambda x: jax.jit(guarded)(x),
    "inner filter_jit": lambda x: filter_jit(guarded)(x),
    "scan": lambda x: jax.lax.scan(lambda c, _: (guarded(c), None), x, length=2)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c.min() < 2, lambda c: guarded(c) + 1.0, x),
    "endless while": lambda x: jax.lax.cond(
        x.max() > 2,
        lambda x: jax.lax.while_loop(lambda c: c.sum() > -1, lambda c: guarded(c), x),
        lambda x: x,
        x,
    ),
    "cond": lambda x: jax.lax.cond(x.sum() > 0, guarded, lambda x: x, x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(guarded(x)))(x),
    "gradient": lambda x: jax.grad(lambda x: jnp.sum(guarded(x) ** 2))(x),
    "gradient of checkpoint": lambda x: jax.grad(
        lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(guarded(x)))(x))
    )(x),
    "jvp": lambda x: jax.jvp(guarded, (x,), (x,)),
    "custom_vjp": lambda x: jax.grad(lambda x: jnp.sum(doubled(x)))(x),
    "map": lambda x: jax.lax.map(guarded, x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_failure_is_raised_with_message_and_place_and_nothing_else(name):
    compiled = filter_jit(PROGRAMS[name])
    jax.block_until_ready(compiled(X))
    error = failure_of(compiled, BIG)
    assert error.message == "too big"
    assert error.place.splitlines()[-1].strip() == 'return error_if(x, x > limit, "too big")'
    # What is outside of the compiled function is in the traceback.
    assert "pytest" not in error.place
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None
    assert "Xla" not in str(error)
    assert "INTERNAL" not in str(error)
    # The program is as good as before.
    jax.block_until_ready(compiled(X))
    assert compiled.trace_count == 1


def test_the_first_call_of_a_program_may_fail():
    assert failure_of(filter_jit(guarded), BIG).message == "too big"


def test_a_branch_that_is_not_taken_does_not_fail():
    f = filter_jit(lambda x: jax.lax.cond(x.sum() < 0, guarded, lambda x: x, x))
    np.testing.assert_array_equal(f(BIG), BIG)


def test_a_check_whose_result_is_not_used_does_not_exist():
    assert filter_jit(lambda x: [guarded(x), x][1])(BIG) is not None


@pytest.mark.parametrize("compiled", [False, True])
def test_failing_indices_of_a_batch_are_listed(compiled):
    f = jax.vmap(jax.vmap(guarded))
    f = filter_jit(f) if compiled else f
    message = failure_of(f, jnp.array([[1.0, 3.0], [2.0, 4.0], [0.0, 0.0]])).message
    assert message == "too big\n  at batch indices (0, 1), (1, 1) (2 of 6)"


def test_a_batch_inside_a_loop_is_listed_too():
    def f(x):
        return jax.lax.scan(lambda c, a: (guarded(c + a), None), x, jnp.ones(3))[0]

    message = failure_of(filter_jit(jax.vmap(f)), jnp.array([-5.0, 0.0, -6.0])).message
    assert message == "too big\n  at batch index (1,) (1 of 3)"


def test_an_unmapped_check_has_no_batch():
    f = jax.vmap(lambda x, y: guarded(y) + x, in_axes=(0, None))
    assert failure_of(filter_jit(f), X, jnp.array(3.0)).message == "too big"
    np.testing.assert_array_equal(filter_jit(f)(X, jnp.array(1.0)), X + 1)


@pytest.mark.parametrize("wrap", [jax.grad, vernal.filter_value_and_grad, jax.vmap, jax.jit])
def test_a_compiled_function_inside_of_a_transformation_is_readable(wrap):
    f = filter_jit(lambda x: jnp.sum(guarded(x) ** 2))
    if wrap is jax.jit:
        wrap = filter_jit
    assert failure_of(wrap(f), BIG).message.startswith("too big")


def test_derivatives_are_those_of_the_value():
    def f(x):
        return jnp.sum(jnp.sin(guarded(x, 10.0)) * x)

    def plain(x):
        return jnp.sum(jnp.sin(x) * x)

    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), jax.grad(plain)(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.hessian(f))(X), jax.hessian(plain)(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(f))(X), jax.jacfwd(plain)(X), rtol=1e-6)


def test_what_is_not_differentiated_stays_known_to_be_zero():
    @jax.custom_jvp
    def rule(x, y):
        return x * y

    seen = []

    def jvp(primals, tangents):
        seen.append([type(t).__name__ for t in tangents])
        return rule(*primals), tangents[0] * primals[1]

    rule.defjvp(jvp, symbolic_zeros=True)

    def f(x, y):
        y = error_if(y, x > 9, "big")
        return rule(x, y)

    jax.jit(jax.grad(f))(1.0, 2.0)
    assert all(kinds[1] == "SymbolicZero" for kinds in seen)


def test_integers_keys_and_other_leaves_go_through():
    def f(tree):
        return error_if(tree, tree["x"] > 9, "big")

    tree = {"x": jnp.array(1.0), "i": jnp.arange(3), "k": jax.random.key(0), "f": jnp.sin}
    out = filter_jit(f)(tree)
    assert vernal.tree_equal(tree, out)


def test_plain_jit_says_the_same_among_the_words_of_xla(caplog):
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(jax.jit(guarded)(BIG))
    text = str(caught.value)
    assert "too big" in text
    assert 'return error_if(x, x > limit, "too big")' in text
    assert "vernal.filter_jit instead of jax.jit" in text
    assert not caplog.records


def test_nothing_is_logged(caplog, capfd):
    failure_of(filter_jit(guarded), BIG)
    assert not caplog.records
    assert capfd.readouterr().err == ""


def test_donated_arguments_and_ahead_of_time_programs_fail_readably():
    donating = filter_jit(lambda x: guarded(x) + 1, donate="all")
    np.testing.assert_array_equal(donating(X + 0), X + 1)
    assert failure_of(donating, BIG + 0).message == "too big"
    again = filter_jit(lambda x: guarded(x) + 1, donate="all")
    assert failure_of(again, BIG + 0).message == "too big"
    compiled = filter_jit(guarded).lower(X).compile()
    np.testing.assert_array_equal(compiled(X), X)
    assert failure_of(compiled, BIG).message == "too big"


def test_a_program_is_looked_at_for_every_shape():
    # The check is in the program for matrices only.
    f = filter_jit(lambda x: guarded(x) if x.ndim == 2 else x)
    f(BIG)
    assert failure_of(f, BIG[None]).message == "too big"
    f(BIG)


def test_a_trace_that_fails_leaves_nothing_behind():
    def f(x, stop):
        if stop:
            raise RuntimeError("while tracing")
        return x

    f = filter_jit(f)
    with pytest.raises(RuntimeError, match="while tracing"):
        f(X, True)
    np.testing.assert_array_equal(f(X, False), X)


def test_a_program_without_checks_is_not_waited_for(monkeypatch):
    waits = []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waits.append(x))
    filter_jit(jnp.sin)(X)
    filter_jit(jnp.sin)(X)
    assert not waits
    f = filter_jit(lambda x: guarded(x))
    failure_of(f, BIG)
    waits.clear()
    f(X)
    assert len(waits) == 1


def test_threads_get_their_own_errors():
    checks = [filter_jit(lambda x, n=n: error_if(x, x > 0, f"thread {n}")) for n in range(4)]

    def work(task):
        n, x = task
        try:
            return float(checks[n](jnp.float32(x)))
        except RuntimeCheckError as error:
            return error.message

    tasks = [(i % 4, (-1.0) ** (i // 4) * (i + 1)) for i in range(64)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, tasks))
    for (n, x), result in zip(tasks, results, strict=True):
        assert result == (f"thread {n}" if x > 0 else x)


def test_threads_that_share_a_new_program_all_see_its_errors():
    f = filter_jit(lambda x: guarded(jax.jit(guarded)(x)))

    def work(i):
        try:
            return float(f(jnp.full(i // 8 + 1, float(i % 2) * 9)).sum())
        except RuntimeCheckError as error:
            return error.message

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(32)))
    assert results == [0.0, "too big"] * 16


def test_ordered_effects_work_again_after_a_failure():
    seen = []

    def f(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x.sum(), ordered=True)
        return guarded(x)

    f = filter_jit(f)
    failure_of(f, BIG)
    jax.effects_barrier()
    f(X)
    jax.effects_barrier()
    assert seen[-1] == 3


def test_a_long_message_arrives_whole():
    text = "long " * 5000
    assert failure_of(filter_jit(lambda x: error_if(x, x > 0, text)), X).message == text


AXIS_TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


@pytest.fixture(params=list(AXIS_TYPES))
def sharded(request):
    """An array over eight devices, with its mesh set."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AXIS_TYPES[request.param],))
    with jax.set_mesh(mesh):
        yield jax.device_put(jnp.arange(16.0).reshape(8, 2), jax.P("d"))


def test_an_array_over_devices_is_checked_where_it_lies(sharded):
    f = filter_jit(lambda x: guarded(x, 100.0) * 2)
    out = f(sharded)
    np.testing.assert_array_equal(out, np.asarray(sharded) * 2)
    assert out.sharding.is_equivalent_to(sharded.sharding, 2)
    assert "all-gather" not in f.lower(sharded).compile().as_text()
    # All eight devices raise, and none waits for another.
    g = filter_jit(lambda x: jnp.sum(guarded(x) * 2, axis=0))
    assert failure_of(g, sharded).message == "too big"


def test_the_array_of_a_batch_over_devices_is_not_gathered(sharded):
    def f(row):
        return error_if(row, row.sum() > 9, "too big") * 2

    f = filter_jit(jax.vmap(f))
    message = failure_of(f, sharded).message
    assert message == "too big\n  at batch indices (3,), (4,), (5,), (6,), (7,) (5 of 8)"
    small = sharded / 100
    np.testing.assert_array_equal(f(small), np.asarray(small) * 2)
    gathered = [
        line for line in f.lower(small).compile().as_text().splitlines() if " all-gather(" in line
    ]
    assert all("pred[" in line for line in gathered)


def test_nan_and_gradient_keep_the_sharding(sharded):
    f = jax.vmap(lambda row: error_if(row, row.sum() > 9, "too big", on_error="nan"))
    out = filter_jit(f)(sharded)
    np.testing.assert_array_equal(np.isnan(out[:, 0]), [0, 0, 0, 1, 1, 1, 1, 1])
    assert out.sharding.is_equivalent_to(sharded.sharding, 2)
    grad = filter_jit(jax.grad(lambda x: jnp.sum(guarded(x, 100.0) ** 2)))(sharded)
    np.testing.assert_array_equal(grad, 2 * np.asarray(sharded))
    assert grad.sharding.is_equivalent_to(sharded.sharding, 2)


def mean_over_devices(x):
    return jax.lax.pmean(guarded(x, 13.0).sum(), "d")


@pytest.mark.parametrize("compiled", [False, True])
def test_one_failing_device_of_a_shard_map_leaves_none_waiting(sharded, compiled):
    f = jax.shard_map(mean_over_devices, in_specs=jax.P("d"), out_specs=jax.P())
    f = filter_jit(f) if compiled else f
    assert failure_of(f, sharded).message == "too big"
    assert f(sharded / 100) == pytest.approx(0.15)


def test_under_plain_jit_a_shard_map_logs_the_error_and_goes_on_with_nan(sharded, caplog):
    f = jax.jit(jax.shard_map(mean_over_devices, in_specs=jax.P("d"), out_specs=jax.P()))
    with caplog.at_level(logging.ERROR, "vernal.runtime"):
        assert jnp.isnan(f(sharded))
    assert len(caplog.records) == 1
    assert "too big" in caplog.text


def test_a_replicated_value_stays_replicated_inside_shard_map(sharded):
    def f(x, y):
        return guarded(y, x.max() + 100)

    f = jax.shard_map(f, in_specs=(jax.P("d"), jax.P()), out_specs=jax.P())
    assert filter_jit(f)(sharded, jnp.array(1.0)) == 1


SCRIPT = """
import jax, jax.numpy as jnp, vernal
from vernal.runtime import error_if
try:
    vernal.filter_jit(lambda x: error_if(x, x > 0, "too big"))(jnp.array(1.0))
except vernal.runtime.RuntimeCheckError as error:
    print(error.message)
jax.effects_barrier()
"""


@pytest.mark.slow
def test_a_failure_is_forgotten_when_python_exits():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "too big\n", "")
