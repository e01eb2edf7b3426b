"""Names of leaves and patterns over them."""

import collections
import fnmatch
import re

import hypothesis.strategies as st
import jax.tree_util as jtu
import pytest
from hypothesis import assume, given

from vernal.show import short
from vernal.trees import Pattern, match_paths, named_leaves, path_name, tree_paths

_MODEL = {
    "blocks": [{"attn": {"q": {"weight": 0, "bias": 1}}, "mlp": {"weight": 2}} for _ in range(2)],
    "heads": {"value": {"bias": 3}, "policy": {"bias": 4}},
}


# --- names


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (jtu.GetAttrKey("weight"), "weight"),
        (jtu.SequenceKey(3), "3"),
        (jtu.FlattenedIndexKey(3), "3"),
        (jtu.DictKey("weight"), "weight"),
        (jtu.DictKey("conv-1/w:0 x"), "conv-1/w:0 x"),
        (jtu.DictKey("größe"), "größe"),
        (jtu.DictKey(3), "3"),
        (jtu.DictKey(-3), "-3"),
        (jtu.DictKey("3"), '"3"'),
        (jtu.DictKey("-3"), '"-3"'),
        (jtu.DictKey("3a"), "3a"),
        (jtu.DictKey(""), '""'),
        (jtu.DictKey("a.b"), '"a.b"'),
        (jtu.DictKey('say "so"'), r'"say \"so\""'),
        (jtu.DictKey(" a"), '" a"'),
        (jtu.DictKey("a*"), '"a*"'),
        (jtu.DictKey("a\nb"), r'"a\nb"'),
        (jtu.DictKey(True), "`True`"),
        (jtu.DictKey(1.5), "`1.5`"),
        (jtu.DictKey((0, "`")), r"`(0, '\`')`"),
        ("somebody's", "somebody's"),
        ("[key.of.another.class]", '"[key.of.another.class]"'),
    ],
    ids=short,
)
def test_parts_are_quoted_where_they_could_be_misread(key, name):
    assert path_name((key,)) == name
    assert path_name((jtu.GetAttrKey("a"), key, jtu.SequenceKey(0))) == f"a.{name}.0"
    assert Pattern(name).matches(name) and Pattern(name).matches((key,))


_KEYS = st.integers() | st.text() | st.text(alphabet='ab.*?[]{},"`\\ 1-!', max_size=6)
_PATHS = st.lists(st.builds(jtu.DictKey, _KEYS), max_size=4).map(tuple)


@given(a=_PATHS, b=_PATHS)
def test_different_paths_have_different_names(a, b):
    assert (path_name(a) == path_name(b)) == (a == b)


@given(path=_PATHS)
def test_a_name_is_a_pattern_for_itself(path):
    assert Pattern(path_name(path)).matches(path)
    assert Pattern(path_name(path)).matches(path_name(path))


@given(a=_PATHS, b=_PATHS)
def test_a_name_matches_only_paths_whose_keys_print_alike(a, b):
    alike = [str(key.key) for key in a] == [str(key.key) for key in b]
    assert Pattern(path_name(a)).matches(b) == alike


def test_the_tree_itself_has_the_empty_name():
    assert path_name(()) == "" and tree_paths(1.0) == "" and named_leaves(1.0) == {"": 1.0}


def test_names_of_a_tree_have_its_structure():
    Point = collections.namedtuple("Point", ["x", "y"])
    tree = {"a": Point(1, [2, None]), "b": ()}
    assert tree_paths(tree) == {"a": Point("a.x", ["a.y.0", None]), "b": ()}
    assert named_leaves(tree) == {"a.x": 1, "a.y.0": 2}


def test_is_leaf_stops_at_nodes():
    def is_list(x):
        return isinstance(x, list)

    assert tree_paths({"a": [1, 2]}, is_leaf=is_list) == {"a": "a"}
    assert named_leaves({"a": [1, 2]}, is_leaf=is_list) == {"a": [1, 2]}
    assert match_paths({"a": [1, 2]}, {"a": "x"}, is_leaf=is_list) == {"a": "x"}


class _SameRepr:
    def __repr__(self):
        return "same"


def test_two_leaves_of_one_name_are_an_error():
    tree = collections.OrderedDict([(_SameRepr(), 1), (_SameRepr(), 2)])
    with pytest.raises(ValueError, match=r"two leaves have the name '`same`'"):
        named_leaves(tree)


# --- patterns


@pytest.mark.parametrize(
    ("pattern", "matched", "not_matched"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.c", "ab", "x.a.b", "A.b"]),
        ("a.*", ["a.b", "a.0", 'a."b.c"', 'a.""'], ["a", "a.b.c"]),
        ("*", ["a", "0"], ["", "a.b"]),
        ("a*c", ["ac", "abc", '"a.c"'], ["ab", "a.c"]),
        ("**", ["", "a", "a.b.c"], []),
        ("**.bias", ["bias", "a.bias", "a.b.bias"], ["abias", "bias.a"]),
        ("a.**", ["a", "a.b", "a.b.c"], ["b.a", "ab"]),
        ("a.**.z", ["a.z", "a.b.z", "a.b.c.z"], ["a", "z", "a.z.b"]),
        ("**.a.**.b.**", ["a.b", "x.a.y.b.z"], ["b.a"]),
        ("a.?", ["a.b", 'a."."'], ["a.bc", "a"]),
        ("[ab].[!ab].[a-c]", ["a.c.b"], ["c.c.b", "a.a.b", "a.c.d"]),
        ("{a,b.c}.d", ["a.d", "b.c.d"], ["b.d", "a.c.d"]),
        ("x{,1}", ["x", "x1"], ["x2"]),
        ("{a,{b,c}.*}", ["a", "b.z", "c.z"], ["b", "a.z"]),
        ("layers.{0,[2-4],**.w}", ["layers.0", "layers.3", "layers.w", "layers.1.w"], ["layers.1"]),
        ('a."b.*"', ['a."b.*"'], ["a.b.c", 'a."b.c"']),
        ("a.3", ["a.3", 'a."3"'], ["a.4"]),
        ("`(0, 1)`.*", ["`(0, 1)`.a"], ["`(0, 2)`.a"]),
        ("", [""], ["a"]),
    ],
)
def test_patterns_match_whole_names_part_by_part(pattern, matched, not_matched):
    assert all(Pattern(pattern).matches(name) for name in matched)
    assert not any(Pattern(pattern).matches(name) for name in not_matched)


_WORDS = st.text(alphabet="ab1", min_size=1, max_size=3)


@given(
    parts=st.lists(st.text(alphabet="ab1*?", min_size=1, max_size=3), min_size=1, max_size=3),
    words=st.lists(_WORDS, min_size=1, max_size=3),
)
def test_wildcards_in_a_part_mean_what_they_mean_in_a_shell(parts, words):
    assume(not any("**" in part for part in parts))
    expected = len(parts) == len(words) and all(map(fnmatch.fnmatchcase, words, parts))
    assert Pattern(".".join(parts)).matches(".".join(words)) == expected


@given(
    parts=st.lists(st.sampled_from(["**", "*", "a", "b"]), min_size=1, max_size=5),
    words=st.lists(st.sampled_from("ab"), max_size=5),
)
def test_double_stars_agree_with_a_regular_expression(parts, words):
    whole = "".join({"**": "(?:[ab];)*", "*": "[ab];"}.get(part, f"{part};") for part in parts)
    expected = bool(re.fullmatch(whole, "".join(f"{word};" for word in words)))
    assert Pattern(".".join(parts)).matches(".".join(words)) == expected


@given(
    choices=st.lists(_WORDS, min_size=1, max_size=4),
    before=_WORDS,
    after=_WORDS,
    word=_WORDS,
)
def test_braces_are_any_of_their_alternatives(choices, before, after, word):
    pattern = Pattern(f"{before}.x{{{','.join(choices)}}}.{after}")
    assert pattern.matches(f"{before}.x{word}.{after}") == (word in choices)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a..b", "an empty part"),
        (".", "an empty part"),
        ("..a", "an empty part"),
        ("a.", "an empty part"),
        ("a.{b,}", "an empty part"),
        ("a**", r"\*\* beside other text"),
        ("***", r"\*\* beside other text"),
        ("{a,b", "{ without }"),
        ("a}", "} without {"),
    ],
)
def test_a_pattern_that_cannot_be_read_is_an_error(pattern, problem):
    with pytest.raises(ValueError, match=f"the path .* cannot be read(.|\n)*got: {problem}"):
        Pattern(pattern)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('a."b', '" that is not closed'),
        ("a.`b", "` that is not closed"),
        ("a[0", r"\[ that is not closed"),
        (r'"\q"', "which is not JSON"),
    ],
)
def test_quotes_and_brackets_that_are_not_closed_are_an_error(text, problem):
    expected = f"the path .* cannot be read(.|\n)*got: .*{problem}"
    with pytest.raises(ValueError, match=expected):
        Pattern(text)
    with pytest.raises(ValueError, match=expected):
        Pattern("**").matches(text)


def test_a_pattern_covers_what_it_matches_and_what_is_below():
    name = "blocks.0.attn.q.weight"
    covering = ["blocks", "blocks.*", "blocks.0.attn", "**.q", "**", "", name, "blocks.**.weight"]
    assert all(Pattern(text).covers(name) for text in covering)
    assert not any(
        Pattern(text).covers(name) for text in ["block", "attn", "blocks.1", f"{name}.x"]
    )
    assert Pattern("a").covers((jtu.GetAttrKey("a"), jtu.SequenceKey(0)))


def test_patterns_are_values():
    assert Pattern("a.*") == Pattern("a.*") and len({Pattern("a"), Pattern("a"), Pattern("b")}) == 2


# --- rules


def test_every_leaf_gets_the_value_of_its_rule():
    found = match_paths(
        _MODEL, {"blocks.*.attn.**": 1, "blocks.*.mlp.*": None, "heads.**.bias": [2]}
    )
    block = {"attn": {"q": {"weight": 1, "bias": 1}}, "mlp": {"weight": None}}
    heads = {"value": {"bias": [2]}, "policy": {"bias": [2]}}
    assert found == {"blocks": [block, block], "heads": heads}


def test_leaves_without_a_rule_get_the_default():
    found = match_paths(_MODEL, {"**.weight": True}, default=False)
    assert named_leaves(found) == {name: name.endswith("weight") for name in named_leaves(_MODEL)}


def test_leaves_without_a_rule_are_an_error():
    expected = "blocks.0.attn.q.bias: no path matches it\n    blocks.1.attn.q.bias: no"
    with pytest.raises(ValueError, match=f"the paths do not match the tree(.|\n)*{expected}"):
        match_paths(_MODEL, {"**.weight": 1})


def test_two_rules_for_one_leaf_are_an_error_even_with_a_default():
    expected = r"blocks.0.mlp.weight: more than one path matches it, '\*\*.weight' and"
    with pytest.raises(ValueError, match=expected):
        match_paths(_MODEL, {"**.weight": 1, "**.mlp.*": 2}, default=0)


def test_a_rule_without_a_leaf_is_an_error_that_shows_the_leaves():
    expected = r"'head.\*': no leaf there; did you mean 'heads.\*'"
    with pytest.raises(ValueError, match=expected):
        match_paths(_MODEL, {"head.*": 1}, default=0)
    with pytest.raises(ValueError, match=r"'x': no leaf there(.|\n)*heads.policy"):
        match_paths(_MODEL, {"x": 1}, default=0)


def test_a_rule_for_a_part_is_for_its_leaves_if_it_has_no_wildcards():
    whole = match_paths(_MODEL, {"heads.**": 1}, default=0)
    assert match_paths(_MODEL, {"heads": 1}, default=0) == whole
    expected = r"a part, not a leaf; for the leaves in it, write 'heads.\*.\*\*'"
    with pytest.raises(ValueError, match=expected):
        match_paths(_MODEL, {"heads.*": 1}, default=0)


def test_one_error_tells_everything_but_not_at_length():
    tree = {"a": list(range(30)), "b": 1}
    with pytest.raises(ValueError, match="a.9: no path(.|\n)*and 20 more\n") as caught:
        match_paths(tree, {"b": 1, "{b,c}": 2, "nothing": 3})
    assert "b: more than one path matches it, 'b' and '{b,c}'" in str(
        caught.value
    ) and "'nothing'" in str(caught.value)


def test_a_tree_without_leaves_needs_no_rules():
    assert match_paths({"a": None}, {}) == {"a": None}


def test_a_single_leaf_has_rules_too():
    assert match_paths(1.0, {"**": "x"}) == "x"
    with pytest.raises(ValueError, match=re.escape("(the tree itself)")):
        match_paths(1.0, {})
