"""The rule: arrays are leaves, everything else is structure."""

import collections
import enum
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from vernal import Module, Partial, Static, field, filter_jit
from vernal.modules._sorting import sort_value


class Holder(Module):
    x: Any


class Linear(Module):
    w: jax.Array

    def __call__(self, x):
        return self.w * x


class Pair(NamedTuple):
    a: Any
    b: Any


class Colour(enum.Enum):
    RED = 1


class Convertible:
    def __jax_array__(self):
        return jnp.ones(2)


class Opaque:
    pass


@jtu.register_pytree_node_class
class Registered:
    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@jax.custom_jvp
def custom(x):
    return x


def paths(tree):
    return [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)]


LEAF = [
    jnp.ones(2),
    np.ones(2),
    np.float32(1),
    np.bool_(True),
    jnp.ones((), jnp.bfloat16),
    jax.random.key(0),
    jax.random.PRNGKey(0),
    jax.ShapeDtypeStruct((2,), jnp.float32),
    Convertible(),
    jnp.ones(0),
]
STRUCTURE = [
    "text",
    b"bytes",
    True,
    1,
    1.5,
    1j,
    ...,
    jax.nn.relu,
    jnp.tanh,
    jnp.add,
    len,
    custom,
    lambda x: x,
    functools.partial(jnp.sum, axis=0),
    int,
    Linear,
    Colour.RED,
    Opaque(),
    jnp.float32,
    np.dtype("float32"),
    range(3),
    slice(1, 2),
    frozenset({1}),
    (1, "a", jnp.tanh),
    ((1, (2,)), "b"),
    Pair("a", jax.nn.relu),
    np.datetime64("2020-01-01"),
    np.str_("text"),
    jax.sharding.PartitionSpec("x"),
    jnp,
]
NODE_WITHOUT_LEAVES = [
    None,
    (),
    [],
    {},
    ["a", 1],
    {"k": jnp.tanh},
    [[], ["a"]],
    (["a"], 1),
    [None, 1],
    Static("x"),
    Holder(1),
]


@pytest.mark.parametrize("value", LEAF, ids=lambda v: type(v).__name__)
def test_what_computes_is_a_leaf(value):
    m = Holder(value)
    [leaf] = jax.tree.leaves(m)
    assert leaf is value
    assert paths(m) == [".x"]


@pytest.mark.parametrize("value", STRUCTURE, ids=lambda v: type(v).__name__)
def test_everything_else_is_structure(value):
    m = Holder(value)
    assert jax.tree.leaves(m) == []
    assert jtu.tree_structure(m) == jtu.tree_structure(Holder(value))
    # In place of a partial, structure has one that cannot be changed.
    kept = m.x if type(value) is functools.partial else value
    assert jax.tree.map(lambda x: 1 / 0, m).x is kept
    assert filter_jit(lambda m: 1)(m) == 1
    assert jax.jit(lambda m: m)(m).x is kept


@pytest.mark.parametrize("value", NODE_WITHOUT_LEAVES)
def test_nodes_without_arrays_have_no_leaves(value):
    m = Holder(value)
    assert jax.tree.leaves(m) == []
    again = jax.tree.map(lambda x: x, m).x
    assert type(again) is type(value)
    assert again == value


MIXED = {
    "list": ([jnp.ones(1), jnp.tanh, 2.0, jnp.ones(2)], [".x[0]", ".x[3]"]),
    "tuple": ((jnp.ones(1), "a"), [".x[0]"]),
    "dict": ({"b": jnp.ones(1), "a": "text"}, [".x['b']"]),
    "namedtuple": (Pair(jnp.ones(1), jnp.tanh), [".x.a"]),
    "ordered": (collections.OrderedDict(z=1, y=jnp.ones(1)), [".x['y']"]),
    "default": (collections.defaultdict(list, z=jnp.ones(1), y=1), [".x['z']"]),
    "modules": (
        [Linear(jnp.ones(1)), jax.nn.relu, jnp.ravel, Linear(jnp.ones(1))],
        [".x[0].w", ".x[3].w"],
    ),
    "nested": (
        {"k": [(Linear(jnp.ones(1)), "s"), {"f": jnp.tanh, "g": (1, jnp.ones(1))}], "n": None},
        [".x['k'][0][0].w", ".x['k'][1]['g'][1]"],
    ),
    "none": ([None, jnp.tanh, jnp.ones(1)], [".x[2]"]),
    "registered": (
        [Registered(jnp.ones(1), jnp.ones(2)), "a"],
        [".x[0][<flat index 0>]", ".x[0][<flat index 1>]"],
    ),
    "partial": (Partial(jnp.add, jnp.ones(1), k="v"), [".x.args[0]"]),
    "jax partial": (jtu.Partial(jnp.add, jnp.ones(1)), [".x[0][0]"]),
}


@pytest.mark.parametrize(("value", "expected"), MIXED.values(), ids=MIXED)
def test_a_mixed_container_shows_its_arrays_under_ordinary_paths(value, expected):
    m = Holder(value)
    found = paths(m)
    if "registered" in str(expected) or "flat index" in str(expected) or type(value) is jtu.Partial:
        assert len(found) == len(expected)
    else:
        assert found == expected
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(m))
    for again in (jax.tree.map(lambda x: x, m), jax.jit(lambda m: m)(m)):
        assert type(again.x) is type(value)
        assert jtu.tree_structure(again) == jtu.tree_structure(m)
        assert jax.tree.leaves(again.x)[-1] is not None


def test_containers_keep_their_class_order_and_factory():
    m = Holder(collections.defaultdict(list, b=jnp.ones(1), a="s"))
    again = jax.tree.map(lambda x: x + 1, m).x
    assert again.default_factory is list
    ordered = Holder(collections.OrderedDict([("z", "s"), ("a", jnp.ones(1))]))
    assert list(jax.tree.map(lambda x: x, ordered).x) == ["z", "a"]


def test_masks_axes_and_gradients_keep_the_structure():
    m = Holder([Linear(jnp.ones((2, 2))), jnp.tanh, {"b": jnp.ones(2), "f": len}, "s"])
    structure = jtu.tree_structure(m)
    for to in (True, 0, None, "name", jnp.tanh, 1.5):
        tree = jax.tree.map(lambda _: to, m)  # noqa: B023 (used up at once)
        assert tree.x[0].w is to
        assert tree.x[1] is jnp.tanh
        if to is not None:
            assert jtu.tree_structure(tree) == structure
            assert jax.tree.leaves(tree) == [to, to]
    grads = jax.grad(lambda m: jnp.sum(m.x[0].w) + jnp.sum(m.x[2]["b"]))(m)
    assert jtu.tree_structure(grads) == structure


def test_structure_in_a_list_that_is_changed_in_place_is_seen():
    m = Holder(["a", "b"])
    before = jtu.tree_structure(m)
    traces = []
    f = jax.jit(lambda m: traces.append(m.x[0]) or len(m.x))
    ours = filter_jit(lambda m: m.x[0])
    assert (f(m), ours(m)) == (2, "a")
    m.x[0] = "c"
    assert jtu.tree_structure(m) != before
    assert (f(m), ours(m)) == (2, "c")
    m.x.append("d")
    assert f(m) == 3
    assert traces == ["a", "c", "c"]


def test_a_mixed_list_that_is_changed_in_place_is_seen():
    m = Holder([jnp.tanh, jnp.ones(2)])
    jax.tree.leaves(m)
    m.x[1] = jnp.zeros(3)
    assert jax.tree.leaves(m)[0].shape == (3,)
    m.x[0] = jnp.ones(1)
    assert [leaf.shape for leaf in jax.tree.leaves(m)] == [(1,), (3,)]
    m.x.append(Linear(jnp.ones(4)))
    assert len(jax.tree.leaves(m)) == 3
    del m.x[:]
    assert jax.tree.leaves(m) == []


def test_a_mixed_dict_whose_keys_are_exchanged_in_place_is_seen():
    m = Holder({"a": jnp.tanh, "b": jnp.ones(2)})
    jax.tree.leaves(m)
    del m.x["a"]
    m.x["c"] = jnp.sin
    assert paths(m) == [".x['b']"]
    assert jax.tree.map(lambda x: x, m).x["c"] is jnp.sin


def test_a_nested_mixed_container_may_be_exchanged_in_place_for_anything():
    for new, count in [(jnp.ones(2), 2), ("text", 1), (None, 1), (Linear(jnp.ones(1)), 2), ([], 1)]:
        m = Holder([jnp.ones(1), [jnp.tanh, jnp.ones(2)]])
        jax.tree.leaves(m)
        m.x[1] = new
        assert len(jax.tree.leaves(m)) == count
        assert len(paths(m)) == count


def test_a_mask_of_a_mixed_container_is_left_alone():
    m = Holder([jnp.ones(1), jnp.tanh])
    mask = jax.tree.map(lambda _: True, m)
    assert jax.tree.leaves(mask) == [True]
    assert jax.tree.leaves(jax.tree.map(lambda x: not x, mask)) == [False]


def test_the_fields_layout_makes_every_field_a_child():
    class F(Module, layout="fields"):
        a: Any
        b: Any
        c: Any = field(static=True, default="s")

    m = F(jnp.tanh, [1, "t"])
    assert jax.tree.leaves(m) == [jnp.tanh, 1, "t"]

    class G(F):
        pass

    assert len(jax.tree.leaves(G(1, None))) == 1

    class H(F, layout="arrays"):
        pass

    assert jax.tree.leaves(H(1, 2)) == []
    assert filter_jit(lambda m: m.a)(m) is jnp.tanh


def test_equal_containers_share_one_treedef_object_and_one_trace():
    count = []
    f = jax.jit(lambda m: count.append(1))
    for _ in range(3):
        f(Holder([jnp.ones(1), jax.nn.relu, {"n": (1, 2.0)}]))
    assert len(count) == 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, True),
        ((), True),
        ((1,), False),
        ([1], (False,)),
        ([jnp.ones(1)], True),
        ([jnp.ones(1), 1], (True, False)),
        ({"a": [1]}, ((False,),)),
        (((1,), jnp.ones(1)), (False, True)),
    ],
)
def test_the_kinds(value, kind):
    assert sort_value(value) == kind
