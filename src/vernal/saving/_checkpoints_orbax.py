"""The arrays of checkpoints in Orbax's format: every process writes its pieces of the sharded arrays,
while the program continues.

Orbax gets a flat dictionary of arrays by name. It does not check what it reads, so the first process
records a checksum of every file when everything is written.
"""

import collections
import concurrent.futures
import os
import urllib.parse
import zlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..show import message, shown_name
from ._checkpoints_folder import damaged
from ._encoding import DTYPES, Remarks, decode, decoded_spec, encode
from ._file import Entry
from ._fitting import Request, Store
from ._leaves import check_width, is_key, place, sharding_of
from ._processes import agree, check_same, gathered, is_local, process_count, process_index

_FOLDER = "arrays"
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def _orbax(path: str) -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            message(
                "Orbax is not installed",
                where=path,
                expected="the package that writes and reads checkpoints with backend='orbax'",
                instead="pip install orbax-checkpoint; or save with backend='safetensors'",
            )
        ) from error
    return orbax.checkpoint


def _key(name: str) -> str:
    """A name in the form that Orbax needs: not empty, and without characters that are special in a path."""
    return urllib.parse.quote(name, safe="") or "%"


def _encoded(leaf: Any, name: str) -> tuple[Any, Remarks]:
    """A leaf as Orbax stores it. JAX arrays stay where they are, if Orbax has their dtype."""
    remarks: Remarks = {}
    if is_key(leaf):
        remarks["key"] = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    several = process_count() > 1
    if (
        isinstance(leaf, jax.Array)
        and leaf.dtype.name in _CODES
        and not (several and is_local(leaf))
    ):
        return leaf, remarks
    value, more = encode(gathered(leaf), shown_name(name))
    return value, remarks | more


def begin(path: str, leaves: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Begins to write leaves, by name, into an empty folder; after the call the arrays may be donated or changed.
    Returns a function that waits until everything is written, and returns the `about` of `OrbaxStore`."""
    ocp = _orbax(path)
    encoded = {name: _encoded(leaf, name) for name, leaf in leaves.items()}
    check_same({n: array for n, (array, _) in encoded.items() if isinstance(array, np.ndarray)})
    about = {
        name: {"code": _CODES[array.dtype.name], "shape": list(array.shape), "remarks": remarks}
        for name, (array, remarks) in encoded.items()
    }
    # Orbax refuses empty arrays, and trees without arrays.
    arrays = {_key(name): array for name, (array, _) in encoded.items() if array.size}
    if not arrays:
        return lambda: {"leaves": about, "files": {}}
    inside = os.path.join(path, _FOLDER)
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    checkpointer.save(inside, args=ocp.args.PyTreeSave(arrays))

    def finish() -> dict[str, Any]:
        try:
            checkpointer.wait_until_finished()
        finally:
            checkpointer.close()
        files = _files_in(inside) if process_index() == 0 else []
        return {"leaves": about, "files": dict(zip(files, _sums(inside, files), strict=True))}

    return finish


# --- checksums


def _files_in(folder: str) -> list[str]:
    found = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]
    return sorted(os.path.relpath(path, folder).replace(os.sep, "/") for path in found)


def _sum(path: str) -> int | None:
    """The checksum of a file; None if there is none."""
    total = 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(1 << 22):
                total = zlib.crc32(piece, total)
    except FileNotFoundError:
        return None
    return total


def _sums(folder: str, files: list[str]) -> list[int | None]:
    # Computing a checksum releases the GIL.
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        return list(threads.map(_sum, [os.path.join(folder, name) for name in files]))


# --- reading


class OrbaxStore(Store):
    """The arrays of a checkpoint. Every process checks some of the files before any is used.

    Args:
        path: the folder of the checkpoint.
        about: what the writer returned.

    Raises:
        ValueError: in every process, if a file is damaged.
    """

    def __init__(self, path: str, about: dict[str, Any]):
        self._inside = os.path.join(path, _FOLDER)
        mine = list(about["files"])[process_index() :: process_count()]
        found = _sums(self._inside, mine)
        bad = [n for n, total in zip(mine, found, strict=True) if total != about["files"][n]]
        agree(damaged(path, f"{', '.join(bad)}: not what was written") if bad else None)
        super().__init__(path, {n: _entry(n, **told) for n, told in about["leaves"].items()})

    def array(self, entry: Entry) -> np.ndarray:
        """The elements of an entry; for a key, its key data."""
        return self._read({entry.name: (entry, None)})[entry.name]

    def leaves(self, requests: list[Request]) -> list[Any]:
        """The entries, each as a leaf of the same kind and on the same devices as the leaf it is for."""
        times = collections.Counter(entry.name for entry, _, _ in requests)
        wanted = {
            entry.name: (entry, _sharding(entry, like, name) if times[entry.name] == 1 else None)
            for entry, like, name in requests
        }
        found = self._read(wanted)
        return [
            place(found[entry.name], like, shown_name(name), entry.remarks.get("key"))
            if wanted[entry.name][1] is None
            else found[entry.name]
            for entry, like, name in requests
        ]

    def _read(self, wanted: dict[str, tuple[Entry, Any]]) -> dict[str, Any]:
        """Entries by name: JAX arrays if they have a sharding, otherwise NumPy arrays."""
        empty = {name: entry for name, (entry, _) in wanted.items() if 0 in entry.shape}
        found: dict[str, Any] = {n: np.empty(e.shape, DTYPES[e.code]) for n, e in empty.items()}
        args = {_key(name): at for name, (_, at) in wanted.items() if name not in empty}
        if args:
            ocp = _orbax(self.path)
            how = {
                key: ocp.RestoreArgs(restore_type=np.ndarray)
                if at is None
                else ocp.ArrayRestoreArgs(sharding=at)
                for key, at in args.items()
            }
            item = dict.fromkeys(args, 0)
            restore = ocp.args.PyTreeRestore(item, restore_args=how, partial_restore=True)
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                read = checkpointer.restore(self._inside, args=restore)
            found.update((name, read[_key(name)]) for name in wanted if name not in empty)
        return {
            name: decode(found[name], entry.remarks) if at is None else found[name]
            for name, (entry, at) in wanted.items()
        }


def _sharding(entry: Entry, like: Any, name: str) -> Any:
    """The sharding by which Orbax itself places an array; None if we make the leaf."""
    if not isinstance(like, jax.Array | jax.ShapeDtypeStruct) or entry.remarks or 0 in entry.shape:
        return None
    if entry.shape == () or (isinstance(like, jax.Array) and not like.committed):
        return None
    if DTYPES[entry.code] != like.dtype.name:
        # It must be converted.
        return None
    check_width(np.dtype(DTYPES[entry.code]), name)
    return sharding_of(like, name)


def _entry(name: str, code: str, shape: list[int], remarks: Remarks) -> Entry:
    spec = decoded_spec(code, tuple(shape), remarks)
    return Entry(name, spec, code, tuple(shape), 0, remarks)
