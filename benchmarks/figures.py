"""The figures of the page of benchmarks: `python benchmarks/figures.py`.

Reads the tables in `docs/benchmarks.md`, which the other scripts print, and draws them into `docs/images/`; so the
figures say what the tables say.
"""

import re
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"
Table = dict[str, list[list[float]]]
"""The numbers in each cell of a row, by the first cell of that row."""


def table(page: str, header: str) -> Table:
    """The first table whose header begins like this."""
    if header not in page:
        sys.exit(f"docs/benchmarks.md has no table that begins with {header!r}")
    lines = page[page.index(header) :].split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {name.replace("`", ""): [_numbers(cell) for cell in row] for name, *row in cells[2:]}


def _numbers(cell: str) -> list[float]:
    return [
        float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*(?=$|\D)", cell)
    ]


def bars(axis: plt.Axes, rows: dict[str, list[float]], names: list[str], label: str) -> None:
    """A group of bars for each name; in each group a bar for each row."""
    width = 0.8 / len(rows)
    for i, (row, heights) in enumerate(rows.items()):
        places = [k + (i - (len(rows) - 1) / 2) * width for k in range(len(names))]
        axis.bar(places, heights, width, label=row)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel(label)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4, fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)


def dispatch(page: str) -> plt.Figure:
    rows = table(page, "| JAX 0.10.2 | number: 10, 100, 1,000 |")
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    libraries = {name: cells[1] for name, cells in rows.items() if "jax.jit" not in name}
    bars(axis, libraries, ["10 arrays", "100", "1,000"], "time of a call over jax.jit's")
    axis.set_yscale("log")
    axis.axhline(1, color="black", linewidth=0.8)
    return figure


def training(page: str) -> plt.Figure:
    header = "| milliseconds |"
    rows = table(page, header)
    libraries = page[page.index(header) :].splitlines()[0].strip("|").split("|")[1:]
    figure, axis = plt.subplots(figsize=(9, 3.5), layout="constrained")
    # Over Vernal's: the rows take from microseconds to a second.
    heights = {
        name.strip(): [cells[i][0] / cells[0][0] for cells in rows.values()]
        for i, name in enumerate(libraries)
    }
    bars(axis, heights, list(rows), "time of a step over Vernal's")
    axis.set_yscale("log")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.tick_params(axis="x", labelsize=7)
    return figure


def attention(page: str) -> plt.Figure:
    rows = table(page, "| | T = 1,024 | T = 4,096 | T = 16,384 |")
    figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    heights = {name: [cell[0] for cell in cells] for name, cells in rows.items()}
    bars(axis, heights, ["1,024 tokens", "4,096", "16,384"], "MB for the gradient")
    axis.set_yscale("log")
    return figure


def main(folder: Path) -> None:
    page = (DOCS / "benchmarks.md").read_text()
    for draw in (dispatch, training, attention):
        path = folder / f"benchmark-{draw.__name__}.png"
        figure = draw(page)
        figure.savefig(path, dpi=110)
        plt.close(figure)
        print(path.name)


if __name__ == "__main__":
    main(DOCS / "images")
