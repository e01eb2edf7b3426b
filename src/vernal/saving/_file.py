"""Reading and writing safetensors files, with checksums that detect damage.

The format is a header in JSON, which gives for every name a dtype, a shape and a range of bytes,
followed by these bytes. The header may hold texts of our own, under `__metadata__`. We write three:

* `vernal`: the version of this scheme, and for every name its checksum and remarks (see
  `_encoding.py`);
* `vernal.metadata`: the user's own dictionary;
* `vernal.checksum`: a checksum of everything else in the header.

All checksums are CRC-32, which detects every change of up to 32 bits in a row. Files from other
programs have none of the three, and are read without them.
"""

import json
import mmap
import os
import zlib
from typing import Any, NamedTuple

import numpy as np
from safetensors import (
    SafetensorError,
    TensorSpec,
    deserialize,
    safe_open,
    serialize,
    serialize_file,
)

from ..show import message, value_error
from ._encoding import DTYPES, Remarks, decode, decoded_spec
from ._leaves import Spec

_VERSION = 1
_OURS, _METADATA, _CHECKSUM = "vernal", "vernal.metadata", "vernal.checksum"
# The one name that the format reserves. `path_name` never quotes a name that needs no quotes, so the
# quoted form cannot clash with another name.
_RESERVED, _ESCAPED = "__metadata__", '"__metadata__"'


def _crc(stored: np.ndarray) -> int:
    return zlib.crc32(stored.reshape(-1).view(np.uint8).data)


def _header_crc(shapes: dict[str, tuple[str, list[int]]], texts: dict[str, str]) -> str:
    content = [sorted(shapes.items()), texts.get(_OURS), texts.get(_METADATA)]
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


_Leaves = dict[str, tuple[np.ndarray, Remarks]]


def _described(
    leaves: _Leaves, metadata: str | None
) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """The contents of the header: the arrays (whose memory `leaves` keeps alive), and the texts."""
    leaves = {_ESCAPED if name == _RESERVED else name: leaf for name, leaf in leaves.items()}
    about = {name: {"crc32": _crc(stored), **remarks} for name, (stored, remarks) in leaves.items()}
    texts = {_OURS: json.dumps({"version": _VERSION, "leaves": about})}
    if metadata is not None:
        texts[_METADATA] = metadata
    specs = {
        name: TensorSpec(
            dtype=stored.dtype.name,
            shape=stored.shape,
            data_ptr=stored.ctypes.data,
            data_len=stored.nbytes,
        )
        for name, (stored, _) in leaves.items()
    }
    shapes = {name: (spec.dtype, list(spec.shape)) for name, spec in specs.items()}
    texts[_CHECKSUM] = _header_crc(shapes, texts)
    return specs, texts


def write(path: str, leaves: _Leaves, metadata: str | None) -> None:
    """Writes a file of the encoded leaves (see `encode`), by name, and the user's dictionary as JSON."""
    specs, texts = _described(leaves, metadata)
    try:
        serialize_file(specs, path, texts)
    except SafetensorError as error:
        raise OSError(
            message("the file could not be written", where=path, got=str(error))
        ) from error


def as_bytes(leaves: _Leaves, metadata: str | None) -> bytes:
    """The bytes that `write` would write."""
    return serialize(*_described(leaves, metadata))


def _damaged(path: str, why: str) -> ValueError:
    return value_error(
        "the file is damaged, or not a safetensors file",
        where=path,
        got=why,
        instead="take another copy of it; nothing was loaded",
    )


# How files in other formats begin, what wrote them, and what reads them.
_OTHERS = {
    b"\x93NUMPY": (
        "`tree_serialise_leaves` of Equinox or `numpy.save`",
        "vernal.tree_deserialise_leaves(path, like)",
    ),
    b"PK\x03\x04": (
        "`torch.save` or `numpy.savez`",
        "vernal.saving.from_torch(model, torch.load(path)), or numpy.load(path)",
    ),
}


def _unreadable(path: str, content: bytes, why: str) -> ValueError:
    """The error for a file that cannot be read: it has another format, or is damaged."""
    for beginning, (writer, reader) in _OTHERS.items():
        if content.startswith(beginning):
            return value_error(
                "the file has another format",
                where=path,
                expected="a safetensors file",
                got=f"a file of {writer}",
                instead=reader,
            )
    return _damaged(path, why)


class Entry(NamedTuple):
    """One array in a file. `spec` is None if no leaf can have its shape and dtype."""

    name: str
    spec: Spec | None
    code: str
    shape: tuple[int, ...]
    start: int
    remarks: Remarks

    def __str__(self) -> str:
        if self.spec is not None:
            return str(self.spec)
        kind = self.remarks.get("key", self.code)
        return f"{kind}[{','.join(map(str, self.shape))}], which this version of JAX does not have"


class StoredFile(NamedTuple):
    """An open file: its entries by name, its texts, and its memory map."""

    path: str
    entries: dict[str, Entry]
    texts: dict[str, str]
    content: Any

    def array(self, entry: Entry) -> np.ndarray:
        """The elements of an entry as a view of the file, after checking them."""
        dtype = np.dtype(DTYPES[entry.code])
        count = int(np.prod(entry.shape, dtype=np.int64))
        # NumPy cannot make an empty view at the very end of the file.
        flat = (
            np.frombuffer(self.content, dtype, count, entry.start) if count else np.empty(0, dtype)
        )
        stored = flat.reshape(entry.shape)
        if entry.remarks.get("crc32", _crc(stored)) != _crc(stored):
            raise _damaged(self.path, f"the data of {entry.name!r} do not match their checksum")
        return decode(stored, entry.remarks)

    def metadata(self) -> dict[str, Any]:
        """The user's dictionary; for a file of another program, its texts."""
        if _OURS not in self.texts:
            return dict(self.texts)
        return json.loads(self.texts.get(_METADATA, "{}"))


def _about(path: str, header: dict[str, Any], texts: dict[str, str]) -> dict[str, Remarks]:
    """Our remarks on each name, after checking the header."""
    if _OURS not in texts and _CHECKSUM not in texts:
        return {}
    shapes = {name: (info["dtype"], info["shape"]) for name, info in header.items()}
    if texts.get(_CHECKSUM) != _header_crc(shapes, texts):
        raise _damaged(path, "the header does not match its checksum")
    ours = json.loads(texts[_OURS])
    if ours["version"] != _VERSION:
        raise value_error(
            "the file was written by a newer version of Vernal",
            where=path,
            expected=f"version {_VERSION} of the scheme",
            got=f"version {ours['version']}",
            instead="update Vernal",
        )
    return ours["leaves"]


def read(path: str | os.PathLike[str]) -> StoredFile:
    """Opens a file: reads and checks its header, and maps the rest into memory.

    Args:
        path: a safetensors file, written by us or by another program.

    Raises:
        ValueError: if the file is incomplete, has another format, or was written by a newer version.
    """
    path = os.fspath(path)
    with open(path, "rb") as file:
        try:
            # Checks that the header makes sense, and that its arrays fill the file without gaps.
            with safe_open(path, "np"):
                pass
        except SafetensorError as error:
            raise _unreadable(path, file.read(8), str(error)) from error
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _parsed(path, content)


def read_bytes(content: bytes, where: str) -> StoredFile:
    """Reads the bytes that `as_bytes` returned; `where` is their name in errors, which are those of `read`."""
    try:
        deserialize(content)
    except SafetensorError as error:
        raise _damaged(where, str(error)) from error
    return _parsed(where, content)


def _parsed(path: str, content: Any) -> StoredFile:
    """The entries of a file that is known to be complete."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    texts = header.pop(_RESERVED, {})
    about = _about(path, header, texts)
    entries: dict[str, Entry] = {}
    for name, info in header.items():
        code, shape = info["dtype"], tuple(info["shape"])
        remarks = about.get(name, {})
        spec = decoded_spec(code, shape, remarks)
        start = 8 + size + info["data_offsets"][0]
        plain = _RESERVED if name == _ESCAPED else name
        entries[plain] = Entry(plain, spec, code, shape, start, remarks)
    return StoredFile(path, entries, texts, content)
