"""`filter`, `partition`, `combine`."""

from typing import Any

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import vernal
from vernal import combine, is_array, partition
from vernal.show import short


class Layer(vernal.Module):
    w: Any
    b: Any = None
    act: Any = jnp.tanh

    def __call__(self, x):
        raise AssertionError("a tree of bools is not a predicate")


TREE = {"a": [1, "x", None], "b": (2.0, jnp.ones(2))}


def test_filter_keeps_what_the_predicate_chooses():
    assert vernal.filter([1, "a", 2.0], lambda x: isinstance(x, int)) == [1, None, None]
    assert vernal.filter([1, "a"], lambda x: isinstance(x, int), inverse=True) == [None, "a"]
    assert vernal.filter([1, "a"], lambda x: isinstance(x, int), replace=0) == [1, 0]


def test_specifications_may_be_bools_prefixes_and_mixtures():
    assert vernal.filter([1, [2, 3]], True) == [1, [2, 3]]
    assert vernal.filter([1, [2, 3]], False) == [None, [None, None]]
    assert vernal.filter([1, [2, 3]], [False, True]) == [None, [2, 3]]
    assert vernal.filter([1, [2, "a"]], [True, lambda x: x == "a"]) == [1, [None, "a"]]
    assert vernal.filter({"a": 1, "b": None}, {"a": True, "b": None}) == {"a": 1, "b": None}


def test_leaves_may_be_stopped_early():
    stop = lambda x: isinstance(x, tuple)  # noqa: E731 (read inline)
    assert vernal.filter([(1, 2), 3], stop, is_leaf=stop) == [(1, 2), None]
    chosen, rest = partition([(1, 2), 3], stop, is_leaf=stop)
    assert (chosen, rest) == ([(1, 2), None], [None, 3])
    assert combine(chosen, rest, is_leaf=stop) == [(1, 2), 3]


def test_a_callable_module_of_bools_is_a_tree_not_a_predicate():
    layer = Layer(jnp.ones(2), jnp.zeros(2))
    mask = Layer(True, False)
    mask = jax.tree.map(lambda x: x.sum() > 1, jax.tree.map(np.asarray, layer))
    mask = jax.tree.map(bool, mask)
    kept = vernal.filter(layer, mask)
    assert kept.b is None
    assert kept.w is layer.w
    assert kept.act is jnp.tanh


def test_partition_and_combine_a_module():
    layer = Layer(jnp.ones(2), jnp.arange(2))
    trained, rest = partition(layer, vernal.is_inexact_array)
    assert trained.b is None
    assert rest.w is None
    assert jax.tree.structure(combine(trained, rest)) == jax.tree.structure(layer)
    assert combine(trained, rest) == layer
    grads = jax.grad(lambda t: combine(t, rest).w.sum())(trained)
    assert (grads.w == 1).all()


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ("yes", "filter_spec\n"),
        (np.bool_(True), "filter_spec\n"),
        (1, "filter_spec\n"),
        ({"a": "yes", "b": True}, r"filter_spec\['a'\]"),
        ({"a": None, "b": True}, r"filter_spec\['a'\]"),
        ({"a": [True, 1, None], "b": True}, r"filter_spec\['a'\]\[1\]"),
    ],
    ids=short,
)
def test_a_specification_of_something_else_is_refused(spec, where):
    with pytest.raises(
        ValueError, match=rf"a filter specification must consist of bools[\s\S]*{where}"
    ):
        vernal.filter(TREE, spec)


@pytest.mark.parametrize("answer", [1, np.bool_(True), jnp.array(True), None, "yes"], ids=short)
def test_a_predicate_must_answer_with_a_bool(answer):
    def predicate(leaf):
        return answer

    with pytest.raises(
        ValueError,
        match=r"a filter predicate must return a Python bool[\s\S]*`predicate` at filter_spec",
    ):
        vernal.filter(TREE, predicate)
    with pytest.raises(ValueError, match=r"must return a Python bool[\s\S]*filter_spec\['b'\]"):
        partition(TREE, {"a": True, "b": predicate})


@pytest.mark.parametrize(
    "spec",
    [[True], {"a": True}, {"a": [True], "b": True}, (True, False), {"a": {"c": True}, "b": True}],
)
def test_a_specification_that_is_no_prefix_is_refused(spec):
    with pytest.raises(ValueError, match="the filter specification is not a prefix of the tree"):
        partition(TREE, spec)


def test_combine_takes_the_first_that_is_not_none():
    assert combine([1, None, None], [2, 2, None], [3, 3, 3]) == [1, 2, 3]
    assert combine([None], [None]) == [None]
    assert combine({"a": 1}) == {"a": 1}
    assert combine(None, {"a": 1}) == {"a": 1}
    assert combine([1, None], [None, [2, None]]) == [1, [2, None]]
    assert combine([False, 0], [True, 1]) == [False, 0]


def test_combine_needs_a_tree():
    with pytest.raises(
        TypeError, match=r"combine needs at least one tree[\s\S]*combine\(chosen, rest\)"
    ):
        combine()


@pytest.mark.parametrize(
    "trees", [([1], [1, 2]), ([1], (1,)), ({"a": 1}, {"b": 1}), ([1, [2]], [None, 3, 4])], ids=short
)
def test_combine_refuses_trees_of_different_structure(trees):
    with pytest.raises(ValueError, match="the trees to combine must have the same structure"):
        combine(*trees)


def test_combine_names_the_place_of_the_difference():
    with pytest.raises(ValueError, match=r"\['b'\]"):
        combine({"a": 1, "b": [1]}, {"a": None, "b": [1, 2]})


LEAVES = st.sampled_from([None, 1, 2.0, "a", True, jnp.float32(1), np.ones(1)])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from("ab"), inner).map(lambda d: dict(sorted(d.items()))),
    ),
    max_leaves=6,
)


@given(TREES, st.sampled_from([is_array, lambda x: isinstance(x, str), True, False]))
def test_agreement_with_equinox(tree, spec):
    ours, theirs = partition(tree, spec), eqx.partition(tree, spec)
    assert repr(ours) == repr(theirs)
    assert repr(combine(*ours)) == repr(eqx.combine(*theirs)) == repr(combine(*reversed(ours)))
    assert repr(vernal.filter(tree, spec, inverse=True, replace=7)) == repr(
        eqx.filter(tree, spec, inverse=True, replace=7)
    )


@given(TREES, st.data())
def test_masks_agree_with_equinox(tree, data):
    mask = jax.tree.map(lambda _: data.draw(st.booleans()), tree)
    ours = partition(tree, mask)
    assert repr(ours) == repr(eqx.partition(tree, mask))
    assert repr(combine(*ours)) == repr(tree if jax.tree.leaves(tree) else combine(*ours))
