"""The weights of other programs as a mapping from names to tensors, read only when they are used.

A state dictionary of PyTorch is one already. What Hugging Face publishes is a safetensors file, or
several and an index in JSON that says which tensor is in which, in one folder.
"""

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..show import value_error
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


def weights_of(source: Source) -> Mapping[str, Any]:
    """The tensors of a source by name: a mapping, returned as it is; or the path of a safetensors file, of an index
    of several, or of a folder with one of these under the name that Hugging Face gives it. Raises `ValueError` if
    there is no such file in the folder, or the file is of another kind."""
    if isinstance(source, Mapping):
        return source
    path = os.fspath(source)
    if os.path.isdir(path):
        inside = [os.path.join(path, name) for name in (_FILE, _INDEX)]
        path = next(filter(os.path.exists, inside), "")
        if not path:
            raise value_error(
                "the folder has no weights in it",
                where=os.fspath(source),
                expected=f"{_FILE} or {_INDEX}",
                got=", ".join(sorted(os.listdir(source))) or "nothing",
                instead="the path of the file itself, if it has another name",
            )
    if path.endswith(".json"):
        with open(path, encoding="utf-8") as file:
            parts = json.load(file)["weight_map"].values()
        return _Files(*(os.path.join(os.path.dirname(path), part) for part in parts))
    if path.endswith((".pt", ".pth", ".bin")):
        raise value_error(
            "this is a file of PyTorch's own, which is a pickle",
            where=path,
            expected="a safetensors file, an index of several, or a folder with one of these",
            instead="give the dictionary that torch.load(path, weights_only=True) returns",
        )
    return _Files(path)


def tensor_array(tensor: Any) -> np.ndarray:
    """The elements of a tensor of PyTorch, NumPy or JAX, or of a file, as a NumPy array, which may
    share its memory."""
    if not hasattr(tensor, "detach"):
        return np.asarray(tensor)
    try:
        return tensor.numpy(force=True)
    except TypeError:
        # NumPy has no dtype for it. Every bfloat16 or float8 number is a float32.
        return tensor.float().numpy(force=True)


def tensor_like(array: np.ndarray, like: Any) -> Any:
    """An array as what `like` is: a tensor of PyTorch of the same dtype, or an array."""
    if not hasattr(like, "new_tensor"):
        return array
    if array.dtype.isbuiltin != 1:
        # One of the small floats of `ml_dtypes`, which PyTorch does not know.
        array = array.astype(np.float32)
    return like.new_tensor(array)
