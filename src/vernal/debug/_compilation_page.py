"""A recording of compilations as a page for the browser, with a timeline.

The page is one file that loads nothing. It is complete without JavaScript, which only sorts,
filters, and points from the table to the timeline and back.
"""

import html
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ._compilation import PHASES, Compilation, Recording, Row, rows_of, seconds_in, seconds_text

_TEMPLATE = Path(__file__).with_name("_compilation_page.html")
_MOST_TICKS = 10


def compilation_page(recording: Recording, title: str) -> str:
    """The page of a recording, as self-contained HTML."""
    rows = rows_of(recording.compilations)
    sums = [seconds_in(rows, phase) for phase in (*PHASES, None)]
    parts = {
        "title": html.escape(title),
        "when": time.strftime("%Y-%m-%d %H:%M", time.localtime(recording.began)),
        "summary": html.escape(recording.summary()),
        "timeline": "\n".join(_lanes(rows, recording.seconds)),
        "ticks": "\n".join(_ticks(recording.seconds)),
        "rows": "\n".join(_table_rows(rows)),
        "count": str(len(recording.compilations)),
        "sums": "".join(f'<td class="number">{seconds_text(x)}</td>' for x in sums),
    }
    # In one pass: inserted text may look like a placeholder.
    template = _TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _table_rows(rows: list[Row]) -> Iterator[str]:
    for i, row in enumerate(rows):
        reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in row.reasons())
        count, seconds = len(row.compilations), [row.seconds(x) for x in (*PHASES, None)]
        yield (
            f'<tr data-row="{i}"><th scope="row">{html.escape(row.function)}</th>'
            f'<td class="place">{html.escape(row.place)}</td>'
            f'<td class="number" data-value="{count}">{count}</td>'
            + "".join(
                f'<td class="number" data-value="{x:.6f}">{seconds_text(x)}</td>' for x in seconds
            )
            + f'<td class="reason">{f"<ul>{reasons}</ul>" if reasons else ""}</td></tr>'
        )


class _Bar(NamedTuple):
    """A phase of a compilation on the timeline."""

    start: float
    stop: float
    phase: str
    row: int
    compilation: Compilation


def _lanes(rows: list[Row], seconds: float) -> Iterator[str]:
    """A lane for each thread, as high as its deepest nesting of compilations."""
    threads: dict[str, list[_Bar]] = {}
    for i, row in enumerate(rows):
        for x in row.compilations:
            bars = threads.setdefault(x.thread, [])
            bars += [_Bar(span.start, span.stop, span.phase, i, x) for span in x.spans]
    for name, bars in sorted(threads.items()):
        placed, height = [], 0
        around: list[float] = []
        for bar in sorted(bars, key=lambda bar: (bar.start, -bar.stop)):
            # The bars that began earlier and have not ended contain this one.
            around = [stop for stop in around if stop > bar.start]
            placed.append(_bar(bar, len(around), seconds))
            around.append(bar.stop)
            height = max(height, len(around))
        yield f'<h3>{html.escape(name)}</h3><div class="lane" style="--height:{height}">'
        yield from placed
        yield "</div>"


def _bar(bar: _Bar, depth: int, seconds: float) -> str:
    left, width = bar.start / seconds, (bar.stop - bar.start) / seconds
    x = bar.compilation
    lines = f"{x.function}: {bar.phase}, {seconds_text(bar.stop - bar.start)} s", x.place, x.reason
    tip = html.escape("\n".join(filter(None, lines)))
    return (
        f'<i class="{bar.phase}" data-row="{bar.row}" title="{tip}" '
        f'style="left:{left:.4%};width:{width:.4%};--depth:{depth}"></i>'
    )


def _ticks(seconds: float) -> Iterator[str]:
    """Marks at round numbers of seconds."""
    step = 0.001
    for factor in (2, 2.5, 2) * 8:
        if seconds / step <= _MOST_TICKS:
            break
        step *= factor
    for i in range(int(seconds / step) + 1):
        yield f'<span style="left:{i * step / seconds:.4%}">{i * step:g} s</span>'
