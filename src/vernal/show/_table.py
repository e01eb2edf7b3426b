"""Tables and numbers for summaries: plain text, laid out by rich."""

import io
import re
from collections.abc import Sequence
from typing import Any

from ._message import value_error

# A number, perhaps with a unit or a percent sign: columns of these are right-aligned.
_NUMERIC = re.compile(r"[-+]?\.?\d[\d.,]*(e[-+]?\d+)?\s?[A-Za-zµ%]{0,4}", re.IGNORECASE)


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def _refuse_ragged(columns: Sequence[str], row: Sequence[Any], name: str) -> None:
    if len(row) != len(columns):
        raise value_error(
            "a row of the table has the wrong number of cells",
            where=name,
            expected=f"{len(columns)} cells: {', '.join(columns)}",
            got=f"{len(row)} cells: {', '.join(map(_cell_text, row))}",
            instead="give one cell for each column; None leaves a cell empty",
        )


def table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    footer: Sequence[Any] | None = None,
    *,
    width: int = 100,
) -> str:
    """A table as plain text, without colours or markup.

    Args:
        title: a line above the table, or None.
        columns: the headings.
        rows: the cells, shown by `str`; floats with four digits, None as an empty cell. Columns in
            which every cell is a number, with or without a unit, are right-aligned.
        footer: one more row, below a line.
        width: the maximum width of the table in characters; longer cells wrap.

    Returns:
        The lines of the table, without trailing spaces.

    Raises:
        ValueError: if a row or the footer does not have one cell for each column.

    Example:
        >>> from vernal.show import table
        >>> text = table("Parameters", ["name", "size"], [["weight", 12], ["bias", 4]], ["sum", 16])
        >>> text.splitlines()[0].strip()
        'Parameters'
        >>> "weight" in text and "16" in text
        True
    """
    for i, row in enumerate(rows):
        _refuse_ragged(columns, row, f"rows[{i}]")
    if footer is not None:
        _refuse_ragged(columns, footer, "footer")
    # Inside the function, because importing rich would be a good part of the library's import time, and
    # most programs never print a table.
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Cells are `Text`: in a string, rich would read `f32[2]` as markup.
    laid_out = Table(
        title=None if title is None else Text(title),
        title_justify="left",
        box=SIMPLE,
        show_footer=footer is not None,
        pad_edge=False,
    )
    for j, name in enumerate(columns):
        cells = [_cell_text(row[j]) for row in rows]
        filled = [cell for cell in cells if cell]
        numeric = bool(filled) and all(_NUMERIC.fullmatch(cell) for cell in filled)
        laid_out.add_column(
            Text(name),
            footer=Text("" if footer is None else _cell_text(footer[j])),
            justify="right" if numeric else "left",
            overflow="fold",
        )
    for row in rows:
        laid_out.add_row(*(Text(_cell_text(cell)) for cell in row))
    out = io.StringIO()
    Console(
        file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False
    ).print(laid_out)
    return "\n".join(line.rstrip() for line in out.getvalue().strip("\n").splitlines()).strip("\n")


def _scaled(n: int | float, step: int, units: Sequence[str], sep: str) -> str:
    size, at = abs(n), 0
    # Rounded first: 999.96 would otherwise be printed as 1000.0 of the smaller unit.
    while round(size, 1) >= step and at < len(units) - 1:
        size, at = size / step, at + 1
    digits = f"{size:g}" if at == 0 else f"{size:.1f}"
    return f"{'-' if n < 0 else ''}{digits}{sep if units[at] else ''}{units[at]}"


def human_bytes(n: int | float) -> str:
    """A number of bytes in binary units.

    Args:
        n: bytes.

    Returns:
        The number with one decimal and its unit.

    Example:
        >>> from vernal.show import human_bytes
        >>> human_bytes(512), human_bytes(1536), human_bytes(3 * 2**30)
        ('512 B', '1.5 KiB', '3.0 GiB')
    """
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), " ")


def human_count(n: int | float) -> str:
    """A count in thousands, millions, ...

    Args:
        n: the count.

    Returns:
        The number, with one decimal and k, M, G or T from one thousand on.

    Example:
        >>> from vernal.show import human_count
        >>> human_count(999), human_count(1234), human_count(7_000_000)
        ('999', '1.2k', '7.0M')
    """
    return _scaled(n, 1000, ("", "k", "M", "G", "T"), "")
