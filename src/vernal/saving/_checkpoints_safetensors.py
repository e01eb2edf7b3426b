"""The arrays of checkpoints in one safetensors file, which the first process writes in the
background. Arrays that are sharded over processes are gathered first."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from ..show import shown_name
from ._encoding import encode
from ._file import read, write
from ._named import File
from ._processes import check_same, gathered, is_local, process_index

_FILE = "arrays.safetensors"


def begin(path: str, leaves: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Copies leaves, by name; after the call the arrays may be donated or changed. Returns a function that writes the
    copies into the empty folder, and returns the `about` of `open_store`."""
    first = process_index() == 0
    copies, local = {}, {}
    for name, leaf in leaves.items():
        value, remarks = encode(gathered(leaf), shown_name(name))
        if first:
            # On the CPU, the NumPy array may share the memory of the JAX array.
            copies[name] = np.array(value, order="C"), remarks
        if is_local(leaf):
            local[name] = value
    check_same(local)

    def finish() -> dict[str, Any]:
        if first:
            write(os.path.join(path, _FILE), copies, None)
        return {}

    return finish


def open_store(path: str, about: dict[str, Any]) -> File:
    """The arrays of a checkpoint in a folder; `about` is what the writer returned. Raises `ValueError` if the file
    is damaged."""
    return File(read(os.path.join(path, _FILE)))
