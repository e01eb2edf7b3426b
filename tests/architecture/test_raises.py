"""Every error message is read by a test."""

from pathlib import Path

import pytest

from tests.architecture._checks import listing
from tests.architecture._raises import check_raises, covers

ROOT = Path(__file__).parents[2]


def test_every_raise_of_the_package_is_read_by_a_test():
    here = Path(__file__).parent
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent != here]
    problems = check_raises(ROOT / "src" / "vernal", sorted(tests))
    assert not problems, listing(problems)


def check(tmp_path: Path, source: str, test: str) -> list[str]:
    root = tmp_path / "vernal"
    root.mkdir()
    (root / "a.py").write_text(source)
    (tmp_path / "test_a.py").write_text("import pytest\n" + test)
    return check_raises(root, [tmp_path / "test_a.py"])


LITERAL = "def f(x):\n    raise ValueError(f'the shape {x} is not allowed here')\n"
BUILT = (
    "def f(x):\n"
    "    raise ValueError(message('cannot split', where=x, expected='a whole number', got=x))\n"
)
VARIABLE = "def f(x):\n    text = f'the shape {x} is wrong'\n    raise ValueError(text)\n"
HELPER = (
    "def why(x):\n    '''Docstring about pears.'''\n    return f'the shape {x} is wrong'\n"
    "def f(x):\n    raise ValueError(why(x))\n"
)


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        (LITERAL, "'is not allowed'"),
        (LITERAL, "r'the shape .* is not allowed'"),
        (LITERAL, "'the shape (3, 2) is not allowed here'"),
        (LITERAL, "re.escape('the shape (3,) is not')"),
        (LITERAL, "f'shape {n} is not allowed'"),
        (BUILT, "'cannot split'"),
        (BUILT, "r'cannot split(.|\\n)*expected: a whole number'"),
        (VARIABLE, "'shape 3 is wrong'"),
        (HELPER, "'shape 3 is wrong'"),
    ],
)
def test_a_pattern_covers_the_raise_it_was_written_for(tmp_path, source, pattern):
    test = f"def test_f():\n    with pytest.raises(ValueError, match={pattern}):\n        f(3)\n"
    assert check(tmp_path, source, test) == []


@pytest.mark.parametrize(
    ("source", "pattern"),
    [
        (LITERAL, "'something else is said'"),
        (LITERAL, "'.*'"),
        (LITERAL, "'is'"),
        (LITERAL, "'here allowed not is'"),
        (HELPER, "'Docstring about pears'"),
    ],
)
def test_a_raise_that_no_pattern_reads_is_found(tmp_path, source, pattern):
    test = f"def test_f():\n    with pytest.raises(ValueError, match={pattern}):\n        f(3)\n"
    (found,) = check(tmp_path, source, test)
    assert "no test reads" in found
    assert "shape" in found


def test_patterns_are_also_taken_from_the_table_of_a_parametrised_test(tmp_path):
    table = "CASES = [(3, 'the shape 3 is not allowed')]\n"
    test = "def test_f(x, text):\n    with pytest.raises(ValueError, match=text):\n        f(x)\n"
    decorator = "@pytest.mark.parametrize(('x', 'text'), CASES)\n"
    assert check(tmp_path, LITERAL, table + decorator + test) == []


def test_a_text_is_found_in_a_neighbouring_file_of_the_room(tmp_path):
    root = tmp_path / "vernal"
    root.mkdir()
    (root / "_refuse.py").write_text(
        "def wrong(x):\n    return TypeError('pears are not allowed')\n"
    )
    (root / "a.py").write_text("from . import _refuse\ndef f(x):\n    raise _refuse.wrong(x)\n")
    (found,) = check_raises(root, [])
    assert found == "vernal/a.py:3: no test reads 'pears are not allowed'"


def test_a_string_that_is_no_match_does_not_count(tmp_path):
    (found,) = check(tmp_path, LITERAL, "def test_f():\n    'the shape 3 is not allowed here'\n")
    assert found.startswith("vernal/a.py:2")


def test_a_raise_without_words_is_found(tmp_path):
    (found,) = check(tmp_path, "def f(x):\n    raise KeyError(x)\n", "")
    assert found == "vernal/a.py:2: its text cannot be read from this file"


def test_the_protocol_of_attribute_access_needs_no_text(tmp_path):
    source = "class A:\n    def __getattr__(self, name):\n        raise AttributeError(name)\n"
    assert check(tmp_path, source, "") == []


def test_passing_an_error_on_needs_no_text(tmp_path):
    source = "try:\n    f()\nexcept ValueError as e:\n    raise\nraise e\n"
    assert check(tmp_path, source, "") == []


def test_a_broken_regular_expression_covers_nothing():
    assert not covers("(unbalanced and long", "(unbalanced and long")
