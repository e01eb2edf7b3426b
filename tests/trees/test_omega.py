"""`ω`: agreement with the peer and with `jax.tree.map`."""

import copy
import operator
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equinox.internal import ω as peer
from hypothesis import given

from vernal.show import short
from vernal.trees import tree_equal, ω

_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow"]
_COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
_BITS = ["and_", "or_", "xor", "lshift", "rshift"]
_UPDATES = ["set", "add", "multiply", "divide", "power", "min", "max"]


def _tree(getkey, low=0.5, high=3.0):
    def leaf(*shape):
        return jax.random.uniform(getkey(), shape, minval=low, maxval=high)

    return {"a": leaf(3), "b": (leaf(3, 3), None), "c": [leaf(3)]}


@pytest.mark.parametrize("name", _ARITHMETIC + _COMPARISONS + ["matmul"])
def test_operators_on_two_trees_agree_with_the_peer(name, getkey):
    x, y = _tree(getkey), _tree(getkey)
    op = getattr(operator, name)
    assert tree_equal(op(x**ω, y**ω).ω, op(x**peer, y**peer).ω)


@pytest.mark.parametrize("other", [2.0, jnp.float32(2.0)], ids=["number", "array"])
@pytest.mark.parametrize("name", _ARITHMETIC + _COMPARISONS)
def test_operators_with_one_number_agree_with_the_peer_on_both_sides(name, other, getkey):
    x = _tree(getkey)
    op = getattr(operator, name)
    assert tree_equal(op(x**ω, other).ω, op(x**peer, other).ω)
    assert tree_equal(op(other, x**ω).ω, op(other, x**peer).ω)


@pytest.mark.parametrize("name", _BITS)
def test_bit_operators_agree_with_the_peer(name):
    x, y = {"a": jnp.array([1, 2, 12])}, {"a": jnp.array([3, 1, 2])}
    op = getattr(operator, name)
    assert tree_equal(op(x**ω, y**ω).ω, op(x**peer, y**peer).ω)
    assert tree_equal(op(x**ω, 2).ω, op(x**peer, 2).ω)
    assert tree_equal(op(2, x**ω).ω, op(2, x**peer).ω)


@pytest.mark.parametrize("name", ["neg", "pos", "abs"])
def test_signs_agree_with_the_peer(name, getkey):
    x = _tree(getkey, low=-1.0)
    op = getattr(operator, name)
    assert tree_equal(op(x**ω).ω, op(x**peer).ω)


def test_inversion_negates_bools():
    assert tree_equal((~([jnp.array([True, False])] ** ω)).ω, [jnp.array([False, True])])


def test_a_matrix_multiplies_every_leaf_from_the_left(getkey):
    x = _tree(getkey)
    matrix = jax.random.normal(getkey(), (3, 3))
    assert tree_equal((matrix @ x**ω).ω, jax.tree.map(lambda leaf: matrix @ leaf, x))


@pytest.mark.parametrize("name", _UPDATES)
def test_updates_in_place_agree_with_the_peer(name, getkey):
    x, y = _tree(getkey), _tree(getkey)
    ours, theirs = (x**ω).at[1], (x**peer).at[1]
    assert tree_equal(getattr(ours, name)(2.0).ω, getattr(theirs, name)(2.0).ω)
    mine, other = getattr(ours, name)((y**ω)[0]), getattr(theirs, name)((y**peer)[0])
    assert tree_equal(mine.ω, other.ω)


def test_updates_turn_numpy_leaves_into_jax_arrays():
    assert tree_equal(([np.zeros(2, np.float32)] ** ω).at[0].set(1.0).ω, [jnp.array([1.0, 0.0])])


def test_index_and_call_act_on_every_leaf(getkey):
    x = _tree(getkey)
    assert tree_equal((x**ω)[1:].ω, jax.tree.map(lambda leaf: leaf[1:], x))
    assert tree_equal((x**ω).call(jnp.sum).ω, jax.tree.map(jnp.sum, x))


@pytest.mark.parametrize(
    "other", [np.float32(2), np.array(2, np.float32), np.array([1, 2, 3], np.float32)], ids=short
)
def test_numpy_arrays_and_scalars_may_stand_on_both_sides(other):
    x = {"a": jnp.array([4.0, 5.0, 6.0])}
    assert tree_equal((x**ω * other).ω, {"a": x["a"] * other})
    assert tree_equal((other * x**ω).ω, {"a": x["a"] * other})
    assert tree_equal((other - x**ω).ω, {"a": other - x["a"]})
    assert tree_equal((other < x**ω).ω, {"a": other < x["a"]})


@pytest.mark.parametrize("leaf", [2.0, np.float32(2), np.ones(3), jnp.ones(3)], ids=short)
def test_one_array_is_a_tree_too(leaf):
    assert isinstance(leaf**ω, ω) and tree_equal((leaf**ω).ω, leaf, typematch=True)


_LEAVES = st.recursive(
    st.integers(-9, 9) | st.none(),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from("abc"), x),
)


@given(tree=_LEAVES, factor=st.integers(-9, 9))
def test_formulas_mean_what_they_mean_on_leaves(tree, factor):
    doubled = jax.tree.map(lambda a: 2 * a, tree)
    assert (tree**ω * factor - (doubled**ω + 1)).ω == jax.tree.map(
        lambda a, b: a * factor - (b + 1), tree, doubled
    )


def test_formulas_are_compiled_and_differentiated(getkey):
    x, y = _tree(getkey), _tree(getkey)

    @jax.jit
    @jax.grad
    def gradient(x):
        return sum(map(jnp.sum, jax.tree.leaves((x**ω * y**ω + 0.5 * (x**ω) ** 2).ω)))

    expected = jax.tree.map(jnp.add, x, y)
    assert tree_equal(gradient(x), expected, rtol=1e-6)


def test_is_leaf_makes_leaves_of_nodes():
    def is_pair(x):
        return isinstance(x, tuple)

    pairs = {"a": (1, 2), "b": (3,)}
    wrapped = ω(pairs, is_leaf=is_pair)
    assert (wrapped + wrapped).ω == {"a": (1, 2, 1, 2), "b": (3, 3)}
    assert wrapped.call(len).ω == {"a": 2, "b": 1}
    assert (wrapped * 2).is_leaf is is_pair


def test_the_wrapper_shows_and_copies_its_tree():
    x = {"a": 1, "b": None}
    assert repr(x**ω) == "ω({'a': 1, 'b': None})"
    assert copy.deepcopy(x**ω).ω == x


def test_other_structures_are_an_error_that_tells_where():
    x, y = {"a": [1, 2], "b": 3}, {"a": [1], "b": 3}
    expected = r"both sides of an ω operation have different structures(.|\n)*tree\['a'\]"
    with pytest.raises(ValueError, match=expected):
        x**ω + y**ω
    with pytest.raises(ValueError, match=expected):
        (x**ω).at[0].set(y**ω)


def test_other_leaves_by_is_leaf_are_an_error_that_names_it():
    x = [(1, 2)]
    with pytest.raises(
        ValueError, match=r"have different structures(.|\n)*is_leaf=None and is_leaf="
    ):
        x**ω + ω(x, is_leaf=lambda node: isinstance(node, tuple))


@pytest.mark.parametrize("other", [[1.0], "text", None, {"a": 1}], ids=short)
def test_an_operand_that_is_not_wrapped_is_an_error(other):
    with pytest.raises(
        TypeError, match=r"the other operand of ω arithmetic must be(.|\n)*each tree needs"
    ):
        {"a": 1} ** ω + other


def test_a_tree_is_wrapped_only_once():
    with pytest.raises(TypeError, match="the tree is already wrapped in ω"):
        ([1.0] ** ω) ** ω
    with pytest.raises(TypeError, match="the tree is already wrapped in ω"):
        ω([1.0] ** ω)


def test_a_comparison_has_no_truth_value():
    with pytest.raises(TypeError, match="an ω has no truth value"):
        bool([1.0] ** ω == [1.0] ** ω)


def test_the_wrapper_is_neither_hashed_nor_iterated_nor_passed_on():
    wrapped = [jnp.ones(2)] ** ω
    with pytest.raises(TypeError, match="unhashable type"):
        hash(wrapped)
    with pytest.raises(TypeError, match=re.escape("'ω' object is not iterable")):
        list(wrapped)
    with pytest.raises(TypeError, match="ω"):
        jax.jit(lambda x: x)(wrapped)
