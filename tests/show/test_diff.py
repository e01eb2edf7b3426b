"""The difference of two trees is told by key path, and telling it never fails."""

import collections
import dataclasses
import functools
from typing import Any, ClassVar

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from vernal.show import Difference, diff, diff_text, short


@functools.partial(
    jtu.register_dataclass, data_fields=["weight", "inner"], meta_fields=["act", "size"]
)
@dataclasses.dataclass
class Layer:
    weight: Any = None
    inner: Any = None
    act: Any = None
    size: Any = 1


@functools.partial(jtu.register_dataclass, data_fields=["weight"], meta_fields=[])
@dataclasses.dataclass
class Other:
    weight: Any = None


class Opaque:
    """A node without field names, whose structure is one value."""

    def __init__(self, child, aux):
        self.child, self.aux = child, aux

    def __repr__(self):
        return "Opaque()"


jtu.register_pytree_node(
    Opaque, lambda x: ((x.child,), x.aux), lambda aux, children: Opaque(*children, aux)
)


class Stand:
    """Stands for a list while it is flattened: its arrays are children, the rest is structure."""

    def __init__(self, value):
        self.value = value


def is_child(x):
    return isinstance(x, jax.Array)


jtu.register_pytree_with_keys(
    Stand,
    lambda s: (
        tuple((jtu.SequenceKey(i), x) for i, x in enumerate(s.value) if is_child(x)),
        tuple(x for x in s.value if not is_child(x)),
    ),
    lambda aux, children: Stand([*children, *aux]),
)


@dataclasses.dataclass
class Sorted:
    """Like a module: a field is a child or structure depending on its value."""

    items: Any
    shared: ClassVar[Any] = None


def flatten_sorted(x):
    if isinstance(x.items, list):
        return ((jtu.GetAttrKey("items"), Stand(x.items)),), ("mixed",)
    if is_child(x.items):
        return ((jtu.GetAttrKey("items"), x.items),), ("child",)
    return (), ("structure", x.items)


jtu.register_pytree_with_keys(Sorted, flatten_sorted, lambda aux, children: Sorted(*children))


def places(a, b, **options):
    return [(d.path_text, d.expected, d.got) for d in diff(a, b, **options)]


F3, F23 = jnp.zeros(3), jnp.zeros((2, 3))


def test_equal_trees_have_no_difference():
    tree = {"a": [F3, None, (1, "x")], "b": Layer(F23, act=jax.nn.relu)}
    again = jax.tree.map(lambda x: x + 0 if isinstance(x, jax.Array) else x, tree)
    for leaves in ("shape", "value", "ignore"):
        assert diff(tree, again, leaves=leaves) == []
    assert diff_text(tree, again) == "no difference"


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (F3, F23, [("(the tree itself)", "f32[3]", "f32[2,3]")]),
        ({"k": F3}, {"k": jnp.zeros(3, jnp.int8)}, [("['k']", "f32[3]", "i8[3]")]),
        ([jnp.asarray(1.0)], [jnp.zeros(())], [("[0]", "weak_f32[]", "f32[]")]),
        ([F3, F3], [F3], [("[1]", "f32[3]", "nothing")]),
        ([F3], [F3, "x"], [("[1]", "nothing", "'x'")]),
        (
            {"a": 1, "b": 2},
            {"b": 2, "c": 3},
            [("['a']", "1", "nothing"), ("['c']", "nothing", "3")],
        ),
        ([None], [F3], [("[0]", "None", "f32[3]")]),
        ([F3], [None], [("[0]", "f32[3]", "None")]),
        ([[1]], [(1,)], [("[0]", "list [1]", "tuple (1,)")]),
        ([1], [1.0], [("[0]", "1", "1.0")]),
        ([1], [True], [("[0]", "1", "True")]),
        ([0.0], [-0.0], [("[0]", "0.0", "-0.0")]),
        ([1.0], [F3], [("[0]", "1.0", "f32[3]")]),
        ([{"a": F3}], [F3], [("[0]", "dict {'a': f32[3]}", "f32[3]")]),
        (
            Layer(F3),
            Other(F3),
            [("(the tree itself)", "Layer(weight=f32[3])", "Other(weight=f32[3])")],
        ),
        ([float("nan")], [float("nan")], []),
        ([F3], [np.zeros(3, np.float32)], []),
        ([F3], [jax.ShapeDtypeStruct((3,), jnp.float32)], []),
    ],
)
def test_each_kind_of_difference_is_named_with_its_place(a, b, expected):
    assert places(a, b) == expected


def test_static_fields_are_named_not_dumped():
    a, b = (
        Layer(F3, act=jax.nn.relu, size=(1, {"k": 2})),
        Layer(F23, act=jnp.sin, size=(1, {"k": 3})),
    )
    assert places([a], [b], root="model") == [
        ("model[0].weight", "f32[3]", "f32[2,3]"),
        ("model[0].act", "<wrapped function relu>", "<wrapped function sin>"),
        ("model[0].size[1]['k']", "2", "3"),
    ]


def test_static_fields_count_even_when_leaves_are_ignored():
    assert places(Layer(F3, size=1), Layer(F23, size=2), leaves="ignore") == [(".size", "1", "2")]
    assert places(Layer(1, F3), Layer("x", F3), leaves="ignore") == []
    assert places(Layer(1, F3), Layer(1, None), leaves="ignore") == [(".inner", "f32[3]", "None")]


def test_static_arrays_are_compared_by_value():
    a, b = Layer(size=np.zeros(2)), Layer(size=np.ones(2))
    assert places(a, b) == [
        (".size", "f64[2](numpy) with 0.0 at [0]", "f64[2](numpy) with 1.0 at [0] (2 of 2 differ)")
    ]
    assert (
        places(a, Layer(size=np.zeros(2)))[0][1] == "Layer with static data (None, f64[2](numpy))"
    )


def test_different_objects_that_print_the_same_are_told_apart():
    def make(n):
        return lambda x: n * x

    [difference] = diff(Layer(act=make(1)), Layer(act=make(2)))
    name = "<function <lambda>>"
    assert difference == Difference(".act", name, f"{name} (another one that prints the same)")


def test_structure_without_field_names_is_shown_whole():
    assert places([Opaque(F3, 1)], [Opaque(F3, 2)]) == [
        ("[0]", "Opaque with static data 1", "Opaque with static data 2")
    ]
    assert places([Opaque(F3, 1)], [Opaque(F23, 1)]) == [
        ("[0][<flat index 0>]", "f32[3]", "f32[2,3]")
    ]
    assert [p[0] for p in places(Opaque(F3, 1), Opaque(F23, 2))] == [
        "[<flat index 0>]",
        "(the tree itself)",
    ]


def test_the_order_of_an_ordered_dict_is_structure():
    a = collections.OrderedDict(x=1, y=2)
    b = collections.OrderedDict(y=2, x=1)
    [difference] = diff(a, b)
    assert "('x', 'y')" in difference.expected and "('y', 'x')" in difference.got


def test_a_field_that_another_object_stands_for_is_walked_itself():
    a, b = Sorted([F3, jnp.sin, 1, F3]), Sorted([F23, jnp.cos, 2, F3])
    expected = [
        (".items[1]", "<wrapped function sin>", "<wrapped function cos>"),
        (".items[2]", "1", "2"),
    ]
    assert places(a, b) == [(".items[0]", "f32[3]", "f32[2,3]"), *expected]
    assert places(a, b, leaves="ignore") == expected
    assert places(a, Sorted([F3, jnp.sin, 1, F3])) == []


def test_a_field_that_is_a_child_on_one_side_only_shows_both_values():
    assert places(Sorted(F3), Sorted("x")) == [(".items", "f32[3]", "'x'")]
    assert places(Sorted(1), Sorted(F3)) == [(".items", "1", "f32[3]")]


def test_class_variables_are_no_fields():
    a, b = Sorted(1), Sorted(2)
    a.shared = "a"
    assert places(a, b) == [(".items", "1", "2")]


def test_values_are_compared_on_request():
    a, b = jnp.array([[1.0, 2.0], [3.0, jnp.nan]]), jnp.array([[1.0, 2.5], [3.5, jnp.nan]])
    assert places([a], [b]) == []
    assert places([a], [b], leaves="value") == [
        ("[0]", "f32[2,2] with 2.0 at [0, 1]", "f32[2,2] with 2.5 at [0, 1] (2 of 4 differ)")
    ]
    assert places(jnp.ones(()), jnp.zeros(()), leaves="value") == [
        ("(the tree itself)", "f32[] with 1.0", "f32[] with 0.0")
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "bool", "complex64"])
def test_values_of_every_dtype_can_be_compared(dtype):
    a, b = jnp.zeros(3, dtype), jnp.ones(3, dtype)
    assert diff(a, a + jnp.zeros(3, dtype) if dtype != "bool" else ~~a, leaves="value") == []
    assert "(3 of 3 differ)" in diff_text(a, b, leaves="value")


def test_keys_are_compared_by_their_data(getkey):
    key = getkey()
    assert diff(key, jax.random.wrap_key_data(jax.random.key_data(key)), leaves="value") == []
    assert "key<fry>[]" in diff_text(key, getkey(), leaves="value")


def test_values_that_cannot_be_read_do_not_count_as_equal():
    gone = jnp.ones(3)
    gone.delete()
    assert "(deleted, its values are gone)" in diff_text(gone, F3, leaves="value")
    struct = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert "f32[3](struct) (only a shape, without values)" in diff_text(struct, F3, leaves="value")
    assert diff(struct, jax.ShapeDtypeStruct((3,), jnp.float32), leaves="value") == []
    objects = np.array([object()]), np.array([np.zeros(2)] + [None], dtype=object)[:1]
    assert len(diff(*objects, leaves="value")) == 1
    texts = []
    jax.jit(lambda x: texts.append(diff_text(x, F3, leaves="value")))(F3)
    assert "traced" in texts[0]


def test_weak_types_can_be_overlooked():
    assert diff(jnp.asarray(1.0), jnp.zeros(()), weak_type=False) == []


def test_long_reports_are_cut():
    text = diff_text(list(range(30)), [], limit=2)
    assert text == "[0]: expected 0, got nothing\n[1]: expected 1, got nothing\nand 28 more"


def test_unknown_ways_to_compare_are_refused():
    with pytest.raises(ValueError, match="unknown value of `leaves`(.|\n)*got: 'close'"):
        diff(1, 2, leaves="close")
    with pytest.raises(ValueError, match="unknown value of `leaves`"):
        diff_text(1, 2, leaves="close")


def test_objects_that_are_not_built_yet_can_be_compared():
    partly = object.__new__(Sorted)
    assert len(diff(partly, Sorted(1))) == 1
    assert diff(partly, partly) == []


def test_cycles_and_great_depth_end():
    a, b = [1], [2]
    a.append(a)
    b.append(b)
    assert places(a, b) == [("[0]", "1", "2")]
    deep = [[], []]
    for _ in range(5000):
        deep = [[d] for d in deep]
    assert "too deeply" in diff_text(*deep)


class Contrary:
    def __eq__(self, other):
        raise RuntimeError("contrary")

    def __hash__(self):
        raise RuntimeError("contrary")

    def __repr__(self):
        raise RuntimeError("contrary")


class Proxy:
    @property
    def __class__(self):
        raise RuntimeError("proxy of nothing")


def leaves():
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 2),
        # NaN is the same as NaN for us, and -0.0 is not 0.0: JAX sees it otherwise in static data.
        st.sampled_from([0.0, 1.5]),
        st.text(max_size=2),
        st.sampled_from([F3, F23, np.zeros(3), np.float32(1), jnp.asarray(1.0), jax.random.key(0)]),
        st.sampled_from([jax.ShapeDtypeStruct((3,), jnp.float32), max, jax.nn.relu, int, Layer]),
        st.builds(object),
    )


def odd_leaves():
    return st.one_of(
        leaves(),
        st.builds(Contrary),
        st.builds(Proxy),
        st.builds(lambda: object.__new__(Sorted)),
    )


NAMES = st.sampled_from(["a", "b", "c"])


def branches(children, keys=NAMES):
    lists = st.lists(children, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.dictionaries(keys, children, max_size=3),
        st.dictionaries(st.sampled_from("ab"), children).map(collections.OrderedDict),
        st.builds(Layer, children, children, children, children),
        st.builds(Sorted, children),
        st.builds(Opaque, children, children),
        st.builds(jtu.Partial, st.just(max), children),
    )


def odd_branches(children):
    # Without an order, so that JAX cannot flatten some of the dictionaries.
    return branches(children, st.sampled_from([0, 1, "a", (1, "a")]))


# Kept apart because on Python 3.11 every failure of JAX to flatten inside a tree lowers the recursion limit of the
# whole process. (`diff` flattens one level at a time, where that does not happen.)
TREES = st.recursive(leaves(), branches, max_leaves=12)
ODD_TREES = st.recursive(odd_leaves(), odd_branches, max_leaves=12)


@hypothesis.given(ODD_TREES, ODD_TREES, st.sampled_from(["shape", "value", "ignore"]))
@hypothesis.example([float("nan")], [-0.0], "value")
def test_no_pair_of_trees_makes_it_fail(a, b, mode):
    for found in (diff(a, b, leaves=mode), diff(b, a, leaves=mode)):
        assert all(d.expected != d.got for d in found)
    assert diff(a, a, leaves=mode) == []
    assert isinstance(short(a), str)


@hypothesis.given(TREES, TREES)
def test_silence_about_structure_means_equal_structure(a, b):
    structures = jtu.tree_structure(a), jtu.tree_structure(b)
    try:
        equal = structures[0] == structures[1]
    except Exception:
        # Static data that JAX cannot compare, such as arrays.
        hypothesis.reject()
    found = diff(a, b, leaves="ignore")
    assert not found if equal else found
