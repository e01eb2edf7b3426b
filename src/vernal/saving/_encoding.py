"""How a leaf is stored in a safetensors file: as which array, and with which remarks.

Most dtypes are stored directly. A dtype for which safetensors has no code is stored as one with the
same bytes, with the true dtype in the remarks: `complex128` as `float64` with one more axis of length
2 (real, imaginary), and the small types of `ml_dtypes` that it lacks (`int4`, `uint4`,
`float8_e4m3b11fnuz`, ...), which take a byte per element in memory, as `uint8`. A typed PRNG key is
stored as its key data, with the name of its implementation.
"""

from typing import Any

import jax
import numpy as np

from ..show import type_error
from ._leaves import Spec, is_key, key_spec, on_host

Remarks = dict[str, Any]

# The codes of the format that name a dtype of NumPy or ml_dtypes; the dtype is found by its name.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_NATIVE = frozenset(DTYPES.values())


def encode(leaf: Any, name: str) -> tuple[np.ndarray, Remarks]:
    """The array to store for a leaf, little-endian and in C order, and the remarks needed to read it. Raises
    `ValueError` if its elements cannot be read, and `TypeError` if the format cannot store its dtype."""
    remarks: Remarks = {}
    if is_key(leaf) and not isinstance(leaf, jax.ShapeDtypeStruct):
        remarks["key"] = str(jax.random.key_impl(leaf))
        leaf = jax.random.key_data(leaf)
    value = np.asarray(on_host(leaf, name), order="C")
    if value.dtype.byteorder == ">":
        value = value.astype(value.dtype.newbyteorder("<"))
    if value.dtype.name in _NATIVE:
        return value, remarks
    remarks["dtype"] = value.dtype.name
    if value.dtype == np.complex128:
        return value.reshape(-1).view(np.float64).reshape(*value.shape, 2), remarks
    if value.dtype.itemsize == 1:
        return value.view(np.uint8), remarks
    raise type_error(
        f"an array of dtype {value.dtype} cannot be stored",
        where=name,
        expected="a dtype that means the same on every machine",
        instead="convert it to float64 or complex128",
    )


def decode(stored: np.ndarray, remarks: Remarks) -> np.ndarray:
    """The array that was stored, as a view. For a key: its key data."""
    dtype = remarks.get("dtype")
    if dtype is None:
        return stored
    if dtype == "complex128":
        return stored.reshape(-1).view(np.complex128).reshape(stored.shape[:-1])
    return stored.view(np.dtype(dtype))


def decoded_spec(code: str, shape: tuple[int, ...], remarks: Remarks) -> Spec | None:
    """Shape and dtype of the leaf that was stored; None if no leaf can have them."""
    if "key" in remarks:
        return key_spec(shape, remarks["key"])
    if remarks.get("dtype") == "complex128":
        return Spec(shape[:-1], np.dtype(np.complex128))
    dtype = remarks.get("dtype", DTYPES.get(code))
    return None if dtype is None else Spec(shape, np.dtype(dtype))
