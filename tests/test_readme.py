"""The Python blocks of README.md and docs/*.md run, in order, in one namespace per file, and print what they say.

A page says what is printed in two ways: `print(...)  # this`, and a block of text right after the code, which is all
that the code prints, or the error that it raises; in it `...` stands for anything.
"""

import contextlib
import doctest
import io
import re
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
    # PyTorch is installed for Python 3.11 only.
    if sys.version_info < (3, 12) or "import torch" not in page.read_text(encoding="utf-8")
]
_PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*$")


class Block(NamedTuple):
    """A block of code, with the number of its first line, and what stands below it as its output."""

    start: int
    source: str
    output: str | None = None


def python_blocks(text: str) -> list[Block]:
    """The ```python blocks of a page."""
    blocks: list[Block] = []
    language: str | None = None
    start, indent, lines, is_next = 0, "", [], False
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and language is None:
            language, indent = fence["language"], fence["indent"]
            start, lines = number + 1, []
        elif fence and not fence["language"]:
            body = "\n".join(lines) + "\n"
            if language == "python":
                blocks.append(Block(start, body))
            elif language == "text" and is_next:
                blocks[-1] = blocks[-1]._replace(output=body)
            is_next, language = language == "python", None
        elif language is not None:
            lines.append(line.removeprefix(indent))
        elif line.strip():
            is_next = False
    assert language is None, f"the block that opens above line {start} is never closed"
    return blocks


def said(text: str) -> list[str]:
    """What a page says is printed: `print(...)  # this`."""
    return [found for block in python_blocks(text) for found in _PRINTED.findall(block.source)]


def run_page(text: str, filename: str) -> dict[str, object]:
    """Executes a page; tracebacks name the page and its own line numbers."""
    namespace: dict[str, object] = {"__name__": "page"}
    for start, source, output in python_blocks(text):
        code = compile("\n" * (start - 1) + source, filename, "exec")
        if output is None:
            exec(code, namespace)
            continue
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, namespace)
        except Exception as error:
            printed.writelines(traceback.format_exception_only(error))
        got = "\n".join(line.rstrip() for line in printed.getvalue().splitlines()) + "\n"
        is_same = doctest.OutputChecker().check_output(output, got, doctest.ELLIPSIS)
        assert is_same, f"{filename}:{start} prints\n{got}"
        print(got)
    return namespace


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_of_a_page_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    # As readers run it: Optax promotes.
    with jax.numpy_dtype_promotion("standard"):
        run_page(text, str(page))
    printed = iter(capsys.readouterr().out.splitlines())
    missing = [line for line in said(text) if line not in printed]
    assert not missing


def test_blocks_share_one_namespace_and_other_languages_are_left_alone():
    page = "# T\n```python\nx = 1\n```\n```bash\nrm x\n```\n```text\n(\n```\n```python\ny = x + 1\n```\n"
    assert python_blocks(page) == [Block(3, "x = 1\n"), Block(12, "y = x + 1\n")]
    assert run_page(page, "page.md")["y"] == 2


def test_an_error_names_the_page_and_its_line():
    page = "text\n\n```python\na = 1\nb = a / 0\n```\n"
    with pytest.raises(ZeroDivisionError, match="division by zero") as caught:
        run_page(page, "page.md")
    last = caught.traceback[-1]
    assert (str(last.path), last.lineno + 1) == ("page.md", 5)


def test_what_is_said_to_be_printed_is_found():
    page = "```python\nprint(1)  # 1\nprint(2)\nif True:\n    print(f(3))  # (3, 3)\n```\nprint(4)  # 4\n"
    assert said(page) == ["1", "(3, 3)"]


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("print(1)\nprint('a b ')", "1\na b"),
        ("print(7.5)", "7..."),
        ("int('x')", "ValueError: ..."),
    ],
)
def test_a_block_of_text_below_code_is_what_it_prints(source, output):
    page = f"```python\n{source}\n```\n\n```text\n{output}\n```\n"
    run_page(page, "page.md")
    with pytest.raises(AssertionError, match=r"page.md:2 prints"):
        run_page(page.replace(output, "something else"), "page.md")


def test_a_block_of_text_below_a_sentence_is_no_output():
    assert python_blocks("```python\nx\n```\n\nSo:\n\n```text\ny\n```\n") == [Block(2, "x\n")]
