"""The Python blocks of README.md and docs/*.md run, in order, in one namespace per file, and print what they say."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_PRINTED = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*$")


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The ```python blocks of a page, each with the line number of its first line of code."""
    blocks: list[tuple[int, str]] = []
    language: str | None = None
    start, indent, lines = 0, "", []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and language is None:
            language, indent = fence["language"], fence["indent"]
            start, lines = number + 1, []
        elif fence and not fence["language"]:
            if language == "python":
                blocks.append((start, "\n".join(lines) + "\n"))
            language = None
        elif language is not None:
            lines.append(line.removeprefix(indent))
    assert language is None, f"the block that opens above line {start} is never closed"
    return blocks


def said(text: str) -> list[str]:
    """What a page says is printed: `print(...)  # this`."""
    return [found for _, source in python_blocks(text) for found in _PRINTED.findall(source)]


def run_page(text: str, filename: str) -> dict[str, object]:
    """Executes a page; tracebacks name the page and its own line numbers."""
    namespace: dict[str, object] = {"__name__": "page"}
    for start, source in python_blocks(text):
        code = compile("\n" * (start - 1) + source, filename, "exec")
        exec(code, namespace)
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
    assert python_blocks(page) == [(3, "x = 1\n"), (12, "y = x + 1\n")]
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
