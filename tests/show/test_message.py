"""Error messages have one shape."""

import jax.tree_util as jtu
import pytest

from vernal.show import message, path_text


def test_all_parts_come_in_order_one_to_a_line():
    text = message("what", instead="i", got="g", expected="e", where="w")
    assert text == "what\n  where: w\n  expected: e\n  got: g\n  instead: i"


def test_parts_that_are_not_given_leave_no_line():
    assert message("what") == "what"
    assert message("what", got="g") == "what\n  got: g"


def test_later_lines_of_a_part_stay_under_it():
    assert message("what", got="a\nb") == "what\n  got: a\n    b"


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
        ((Foreign(),), "!foreign"),
        ((jtu.DictKey(Mute()),), "[<DictKey>]"),
    ],
)
def test_paths_read_like_python(path, text):
    assert path_text(path) == text


def test_a_root_comes_before_the_path():
    assert path_text((jtu.GetAttrKey("w"),), root="model") == "model.w"
    assert path_text((), root="model") == "model"
    assert path_text([jtu.SequenceKey(1)], "x") == "x[1]"
