"""Checks that a recurrent layer has the cells that it was made with."""

from collections.abc import Sequence
from typing import Any

from ..show import short, value_error


def check_cells(
    layer: str, cells: Any, kind: Any, sizes: Sequence[int], hidden_size: int, directions: int
) -> None:
    """Refuses cells other than those a layer was made with, which `vernal.tree_at` may have put in.

    Args:
        layer: the name of its class.
        cells: for each layer, one cell for each direction.
        kind: the class of all of them.
        sizes: the length of the input of each layer.
        hidden_size: that of every cell.
        directions: the number of directions.

    Raises:
        ValueError: if there are more or fewer cells, or one is of another kind or size.
    """
    counts = [len(each) for each in cells]
    if counts != [directions] * len(sizes):
        raise value_error(
            f"the number of cells of `{layer}` does not match its layers and directions",
            where=f"`cells` of {layer}",
            expected=f"num_layers={len(sizes)} tuples of {directions}",
            got=f"tuples of {counts}",
            instead=f"a new {layer}, which creates its own cells",
        )
    for i, (each, size) in enumerate(zip(cells, sizes, strict=True)):
        for j, cell in enumerate(each):
            fits = isinstance(cell, kind) and cell.input_size == size
            if not fits or cell.hidden_size != hidden_size:
                raise value_error(
                    f"a cell of `{layer}` has the wrong class or size",
                    where=f"`cells.{i}.{j}` of {layer}",
                    expected=f"{kind.__name__}({size}, {hidden_size})",
                    got=short(cell),
                    instead=f"a new {layer}, which creates its own cells",
                )
