"""What a compiled function returns besides arrays is one object for all calls: it cannot change, and hides nothing."""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vernal
from vernal import filter_jit

X = jnp.ones(2)


@dataclasses.dataclass
class Stats:
    steps: int = 0


@dataclasses.dataclass(eq=False)
class Loose:
    steps: int = 0


class Plain:
    def __init__(self, x):
        self.x = x


class Holder(vernal.Module):
    x: jax.Array
    what: object


CHANGEABLE = {
    "set": lambda x: {1, 2},
    "bytearray": lambda x: bytearray(b"a"),
    "deque": lambda x: collections.deque([1]),
    "counter": lambda x: collections.Counter("a"),
    "list subclass": lambda x: collections.UserList([1]),
    "namespace": lambda x: types.SimpleNamespace(a=1),
    "dataclass": lambda x: Stats(),
    "dataclass without eq": lambda x: Loose(),
    "strings": lambda x: np.array(["a"]),
    "iterator": lambda x: map(str, [1, 2]),
    "generator": lambda x: (i for i in range(2)),
}
HIDING = {
    "frozen dataclass": lambda x: dataclasses.make_dataclass(
        "Out", ["loss"], frozen=True, eq=False
    )(x),
    "closure": lambda x: lambda: x,
    "partial": lambda x: functools.partial(jnp.add, x),
    "default": lambda x: lambda x=x: x,
    "object": Plain,
    "object in an object": lambda x: Plain([Plain(x)]),
    "object beside much else": lambda x: Plain([x, [[i] for i in range(20_000)]]),
    "objects in a frozenset": lambda x: frozenset([Plain(x)]),
    "slice": lambda x: slice(x, x),
    "view of a dict": lambda x: {"a": x}.values(),
    "exception": ValueError,
    "property": lambda x: property(lambda self: x),
    "class": lambda x: type("Local", (), {"x": x, "__qualname__": "f.<locals>.Local"}),
    "coroutine": lambda x: _coroutine(x),
}


async def _coroutine(x):
    return x


# Also where nothing is kept: what is left behind there is no number, and has no derivative.
LEAVING = {
    "filter_checkpoint": lambda make: vernal.filter_checkpoint(make)(X),
    "filter_eval_shape": lambda make: vernal.filter_eval_shape(make, X),
    "filter_grad": lambda make: vernal.filter_grad(lambda x: (x[0], make(x)), has_aux=True)(X),
    "filter_jvp": lambda make: vernal.filter_jvp(make, (X,), (X,)),
    "filter_vjp": lambda make: vernal.filter_vjp(lambda x: (x, make(x)), X, has_aux=True),
    "filter_vmap": lambda make: vernal.filter_vmap(lambda x: (x, make(x)))(X),
}


def routes(make):
    """Ways to compile a function that returns what `make` makes."""

    def with_aux(x):
        return jnp.sum(x), {"what": make(x)}

    def plain(x):
        return x, {"what": make(x)}

    return {
        "filter_jit": filter_jit(plain),
        "aux": filter_jit(vernal.filter_value_and_grad(with_aux, has_aux=True)),
        "out_shardings": filter_jit(
            plain, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0])
        ),
        "compiled": lambda x: filter_jit(plain).lower(x).compile()(x),
        "converted": lambda x: vernal.filter_closure_convert(plain, x)(x),
    }


# JAX deprecates iterators as leaves.
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("route", routes(None))
@pytest.mark.parametrize("name", CHANGEABLE)
def test_what_can_change_is_not_returned(name, route):
    with pytest.raises(ValueError, match=r"(?s)can change in place, and all calls.*\['what'\]"):
        routes(CHANGEABLE[name])[route](X)


# The coroutine is never awaited.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("route", routes(None))
@pytest.mark.parametrize("name", HIDING)
def test_what_hides_a_traced_array_is_not_returned(name, route):
    with pytest.raises(ValueError, match="an object that hides a traced array|can change in place"):
        routes(HIDING[name])[route](X)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
@pytest.mark.parametrize("transform", LEAVING)
@pytest.mark.parametrize("name", HIDING)
def test_what_hides_a_traced_array_does_not_leave_a_transformation(name, transform):
    with pytest.raises(
        ValueError, match="hides a traced array, which has no value outside of the func"
    ):
        LEAVING[transform](HIDING[name])


@pytest.mark.parametrize("transform", LEAVING)
def test_an_object_that_holds_an_array_from_outside_leaves_a_transformation(transform):
    jax.grad(lambda y: LEAVING[transform](lambda x: Plain(y)) and y)(1.0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loop", [vernal.loops.scan, vernal.loops.map])
def test_what_hides_a_traced_array_does_not_leave_a_loop(loop, compiled):
    def f(xs):
        if loop is vernal.loops.map:
            return loop(lambda x: (x, Plain(x)), xs)
        return loop(lambda c, x: (c, lambda: x), 0.0, xs)

    with pytest.raises(
        ValueError, match="hides a traced array, which has no value outside of the func"
    ):
        (jax.jit(f) if compiled else f)(X)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("around", [jax.grad, lambda f: lambda w: jax.vmap(f)(w[None])[0]])
def test_a_loop_carries_an_object_that_holds_a_traced_array_from_outside(around, compiled):
    def f(w):
        def step(carry, y):
            total, scale = carry
            return (total + scale(y), scale), None

        return vernal.loops.scan(step, (0.0, lambda z: z * w), jnp.ones(3))[0][0]

    run = around(f)
    assert (jax.jit(run) if compiled else run)(jnp.array(2.0)) in (3.0, 6.0)


def test_a_compiled_function_returns_an_object_that_its_caller_brought():
    step = filter_jit(lambda w, h: (h(w), h))

    def outer(x):
        return step(x, lambda z: z * x)[1](2.0)

    assert outer(jnp.array(3.0)) == jax.jit(outer)(3.0) == 6.0


def test_what_every_call_may_share_is_returned():
    shared = (lambda x: X + x, object(), Holder, jnp.float32, range(3), frozenset({1}), "a", None)

    @filter_jit
    def f(x):
        return [x, *shared], {"here": x, "list": [1, 2]}

    for scale in (1, 2):
        (x, *rest), more = f(scale * X)
        assert all(a is b for a, b in zip(rest, shared, strict=True))
        assert x[0] == scale and more["list"] == [1, 2]
        # A container is made anew for each call.
        more["list"].append(3)


def test_a_failed_trace_leaves_nothing_behind():
    wanted = [set()]
    f = filter_jit(lambda x: (x, wanted[0]))
    with pytest.raises(ValueError, match="can change in place"):
        f(X)
    wanted[0] = "text"
    assert f(X)[1] == "text"


def test_without_jit_a_function_runs_once_and_as_written():
    seen = []

    def f(x, scale):
        seen.append(type(x))
        return x * float(x[0]) * scale, {1, 2}

    with jax.disable_jit():
        compiled = filter_jit(f)
        for _ in range(2):
            x, what = compiled(2 * X, 3.0)
            assert x.tolist() == [12.0, 12.0] and what == {1, 2}
    assert len(seen) == 2 and compiled.trace_count == 0


class StandsForAnArray:
    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return jnp.asarray(self.value)


def test_an_object_that_stands_for_an_array_is_no_static_argument():
    # It can be changed in place, and a compiled program would not see it.
    with pytest.raises(ValueError, match=r"(?s)Non-hashable static arguments.*StandsForAnArray"):
        filter_jit(lambda x: jnp.asarray(x) * 2)(StandsForAnArray(1.0))
