"""The table of `docs/from-equinox.md` is the one that the code prints."""

from pathlib import Path

from vernal.compat._differences import DIFFERENCES, public_names, table

PAGE = Path(__file__).parents[2] / "docs" / "from-equinox.md"


def test_the_page_holds_the_table():
    assert PAGE.read_text(encoding="utf-8").endswith("\n\n" + table())


def test_every_difference_is_about_a_name():
    assert set(DIFFERENCES) <= set(public_names())
    assert len(public_names()) == 52 + 47 + 7 + 70
