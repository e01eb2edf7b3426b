"""`tree_at` and its relatives."""

import collections
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

from vernal import Module, Partial, field, tree_at
from vernal.show import short
from vernal.trees import values_with_paths


class Linear(Module):
    weight: jax.Array
    bias: Any = None

    @property
    def both(self):
        return self.weight, self.bias

    def method(self, x):
        return self.weight * x


class Dropout(Module):
    p: float = 0.5
    other: float = 0.5


class Net(Module):
    layers: list
    act: Any = jnp.tanh
    drop: Dropout = Dropout()
    names: tuple = ("a", "b")
    same_names: tuple = ("a", "b")
    extra: Any = None
    more: Any = None
    fixed: int = field(static=True, default=3)
    scale: jax.Array = 1.0

    @property
    def first(self):
        return self.layers[0]


class Pair(NamedTuple):
    a: Any
    b: Any


NAMES = ("a", "b")


def net():
    layers = [
        Linear(jnp.ones((2, 2)), jnp.zeros(2)),
        jax.nn.relu,
        {"w": Linear(jnp.ones(2)), "f": len},
        (1, "x"),
    ]
    return Net(layers, names=NAMES, same_names=NAMES)


REPLACEMENTS = {
    # where, new value, how to read it back, change in the number of leaves
    "leaf": (lambda m: m.layers[0].weight, jnp.zeros((2, 2)), 0),
    "another shape": (lambda m: m.layers[0].weight, jnp.zeros(5), 0),
    "another dtype": (lambda m: m.layers[0].bias, np.arange(3), 0),
    "leaf to none": (lambda m: m.layers[0].bias, None, -1),
    "leaf to structure": (lambda m: m.layers[0].bias, jnp.sin, -1),
    "leaf to string": (lambda m: m.layers[0].bias, "text", -1),
    "none to leaf": (lambda m: m.extra, jnp.ones(3), 1),
    "none to structure": (lambda m: m.extra, "text", 0),
    "none to a mixed list": (lambda m: m.extra, [jnp.ones(1), "s"], 1),
    "none in a child": (lambda m: m.layers[2]["w"].bias, jnp.ones(2), 1),
    "float": (lambda m: m.drop.p, 0.1, 0),
    "float to array": (lambda m: m.drop.p, jnp.array(0.1), 1),
    "function": (lambda m: m.act, jax.nn.gelu, 0),
    "function to module": (lambda m: m.act, Linear(jnp.ones(1)), 1),
    "function in a list": (lambda m: m.layers[1], jnp.sin, 0),
    "function in a list to module": (lambda m: m.layers[1], Linear(jnp.ones(1)), 1),
    "function in a dict in a list": (lambda m: m.layers[2]["f"], abs, 0),
    "module in a list to function": (lambda m: m.layers[0], jnp.sin, -2),
    "module to module": (lambda m: m.layers[0], Linear(jnp.ones(7)), -1),
    "number in a tuple in a list": (lambda m: m.layers[3][0], 2, 0),
    "number in a tuple to array": (lambda m: m.layers[3][0], jnp.ones(1), 1),
    "tuple of names": (lambda m: m.names, ("c",), 0),
    "name in a tuple": (lambda m: m.names[1], "c", 0),
    "name in the other tuple": (lambda m: m.same_names[0], "c", 0),
    "list": (lambda m: m.layers, [jnp.ones(1)], -2),
    "list to none": (lambda m: m.layers, None, -3),
    "module": (lambda m: m.drop, Dropout(0.9), 0),
    "module to none": (lambda m: m.drop, None, 0),
    "through a property": (lambda m: m.first.weight, jnp.zeros(1), 0),
}


@pytest.mark.parametrize(("where", "new", "change"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_any_node_can_be_replaced_by_anything(where, new, change):
    m = net()
    count = len(jax.tree.leaves(m))
    out = tree_at(where, m, new)
    got = where(out)
    assert type(got) is type(new)
    assert got is new or jtu.tree_structure(got) == jtu.tree_structure(new)
    assert len(jax.tree.leaves(out)) == count + change
    assert all(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in jax.tree.leaves(out))
    # nothing else has changed, and the original not at all
    assert jtu.tree_structure(tree_at(where, out, where(m))) == jtu.tree_structure(m)
    assert len(jax.tree.leaves(m)) == count
    assert jtu.tree_structure(jax.jit(lambda m: m)(out)) == jtu.tree_structure(out)


def test_equal_values_in_other_places_are_left_alone():
    m = net()
    assert tree_at(lambda m: m.drop.p, m, 0.1).drop.other == 0.5
    for pick, other in [
        (lambda m: m.names, lambda m: m.same_names),
        (lambda m: m.same_names, lambda m: m.names),
    ]:
        out = tree_at(pick, m, ("z",))
        assert pick(out) == ("z",)
        assert other(out) == ("a", "b")
    shared = jnp.ones(2)
    out = tree_at(lambda t: t[1], [shared, shared, shared], jnp.zeros(2))
    assert [float(x.sum()) for x in out] == [2, 0, 2]
    layer = Linear(shared)
    out = tree_at(lambda t: t[1].weight, [layer, layer], jnp.zeros(2))
    assert [float(x.weight.sum()) for x in out] == [2, 0]
    lists = ["a"]
    assert tree_at(lambda m: m.extra, Net([], extra=lists, more=lists), "new").more == ["a"]


def test_several_nodes_at_once():
    m = net()
    out = tree_at(
        lambda m: (m.layers[0].weight, m.act, m.extra), m, (jnp.zeros(1), abs, jnp.ones(4))
    )
    assert out.layers[0].weight.shape == (1,)
    assert out.act is abs
    assert out.extra.shape == (4,)
    out = tree_at(lambda m: [m.extra, m.more], m, [1, "two"])
    assert (out.extra, out.more) == (1, "two")
    out = tree_at(lambda m: {"x": m.extra, "y": (m.more,)}, m, {"x": 1, "y": (2,)})
    assert (out.extra, out.more) == (1, 2)
    out = tree_at(lambda m: (m.drop.p, m.drop.other), m, (0.1, 0.2))
    assert (out.drop.p, out.drop.other) == (0.1, 0.2)
    assert tree_at(lambda m: m.first.both, m, (jnp.ones(1), None)).first.bias is None


def test_masks_axes_and_specifications_keep_their_shape():
    m = net()
    for to, new in [(False, True), (0, None), (0, 1), ("a", "b"), (None, 0)]:
        tree = jax.tree.map(lambda _: to, m)  # noqa: B023 (used up at once)
        out = tree_at(lambda t: t.layers[0].weight, tree, new)
        assert out.layers[0].weight is new
        if new is not None and to is not None:
            assert jtu.tree_structure(out) == jtu.tree_structure(m)
    mask = tree_at(
        lambda t: (t.layers[0].bias, t.layers[2]["w"].weight),
        jax.tree.map(lambda _: False, m),
        replace_fn=lambda _: True,
    )
    assert jtu.tree_structure(mask) == jtu.tree_structure(m)
    assert sum(jax.tree.leaves(mask)) == 2
    mask = tree_at(
        lambda t: t.layers[0],
        jax.tree.map(lambda _: False, m),
        jax.tree.map(lambda _: True, m.layers[0]),
    )
    assert jtu.tree_structure(mask) == jtu.tree_structure(m)
    mask = tree_at(
        lambda t: t.layers, jax.tree.map(lambda _: False, m), jax.tree.map(lambda _: True, m).layers
    )
    assert jtu.tree_structure(mask) == jtu.tree_structure(m)
    axes = tree_at(lambda t: t.scale, jax.tree.map(lambda _: 0, m), None)
    assert axes.scale is None
    gradient = jax.grad(lambda m: m.layers[0].weight.sum())(m)
    assert jtu.tree_structure(
        tree_at(lambda t: t.scale, gradient, jnp.ones(3))
    ) == jtu.tree_structure(m)


def test_numbers_for_fields_annotated_as_arrays_become_arrays():
    m = net()
    assert isinstance(tree_at(lambda m: m.scale, m, 2.0).scale, jax.Array)
    assert isinstance(tree_at(lambda m: m.scale, m, replace_fn=lambda _: 3).scale, jax.Array)
    out = tree_at(lambda m: m.scale, tree_at(lambda m: m.scale, m, None), 2.0)
    assert jtu.tree_structure(out) == jtu.tree_structure(m) or out.scale == 2.0
    assert type(tree_at(lambda m: m.drop.p, m, 0.1).drop.p) is float


def test_replace_fn_computes_from_the_old_value():
    m = net()
    assert (
        tree_at(lambda m: m.layers[0].weight, m, replace_fn=lambda x: x * 3).layers[0].weight == 3
    ).all()
    assert tree_at(lambda m: m.drop.p, m, replace_fn=lambda p: p / 2).drop.p == 0.25
    assert tree_at(lambda m: m.extra, m, replace_fn=lambda x: (x, "was none")).extra == (
        None,
        "was none",
    )
    out = tree_at(
        lambda m: (m.drop.p, m.layers),
        m,
        replace_fn=lambda x: x if isinstance(x, float) else len(x),
    )
    assert (out.drop.p, out.layers) == (0.5, 4)
    assert tree_at(lambda m: m.layers[0], m, replace_fn=lambda layer: layer.method(2.0)).layers[
        0
    ].shape == (2, 2)


def test_plain_trees():
    assert tree_at(lambda t: t[0], [1, 2], 5) == [5, 2]
    assert tree_at(lambda t: t["a"]["b"], {"a": {"b": 1}, "c": 2}, "x") == {"a": {"b": "x"}, "c": 2}
    assert tree_at(lambda t: t.a, Pair(1, 2), 5) == Pair(5, 2)
    assert tree_at(
        lambda t: t["a"], collections.OrderedDict(b=1, a=2), 5
    ) == collections.OrderedDict(b=1, a=5)
    out = tree_at(lambda t: t["a"], collections.defaultdict(list, a=2), 5)
    assert out.default_factory is list
    assert tree_at(lambda t: t[0], (None, None, 1), 5) == (5, None, 1)
    assert tree_at(lambda t: (t[0], t[1]), (None, None, 1), (5, 6)) == (5, 6, 1)
    assert tree_at(lambda t: t[1], [(), ()], "x") == [(), "x"]
    assert tree_at(lambda t: t[0], [{}, 1], {"new": 1}) == [{"new": 1}, 1]


def test_the_whole_tree():
    assert tree_at(lambda t: t, [1, 2], "x") == "x"
    assert tree_at(lambda t: t, 1, "x") == "x"
    assert tree_at(lambda t: t, None, "x") == "x"
    assert tree_at(lambda t: t, net(), 3) == 3
    assert tree_at(lambda t: t, [1], replace_fn=lambda t: [*t, 2]) == [1, 2]


def test_is_leaf_is_respected():
    assert tree_at(lambda t: t[0], [(1, 2), 3], "x", is_leaf=lambda x: isinstance(x, tuple)) == [
        "x",
        3,
    ]
    assert tree_at(lambda t: t[0], [None, 3], "x", is_leaf=lambda x: x is None) == ["x", 3]


def test_methods_and_partials_are_trees_too():
    layer = Linear(jnp.ones(2))
    out = tree_at(lambda f: f.__self__.weight, layer.method, jnp.zeros(2))
    assert (out(3.0) == 0).all()
    p = tree_at(lambda p: p.args[0], Partial(jnp.add, 1.0), jnp.ones(2))
    assert (p(1.0) == 2).all()
    assert tree_at(lambda p: p.func, p, jnp.subtract)(1.0).sum() == 0


def test_no_init_converter_or_check_runs():
    class Strict(Module):
        x: Any = field(converter=lambda x: x + 1)

        def __check_init__(self):
            assert self.x == 2

    assert tree_at(lambda m: m.x, Strict(1), 10).x == 10


def test_surgery_under_transformations():
    def f(m, x):
        return tree_at(lambda m: m.layers[0].weight, m, x).layers[0].weight.sum()

    assert jax.jit(f)(net(), jnp.ones(3)) == 3
    assert jax.grad(f, 1)(net(), jnp.ones(3)).tolist() == [1, 1, 1]
    assert jax.vmap(f, (None, 0))(net(), jnp.ones((2, 3))).shape == (2,)


BAD_WHERE = {
    "a number of its own": lambda m: 3,
    "nothing": lambda m: (),
    "a value computed": lambda m: m.layers[0].weight + 1,
    "a shape": lambda m: m.layers[0].weight.shape,
    "an element": lambda m: m.layers[0].weight[0],
    "a method call": lambda m: m.layers[0].weight.sum(),
    "a comparison": lambda m: m.layers[0].weight == 1,
    "the value of a static field": lambda m: m.fixed + 0,
    "one good, one bad": lambda m: (m.layers[0].weight, "stranger"),
    "another tree": lambda m: net().layers[0].weight,
}


@pytest.mark.parametrize("where", BAD_WHERE.values(), ids=BAD_WHERE)
def test_where_may_only_pick(where):
    with pytest.raises(
        ValueError, match="`where` must use only the structure of the tree, not the values in it"
    ):
        tree_at(where, net(), 0)


def test_a_static_field_is_named_as_the_reason():
    match = r"(?s)a static field cannot be picked.*{}.*3, the value of {}.*{}"
    for where in (lambda m: m.fixed, lambda m: (m.act, m.fixed)):
        with pytest.raises(
            ValueError, match=match.format("function `where`", r"tree\.fixed", "Net")
        ):
            tree_at(where, net(), 4)
    for where in ("fixed", "**.fixed", ["act", "fixed"]):
        with pytest.raises(
            ValueError, match=match.format("tree_at", r"tree\.fixed", "`fixed` without")
        ):
            tree_at(where, net(), 4 if isinstance(where, str) else [jnp.sin, 4])
    several = match.format("tree_at", r"tree\[0\]\.fixed, tree\[1\]\.fixed", "a new module")
    with pytest.raises(ValueError, match=several):
        tree_at("[*].fixed", [net(), net()], [4, 4])
    with pytest.raises(ValueError, match="which is not in the tree"):
        tree_at(lambda m: 17.5, net(), 4)


def test_errors_of_the_users_function_pass_through():
    with pytest.raises(AttributeError, match="no attribute 'wieght'"):
        tree_at(lambda m: m.layers[0].wieght, net(), 0)
    with pytest.raises(IndexError, match="out of range"):
        tree_at(lambda m: m.layers[10], net(), 0)
    with pytest.raises(ZeroDivisionError, match="division"):
        tree_at(lambda m: m.act, net(), replace_fn=lambda x: 1 / 0)


OVERLAPS = {
    "leaf twice": (
        lambda m: (m.layers[0].weight, m.layers[0].weight),
        "the same node is picked twice",
    ),
    "structure twice": (lambda m: (m.drop.p, m.drop.p), "the same node is picked twice"),
    "node twice": (lambda m: (m.layers, m.layers), "the same node is picked twice"),
    "none twice": (lambda m: (m.extra, m.extra), "the same node is picked twice"),
    "inside": (lambda m: (m.layers[0], m.layers[0].weight), "one picked node is inside another"),
    "inside, the other way": (
        lambda m: (m.layers[0].weight, m.layers),
        "one picked node is inside another",
    ),
    "the whole and a part": (lambda m: (m, m.act), "one picked node is inside another"),
}


@pytest.mark.parametrize(("where", "text"), OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_picks_are_refused(where, text):
    with pytest.raises(ValueError, match=rf"`where` is ambiguous: {text}\n.*tree"):
        tree_at(where, net(), (1, 2))
    with pytest.raises(ValueError, match="`where` is ambiguous"):
        tree_at(where, net(), replace_fn=lambda x: x)


@pytest.mark.parametrize("replace", [(1,), (1, 2, 3), 1, None, {"a": 1}], ids=short)
def test_a_wrong_number_of_replacements_is_refused(replace):
    with pytest.raises(
        ValueError, match="the replacements do not match the nodes that `where` picks"
    ):
        tree_at(lambda m: (m.extra, m.more), net(), replace)


def test_exactly_one_of_replace_and_replace_fn():
    with pytest.raises(
        ValueError, match=r"exactly one of `replace` and `replace_fn`[\s\S]*neither"
    ):
        tree_at(lambda t: t[0], [1])
    with pytest.raises(ValueError, match=r"exactly one of `replace` and `replace_fn`[\s\S]*both"):
        tree_at(lambda t: t[0], [1], 2, replace_fn=lambda x: x)
    assert tree_at(lambda t: t[0], [1], None) == [None]


def test_every_value_is_listed_with_its_path():
    found = {jtu.keystr(path): value for path, value in values_with_paths(net())}
    assert found[".drop.p"] == 0.5
    assert found[".layers[2]['f']"] is len
    assert found[".extra"] is None
    assert found[".names[0]"] == "a"
    assert ".fixed" not in found
    assert ".layers[0].weight" in found


TREES = st.recursive(
    st.integers(0, 3).map(float),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
    ),
    max_leaves=8,
)


def follow(tree, path):
    for key in path:
        tree = tree[getattr(key, "idx", getattr(key, "key", None))]
    return tree


@given(TREES, st.data())
def test_agreement_with_equinox_on_plain_trees(tree, data):
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    path = data.draw(st.sampled_from(paths))
    path = path[: data.draw(st.integers(0, len(path)))]
    new = data.draw(st.sampled_from([7, "new", None, [1, 2]]))

    def where(tree):
        return follow(tree, path)

    assert tree_at(where, tree, new) == eqx.tree_at(where, tree, new)
    assert tree_at(where, tree, replace_fn=lambda x: [x]) == eqx.tree_at(
        where, tree, replace_fn=lambda x: [x]
    )


@given(TREES, st.data())
def test_agreement_with_equinox_on_several_leaves(tree, data):
    paths = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    chosen = data.draw(st.lists(st.sampled_from(paths), unique_by=str, min_size=1, max_size=3))

    def where(tree):
        return [follow(tree, path) for path in chosen]

    new = [f"new {i}" for i in range(len(chosen))]
    assert tree_at(where, tree, new) == eqx.tree_at(where, tree, new)
