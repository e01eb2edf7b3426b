"""Flattening and unflattening: round trips, paths, and when two treedefs are one."""

import linecache
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest

from vernal import Module, field, tree_at
from vernal.modules import _structure


class M(Module):
    a: Any
    b: Any = None
    c: Any = field(static=True, default=0)


def structure(*args, **kwargs):
    return jtu.tree_structure(M(*args, **kwargs))


def test_flatten_and_unflatten_are_inverse():
    m = M(jnp.ones(2), {"k": jnp.zeros(3)}, "static")
    leaves, treedef = jtu.tree_flatten(m)
    again = treedef.unflatten(leaves)
    assert again.a is m.a
    assert again.b["k"] is m.b["k"]
    assert again.c == "static"
    assert again == m


def test_unflattening_runs_no_code_of_the_user():
    class Loud(Module):
        x: Any = field(converter=jnp.asarray)

        def __new__(cls, *args, allowed=False):
            assert args
            return super().__new__(cls)

        def __init__(self, x):
            assert not getattr(type(self), "closed", False)
            self.x = x

        def __check_init__(self):
            assert not getattr(type(self), "closed", False)

    m = Loud(1.0)
    Loud.closed = True
    for leaf in (object(), None, "text", 1):
        assert jax.tree.map(lambda _: leaf, m).x is leaf  # noqa: B023 (used up at once)


def test_key_paths_are_attributes_in_the_order_of_the_fields():
    m = M({"z": jnp.ones(1), "a": [jnp.ones(1)]}, (jnp.ones(1), M(jnp.ones(1))))
    assert [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(m)] == [
        ".a['a'][0]",
        ".a['z']",
        ".b[0]",
        ".b[1].a",
    ]
    assert jtu.tree_flatten_with_path(m)[1] == jtu.tree_structure(m)


DIFFERENT = [
    (1, 1.0),
    (1, True),
    (0, False),
    (0.0, -0.0),
    (1.0, 1 + 0j),
    ((1,), (1.0,)),
    ((0.0, "a"), (-0.0, "a")),
    (frozenset({1}), frozenset({1.0})),
    ("a", "b"),
    (jnp.sin, jnp.cos),
    (lambda x: x, lambda x: x),
    (jnp.float32, jnp.float16),
    ([1], [1.0]),
    ([1], (1,)),
    ({"a": 1}, {"a": True}),
    ({"a": 1}, {"b": 1}),
    ([jnp.ones(1), 0.0], [jnp.ones(1), -0.0]),
    ([jnp.ones(1), 1], [1, jnp.ones(1)]),
    (None, jnp.ones(1)),
]


@pytest.mark.parametrize(("x", "y"), DIFFERENT)
def test_different_structure_is_never_a_cache_hit(x, y):
    assert structure(x) != structure(y)
    seen = []
    f = jax.jit(lambda m: seen.append(m.a))
    f(M(x))
    f(M(y))
    f(M(x))
    assert len(seen) == 2
    assert repr(seen[0]) == repr(jax.jit(lambda m: m)(M(x)).a) or isinstance(x, list)


@pytest.mark.parametrize(
    "static", [1, 1.0, True, 0.0, -0.0, (1, 2.0), "a", None, frozenset({1}), (("k", 0.0),)]
)
def test_a_compiled_function_returns_the_static_value_it_was_given(static):
    f = jax.jit(lambda m: m)
    others = [1, 1.0, True, 0, False, 0.0, -0.0]
    for value in [*others, static]:
        got = f(M(jnp.ones(1), c=value)).c
        assert type(got) is type(value)
        assert repr(got) == repr(value)


@pytest.mark.parametrize("value", [float("nan"), (float("nan"), 1), [float("nan")], complex("nan")])
def test_nan_is_the_same_structure_every_time(value):
    count = []
    f = jax.jit(lambda m: count.append(1))
    f(M(value))
    f(
        M(
            eval(repr(value).replace("nan", "float('nan')"))
            if not isinstance(value, complex)
            else complex("nan")
        )
    )
    assert len(count) == 1


def test_equal_static_values_are_interned():
    one, two = M(jnp.ones(1), c=("a", 1.5)), M(jnp.ones(1), c=("a", 1.5))
    assert vars(one)["_vernal_structure"] is vars(two)["_vernal_structure"]
    three = M(jnp.ones(1), c=("a", 2.5))
    assert vars(three)["_vernal_structure"] is not vars(one)["_vernal_structure"]


def test_lists_and_dicts_of_plain_values_are_read_whenever_they_are_flattened():
    m = M([1, {"a": 2}])
    assert jtu.tree_structure(m) == structure([1, {"a": 2}])
    assert jtu.tree_structure(m) != structure([1, {"a": 2.0}])
    m.a[1]["a"] = 2.0
    assert jtu.tree_structure(m) == structure([1, {"a": 2.0}])
    assert hash(structure([1])) == hash(structure([1]))


def test_different_classes_are_different_structures():
    class N(M):
        pass

    assert jtu.tree_structure(N(jnp.ones(1))) != structure(jnp.ones(1))
    with pytest.raises(ValueError, match="tree"):
        jax.tree.map(lambda a, b: a, M(jnp.ones(1)), N(jnp.ones(1)))


def test_flattening_shows_what_is_there_now():
    m = M(jnp.ones(1), [jnp.ones(2)])
    jax.tree.leaves(m)
    changed = jax.tree.map(lambda x: x + 1, m)
    assert jax.tree.leaves(m)[0] == 1
    assert jax.tree.leaves(changed)[0] == 2
    object.__setattr__(m, "a", jnp.zeros(1))
    assert jax.tree.leaves(m)[0] == 0


def test_generated_code_can_be_read_by_a_debugger():
    m = M(jnp.ones(1))
    make = vars(m)["_vernal_structure"][0].make
    lines = linecache.getlines(make.__code__.co_filename)
    assert any("values['a']" in line for line in lines)


def test_treedefs_print_class_and_structure():
    text = str(structure(jnp.ones(1), "text", 3))
    assert "M" in text
    assert "b='text'" in text
    assert "c=3" in text
    assert "('s',)" in str(structure([jnp.ones(1), "s"]))


def test_modules_without_fields_and_with_one_field():
    class Empty(Module):
        pass

    class One(Module):
        x: Any

    assert jax.tree.leaves(Empty()) == []
    assert jax.jit(lambda m: m)(Empty()) == Empty()
    assert jax.tree.map(lambda x: x + 1, One(1.0)).x == 1.0
    assert jax.tree.map(lambda x: x + 1, One(jnp.ones(()))).x == 2.0


@pytest.mark.parametrize(
    "name",
    ["values", "children", "template", "new", "cls", "module", "self", "get", "keys", "make"],
)
def test_field_names_that_generated_code_might_use(name):
    cls = type(Module)("N", (Module,), {"__annotations__": {name: Any, "other": Any}})
    m = jax.tree.map(lambda x: x * 2, cls(jnp.ones(1), "s"))
    assert getattr(m, name) == 2
    assert m.other == "s"


def test_deep_and_wide_models():
    m: Any = jnp.ones(1)
    for _ in range(50):
        m = M(m, [jnp.tanh, jnp.ones(1)])
    assert len(jax.tree.leaves(m)) == 51
    wide = M([M(jnp.ones(1), "x") for _ in range(300)])
    assert len(jax.tree.leaves(jax.jit(lambda m: m)(wide))) == 300


def test_the_first_modules_of_a_class_made_in_two_threads_have_one_layout(monkeypatch):
    class New(Module):
        x: Any

    make, both = _structure.Layout, threading.Barrier(2)

    def slowly(*args):
        both.wait(timeout=60)
        return make(*args)

    monkeypatch.setattr(_structure, "Layout", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(jtu.tree_structure, pool.map(New, [1.0, 1.0]))
    assert first == second


def test_plain_values_that_are_equal_but_not_one_object():
    def fresh():
        return (("".join(["a", "b"]), jnp.tanh), float("1.25"), 10**6 + len("a"))

    one, two = M(jnp.ones(1), c=fresh()), M(jnp.ones(1), c=fresh())
    assert one.c is two.c
    for m in (one, two, jax.tree.map(lambda x: x, two), tree_at(lambda m: m.b, one, fresh())):
        assert len(jax.tree.leaves(m)) == 1
        assert m.c == fresh()
