"""The figures of the page of benchmarks are drawn from its tables."""

import re
import runpy
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_figure_of_the_page_is_drawn_from_its_tables(tmp_path):
    with warnings.catch_warnings():  # of matplotlib's own dependencies
        warnings.simplefilter("ignore", DeprecationWarning)
        script = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    script["main"](tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    shown = re.findall(r"images/(benchmark-\w+\.png)", (ROOT / "docs/benchmarks.md").read_text())
    assert drawn == set(shown)
    assert all((ROOT / "docs/images" / name).exists() for name in drawn)


def test_a_row_is_read_by_its_numbers():
    script = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    page = "| a | b |\n|---|---|\n| `x` | 1,669 MB |\n| y | 0.98, 1.5 |\n\n| c |"
    assert script["table"](page, "| a |") == {"x": [[1669.0]], "y": [[0.98, 1.5]]}
