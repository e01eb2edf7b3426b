"""`tree_check` and `tree_flatten_one_level`, side by side with the peer."""

import re

import equinox as eqx
import hypothesis.strategies as st
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from hypothesis import given

from vernal.trees import tree_check, tree_equal, tree_flatten_one_level


def _raises(function, argument):
    try:
        function(argument)
    except ValueError:
        return True
    return False


def _trees():
    node, array, empty, hollow = [1], jnp.ones(2), [], [[]]
    itself, later = [], {}
    itself.append(itself)
    later["a"] = [later]
    layer = eqx.nn.Identity()
    return {
        "in itself": itself,
        "in itself further down": later,
        "twice": [node, node],
        "twice at different depths": {"x": node, "y": (node,)},
        "hollow node twice": [hollow, hollow],
        "module twice": [eqx.Module, layer, layer],
        "array twice": [array, array],
        "empty list twice": [empty, empty],
        "empty tuple twice": [(), ()],
        "none twice": [None, None],
        "equal nodes": [[1], [1]],
        "leaf": 1,
        "none": None,
        "tree": {"a": [1, (2, None)], "b": array},
    }


@pytest.mark.parametrize("name", _trees())
def test_trees_pass_or_fail_as_in_the_peer(name):
    tree = _trees()[name]
    assert _raises(tree_check, tree) == _raises(eqx.tree_check, tree)


def test_a_repeated_node_is_told_with_both_places():
    node = [1.0]
    expected = "appears twice in the tree\n  where: tree['a'][1] and tree['b']['c']"
    with pytest.raises(ValueError, match=re.escape(expected)):
        tree_check({"a": (0, node), "b": {"c": node}})


def test_a_cycle_is_told_with_both_places():
    tree = {"a": [0]}
    tree["a"].append(tree["a"])
    expected = "a node of type list contains itself\n  where: tree['a'][1] is tree['a'] again"
    with pytest.raises(ValueError, match=re.escape(expected)):
        tree_check(tree)


class _Fresh:
    """A node that makes new children whenever it is flattened."""


jtu.register_pytree_node(_Fresh, lambda _: (([1], [2], [3]), None), lambda *_: _Fresh())


def test_children_that_are_made_on_the_way_are_not_mistaken_for_each_other():
    tree_check([_Fresh() for _ in range(100)])


_TREES = st.recursive(
    st.integers() | st.none(), lambda x: st.lists(x) | st.tuples(x) | st.dictionaries(st.text(), x)
)


@given(_TREES)
def test_one_level_flattens_as_in_the_peer_and_back(tree):
    children, treedef = tree_flatten_one_level(tree)
    theirs, their_treedef = eqx.tree_flatten_one_level(tree)
    assert (children, treedef) == (theirs, their_treedef)
    assert tree_equal(treedef.unflatten(children), tree, typematch=True) is True


@given(_TREES)
def test_trees_that_share_nothing_pass(tree):
    # Hypothesis may put one object in two places.
    tree_check(jtu.tree_map(lambda x: x, tree))


def test_one_level_of_a_node_in_itself_is_an_error():
    node = []
    node += [1, node]
    expected = "a node of type list contains itself\n  where: tree[1] is tree again"
    with pytest.raises(ValueError, match=re.escape(expected)):
        tree_flatten_one_level(node)


def test_one_level_of_a_node_further_down_in_itself_is_given():
    node = {}
    node["a"] = [node]
    children, _ = tree_flatten_one_level(node)
    assert children[0][0] is node
