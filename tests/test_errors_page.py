"""The headings of `docs/errors.md` are words of the errors that the code below them raises.

`tests/test_readme.py` runs that code, and compares what it raises with what the page shows.
"""

import re
from pathlib import Path

from tests.test_readme import python_blocks

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def entries(text):
    """The words and the text of each entry."""
    parts = re.split(r"^(###? .*)$", text, flags=re.MULTILINE)[1:]
    return {
        words.removeprefix("### "): below
        for words, below in zip(parts[::2], parts[1::2], strict=True)
        if words.startswith("### ")
    }


def not_raised(text):
    """The entries with words that no error below them has."""
    return [
        words
        for words, below in entries(text).items()
        if not any(
            words in " ".join((block.output or "").split())
            for block in python_blocks(below)
            if "# raises:" in block.source
        )
    ]


def test_every_entry_shows_an_error_with_its_words():
    text = PAGE.read_text(encoding="utf-8")
    assert not_raised(text) == []
    assert 20 <= len(entries(text)) <= 30


def test_words_that_are_not_raised_are_found():
    entry = "### other\n\n```python\nf()  # raises:\n```\n\n```text\nValueError: words\n```\n"
    assert not_raised(entry) == ["other"]
    assert not_raised(entry.replace("other", "words")) == []
