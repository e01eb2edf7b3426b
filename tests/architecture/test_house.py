"""Sizes, opening docstrings, and text that must not be in the project."""

from pathlib import Path

import pytest

from tests.architecture._checks import check_constraints, check_sizes, check_text, listing

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", ".ci")
SUFFIXES = {".py", ".md", ".toml", ".txt", ".ipynb", ""}


def project_files() -> list[Path]:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    files = [path for path in [*ROOT.iterdir(), *inside] if path.is_file()]
    # `.git` is a file where the checkout is a linked worktree.
    return sorted(p for p in files if p.suffix in SUFFIXES and p.name not in (".git", "LICENSE"))


def test_files_and_functions_are_of_a_size_to_be_read():
    problems = check_sizes(ROOT / "src" / "vernal")
    assert not problems, listing(problems)


def test_nothing_unfinished_or_private_is_written_in_the_project():
    problems = check_text(project_files(), ROOT)
    assert not problems, listing(problems)


def test_constraints_are_plain():
    files = sorted(ROOT.glob("constraints*.txt"))
    assert len(files) == 2
    problems = check_constraints(files, ROOT)
    assert not problems, listing(problems)


def put(tmp_path: Path, text: str) -> Path:
    root = tmp_path / "vernal"
    root.mkdir()
    (root / "a.py").write_text(text)
    return root


LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 60


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = 1\n", "does not open with a docstring"),
        ('"""D."""\n' + "x = 1\n" * 400, "401 lines"),
        ('"""D."""\n' + LONG_FUNCTION, "f has 61 lines"),
        ('"""D."""\n@g\n' + LONG_FUNCTION, "f has 61 lines"),
    ],
)
def test_a_file_that_is_too_long_or_says_nothing_is_found(tmp_path, text, problem):
    (found,) = check_sizes(put(tmp_path, text))
    assert problem in found


@pytest.mark.parametrize(
    "text",
    [
        '"""D."""\ndef f():\n    """' + "\n" * 90 + '    """\n    return 1\n',
        '"""D."""\n# Long: a table.\n' + LONG_FUNCTION,
    ],
)
def test_docstrings_and_reasons_do_not_count(tmp_path, text):
    assert check_sizes(put(tmp_path, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "# TO" + "DO: later",
        "# FIX" + "ME",
        "open('/ho" + "me/ann/data')",
        "cd /wo" + "rk/place",
        "https://pypi.o" + "rg/simple",
    ],
)
def test_text_that_must_not_be_there_is_found(tmp_path, text):
    root = put(tmp_path, text)
    assert len(check_text([root / "a.py"], root)) == 1


@pytest.mark.parametrize("text", ["https://example.com/home/x", "frame/work/x", "a to-do list"])
def test_harmless_text_is_left_alone(tmp_path, text):
    root = put(tmp_path, text)
    assert check_text([root / "a.py"], root) == []


@pytest.mark.parametrize("line", ["jax>=0.10", "jax==0.10; python_version<'3.12'", "", "-e ."])
def test_a_constraint_that_is_not_plain_is_found(tmp_path, line):
    root = put(tmp_path, line + "\n")
    assert len(check_constraints([root / "a.py"], root)) == 1
