"""The one crossing: arrays, and the rest."""

import inspect
import re
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from vernal import Module
from vernal.show import short
from vernal.transforms import _boundary as boundary
from vernal.transforms._prefixes import broadcast_prefix
from vernal.trees import Rest, split


class M(Module):
    w: Any
    name: str = "m"


def test_split_and_fill_are_inverse():
    tree = {"x": jnp.ones(2), "f": jnp.sin, "m": M(np.ones(1)), "n": None, "s": ["s", 1]}
    arrays, rest = split(tree)
    assert len(arrays) == 2
    back = rest.fill(arrays)
    assert jtu.tree_structure(back) == jtu.tree_structure(tree)
    assert back["f"] is jnp.sin
    assert rest.fill(iter(["a", "b"]))["x"] == "b" or rest.fill(["a", "b"])["x"] == "b"
    assert [jtu.keystr(p) for p in rest.paths()] == ["['m'].w", "['x']"]


def test_another_rule_may_say_what_is_taken_out():
    arrays, rest = split([1, "a", 2.0], lambda x: isinstance(x, (int, float)))
    assert arrays == [1, 2.0]
    assert rest.fill([10, 20]) == [10, "a", 20]


EXACT = [1, 1.0, True, 0.0, -0.0, "a", None, (1,), jnp.sin]


@pytest.mark.parametrize("a", EXACT, ids=short)
@pytest.mark.parametrize("b", EXACT, ids=short)
def test_rests_compare_exactly(a, b):
    x = jnp.ones(1)
    one, two = split([a, x])[1], split([b, x])[1]
    assert (one == two) is (a is b or (type(a) is type(b) and repr(a) == repr(b)))
    if one == two:
        assert hash(one) == hash(two)
    assert one != "something else"
    assert split([x, a])[1] != split([x, x])[1]


def test_a_rest_is_structure_of_any_transformation():
    arrays, rest = split([jnp.ones(2), "text"])
    assert jax.tree.leaves(rest) == []
    out, back = jax.jit(lambda arrays: (arrays, rest))(arrays)
    assert back is rest
    assert "text" in repr(rest)
    assert isinstance(back, Rest)


def test_hold_and_release_are_inverse():
    tree = {"x": jnp.ones(2), "f": jnp.sin, "s": ("s", None)}
    held = boundary.hold(tree)
    assert len(jax.tree.leaves(held)) == 1
    back = boundary.release(jax.jit(lambda h: h)(held))
    assert (back["f"], back["s"]) == (jnp.sin, ("s", None))
    assert jtu.tree_structure(boundary.hold({"a": 1})) != jtu.tree_structure(
        boundary.hold({"a": 1.0})
    )
    assert jtu.tree_structure(boundary.hold({"a": 1})) == jtu.tree_structure(
        boundary.hold({"a": 1})
    )
    assert hash(jtu.tree_structure(boundary.hold([1]))) == hash(
        jtu.tree_structure(boundary.hold([2]))
    )


TREES = st.recursive(
    st.sampled_from([None, 1, 1.0, True, "a", jnp.float32(1), np.ones(1), len]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("ab"), inner)
    ),
    max_leaves=6,
)


@given(TREES)
def test_every_tree_survives_the_crossing(tree):
    arrays, rest = split(tree)
    assert repr(sorted_dicts(rest.fill(arrays))) == repr(sorted_dicts(tree))
    assert split(tree)[1] == rest


def sorted_dicts(tree):
    return jax.tree.map(lambda x: x, tree)


def test_prefixes_are_spread_over_the_leaves():
    tree = {"a": [1, 2], "b": {"c": 3}}

    def spread(prefix, is_leaf=None):
        return broadcast_prefix(prefix, tree, what="it", root="r", is_leaf=is_leaf)

    assert spread(0) == [0, 0, 0]
    assert spread(None) == [None] * 3
    assert spread({"a": 0, "b": None}) == [0, 0, None]
    assert spread({"a": [0, 1], "b": {"c": 2}}) == [0, 1, 2]
    assert spread({"a": P("x"), "b": P()}, lambda x: isinstance(x, P)) == [P("x"), P("x"), P()]


@pytest.mark.parametrize("prefix", [[1], {"a": 1}, {"a": [1, 2, 3], "b": 1}, (1, 2)], ids=short)
def test_a_prefix_that_does_not_fit_is_refused(prefix):
    tree = {"a": [1, 2], "b": {"c": 3}}
    with pytest.raises(ValueError, match=r"`axes` is not a prefix[\s\S]*where: there"):
        broadcast_prefix(prefix, tree, what="`axes`", root="there")


def f(x, y=1, *rest, z=2, **kwargs):
    pass


def test_keywords_move_to_their_positions():
    assert boundary.to_positional(f, (), {"x": 1}) == ((1,), {})
    assert boundary.to_positional(f, (1,), {"z": 3, "y": 2}) == ((1, 2), {"z": 3})
    assert boundary.to_positional(f, (), {"x": 1, "q": 4}) == ((1,), {"q": 4})
    assert boundary.to_positional(type, (1,), {"a": 2}) == ((1,), {"a": 2})
    with pytest.raises(TypeError, match="missing a required argument: 'x'"):
        boundary.to_positional(f, (), {"y": 1})


def test_arguments_have_the_names_that_the_user_gave_them():
    def names(*args, **kwargs):
        paths = split((M(jnp.ones(1)), args, kwargs), lambda leaf: True)[1].paths()
        return [re.sub(r"\s", "", boundary.argument_text(f, path)) for path in paths]

    assert names(1, [2, {"k": 3}]) == ["f.w", "x", "y[0]", "y[1]['k']"]
    assert names(1, 2, 3, M(jnp.ones(1))) == ["f.w", "x", "y", "rest[0]", "rest[1].w"]
    assert names(x=[1], q={"a": 2}) == ["f.w", "q['a']", "x[0]"]
    assert boundary.parameter_name(f, 0) == "x"
    assert boundary.parameter_name(f, 3) == "rest[1]"
    assert boundary.parameter_name(lambda: None, 2) == "args[2]"
    assert inspect.signature(f)
