"""Every compilation explains itself: `.explain()`, `log_retraces` and `no_retrace`."""

import functools
import inspect
import re
import threading
from collections import OrderedDict, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal import transforms
from vernal.debug import RetraceError, log_retraces, no_retrace

X = jnp.arange(8.0)
HERE = "test_retraces.py"
Pair = namedtuple("Pair", "left right")


class Holder(vernal.Module):
    value: Any


class Other(vernal.Module):
    value: Any


class Scale(vernal.Module):
    w: Any

    def times(self, x):
        return self.w * x

    @vernal.filter_jit
    def jitted(self, x):
        return self.w * x


def grown_class(extra):
    """A class of the same name, with one field more."""
    if not extra:

        class Net(vernal.Module):
            w: Any

        return Net(X)

    class Net(vernal.Module):  # type: ignore[no-redef] (on purpose)
        w: Any
        extra: int

    return Net(X, 1)


def scaled(scale):
    return lambda x: scale * x


def outer(scale):
    inner = scaled(scale)
    return lambda x: inner(x)


def with_default(k):
    def f(x, n=0, *, m=k):
        return x

    return f


def line_of(fn):
    return fn.__code__.co_firstlineno


DOUBLE, TRIPLE = (
    lambda x: 2 * x,
    lambda x: 3 * x,
)
ONE, OTHER = jnp.ones(3), jnp.ones(3)

# The value in two calls, what is added to its path, and both in words.
CAUSES = {
    "shape": (jnp.ones(3), jnp.ones(4), "", "f32[3]", "f32[4]"),
    "dtype": (jnp.ones(3), jnp.ones(3, jnp.int32), "", "f32[3]", "i32[3]"),
    "weak type": (jnp.float32(1), jnp.array(1.0), "", "f32[]", "weak_f32[]"),
    "numpy": (np.ones(3, np.float32), jnp.ones(4), "", "f32[3]", "f32[4]"),
    "key": (jax.random.key(0), jax.random.key(0, impl="rbg"), "", "key<fry>[]", "key<rbg>[]"),
    "int": (2, 3, "", "2", "3"),
    "negative int": (-1, -2, "", "-1", "-2"),
    "float": (0.1, 0.2, "", "0.1", "0.2"),
    "bool": (1, True, "", "1", "True"),
    "int to float": (1, 1.0, "", "1", "1.0"),
    "str": ("same", "valid", "", "'same'", "'valid'"),
    "class object": (int, float, "", "int", "float"),
    "array to number": (jnp.ones(3), 3, "", "f32[3]", "3"),
    "none": (None, jnp.ones(3), "", "None", "f32[3]"),
    "function": (jax.nn.relu, jnp.tanh, "", "<relu>", "<tanh>"),
    "builtin": (len, max, "", "<len>", "<max>"),
    "ufunc": (jnp.add, jnp.multiply, "", "<add>", "<multiply>"),
    "lambda": (
        DOUBLE,
        TRIPLE,
        "",
        f"<lambda at {HERE}:{line_of(DOUBLE)}>",
        f"<lambda at {HERE}:{line_of(TRIPLE)}>",
    ),
    "closure cell": (scaled(2), scaled(3), ".scale (captured)", "2", "3"),
    "inner cell": (outer(2), outer(3), ".inner (captured).scale (captured)", "2", "3"),
    "captured array": (
        scaled(ONE),
        scaled(OTHER),
        ".scale (captured)",
        "f32[3]",
        "f32[3] (another one that prints the same)",
    ),
    "captured numpy": (
        scaled(np.ones(2)),
        scaled(np.zeros(2)),
        ".scale (captured)",
        "f64[2]",
        "f64[2] (another one that prints the same)",
    ),
    "default": (with_default(1), with_default(2), ".m (default)", "1", "2"),
    "partial": (
        functools.partial(pow, 1),
        functools.partial(pow, 2),
        ".args[0]",
        "1",
        "2",
    ),
    "wrapped": (
        jax.jit(scaled(2)),
        jax.jit(scaled(3)),
        ".__wrapped__.scale (captured)",
        "2",
        "3",
    ),
    "method": (
        Scale(jnp.ones(3)).times,
        Scale(jnp.ones(4)).times,
        ".__self__.w",
        "f32[3]",
        "f32[4]",
    ),
    "dict key": ({"a": X}, {"a": X, "b": jnp.ones(3)}, "['b']", "nothing", "f32[3]"),
    "dict key lost": ({"a": X, "b": 2}, {"a": X}, "['b']", "2", "nothing"),
    "subtree": ({}, {"b": Holder(X)}, "['b']", "nothing", "Holder"),
    "class": (Holder(X), Other(X), "", "Holder", "Other"),
    "field": (grown_class(False), grown_class(True), ".extra", "nothing", "1"),
    "named tuple": (Pair(X, 1), Pair(X, 2), ".right", "1", "2"),
    "tuple length": ((X,), (X, X, X), "", "tuple of length 1", "tuple of length 3"),
    "tuple of plain values": (
        (1, ("a", None)),
        (1, ("a", None), ("b",)),
        "",
        "(1, ('a', None))",
        "(1, ('a', None), ('b',))",
    ),
    "tuple of other values": ((1,), (2, 3), "", "(1,)", "(2, 3)"),
    "long tuple": (
        tuple(range(20)),
        tuple(range(21)),
        "",
        "tuple of length 20",
        "tuple of length 21",
    ),
    "list to tuple": ([X], (X,), "", "list of length 1", "tuple of length 1"),
}


def at_depth(value: Any, depth: str) -> Any:
    if depth == "top":
        return value
    return {"blocks": [X, Holder((X, value, "text"))]}


PATHS = {"top": "x", "deep": "x['blocks'][1].value[1]"}


def test_the_trace_that_is_most_alike_is_the_one_with_the_fewest_parts_that_differ():
    @vernal.filter_jit
    def step(model):
        return jax.tree.leaves(model)

    model = vernal.nn.MLP(3, 2, width_size=4, depth=1, key=jax.random.key(0))
    step(model)
    step(vernal.nn.cast(model, vernal.nn.Policy(compute=jnp.bfloat16)))
    step(vernal.tree_at("layers[*].bias", model, replace=[None, None]))
    assert seen(step) == [f"model.layers[{i}].bias: f32[{n}] -> None" for i, n in enumerate((4, 2))]
    step(vernal.freeze(model, "layers.1"))
    assert seen(step) == ["model.layers[1] (frozen): nothing -> bias, weight"]


def seen(f: Any) -> list[str]:
    """The differences that led to the last trace."""
    return [str(d) for d in transforms.traces_of(f.fn).recent[-1].differences]


# A module refuses a function that captures arrays.
HIDDEN = {"captured array", "captured numpy"}


@pytest.mark.parametrize(
    ("cause", "depth"),
    [(c, d) for c in CAUSES for d in PATHS if d == "top" or c not in HIDDEN],
)
@pytest.mark.sample(3)
def test_the_reason_is_the_path_and_both_values_and_nothing_else(cause, depth):
    before, after, suffix, *texts = CAUSES[cause]

    @vernal.filter_jit
    def step(x, y, n=1):
        return y

    same = {"w": X, "act": jnp.tanh}
    step(at_depth(before, depth), same)
    lines = []
    with log_retraces(lines.append):
        step(at_depth(after, depth), same)
    expected = f"{PATHS[depth]}{suffix}: {texts[0]} -> {texts[1]}"
    assert seen(step) == [expected]
    assert len(lines) == 1
    pattern = r"step traced again \(2nd, [\d.e-]+ s\): " + re.escape(expected)
    assert re.fullmatch(pattern + r"( \(instead: [^;]+\))?", lines[0])


def from_a_loop(_):
    return lambda x: x


# The value in two calls, and what to write instead.
CURES = {
    "number": (2, 3, "jnp.asarray(x)"),
    "in a dict": ({"lr": 0.1}, {"lr": 0.2}, "jnp.asarray(x['lr'])"),
    "captured": (scaled(2.0), scaled(3.0), "pass the number as an argument, an array"),
    "captured array": (scaled(ONE), scaled(OTHER), "pass the array as an argument"),
    "array to number": (jnp.ones(()), 2.0, "jnp.asarray(x) each time"),
    "shape": (jnp.ones(3), jnp.ones(4), "pad to one shape, or leave out what does not fill it"),
    "dtype": (jnp.ones(3), jnp.ones(3, jnp.int32), "cast to one dtype, .astype(...)"),
    "weak type": (jnp.float32(1), jnp.array(1.0), "jnp.asarray(x, jnp.float32)"),
    "function": (from_a_loop(1), from_a_loop(2), "make the function once, outside of the loop"),
    "optax": (
        optax.sgd(0.1),
        optax.sgd(0.2),
        "vernal.Optimizer, and optimizer.replace(learning_rate=...)",
    ),
    "order of keys": (
        OrderedDict(a=ONE, b=OTHER),
        OrderedDict(b=OTHER, a=ONE),
        "insert the keys in one order",
    ),
    "rank": (jnp.ones(3), jnp.ones(()), None),
    "text": ("same", "valid", None),
    "flag": (True, False, None),
    "number in a module": (
        Holder(2),
        Holder(3),
        "if it changes: `value: jax.Array = vernal.field(trainable=False)`",
    ),
}


@pytest.mark.parametrize("kind", CURES)
def test_the_reason_says_what_to_write_instead(kind):
    before, after, instead = CURES[kind]
    step = vernal.filter_jit(lambda x: 0)
    step(before)
    with no_retrace(), pytest.raises(RetraceError, match="like") as raised:
        step(after)
    step(after)
    told = step.explain().splitlines()[-1]
    if instead is None:
        assert "instead" not in told
        assert "instead: a call like the earlier ones; or a call" in str(raised.value)
    else:
        assert told.endswith(f" (instead: {instead})")
        assert f"instead: {instead}; or a call like this one before the block" in str(raised.value)


def test_where_an_array_is_and_a_setting_have_advice_too():
    step = vernal.filter_jit(lambda x: x + x)
    step(X)
    step(placed_on(1))
    assert (
        "(instead: jax.device_put(..., sharding) before the loop, the same for each call)"
        in step.explain()
    )
    with jax.default_matmul_precision("highest"):
        step(X)
    assert "(instead: change the setting once, before the first call)" in step.explain()


def sharded(spec, axis_type=jax.sharding.AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    return jax.device_put(X, jax.NamedSharding(mesh, spec))


def placed_on(n):
    return jax.device_put(X, jax.devices()[n])


AUTO = jax.sharding.AxisType.Auto
PLACES = {
    "sharding": (
        lambda: sharded(jax.P("data")),
        lambda: sharded(jax.P(None)),
        "traced",
        "sharded P('data',) over mesh(data=8)",
        "sharded P(None,) over mesh(data=8)",
    ),
    "sharding by the compiler": (
        lambda: sharded(jax.P("data"), AUTO),
        lambda: sharded(jax.P(), AUTO),
        "compiled",
        "sharded P('data',) over mesh(data=8 Auto)",
        "sharded P() over mesh(data=8 Auto)",
    ),
    "mesh": (
        lambda: X,
        lambda: sharded(jax.P("data")),
        "traced",
        "uncommitted",
        "sharded P('data',) over mesh(data=8)",
    ),
    "device": (lambda: placed_on(1), lambda: placed_on(2), "compiled", "on cpu:1", "on cpu:2"),
    "commitment": (lambda: X, lambda: placed_on(0), "compiled", "uncommitted", "on cpu:0"),
}


@pytest.mark.parametrize("depth", PATHS)
@pytest.mark.parametrize("cause", PLACES)
def test_where_an_array_is_may_be_the_reason(cause, depth):
    before, after, kind, *texts = PLACES[cause]

    @vernal.filter_jit
    def step(x):
        return jax.tree.leaves(x)

    step(at_depth(before(), depth))
    step(at_depth(after(), depth))
    assert seen(step) == [f"{PATHS[depth]}: f32[8] {texts[0]} -> f32[8] {texts[1]}"]
    last = transforms.traces_of(step.fn).recent[-1]
    assert last.kind == kind
    assert step.trace_count == (2 if kind == "traced" else 1)
    assert f"{seen(step)[0]} (instead: jax.device_put" in step.explain().splitlines()[-1]


SETTINGS = {
    "x64": (lambda: jax.enable_x64(True), "jax_enable_x64: False -> True"),
    "precision": (
        lambda: jax.default_matmul_precision("highest"),
        "jax_default_matmul_precision: None -> 'highest'",
    ),
    "promotion": (
        lambda: jax.numpy_dtype_promotion("standard"),
        "jax_numpy_dtype_promotion: 'strict' -> 'standard'",
    ),
    "mesh": (
        lambda: jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"))),
        "jax.set_mesh: no mesh -> mesh(a=4, b=2)",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_jax_may_be_the_reason(name):
    setting, expected = SETTINGS[name]
    step = vernal.filter_jit(lambda x: x + x)
    step(X)
    with setting():
        step(X)
    assert seen(step) == [expected]


def test_donation_may_be_the_reason():
    def step(x):
        return x + 1

    vernal.filter_jit(step)(X + 0)
    donating = vernal.filter_jit(step, donate="all")
    donating(X + 0)
    assert seen(donating) == ["filter_jit(donate=): 'none' -> 'all'"]


def test_debug_nans_compiles_nothing_until_there_is_a_nan():
    step = vernal.filter_jit(lambda x: jnp.log(x))
    step(X + 1)
    with jax.debug_nans(True), log_retraces(lines := Lines()):
        step(X + 2)
        assert step.trace_count == 1 and lines == []
        with pytest.raises(FloatingPointError, match="nan"):
            step(-X - 1)
    assert seen(step) == ["jax_debug_nans: no NaN -> a NaN, so it runs operation by operation"]
    assert "<lambda> run again (" in lines[0]


class Lines(list):
    """A list that is called to add a line."""

    __call__ = list.append


def test_several_reasons_are_told_in_the_order_of_the_arguments():
    @vernal.filter_jit
    def step(model, x, *rest, n=1, **more):
        return x

    step(Holder([jnp.tanh]), jnp.ones((32, 4)))
    with log_retraces(lines := Lines()):
        step(Holder([jax.nn.relu]), jnp.ones((31, 4)), 1, n=2, k=3)
    assert lines[0].partition(": ")[2].partition(" (instead")[0] == (
        "model.value[0]: <tanh> -> <relu>; x: f32[32,4] -> f32[31,4]; "
        "rest: not given -> tuple of length 1; n: not given -> 2; k: not given -> 3"
    )


def test_a_great_many_reasons_are_counted():
    step = vernal.filter_jit(lambda x: None)
    step([jnp.ones(3)] * 20)
    with log_retraces(lines := Lines()):
        step([jnp.ones(4)] * 20)
    assert lines[0].endswith(
        "x[5]: f32[3] -> f32[4] and 14 more (instead: pad to one shape, or leave out what does not fill it)"
    )
    assert len(seen(step)) == 20


def test_the_earlier_trace_that_is_most_alike_is_compared_with():
    step = vernal.filter_jit(lambda a, b, c: None)
    step(1, 1, 1)
    step(2, 2, 2)
    step(3, 3, 3)
    step(2, 2, 7)
    assert seen(step) == ["c: 2 -> 7"]


def test_methods_and_modules_are_functions_too():
    Scale(X).jitted(X)
    Scale(jnp.ones(())).jitted(X)
    assert seen(Scale.jitted) == ["self.w: f32[8] -> f32[]"]

    class Called(vernal.Module):
        w: Any

        def __call__(self, x):
            return self.w * x

    vernal.filter_jit(Called(X))(X)
    f = vernal.filter_jit(Called(jnp.ones(())))
    f(X)
    assert seen(f) == ["Called.w: f32[8] -> f32[]"]
    bound = vernal.filter_jit(Scale(X).times)
    bound(X)
    bound(jnp.ones(()))
    assert seen(bound) == ["x: f32[8] -> f32[]"]


def test_what_cannot_be_seen_is_said_not_to_be_seen():
    step = vernal.filter_jit(lambda x: x)
    step(X)
    jax.clear_caches()
    step(X)
    assert step.trace_count == 2 and seen(step) == []
    assert "2nd" in step.explain() and "JAX's caches were cleared" in step.explain()


def test_a_trace_that_failed_explains_the_next_one():
    fails = [True]

    @vernal.filter_jit
    def step(x):
        if fails:
            raise ValueError(fails.pop())
        return x

    with pytest.raises(ValueError, match="True"):
        step(X)
    step(X)
    assert step.explain().endswith("nothing; the earlier call that traced it failed")


def test_explain_lists_the_traces_with_their_places():
    @vernal.filter_jit
    def step(x, n):
        return n * x

    assert step.explain() == "step: not traced yet"
    line = inspect.currentframe().f_lineno
    step(X, 2)
    assert step.explain().splitlines()[0] == "step: traced once"
    step(X, 3)
    step(X, 3)
    text = re.sub(r"[\d.e-]+ s", "1 s", step.explain())
    assert text.splitlines() == [
        "step: traced 2 times",
        f"  {HERE}:{line + 1}: traced (1st, 1 s)",
        f"  {HERE}:{line + 3}: traced again (2nd, 1 s): n: 2 -> 3 (instead: jnp.asarray(n))",
    ]


def test_explain_forgets_old_traces_and_says_so():
    step = vernal.filter_jit(lambda n: None)
    for n in range(40):
        step.lower(n)
    lines = step.explain().splitlines()
    assert lines[0] == "<lambda>: traced 40 times"
    assert lines[1] == "  ... (8 earlier traces)"
    assert len(lines) == 2 + 32 and "n: 38 -> 39 (instead" in lines[-1]


def test_lowering_is_a_trace_and_what_follows_is_its_first_compilation():
    step = vernal.filter_jit(lambda x: x + 1)
    with log_retraces(lines := Lines(), first=True):
        step.lower(jax.ShapeDtypeStruct((8,), jnp.float32))
        step(jax.device_put(X, jax.devices()[1]))
        step.lower(x=jax.ShapeDtypeStruct((9,), jnp.float32))
    assert len(lines) == 2 and step.trace_count == 2
    assert seen(step) == ["x: f32[8] -> f32[9]"]


def test_inner_functions_explain_themselves_once():
    inner = vernal.filter_jit(lambda x, n: n * x)

    @vernal.filter_jit
    def outer(x, n):
        return inner(x, n) + inner(x, n)

    outer(X, 2.0)
    with log_retraces(lines := Lines()):
        outer(X, 3.0)
        # Compiled for the first time, but not traced again.
        inner(X, 2.0)
    assert [line.partition(" (")[0] for line in lines] == [
        "<lambda> traced again",
        "outer traced again",
    ]
    assert seen(inner) == ["n: 2.0 -> 3.0"]


def test_without_jit_nothing_is_traced():
    step = vernal.filter_jit(lambda x: x)
    with jax.disable_jit(), log_retraces(lines := Lines(), first=True):
        step(X)
        step(X)
    assert lines == [] and step.explain() == "<lambda>: not traced yet"


def test_hits_do_not_pay(monkeypatch):
    step = vernal.filter_jit(lambda x: x)
    more = X + 1
    step(X)
    # Everything that explains begins here.
    monkeypatch.setattr(transforms._programs, "Call", None)
    monkeypatch.setattr(transforms._failures, "log_call", None)
    with log_retraces(lines := Lines(), first=True), no_retrace(first=False):
        step(more)
    assert lines == []
    with pytest.raises(TypeError, match="not callable"):
        step(np.ones(3))


def test_a_log_is_stopped_and_tells_of_first_traces_if_asked():
    step = vernal.filter_jit(lambda x: x)
    log = log_retraces(lines := Lines())
    step(X)
    assert lines == []
    log.stop()
    log.stop()
    step(jnp.ones(3))
    assert lines == []
    with log_retraces(lines, first=True):
        vernal.filter_jit(lambda x: x)(X)
    assert re.fullmatch(r"<lambda> traced \(1st, .* s\)", lines[0])


def test_retraces_are_printed(capsys):
    step = vernal.filter_jit(lambda n: None)
    with log_retraces():
        step(1)
        step(2)
    assert capsys.readouterr().out.endswith("n: 1 -> 2 (instead: jnp.asarray(n))\n")


def test_a_log_hears_of_all_threads():
    step = vernal.filter_jit(lambda x, n: n * x)
    step(X, 0)
    barrier = threading.Barrier(8)

    def work(n):
        barrier.wait()
        step(X, n)

    with log_retraces(lines := Lines()):
        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(lines) == 8
    assert sorted(re.findall(r"\((\d)", " ".join(lines))) == list("23456789")
    assert all(re.search(r"n: \d -> \d \(instead", line) for line in lines)


def test_no_retrace_refuses_and_nothing_is_lost():
    step = vernal.filter_jit(lambda model, x: x)
    step(Holder(jnp.tanh), X)
    with no_retrace():
        line = inspect.currentframe().f_lineno + 2
        with pytest.raises(RetraceError, match=r"`<lambda>` would be traced again") as raised:
            step(Holder(jax.nn.relu), X)
        step(Holder(jnp.tanh), 2 * X)
    text = str(raised.value)
    assert f"where: {HERE}:{line}, inside of no_retrace" in text
    assert "got: model.value: <tanh> -> <relu>\n" in text
    assert raised.value.trace.reason == "model.value: <tanh> -> <relu>"
    # What was refused was not traced, and works afterwards.
    assert transforms.traces_of(step.fn).count == 1
    step(Holder(jax.nn.relu), X)
    assert seen(step) == ["model.value: <tanh> -> <relu>"]


def test_no_retrace_refuses_other_devices_too():
    step = vernal.filter_jit(lambda x: x + 1)
    step(X)
    elsewhere = jax.device_put(X, jax.devices()[3])
    with no_retrace():
        with pytest.raises(RetraceError, match=r"x: f32\[8\] uncommitted -> f32\[8\] on cpu:3"):
            step(elsewhere)
    assert bool(jnp.all(step(elsewhere) == elsewhere + 1))


def test_no_retrace_lets_first_traces_pass_unless_told_otherwise():
    with no_retrace():
        vernal.filter_jit(lambda x: x)(X)
    with no_retrace(first=False):
        first = "would be traced\n.*\n.*\n  got: the first call\n  instead: make and jit the function once"
        with pytest.raises(RetraceError, match=first):
            vernal.filter_jit(lambda x: x)(X)


def test_no_retrace_may_mean_certain_functions():
    step, other = (vernal.filter_jit(f) for f in (lambda n: None, lambda n: None))
    model = Scale(X)
    for f in (step, other):
        f(1)
    model.jitted(X)
    with no_retrace(step, model.jitted):
        other(2)
        with pytest.raises(RetraceError, match="n: 1 -> 2"):
            step(2)
        with pytest.raises(RetraceError, match=r"x: f32\[8\] -> f32\[\]"):
            model.jitted(jnp.ones(()))
    with pytest.raises(TypeError, match="only functions under filter_jit are watched"):
        with no_retrace(len):
            pass


def test_no_retrace_is_for_its_own_thread():
    step = vernal.filter_jit(lambda n: None)
    step(1)
    with no_retrace():
        thread = threading.Thread(target=step, args=(2,))
        thread.start()
        thread.join()
        assert step.trace_count == 2
