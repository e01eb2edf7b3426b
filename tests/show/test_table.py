"""Tables are plain text."""

import pytest

from vernal.show import human_bytes, human_count, table


def test_numbers_stand_at_the_right_and_text_at_the_left():
    lines = table(
        "T", ["name", "n", "size"], [["a", 5, "1.5 KiB"], ["bbbbbb", 500, None]]
    ).splitlines()
    assert lines[0].strip() == "T"
    a = next(line for line in lines if " 5 " in line)
    b = next(line for line in lines if " 500" in line)
    assert a.index("5 ") == b.index("500") + 2
    assert a.index("a") == b.index("bbbbbb")
    assert not any(line != line.rstrip() for line in lines)


def test_array_shorthand_is_not_read_as_markup():
    text = table(None, ["path", "[b]"], [[".w", "f32[2,3]"], [".k[0]", "[red]x"]])
    assert "f32[2,3]" in text and "[red]x" in text and ".k[0]" in text and "[b]" in text


def test_paths_are_not_taken_for_numbers():
    lines = table(None, ["p", "n"], [[".w", 1], [".weight", 2]]).splitlines()
    assert lines[-2].index(".w") == lines[-1].index(".weight")


def test_the_footer_is_below_the_rows():
    text = table("T", ["name", "n"], [["a", 1]], ["sum", 123456])
    assert text.index("sum") > text.index(" 1")
    assert "123456" in text.splitlines()[-1]


def test_no_line_is_wider_than_asked_and_nothing_is_lost():
    text = table(None, ["a", "b"], [["x" * 50, "y" * 50]], width=40)
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("x") == 50 and text.count("y") == 50


def test_floats_have_four_digits():
    assert "0.3333" in table(None, ["a"], [[1 / 3]])
    assert "0.33333" not in table(None, ["a"], [[1 / 3]])


def test_a_table_without_rows_has_its_headings():
    assert table(None, ["alpha", "beta"], []).split()[:2] == ["alpha", "beta"]


def test_ragged_rows_are_refused():
    with pytest.raises(
        ValueError, match=r"wrong number of cells\n  where: rows\[1\]\n  expected: 2"
    ):
        table(None, ["a", "b"], [[1, 2], [3]])
    with pytest.raises(ValueError, match=r"where: footer(.|\n)*got: 3 cells: 1, 2, 3"):
        table(None, ["a", "b"], [], [1, 2, 3])


def test_bytes_and_counts_are_readable():
    assert [human_bytes(n) for n in (0, 1023, 1024, 2**20, -(2**20))] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 MiB",
        "-1.0 MiB",
    ]
    assert [human_count(n) for n in (0, 999, 1000, 999_960, 1_234_567, 10**16)] == [
        "0",
        "999",
        "1.0k",
        "1.0M",
        "1.2M",
        "10000.0T",
    ]
