"""What callables hold inside, and putting other values there."""

import dataclasses
import functools
import gc
import inspect
import math
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import vernal
from vernal.transforms._captured import captured
from vernal.trees import is_array


def is_float(x):
    return type(x) is float


def is_tracer(x):
    return isinstance(x, jax.core.Tracer)


class Scale(vernal.Module, layout="fields"):
    by: Any
    fn: Any = None

    def __call__(self, x):
        return (x if self.fn is None else self.fn(x)) * self.by

    def twice(self, x):
        return 2.0 * self(x)


class Plain:
    def __init__(self, by):
        self.by = by

    def method(self, x):
        return self.by * x

    def __call__(self, x):
        return self.by + x


@dataclasses.dataclass
class Data:
    by: float

    def __call__(self, x):
        return x * self.by


def closure(a):
    return lambda x: a * x


def nested(a):
    def inner(x):
        return a + x

    def outer(x):
        return 2.0 * inner(x)

    return outer


def default(a):
    return lambda x, a=a, n=2: a * x * n


def keyword_default(a):
    def fn(x, *, a=a, n=2):
        return a * x * n

    return fn


def attribute(a):
    def fn(x):
        return fn.a * x

    fn.a = a
    return fn


def wrapped(a):
    @functools.wraps(closure(a))
    def fn(x):
        return fn.__wrapped__(x) + 1.0

    return fn


def recursive(a):
    def power(x, n=3):
        return a if n == 0 else x * power(x, n - 1)

    return power


def mutual(a):
    def even(x, n=4):
        return a if n == 0 else odd(x, n - 1)

    def odd(x, n):
        return x * even(x, n - 1)

    return even


def in_containers(a):
    held = {"z": [a, (a, None)], 1: jnp, "f": closure(a)}
    return lambda x: held["z"][0] * held["z"][1][0] * held[1].sin(x) * held["f"](1.0)


def in_a_list_that_holds_itself(a):
    held = [a]
    held.append(held)
    return lambda x: held[1][1][0] * x


def product_and_sum(x, y, *, z):
    return x * y + z


def times_held(held, x):
    return held[0] * x * len(held[1].args)


def partial_with_itself(a):
    held: list[Any] = [a]
    fn = functools.partial(times_held, held)
    held.append(fn)
    return fn


def custom_jvp(a):
    fn = jax.custom_jvp(lambda x: a * x)
    fn.defjvp(lambda primals, tangents: (fn(*primals), a * tangents[0]))
    return fn


def custom_vjp(a):
    fn = jax.custom_vjp(lambda x: a * x)
    fn.defvjp(lambda x: (a * x, None), lambda _, ct: (a * ct,))
    return fn


def custom_vmap(a):
    fn = jax.custom_batching.custom_vmap(lambda x: a * x)
    fn.def_vmap(lambda size, batched, x: (a * x, batched[0]))
    return fn


def unfinished(a):
    made = []

    class Early(vernal.Module):
        a: Any

        def __init__(self, a):
            self.a = a
            values, rebuild = captured(lambda x: self.a * x, is_float)
            made.append(rebuild(values))

    Early(a)
    return made[0]


CALLABLES = {
    "closure": closure,
    "nested": nested,
    "default": default,
    "keyword default": keyword_default,
    "attribute": attribute,
    "functools.wraps": wrapped,
    "recursive": recursive,
    "mutually recursive": mutual,
    "containers": in_containers,
    "list that holds itself": in_a_list_that_holds_itself,
    "partial that holds itself": partial_with_itself,
    "functools.partial": lambda a: functools.partial(product_and_sum, a, z=a),
    "jax.tree_util.Partial": lambda a: jax.tree_util.Partial(closure(a)),
    "vernal.Partial": lambda a: vernal.Partial(closure(a)),
    "vernal.Partial of it": lambda a: vernal.Partial(jnp.multiply, a),
    "module": lambda a: Scale(jnp.ones(()), closure(a)),
    "method of a module": lambda a: Scale(jnp.ones(()), closure(a)).twice,
    "types.MethodType": lambda a: types.MethodType(lambda self, x: self.by * x, Plain(a)),
    "method of a plain object": lambda a: Plain(a).method,
    "plain object": Plain,
    "dataclass": Data,
    "jax.jit": lambda a: jax.jit(closure(a)),
    "jax.jit with options": lambda a: jax.jit(default(a), static_argnames="n"),
    "functools.cache": lambda a: functools.cache(closure(a)),
    "jax.vmap": lambda a: jax.vmap(closure(a), axis_size=2, in_axes=None),
    "jax.grad": lambda a: jax.grad(closure(a)),
    "jax.checkpoint": lambda a: jax.checkpoint(closure(a)),
    "jax.custom_jvp": custom_jvp,
    "jax.custom_vjp": custom_vjp,
    "custom_vmap": custom_vmap,
    "grad of a custom_jvp": lambda a: jax.grad(custom_jvp(a)),
    "filter_jit": lambda a: vernal.filter_jit(closure(a)),
    "filter_grad of filter_checkpoint": lambda a: vernal.filter_grad(
        vernal.filter_checkpoint(nested(a))
    ),
    "module inside its __init__": unfinished,
}


@pytest.mark.parametrize("name", CALLABLES)
def test_values_are_taken_out_and_others_put_in(name):
    make = CALLABLES[name]
    fn = make(2.0)
    x = np.float32(1.5)
    values, rebuild = captured(fn, lambda leaf: is_float(leaf) and leaf == 2.0)
    assert values == [2.0]
    before = fn(x)
    other = rebuild([3.0])
    np.testing.assert_allclose(other(x), make(3.0)(x))
    np.testing.assert_allclose(rebuild([2.0])(x), before)
    # What was taken apart is as it was.
    np.testing.assert_allclose(fn(x), before)
    assert other is not fn
    assert captured(other, lambda leaf: is_float(leaf) and leaf == 3.0)[0] == [3.0]


@pytest.mark.parametrize("name", CALLABLES)
def test_what_holds_nothing_wanted_is_the_same_object(name):
    fn = CALLABLES[name](2.0)
    values, rebuild = captured(fn, is_tracer)
    assert values == [] and rebuild([]) is fn


# The first takes no tracer as an argument; the second is called where its tracer is gone; for the
# others JAX has no gradient with respect to what they close over.
NO_GRADIENT = {
    "functools.cache",
    "module inside its __init__",
    "jax.custom_jvp",
    "jax.custom_vjp",
    "custom_vmap",
    "grad of a custom_jvp",
}


@pytest.mark.parametrize("name", [name for name in CALLABLES if name not in NO_GRADIENT])
@pytest.mark.sample(5)
def test_gradients_reach_the_values_wherever_they_are(name):
    make = CALLABLES[name]

    def through(a, x):
        found, rebuild = captured(make(a), is_tracer)

        def hoisted(values, x):
            return jnp.sum(rebuild(values)(x))

        # `hoisted` closes over no tracer: JAX may trace it on its own.
        assert not captured(hoisted, is_tracer)[0]
        return jax.jit(hoisted)(found, x)

    a, x = jnp.float32(2.0), jnp.float32(1.5)
    ours = jax.grad(through)(a, x)
    np.testing.assert_allclose(ours, jax.grad(lambda a: jnp.sum(make(a)(x)))(a), rtol=1e-6)
    with jax.checking_leaks():
        np.testing.assert_allclose(jax.jit(jax.grad(through))(a, x), ours, rtol=1e-6)


def test_untouched_cells_and_objects_are_the_same_ones():
    calls, count = [], 0
    weight = 2.0

    def silent(x):
        nonlocal count
        count += 1
        return x

    def fn(x):
        calls.append(x)
        return silent(x) * weight

    values, rebuild = captured(fn, is_float)
    other: Any = rebuild([3.0])
    assert other(1.0) == 3.0 and calls == [1.0] and count == 1 and values == [2.0]
    cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    others = dict(zip(other.__code__.co_freevars, other.__closure__, strict=True))
    assert others["calls"] is cells["calls"] and others["silent"] is cells["silent"]
    assert others["weight"] is not cells["weight"]


def test_functions_that_share_a_cell_share_the_new_one():
    total = 1.0

    def add(x):
        nonlocal total
        total += x

    def read():
        return total

    _, rebuild = captured((add, read), is_float)
    new_add, new_read = rebuild([5.0])
    new_add(2.0)
    assert new_read() == 7.0 and read() == 1.0


def test_each_rebuild_is_its_own():
    _, rebuild = captured(recursive(2.0), is_float)
    first, second = rebuild([1.0]), rebuild([3.0])
    assert (first(2.0), second(2.0), first(2.0)) == (8.0, 24.0, 8.0)
    cell = dict(zip(first.__code__.co_freevars, first.__closure__, strict=True))["power"]
    assert cell.cell_contents is first


def test_a_value_held_twice_is_there_once_and_order_is_that_of_the_code():
    a, b = 1.0, 2.0
    c = [a, b]
    values, rebuild = captured(lambda x, y=a: (a, b, c, y), is_float)
    assert values == [1.0, 2.0]
    assert rebuild(["A", "B"])(0) == ("A", "B", ["A", "B"], "A")


def test_rebuilt_functions_keep_names_documentation_and_signature():
    a = 1.0

    def fn(x: int, y: float = a, *, z: float = a) -> float:
        """Says so."""
        return a

    fn.extra = "kept"  # type: ignore[attr-defined] (functions take attributes)
    other = captured(fn, is_float)[1]([2.0])
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "extra"):
        assert getattr(other, name) == getattr(fn, name)
    assert str(inspect.signature(other)) == "(x: int, y: float = 2.0, *, z: float = 2.0) -> float"


def test_a_cell_without_a_value_stays_so():
    a = 1.0

    def fn():
        return a, later

    other = captured(fn, is_float)[1]([2.0])
    with pytest.raises(NameError):
        other()
    later = 0
    assert fn() == (1.0, later)


def test_what_is_neither_callable_nor_a_tree_is_not_looked_into():
    class Settings:
        def __init__(self):
            self.by = 2.0

    settings, math_module, cls = Settings(), math, Data
    fn = lambda x: (settings, math_module, cls)  # noqa: E731 (a name for it)
    values, rebuild = captured(fn, is_float)
    assert values == [] and rebuild([]) is fn
    array = jnp.ones(2)
    assert captured(array.sum, is_array)[0] == [array]
    assert captured({}.get, is_float)[0] == []


def test_a_module_keeps_its_structure_and_its_kind():
    class Scale(vernal.Module):
        by: Any
        fn: Any = None

    scale = Scale(jnp.ones(2), closure(2.0))
    other = captured(scale, is_float)[1]([3.0])
    assert type(other) is Scale and other.by is scale.by and other.fn(1.0) == 3.0
    assert len(jax.tree.leaves(other)) == 1
    layers = Scale((jnp.ones(2), [closure(2.0), "text"]))
    other = captured(layers, is_float)[1]([3.0])
    assert other.by[1][0](1.0) == 3.0 and other.by[1][1] == "text"
    assert len(jax.tree.leaves(other)) == 1


def test_long_chains_of_closures_are_walked():
    fn = closure(2.0)
    for _ in range(150):
        fn = functools.wraps(fn)(lambda x, fn=fn: fn(x))
    values, rebuild = captured(fn, is_float)
    assert values == [2.0] and rebuild([3.0])(1.0) == 3.0


def with_number(a, n):
    def inner(x):
        return x + n

    held = [n]
    return lambda x: a * inner(x) * held[0]


def test_a_recipe_is_that_of_the_very_same_callable():
    def recipe(fn):
        return captured(fn, is_array)[1]

    one, two = jnp.ones(2), jnp.zeros(3)
    for name, make in CALLABLES.items():
        if name == "module inside its __init__":
            continue
        fn = make(one)
        assert recipe(fn) == recipe(fn), name
        assert hash(recipe(fn)) == hash(recipe(fn))
    # A new function of the user's may do something else; one of a library does not.
    assert recipe(closure(one)) != recipe(closure(two))
    assert recipe(optax.adam(one)) == recipe(optax.adam(two)) != recipe(optax.adam(one, b1=0.8))
    assert recipe(functools.partial(jnp.add, one)) == recipe(functools.partial(jnp.add, two))


def test_recipes_differ_where_the_callables_do():
    def recipe(fn):
        return captured(fn, is_array)[1]

    a = jnp.ones(2)
    base = recipe(with_number(a, 1))
    assert base != recipe(with_number(a, 2))
    assert base != recipe(with_number(a, 1.0))
    assert base != recipe(closure(a)) and base != "something else"
    assert recipe(lambda x: a) != recipe(lambda x: a)
    assert recipe(default(a)) != recipe(keyword_default(a))
    # Other globals.
    fn = closure(a)
    moved = types.FunctionType(fn.__code__, dict(fn.__globals__), closure=fn.__closure__)
    assert recipe(fn) != recipe(moved)
    # The same array in two places is not two arrays.
    pair = lambda a, b: lambda x: (a, b)  # noqa: E731 (one line)
    assert recipe(pair(a, a)) != recipe(pair(a, jnp.ones(2)))


def test_variables_that_are_not_taken_out_stay_what_they_are():
    def make(a):
        n = 0

        def fn(x):
            nonlocal n
            n += 1
            return a * n

        return fn

    fn = make(jnp.ones(2))
    recipe = captured(fn, is_array)[1]
    fn(0)
    assert recipe == captured(fn, is_array)[1]
    assert recipe != captured(make(jnp.ones(2)), is_array)[1]
    assert captured(fn, is_array)[1]([jnp.ones(2)])(0)[0] == 2


def test_a_recipe_holds_none_of_the_values():
    for name, make in CALLABLES.items():
        if name == "module inside its __init__":
            continue
        array = np.ones(3)
        gone = weakref.ref(array)
        recipe = captured(make(array), is_array)[1]
        del array
        # Without a cycle it is gone already, and a collection takes a second late in a run.
        if gone() is not None:
            gc.collect()
        assert gone() is None, name
        del recipe


def test_the_way_to_each_value_is_told():
    settings = {"rate": 1.0, 3: [2.0, 3.0]}
    scale = Scale(4.0, closure(5.0))
    partial = functools.partial(lambda x, y, n: x, 6.0, n=7.0)

    def fn(x, y=8.0, *, z=9.0):
        return settings, scale, partial, Plain(1.0).method

    fn.extra = 10.0  # type: ignore[attr-defined] (functions take attributes)
    values, recipe = captured(fn, is_float)
    told = {values[i]: path for i, path in recipe.paths().items()}
    assert told == {
        1.0: ("settings", "rate"),
        2.0: ("settings", 3, 0),
        3.0: ("settings", 3, 1),
        4.0: ("scale", "by"),
        5.0: ("scale", "fn", "a"),
        6.0: ("partial", 0),
        7.0: ("partial", "n"),
        8.0: ("y",),
        9.0: ("z",),
        10.0: ("extra",),
    }
    plain, recipe = captured((Plain(1.0).method, recursive(2.0)), is_float)
    assert plain == [1.0, 2.0] and recipe.paths() == {0: (0, "by"), 1: (1, "a")}
