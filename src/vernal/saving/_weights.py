"""The weights of other programs as a mapping from names to tensors, each read when it is used.

A PyTorch state dictionary is one already. Hugging Face publishes a safetensors file, or several in one
folder with a JSON index that says which tensor is in which file.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..show import short, type_error, value_error
from ._file import Entry, read

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
Source = Mapping[str, Any] | str | os.PathLike[str]


class Tensor:
    """A tensor in a file, with its shape and dtype; `numpy.asarray` reads it."""

    def __init__(self, file: Any, entry: Entry):
        self._file = file
        self._entry = entry
        spec = entry.spec
        self.shape, self.dtype = (entry.shape, entry.code) if spec is None else spec

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self._entry.spec is None:
            raise value_error(
                "a tensor has a dtype that JAX does not have",
                where=f"{self._file.path}, {self._entry.name}",
                got=self._entry.code,
                instead="convert the file to another dtype",
            )
        return np.asarray(self._file.array(self._entry), dtype)


class _Files(Mapping[str, Tensor]):
    """The tensors of one or more safetensors files."""

    def __init__(self, *paths: str):
        found = map(read, dict.fromkeys(paths))
        self._tensors = {
            name: Tensor(file, entry) for file in found for name, entry in file.entries.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _files_of(index: str) -> list[str]:
    """The files that an index names. They must be in its folder: the author of an index must not choose which other
    files of this machine are read."""
    with open(index, encoding="utf-8") as file:
        content = json.load(file)
    parts = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise value_error(
            "not an index of safetensors files",
            where=index,
            expected='{"weight_map": {name of a tensor: name of a file}}',
            got=short(content),
        )
    folder = os.path.dirname(index)
    # Hugging Face's cache holds links, to files that are all in one other folder.
    allowed = [os.path.realpath(folder), os.path.dirname(os.path.realpath(index))]
    for part in dict.fromkeys(parts.values()):
        target = os.path.realpath(os.path.join(folder, part))
        if not any(os.path.commonpath([target, inside]) == inside for inside in allowed):
            raise value_error(
                "the index names a file outside of its folder",
                where=index,
                expected=f"files in {allowed[0]}",
                got=target if target == part else f"{part}, which is {target}",
                instead="put the files into one folder; or, if you trust this index, read them yourself and give the "
                "dictionary of their tensors",
            )
    return [os.path.join(folder, part) for part in parts.values()]


def weights_of(source: Any) -> Mapping[str, Any]:
    """The tensors of a source by name. A mapping is returned unchanged; a path is that of a safetensors file, of an
    index of several, or of a folder with one of these under Hugging Face's usual name. Raises `ValueError` if the
    folder has no such file, the file is of another kind, or an index names a file outside of its folder."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise type_error(
            "weights must be a dict of tensors by name, or a file",
            where="argument `state_dict`",
            expected="a dictionary, or the path of a safetensors file",
            got=short(source),
            instead="module.state_dict(), for a module of PyTorch",
        )
    path = os.fspath(source)
    if os.path.isdir(path):
        inside = [os.path.join(path, name) for name in (_FILE, _INDEX)]
        path = next(filter(os.path.exists, inside), "")
        if not path:
            raise value_error(
                "the folder holds no weights",
                where=os.fspath(source),
                expected=f"{_FILE} or {_INDEX}",
                got=", ".join(sorted(os.listdir(source))) or "nothing",
                instead="the path of the file itself, if it has another name",
            )
    if path.endswith(".json"):
        return _Files(*_files_of(path))
    if path.endswith((".pt", ".pth", ".bin")):
        raise value_error(
            "a file of `torch.save` is a pickle, which is not read",
            where=path,
            expected="a safetensors file, an index of several, or a folder with one of these",
            instead="give the dictionary that torch.load(path, weights_only=True) returns",
        )
    return _Files(path)


def tensor_array(tensor: Any) -> np.ndarray:
    """The elements of a PyTorch, NumPy or JAX tensor, or of one in a file, as a NumPy array, which may
    share its memory."""
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    try:
        return tensor.numpy(force=True)
    except TypeError:
        # NumPy does not have the dtype. Every bfloat16 or float8 number is exact in float32.
        return tensor.float().numpy(force=True)


def tensor_like(array: np.ndarray, like: Any) -> Any:
    """An array converted to the kind of `like`: a PyTorch tensor of the same dtype, or an array."""
    if not hasattr(like, "new_tensor"):
        return array
    if array.dtype.isbuiltin != 1:
        # One of the small floats of `ml_dtypes`, which PyTorch does not know.
        array = array.astype(np.float32)
    return like.new_tensor(array)
