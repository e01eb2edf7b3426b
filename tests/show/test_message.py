"""Error messages have one shape."""

import jax.tree_util as jtu
import pytest

from vernal.show import listed, message, path_text, shown_name, type_error, value_error


def test_all_parts_come_in_order_one_to_a_line():
    text = message("what", instead="i", got="g", expected="e", where="w")
    assert text == "what\n  where: w\n  expected: e\n  got: g\n  instead: i"


def test_parts_that_are_not_given_leave_no_line():
    assert message("what") == "what"
    assert message("what", got="g") == "what\n  got: g"


def test_later_lines_of_a_part_stay_under_it():
    assert message("what", got="a\nb") == "what\n  got: a\n    b"


@pytest.mark.parametrize(("make", "kind"), [(value_error, ValueError), (type_error, TypeError)])
def test_an_error_holds_the_message_of_its_parts(make, kind):
    error = make("what", where="w", got=None, instead="i")
    assert type(error) is kind
    assert str(error) == message("what", where="w", instead="i")


def test_of_many_things_the_first_are_told_and_the_others_counted():
    assert listed([]) == ""
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(5), most=3) == "0, 1, 2 and 2 more"
    assert listed(iter("abcd"), "\n", 2) == "a\nb\nand 2 more"


def test_a_leaf_without_a_name_is_the_tree():
    assert shown_name("a.b") == "a.b"
    assert shown_name("") == path_text(()) == "(the tree itself)"


class Foreign:
    def __str__(self):
        return "!foreign"


class Mute:
    def __repr__(self):
        raise RuntimeError("mute")


@pytest.mark.parametrize(
    "path, text",
    [
        ((), "(the tree itself)"),
        ((jtu.GetAttrKey("layers"), jtu.SequenceKey(0), jtu.GetAttrKey("w")), ".layers[0].w"),
        ((jtu.DictKey("k"), jtu.DictKey(3)), "['k'][3]"),
        ((jtu.FlattenedIndexKey(2),), "[<flat index 2>]"),
        ((Foreign(),), ".!foreign"),
        ((jtu.DictKey(Mute()),), "[<DictKey>]"),
    ],
)
def test_paths_read_like_python(path, text):
    assert path_text(path) == text


def test_a_root_comes_before_the_path():
    assert path_text((jtu.GetAttrKey("w"),), root="model") == "model.w"
    assert path_text((), root="model") == "model"
    assert path_text([jtu.SequenceKey(1)], "x") == "x[1]"
