"""`filter_jit`."""

import functools
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import vernal
from vernal import Module, Partial, filter_jit
from vernal.show import short

X = jnp.arange(3.0)


class Layer(Module):
    w: jax.Array
    act: Any = jnp.tanh
    name: str = "layer"

    def __call__(self, x):
        return self.act(self.w * x)

    def method(self, x, n=1):
        return self.w * x * n

    @filter_jit
    def jitted(self, x, n=1):
        "A compiled method."
        return self.w * x * n


@filter_jit
def at_the_top(x):
    "Adds one."
    return x + 1


TRACED = [
    jnp.ones(2),
    np.ones(2),
    np.float32(1),
    np.int8(1),
    np.bool_(True),
    jax.random.key(0),
    jax.random.PRNGKey(0),
    np.ones((0,)),
]
STATIC = [
    True,
    1,
    1.0,
    1j,
    "text",
    None,
    len,
    jnp.sin,
    int,
    np.float32,
    (1, "a"),
    np.dtype("f4"),
    ...,
    frozenset({1}),
    b"x",
]


@pytest.mark.parametrize("value", TRACED, ids=lambda v: type(v).__name__)
def test_arrays_are_traced_and_come_back_as_jax_arrays(value):
    inside = []

    @filter_jit
    def f(x):
        inside.append(x)
        return x

    out = f(value)
    f(value)
    assert isinstance(out, jax.Array)
    assert isinstance(inside[0], jax.core.Tracer)
    assert len(inside) == f.trace_count == 1


@pytest.mark.parametrize("value", STATIC, ids=short)
def test_everything_else_is_static_and_comes_back_as_it_is(value):
    inside = []

    @filter_jit
    def f(x, y):
        inside.append(x)
        return x, {"y": y, "x": [x]}

    out, rest = f(value, X)
    f(value, X)
    assert inside == [value]
    assert out is value or out == value
    assert type(rest["x"][0]) is type(value)


def test_a_shape_is_static():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert filter_jit(lambda s: s)(shape) is shape


DIFFERENT = [
    (1, 2),
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ("a", "b"),
    (jnp.sin, jnp.cos),
    ((1,), (1.0,)),
    (None, 1),
    ([1], [1, 2]),
    ([1], (1,)),
]


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=short)
def test_another_static_value_is_another_trace_and_never_a_wrong_hit(a, b):
    @filter_jit
    def f(value):
        return value

    for _ in range(2):
        assert repr(f(a)) == repr(a)
        assert repr(f(b)) == repr(b)
    assert f.trace_count == 2


def test_arrays_of_other_values_share_a_trace_and_of_other_shapes_do_not():
    f = filter_jit(lambda x: x + 1)
    for x in (jnp.zeros(2), jnp.ones(2), np.ones(2, np.float32)):
        f(x)
    assert f.trace_count == 1
    f(jnp.zeros(3))
    f(jnp.zeros(2, jnp.bfloat16))
    assert f.trace_count == 3


def test_arrays_and_static_values_may_change_places():
    f = filter_jit(lambda a, b: (a, b))
    assert f(1, X)[0] == 1
    assert f(X, 1)[1] == 1
    assert f.trace_count == 2


def test_keyword_and_positional_arguments_share_a_trace():
    @filter_jit
    def f(a, b=2, *args, c=3, **kwargs):
        return a, b, args, c, kwargs

    assert f(X, 5)[1] == f(X, b=5)[1] == f(b=5, a=X)[1] == 5
    assert f.trace_count == 1
    f(X)
    assert f.trace_count == 2, "defaults are not filled in"
    assert f(X, 1, 2, 3, c=4, e="e")[1:] == (1, (2, 3), 4, {"e": "e"})


def test_positional_only_and_keyword_only_parameters():
    @filter_jit
    def f(a, /, *, b):
        return a * b

    assert f(2, b=3) == 6
    with pytest.raises(TypeError, match="positional.only"):
        f(a=2, b=3)
    with pytest.raises(TypeError, match="missing"):
        f(2)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        f(2, b=3, c=4)


def test_it_keeps_name_documentation_and_signature():
    assert at_the_top.__name__ == "at_the_top"
    assert at_the_top.__doc__ == "Adds one."
    assert at_the_top.__module__ == __name__
    assert list(inspect.signature(at_the_top).parameters) == ["x"]
    assert inspect.unwrap(at_the_top) is at_the_top.__wrapped__
    assert "at_the_top" in at_the_top.lower(X).as_text()


def test_arbitrary_objects_go_in_and_out():
    class Opaque:
        pass

    opaque = Opaque()
    layer = Layer(X)

    @filter_jit
    def f(fn, layer, thing, data):
        return fn(data["x"]), layer, thing, {"n": None, "deep": [(thing, fn)]}

    y, back, thing, rest = f(jnp.negative, layer, opaque, {"x": X, "s": "s"})
    assert (y == -X).all()
    assert back == layer
    assert jax.tree.structure(back) == jax.tree.structure(layer)
    assert thing is opaque
    assert rest["deep"][0] == (opaque, jnp.negative)
    assert filter_jit(lambda: None)() is None
    assert filter_jit(lambda x: ())(X) == ()


def test_modules_and_methods_are_functions_whose_arrays_are_traced():
    one, two = Layer(X), Layer(2 * X)
    f = filter_jit(one)
    assert jnp.allclose(f(1.0), jnp.tanh(X))
    assert jnp.allclose(filter_jit(two)(1.0), jnp.tanh(2 * X))
    assert f.trace_count == filter_jit(two).trace_count
    g = filter_jit(one.method)
    before = g.trace_count
    assert jnp.allclose(g(2.0), 2 * X)
    assert jnp.allclose(filter_jit(two.method)(2.0), 4 * X)
    assert g.trace_count == before + 1
    assert jnp.allclose(filter_jit(Partial(jnp.add, X))(X), 2 * X)


def test_compiled_methods():
    one, two = Layer(X), Layer(2 * X)
    before = Layer.jitted.trace_count
    assert jnp.allclose(one.jitted(2.0), 2 * X)
    assert jnp.allclose(two.jitted(2.0), 4 * X)
    assert jnp.allclose(one.jitted(x=2.0), 2 * X)
    assert jnp.allclose(Layer.jitted(one, 2.0), 2 * X)
    assert Layer.jitted.trace_count == before + 1
    assert one.jitted.__doc__ == "A compiled method."

    class Plain:
        @filter_jit
        def f(self, x):
            return x + 1

        @staticmethod
        @filter_jit
        def s(x):
            return x + 2

        @classmethod
        @filter_jit
        def c(cls, x):
            return x + 3

    assert (Plain().f(1.0), Plain.s(1.0), Plain.c(1.0)) == (2, 3, 4)

    class Callable(Module):
        w: jax.Array

        @filter_jit
        def __call__(self, x, *, y=0.0):
            return self.w * x + y

    assert (Callable(X)(1.0, y=1.0) == X + 1).all()
    assert Callable.__call__.trace_count == 1


def test_two_wrappers_of_one_function_share_their_programs():
    def f(x):
        return x + 1

    one, two, other = filter_jit(f), filter_jit(f), filter_jit(f, donate="all")
    one(X)
    two(X)
    assert one.trace_count == two.trace_count == 1
    other(jnp.arange(3.0))
    assert one.trace_count == 1
    assert other.trace_count == 1
    assert jax.tree.structure(one) == jax.tree.structure(two)
    assert one == two


def test_programs_die_with_their_function():
    def make():
        big = np.ones(10)

        def f(x):
            return x + big.sum()

        return f, weakref.ref(big)

    f, ref = make()
    compiled = filter_jit(f)
    compiled(X)
    compiled.lower(X).compile()(X)
    del f, compiled
    gc.collect()
    assert ref() is None


def test_programs_of_partials_die_too():
    big = np.ones(10)
    ref = weakref.ref(big)
    compiled = filter_jit(functools.partial(lambda big, x: x + big.sum(), big))
    compiled(X)
    del compiled, big
    gc.collect()
    assert ref() is None


def test_a_function_that_takes_the_place_of_a_dead_one_is_not_taken_for_it():
    for i in range(20):
        assert filter_jit(lambda x, i=i: x + i)(1.0) == 1 + i
        assert filter_jit(functools.partial(lambda i, x: x + i, i))(jnp.ones(())) == 1 + i


def test_callables_of_every_kind():
    class Callable:
        def __init__(self, k):
            self.k = k

        def __call__(self, x):
            return x * self.k

    class Equal(Callable):
        def __eq__(self, other):
            return type(other) is Equal and self.k == other.k

        def __hash__(self):
            return hash(self.k)

    class Slotted:
        __slots__ = ()

        def __call__(self, x):
            return x * 2

    two = jnp.array(2.0)
    assert filter_jit(Callable(3))(two) == 6
    assert filter_jit(Equal(3))(two) == 6
    assert filter_jit(Equal(4))(two) == 8
    assert filter_jit(Slotted())(two) == 4
    assert filter_jit(Callable(3).__call__)(two) == 6
    assert filter_jit(jax.jit(lambda x: x * 2))(two) == 4
    assert filter_jit(jnp.negative)(two) == -2
    assert filter_jit(abs)(two) == 2
    assert filter_jit(functools.partial(jnp.add, two))(two) == 4
    assert filter_jit(Layer)(X).w.shape == (3,)
    assert filter_jit(filter_jit(lambda x: x + 1))(two) == 3


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({1, 2}, "argument thing"),
        (np.array(["text"]), "argument thing"),
        (np.array([None], object), "argument thing"),
        (bytearray(b"x"), "argument thing"),
    ],
    ids=short,
)
def test_an_unhashable_argument_is_named(value, where):
    @filter_jit
    def f(x, thing):
        return x

    with pytest.raises(ValueError, match=rf"Non-hashable static arguments[\s\S]*`f`, {where}\n"):
        f(X, value)
    with pytest.raises(
        ValueError,
        match=r"Non-hashable static arguments[\s\S]*thing\[1\]\['k'\]\n[\s\S]*any other class of yours `__hash__`",
    ):
        f(X, [X, {"k": value}])
    with pytest.raises(ValueError, match=r"`f`, argument thing\[0\]\n"):
        f(thing=[value], x=X)


def test_unhashable_static_fields_of_equinox_are_compared_by_value():
    class M(Module, layout="fields"):
        x: Any = vernal.field(static=True)

    f = filter_jit(lambda m: jax.tree.leaves(m, is_leaf=lambda m: isinstance(m, M))[-1].x)
    for wrap in (lambda m: m, lambda m: [m], lambda m: (1, {"k": m})):
        before = f.trace_count
        assert [f(wrap(M(x))) for x in ([1], [1], [2])] == [[1], [1], [2]]
        assert f.trace_count == before + 2


def test_unhashable_leaves_of_equinox_are_refused():
    class M(Module, layout="fields"):
        x: Any

    for m in (M({1}), M([{1}]), [M({1})], (1, {"k": M({1})})):
        with pytest.raises(ValueError, match="Non-hashable static arguments"):
            filter_jit(lambda m: 1)(m)


def test_options_that_do_not_exist_are_refused():
    for name in ("static_argnums", "static_argnames", "donate_argnums", "backend", "anything"):
        with pytest.raises(
            TypeError, match=rf"filter_jit has no option `{name}`[\s\S]*donate='all'"
        ):
            filter_jit(lambda x: x, **{name: 0})
    with pytest.raises(ValueError, match=r"unknown value of `donate`[\s\S]*'all-except-first'"):
        filter_jit(lambda x: x, donate="arrays")
    with pytest.raises(
        TypeError, match=r"filter_jit needs a function[\s\S]*filter_jit\(f\)\(x\) rather than"
    ):
        filter_jit(3)
    with pytest.raises(TypeError, match="filter_jit needs a function"):
        filter_jit(donate="all")("text")


def test_options_that_exist_are_passed_on():
    f = filter_jit(lambda x, y: x, keep_unused=True)
    assert len(jax.tree.leaves(f.lower(X, X).compile().compiled.in_avals)) == 2
    assert filter_jit(lambda x: x + 1, inline=True)(1) == 2
    g = filter_jit(lambda x: x + 1, inline=True)
    assert "pjit" not in str(jax.make_jaxpr(g)(X))
    h = filter_jit(lambda x: x + 1, compiler_options={"xla_embed_ir_in_executable": True})
    assert (h(X) == X + 1).all()


DONATE = {
    "all": (True, True),
    "all-except-first": (False, True),
    "warn": (True, True),
    "warn-except-first": (False, True),
    "none": (False, False),
}


@pytest.mark.parametrize(("donate", "deleted"), DONATE.items(), ids=DONATE)
def test_donation(donate, deleted):
    f = filter_jit(lambda a, b: (a + 1, b["x"] + 1, b["s"]), donate=donate)
    for _ in range(2):
        a, b = jnp.ones(3), {"x": jnp.ones(4), "s": "text"}
        out = f(a, b)
        assert (a.is_deleted(), b["x"].is_deleted()) == deleted
        assert (out[0] == 2).all() and (out[1] == 2).all() and out[2] == "text"
    a, b = jnp.ones(3), {"x": jnp.ones(4), "s": "text"}
    f(b=b, a=a)
    assert (a.is_deleted(), b["x"].is_deleted()) == deleted


def test_all_except_first_spares_the_whole_first_argument():
    layer, x = Layer(jnp.ones(3)), {"a": jnp.ones(3), "b": jnp.ones(3)}
    out = filter_jit(lambda x, layer: (layer.w + x["a"], x), donate="all-except-first")(x, layer)
    assert layer.w.is_deleted()
    assert not x["a"].is_deleted()
    assert out[0].shape == (3,)


@pytest.mark.parametrize("donate", DONATE)
@pytest.mark.parametrize("transform", [filter_jit, vernal.filter_pmap])
def test_the_function_is_never_donated(transform, donate):
    layer = Layer(jnp.ones(()))
    for fn in (layer, layer.__call__):
        compiled = transform(fn, donate=donate)
        for _ in range(2):
            x = jnp.ones((1, 3))
            assert compiled(x).shape == (1, 3)
            assert x.is_deleted() == DONATE[donate][0]
    assert not layer.w.is_deleted()


@pytest.mark.parametrize("donate", ["all", "warn"])
def test_only_warn_warns_about_buffers_that_could_not_be_used(donate):
    f = filter_jit(lambda a: jnp.sum(a), donate=donate)
    if donate == "warn":
        with pytest.warns(UserWarning, match="Some donated buffers were not usable"):
            f(jnp.ones(3))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f(jnp.ones(3))


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))


def test_shardings_are_filtered_prefixes(mesh):
    split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    layer = Layer(jnp.ones(8))

    def f(layer, x, name):
        return {"y": layer.w * x, "layer": layer, "name": name}

    for prefix in (
        split,
        (split, split, None),
        [split, split, split],
        (jax.tree.map(lambda _: split, layer), split, None),
    ):
        out = filter_jit(f, in_shardings=prefix)(layer, jnp.ones(8), "n")
        assert out["y"].sharding.is_equivalent_to(split, 1), prefix
        assert out["name"] == "n"
    out = filter_jit(f, in_shardings=(None, None, None))(layer, jnp.ones(8), "n")
    assert (out["y"] == 1).all()
    for prefix in (
        whole,
        {"y": split, "layer": whole, "name": None},
        {"y": split, "layer": None, "name": None},
    ):
        out = filter_jit(f, out_shardings=prefix)(layer, jnp.ones(8), "n")
        expected = whole if prefix is whole else split
        assert out["y"].sharding.is_equivalent_to(expected, 1), prefix
        assert out["name"] == "n"
        assert jax.tree.structure(out["layer"]) == jax.tree.structure(layer)
    g = filter_jit(f, in_shardings=split, out_shardings=whole, donate="all-except-first")
    out = g(layer, jnp.ones(8), name="n")
    assert out["y"].sharding.is_equivalent_to(whole, 1)
    compiled = g.lower(layer, jnp.ones(8), "n").compile()
    assert compiled(layer, jax.device_put(jnp.ones(8), split), "n")["name"] == "n"


def test_shardings_that_do_not_fit_are_refused(mesh):
    split = NamedSharding(mesh, P("x"))
    with pytest.raises(
        ValueError,
        match=r"`in_shardings` of `f` is not a prefix[\s\S]*in_shardings",
    ):

        @filter_jit(in_shardings=(split, split))
        def f(x):
            return x

        f(jnp.ones(8))


def test_lowering_and_compiling_ahead_of_time():
    @filter_jit
    def f(fn, x, *, k=1):
        return fn(x) * k, "static"

    lowered = f.lower(jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32), k=2)
    assert "stablehlo" in lowered.as_text()
    assert "module" in lowered.as_text("hlo") or "HloModule" in lowered.as_text("hlo")
    assert lowered.cost_analysis()
    compiled = lowered.compile()
    assert isinstance(compiled.as_text(), str)
    assert compiled.cost_analysis()
    assert compiled.memory_analysis() is not None
    out, static = compiled(jnp.sin, X, k=2)
    assert jnp.allclose(out, 2 * jnp.sin(X), atol=1e-6)
    assert static == "static"
    assert jnp.allclose(compiled(jnp.sin, 2 * X, k=2)[0], 2 * jnp.sin(2 * X), atol=1e-6)
    assert jnp.allclose(compiled(fn=jnp.sin, x=X, k=2)[0], out)
    assert f.trace_count == 1
    assert (
        f.lower(jnp.sin, X, k=2).compile({"xla_embed_ir_in_executable": True})(jnp.sin, X, k=2)[1]
        == "static"
    )


WRONG = {
    "another function": ((jnp.cos, X), {}, r"expected <.*sin>, got <.*cos>"),
    "another shape": ((jnp.sin, jnp.ones(4)), {}, r"expected f32\[3\].*, got f32\[4\]"),
    "another dtype": ((jnp.sin, jnp.ones(3, jnp.bfloat16)), {}, r"got bf16\[3\]"),
    "another number": ((jnp.sin, X), {"k": 3}, r"expected 2, got 3"),
    "another structure": ((jnp.sin, [X]), {}, r"expected f32\[3\], got list"),
    "no array": ((jnp.sin, 1.0), {}, r"expected f32\[3\], got 1\.0"),
}


@pytest.mark.parametrize(("args", "kwargs", "text"), WRONG.values(), ids=WRONG)
def test_a_compiled_function_refuses_other_arguments(args, kwargs, text):
    @filter_jit
    def f(fn, x, k=2):
        return fn(x) * k

    compiled = f.lower(jnp.sin, X, 2).compile()
    with pytest.raises(TypeError, match=rf"`f` was compiled for different arguments[\s\S]*{text}"):
        compiled(*args, **{"k": 2, **kwargs})


def test_compiled_modules_and_methods():
    layer = Layer(X)
    assert jnp.allclose(filter_jit(layer).lower(1.0).compile()(1.0), jnp.tanh(X))
    compiled = Layer.jitted.lower(layer, 1.0).compile()
    assert jnp.allclose(compiled(Layer(2 * X), 1.0), 2 * X)


def test_it_goes_through_other_transformations():
    f = filter_jit(lambda x, s: x**2 if s == "square" else x)

    def g(x):
        return f(x, "square")

    assert jax.vmap(g)(X).tolist() == [0, 1, 4]
    assert jax.vmap(filter_jit(lambda x: x + 1))(X).shape == (3,)
    assert jax.grad(g)(3.0) == 6
    assert jax.jit(g)(3.0) == 9
    assert jax.jit(filter_jit(lambda x: x + 1))(1.0) == 2
    assert jax.lax.scan(lambda c, x: (f(c, "square"), None), 1.0, X)[0] == 1
    assert jax.hessian(g)(3.0) == 2
    assert jax.grad(filter_jit(lambda x: jax.grad(g)(x)))(3.0) == 2
    assert jax.checkpoint(g)(3.0) == 9
    with jax.disable_jit():
        assert g(3.0) == 9
        assert Layer(X).jitted(1.0).shape == (3,)
    with jax.checking_leaks():
        assert filter_jit(lambda x: f(x, "square"))(3.0) == 9
    outer = filter_jit(lambda x: filter_jit(lambda y: y + x)(x))
    assert outer(jnp.array(2.0)) == 4


def test_the_function_may_be_a_scan_carry_and_an_argument():
    f = filter_jit(Layer(X))
    assert len(jax.tree.leaves(f)) == 1
    carry, _ = jax.lax.scan(
        lambda f, _: (jax.tree.map(lambda w: w * 2, f), None), f, None, length=2
    )
    assert jnp.allclose(carry(1.0), jnp.tanh(4 * X))
    assert jax.jit(lambda f, x: f(x))(f, 1.0).shape == (3,)


def test_exceptions_leave_everything_as_it_was():
    state = {"fail": True}

    @filter_jit
    def f(x):
        if state["fail"]:
            raise RuntimeError("inside")
        return x + 1

    for _ in range(2):
        with pytest.raises(RuntimeError, match="inside"):
            f(X)
    state["fail"] = False
    assert (f(X) == X + 1).all()
    assert (f(X) == X + 1).all()
    assert f.trace_count == 3


def test_two_threads_may_call_first_at_the_same_time():
    barrier = threading.Barrier(4)
    results, errors = [], []

    @filter_jit
    def f(x, n):
        return x * n

    def work(i):
        try:
            barrier.wait(timeout=60)
            results.extend(float(f(jnp.array(2.0), n)) == 2 * n for n in (1, 2, i))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert errors == []
    assert results == [True] * 12


def test_it_pickles_where_its_function_does():
    assert pickle.loads(pickle.dumps(at_the_top)) is at_the_top
    assert pickle.loads(pickle.dumps(Layer.jitted)) is Layer.jitted
    again = pickle.loads(pickle.dumps(filter_jit(Layer(X))))
    assert jnp.allclose(again(1.0), jnp.tanh(X))
    again = pickle.loads(pickle.dumps(filter_jit(jnp.negative)))
    assert again(1.0) == -1
    with pytest.raises((pickle.PicklingError, AttributeError), match="pickle|local"):
        pickle.dumps(filter_jit(lambda x: x))


def test_it_is_immutable_hashable_and_weakly_referencable():
    assert hash(at_the_top) == hash(at_the_top)
    assert weakref.ref(at_the_top)() is at_the_top
    with pytest.raises(AttributeError, match="modules are immutable"):
        at_the_top.fn = None
    assert jax.tree.leaves(at_the_top) == []


def test_precision_and_other_contexts_are_respected():
    f = filter_jit(lambda x: x + np.float32(1))
    f(X)
    with jax.default_matmul_precision("float32"):
        f(X)
    assert (f(X) == X + 1).all()


def test_weak_types_are_kept_apart():
    f = filter_jit(lambda x: x)
    weak = jnp.asarray(1.0)
    strong = jnp.float32(1.0)
    assert f(jax.lax.full((), 1.0)).weak_type == jax.lax.full((), 1.0).weak_type
    assert f(weak).weak_type == weak.weak_type
    assert f(strong).weak_type == strong.weak_type


@pytest.mark.parametrize("call", [lambda f: f({"a": X}, X[0]), lambda f: f(x=X[0], model={"a": X})])
def test_errors_of_jax_name_the_function_its_line_and_the_argument(call):
    @filter_jit
    def train(model, x, more=None):
        return model if x > 0 else x

    line = inspect.unwrap(train).__code__.co_firstlineno
    text = rf"function train at .*test_jit\.py:{line} for jit.* argument x\."
    with pytest.raises(jax.errors.TracerBoolConversionError, match=text):
        call(train)
