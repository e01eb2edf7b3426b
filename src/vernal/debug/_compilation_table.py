"""A recording of compilations as a table for the terminal."""

from pathlib import Path

from ..show import table
from ._compilation import PHASES, Recording, rows_of, seconds_in, seconds_text

_MOST_REASONS = 4
_LONGEST_PLACE = 40


def compilation_table(recording: Recording, width: int) -> str:
    """A row for each function, the slowest first, in lines of at most `width` characters."""
    rows = rows_of(recording.compilations)
    if not rows:
        return recording.summary()
    cells = []
    for row in rows:
        reasons = row.reasons()
        if len(reasons) > _MOST_REASONS:
            reasons[_MOST_REASONS - 1 :] = [f"and {len(reasons) - _MOST_REASONS + 1} other reasons"]
        seconds = [seconds_text(row.seconds(phase)) for phase in PHASES]
        count = len(row.compilations)
        place = _short_place(row.place)
        cells.append([row.function, place, count, *seconds, "\n".join(reasons)])
    sums = [seconds_text(seconds_in(rows, phase)) for phase in PHASES]
    columns = ["function", "place", "times", *(f"{phase} s" for phase in PHASES), "reason"]
    footer = ["sum", None, len(recording.compilations), *sums, None]
    return table(recording.summary(), columns, cells, footer, width=width)


def _short_place(place: str) -> str:
    """The end of a long path, because the beginning is the same for most files of a project."""
    return place if len(place) <= _LONGEST_PLACE else "…/" + "/".join(Path(place).parts[-2:])
