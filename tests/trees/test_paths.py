"""One language of paths: what is printed can be written."""

import collections
import enum
import inspect
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given

from vernal import Module, nn, tree_at
from vernal.show import path_text
from vernal.trees import Paths, Pattern, named_leaves, path_name


class Box(Module):
    inside: object


class Colour(enum.Enum):
    RED = 1


class Odd:
    """A key that prints as what would be read as something else."""

    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


_ODD_TEXT = st.text(alphabet="ab.*?[]{},\"'`\\ 1-!<>()", max_size=6)
_KEYS = (
    st.text(max_size=4)
    | _ODD_TEXT
    | st.integers(-20, 20)
    | st.booleans()
    | st.none()
    | st.floats()
    | st.binary(max_size=3)
    | st.tuples(st.integers(0, 3), _ODD_TEXT)
    | st.just(Colour.RED)
    | _ODD_TEXT.map(Odd)
)


def _dicts(children):
    # An OrderedDict, for JAX sorts the keys of a dict, and these cannot be compared.
    pairs = st.lists(st.tuples(_KEYS, children), max_size=4, unique_by=lambda pair: repr(pair[0]))
    return pairs.map(collections.OrderedDict)


_TREES = st.recursive(
    st.just(np.zeros(())),
    lambda children: _dicts(children) | st.lists(children, max_size=3) | st.tuples(children),
    max_leaves=6,
)


def with_modules(tree):
    """With a module for every tuple. (Making one draws random numbers, which Hypothesis does not want.)"""
    if isinstance(tree, tuple):
        return Box(with_modules(tree[0]))
    if isinstance(tree, list):
        return list(map(with_modules, tree))
    if isinstance(tree, dict):
        return collections.OrderedDict((key, with_modules(x)) for key, x in tree.items())
    return tree


@given(tree=_TREES)
def test_a_printed_path_is_the_path_of_just_this_place(tree):
    tree = with_modules(tree)
    leaves = [path for path, _ in jtu.tree_leaves_with_path(tree)]
    paths = Paths(leaves)
    nodes = {path[:end] for path in leaves for end in range(1, len(path) + 1)}
    for node in nodes:
        below = [i for i, leaf in enumerate(leaves) if leaf[: len(node)] == node]
        for text in (path_text(node), path_name(node)):
            assert paths.leaves(text) == paths.covered(text) == below, text
            assert paths.nodes(text) == [path_name(node)]
            assert Pattern(text).covers(leaves[below[0]])
        for root in ("model", "tree"):
            text = path_text(node, root)
            if not paths.nodes(f".{text}"):
                assert paths.leaves(text) == below, text
        if not any(isinstance(getattr(key, "key", 0), (Odd, float)) for key in node):
            assert paths.leaves(jtu.keystr(node)) == below


@given(tree=_TREES)
def test_surgery_finds_a_printed_path(tree):
    tree = with_modules(tree)
    for path, _ in jtu.tree_leaves_with_path(tree):
        if path:
            changed = tree_at(path_text(path), tree, np.ones(()))
            values = dict(jtu.tree_leaves_with_path(changed))
            assert values.pop(path) == 1.0 and not any(values.values())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("layers.0.weight", ["layers.0.weight"]),
        (".layers[0].weight", ["layers.0.weight"]),
        (".layers.0.weight", ["layers.0.weight"]),
        ("layers[0].weight", ["layers.0.weight"]),
        ("layers[0]['weight']", ["layers.0.weight"]),
        ('layers[0]["weight"]', ["layers.0.weight"]),
        ("model.layers[0].weight", ["layers.0.weight"]),
        ("tree.layers.0.weight", ["layers.0.weight"]),
        ("model.**.weight", ["layers.0.weight", "layers.1.weight"]),
        ("layers[*].bias", ["layers.0.bias", "layers.1.bias"]),
        ("**[1].bias", ["layers.1.bias"]),
        ("layers.[01].bias", ["layers.0.bias", "layers.1.bias"]),
        ("layers{[0],[1]}.bias", ["layers.0.bias", "layers.1.bias"]),
        (".layers[1]", ["layers.1.weight", "layers.1.bias"]),
        ("model", ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "s"]),
        ("[0]", []),
        (".model.s", []),
        ("layers['0'].bias", []),
    ],
)
def test_both_spellings_and_their_mixtures_mean_the_same(text, found):
    names = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "s"]
    paths = Paths(names)
    assert [names[i] for i in paths.leaves(text)] == found


def test_a_bracket_behind_a_name_is_a_key_and_behind_a_dot_or_within_text_a_set():
    assert Pattern("x[12]").matches("x.12") and not Pattern("x[12]").matches("x1")
    assert Pattern("x[ab]").matches("xa") and Pattern("x.[12]").matches("x.1")
    assert Pattern("x[12]y").matches("x1y") and Pattern("[01]").matches("0")
    assert Pattern("[10]").matches("10") and not Pattern("[10]").matches("1")
    with pytest.raises(
        ValueError, match=r"the path .* cannot be read[\s\S]*b directly after \[0\]"
    ):
        Pattern("{a[0],c}b")


def test_the_name_of_a_key_goes_before_what_only_has_its_text():
    tree = collections.OrderedDict([(0, 1.0), ("0", 2.0), ("a.b", 3.0), ("a", {"b": 4.0})])
    paths = Paths(named_leaves(tree))
    for text, found in {
        "0": 0,
        "[0]": 0,
        '"0"': 1,
        "['0']": 1,
        "['a.b']": 2,
        '"a.b"': 2,
        "a.b": 3,
        "['a']['b']": 3,
    }.items():
        assert paths.leaves(text) == [found], text
    # Where there is only one of them, it is meant.
    assert Paths(['"0"']).leaves("0") == [0] and Paths(['"0"']).leaves("[0]") == []


def test_the_tree_may_be_called_model_unless_it_has_such_a_part():
    paths = Paths(["model.w", "w"])
    assert paths.leaves("model.w") == [0] and paths.leaves("tree.w") == [1]
    assert paths.leaves(".w") == [1] and paths.leaves("model.model.w") == [0]


# --- tree_at


class Net(Module):
    layers: list
    dropout: nn.Dropout
    none: object = None

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.layers = [*(nn.Linear(2, 2, key=key) for key in keys), jax.nn.relu]
        self.dropout = nn.Dropout(0.5)


def test_surgery_by_path_replaces_one_node_with_one_value():
    net = Net()
    new = jnp.zeros((2, 2))
    for text in (".layers[0].weight", "layers.0.weight", "model.layers[0].weight"):
        assert tree_at(text, net, new) == tree_at(lambda m: m.layers[0].weight, net, new)
    part = tree_at(".layers[1]", net, net.layers[0])
    assert part.layers[1] is net.layers[0]
    assert tree_at("layers.[0].weight", net, new).layers[0].weight is new


def test_surgery_by_path_reaches_structure_as_by_function():
    net = Net()
    assert tree_at("dropout.p", net, 0.1) == tree_at(lambda m: m.dropout.p, net, 0.1)
    assert tree_at("**.p", net, replace_fn=lambda p: p / 5).dropout.p == 0.1
    assert tree_at(".layers[2]", net, jnp.tanh).layers[2] is jnp.tanh
    assert tree_at("none", net, 3.0).none == 3.0


def test_surgery_by_path_on_several_nodes():
    net = Net()
    doubled = tree_at("layers.*.weight", net, replace_fn=lambda x: 2 * x)
    assert all((doubled.layers[i].weight == 2 * net.layers[i].weight).all() for i in (0, 1))
    a, b = jnp.zeros((2, 2)), jnp.ones((2, 2))
    both = tree_at("layers.*.weight", net, (a, b))
    assert both.layers[0].weight is a and both.layers[1].weight is b
    # What is at the end of a path with `*` or `**` has arrays.
    seen = []
    tree_at("layers.*", net, replace_fn=lambda x: seen.append(type(x)) or x)
    tree_at("**", {"a": 1.0, "b": [None, 2.0]}, replace_fn=lambda x: seen.append(x) or x)
    assert seen == [nn.Linear, nn.Linear, 1.0, 2.0]
    # With wildcards None is passed over, unless it is a leaf.
    assert tree_at("*.b", {"a": {"b": None}, "c": {"b": 1.0}}, 2.0)["c"] == {"b": 2.0}
    assert tree_at("*", {"a": None}, 2.0, is_leaf=lambda x: x is None) == {"a": 2.0}


@pytest.mark.parametrize(
    ("where", "replace", "text"),
    [
        (
            "layers.*.weight",
            0.0,
            r"matches several nodes[\s\S]*a list of 2 values[\s\S]*replace_fn",
        ),
        ("layers.*.weight", [0.0], r"matches several nodes[\s\S]*\.layers\[0\]\.weight, \.layers"),
        ("layers.0.wieght", 0.0, r"do not match[\s\S]*tree_at[\s\S]*mean 'layers\.0\.weight'"),
        ("dropout.q", 0.0, r"'dropout.q': no leaf there[\s\S]*dropout.p"),
        ("{layers,layers.0}", [0, 0], r"is ambiguous: one picked node is inside another"),
    ],
)
def test_surgery_by_a_path_that_does_not_fit_is_refused(where, replace, text):
    with pytest.raises(ValueError, match=text):
        tree_at(where, Net(), replace)


def test_surgery_takes_a_list_of_paths():
    net = Net()
    a, b, c = jnp.zeros((2, 2)), jnp.ones((2, 2)), jnp.ones(2)
    changed = tree_at(("layers.1.weight", "dropout.p", "layers.0.weight"), net, [a, 0.1, b])
    assert changed.layers[1].weight is a and changed.layers[0].weight is b
    assert changed.dropout.p == 0.1
    # Each is given what it would be given alone.
    changed = tree_at(["layers.*.weight", "layers.0.bias"], net, [(a, b), c])
    assert [layer.weight for layer in changed.layers[:2]] == [a, b] and changed.layers[0].bias is c
    doubled = tree_at(["layers.0.*", "layers.1.bias"], net, replace_fn=lambda x: 2 * x)
    assert (doubled.layers[0].weight == 2 * net.layers[0].weight).all()
    assert (doubled.layers[1].bias == 2 * net.layers[1].bias).all()
    assert doubled.layers[1].weight is net.layers[1].weight
    assert tree_at([], net, []) is net and tree_at(["dropout.p"], net, [0.1]).dropout.p == 0.1


@pytest.mark.parametrize(
    ("where", "replace", "text"),
    [
        (
            ["layers.0.weight", "layers.1.weight"],
            0.0,
            r"a list with one value for each[\s\S]*a list of length 2",
        ),
        (
            ["layers.0.weight"],
            [0.0, 1.0],
            r"a list with one value for each path[\s\S]*a list of length 1",
        ),
        (["none", "layers.*.weight"], [1, 0.0], r"several nodes[\s\S]*'layers\.\*\.weight'"),
        (["none", "layers.0.wieght"], [1, 0.0], r"mean 'layers\.0\.weight'"),
        (["none", ".none"], [1, 2], r"the same node is picked twice"),
        (["layers.0", "layers.0.bias"], [1, 2], r"one picked node is inside another"),
    ],
)
def test_lists_of_paths_that_do_not_fit_are_refused(where, replace, text):
    with pytest.raises(ValueError, match=text):
        tree_at(where, Net(), replace)


@pytest.mark.parametrize("where", [None, 3, ["none", lambda m: m.none], [0]])
def test_what_is_neither_paths_nor_a_function_is_refused(where):
    with pytest.raises(TypeError, match=r"takes paths, or a function[\s\S]*a list of paths"):
        inspect.unwrap(tree_at)(where, Net(), [1, 2])


# --- what is said of a path that means nothing


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("layer.0.bias", "did you mean 'layers.0.bias'?"),
        (".layers[0].bais", "did you mean 'layers.0.bias'?"),
        ("**.bais", "did you mean '**.bias'?"),
        ("net.layers[0].bias", "did you mean '.layers[0].bias'?"),
        ("__main__.Net.layers[0].bias", "did you mean '.layers[0].bias'?"),
        ("layers.*", "a part, not a leaf; for the leaves in it, write 'layers.*.**'"),
        ("nothing", "no leaf there\n    the leaves are:\n    layers.0.bias"),
        # Another index would be another layer.
        ("layers.7", "no leaf there\n    the leaves are:\n    layers.0.bias"),
        ("layers.7.bias", "no leaf there\n    the leaves are:\n    layers.0.bias"),
        ("layers.-1", "no leaf there; the indices of a path count from the start: 0, 1, 2"),
        ("layers[-1].bias", "no leaf there; the indices of a path count from the start: 0, 1, 2"),
    ],
)
def test_a_miss_says_what_may_be_meant(path, text):
    paths = Paths(["layers.0.bias", "layers.0.weight", "scale"])
    assert paths.leaves(path) == []
    with pytest.raises(ValueError, match=re.escape(f"got: {path!r}: ")) as caught:
        raise paths.refusal("here", [path])
    assert text in str(caught.value) and "where: here" in str(caught.value)
