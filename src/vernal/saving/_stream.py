"""Equinox's `.eqx` format: the leaves of a tree one after the other, each as NumPy's `.npy`,
without names.

Each library reads the other's files if the leaves and their order are the same. `save` adds names,
checksums, PRNG keys and metadata.
"""

import contextlib
import io
import os
import pathlib
from collections.abc import Callable
from typing import Any, BinaryIO

import jax
import numpy as np
from jax import lax

from ..show import message, path_text, short, type_error
from ..trees import has_shape
from ._fields import walk
from ._leaves import PYTHON, Spec, is_key, on_host, place
from ._replacing import replacing

# `BinaryIO` is for static checkers; run-time checkers do not accept a `BytesIO` as one.
_File = str | os.PathLike[str] | io.IOBase | BinaryIO
_IsLeaf = Callable[[Any], bool]


def _is_data(x: Any) -> bool:
    # Unlike named files, this format can hold arrays of strings.
    return (
        isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))
        or type(x) in PYTHON
    )


def _check_no_key(x: Any) -> None:
    if is_key(x):
        raise type_error(
            "the .eqx format cannot store typed PRNG keys",
            expected="arrays and numbers",
            got=short(x),
            instead="use vernal.saving.save and load, which keep it; or store jax.random.key_data(key)",
        )


def default_serialise_filter_spec(f: Any, x: Any) -> None:
    """Writes one leaf: arrays and Python numbers as a `.npy` record, nothing for anything else.

    Args:
        f: a binary file, open for writing.
        x: a leaf.

    Raises:
        TypeError: if `x` is a typed PRNG key, or an array of Python objects.
        ValueError: if the elements of an array cannot be read.

    Example:
        >>> import io
        >>> import jax.numpy as jnp, numpy as np
        >>> from vernal.saving import default_serialise_filter_spec
        >>> file = io.BytesIO()
        >>> default_serialise_filter_spec(file, jnp.arange(3))
        >>> _ = file.seek(0)
        >>> np.load(file)
        array([0, 1, 2], dtype=int32)
    """
    if not _is_data(x):
        return
    _check_no_key(x)
    value = x if isinstance(x, (np.ndarray, np.generic)) else on_host(x, "the leaf")
    if value.dtype.hasobject:
        raise type_error(
            "an array of Python objects cannot be stored without pickle",
            expected="an array of numbers, bools or strings",
            got=short(x),
            instead="keep the objects in a list or a static field",
        )
    if value.dtype.isbuiltin == 2 and value.dtype.kind != "V":
        # NumPy writes most dtypes that it lacks as bytes, but float8_e5m2 as "f1", which cannot be
        # read back.
        value = value.view(np.dtype(("V", value.dtype.itemsize)))
    np.save(f, value, allow_pickle=False)


def _read_record(f: Any) -> np.ndarray:
    try:
        return np.lib.format.read_array(f, allow_pickle=False)
    except Exception as error:
        # NumPy raises different errors at the end of a file, inside a record, and at bytes that are
        # not a record.
        raise RuntimeError(
            message(
                "the file holds no array here",
                expected="a record of NumPy's .npy format",
                got=str(error),
                instead="check that the file is whole, and that `like` has as many leaves as were saved",
            )
        ) from error


def _number(record: np.ndarray, x: Any) -> Any:
    """The record as a number of the type of `x`; the record itself if that would change its value."""
    if record.shape == () and record.dtype.kind in "biufc":
        found = record.item()
        # A complex number is not a float; infinity is not an int.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            converted = type(x)(found)
            if converted == found or (converted != converted and found != found):
                return converted
    return record


def default_deserialise_filter_spec(f: Any, x: Any) -> Any:
    """Reads one leaf: the inverse of `default_serialise_filter_spec`.

    Args:
        f: a binary file, open for reading.
        x: the leaf that decides the kind of the loaded one: a JAX array or `jax.ShapeDtypeStruct`
            gives a JAX array (with its sharding), a NumPy array or scalar a NumPy one, a Python number
            a number of its type.

    Returns:
        The leaf; `x` itself if it is neither array nor number; the record unchanged, a NumPy array, if
        its shape or dtype is not that of `x`.

    Raises:
        RuntimeError: if there is no record at this position of the file.
        TypeError: if `x` is a typed PRNG key.

    Example:
        >>> import io
        >>> import jax.numpy as jnp
        >>> from vernal.saving import default_deserialise_filter_spec, default_serialise_filter_spec
        >>> file = io.BytesIO()
        >>> default_serialise_filter_spec(file, jnp.arange(3))
        >>> _ = file.seek(0)
        >>> default_deserialise_filter_spec(file, jnp.zeros(3, int))
        Array([0, 1, 2], dtype=int32)
    """
    if not _is_data(x):
        return x
    _check_no_key(x)
    record = _read_record(f)
    if type(x) in PYTHON:
        return _number(record, x)
    dtype = np.dtype(x.dtype)
    if record.dtype == np.dtype(("V", dtype.itemsize)) and dtype.isbuiltin == 2:
        # NumPy lacks bfloat16 and its kin: it writes them as raw bytes.
        record = record.view(dtype)
    if record.shape != x.shape or record.dtype.newbyteorder("=") != dtype.newbyteorder("="):
        return record
    found = place(record, x, "the leaf")
    # In Equinox, a loaded array is strongly typed, even if that of `like` is weakly typed.
    weak = getattr(found, "weak_type", False)
    return lax.convert_element_type(found, found.dtype) if weak else found


def _text(x: Any) -> str:
    if has_shape(x):
        return str(Spec(x.shape, x.dtype))
    return short(x)


def _same_kind(like: Any, new: Any) -> bool:
    if isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        kind = jax.Array
    else:
        kind = np.ndarray if isinstance(like, np.ndarray) else type(like)
    if not isinstance(new, kind):
        return False
    if hasattr(like, "shape") and hasattr(like, "dtype"):
        return like.shape == new.shape and like.dtype == new.dtype
    return True


def _check_loaded(path: tuple[Any, ...], like: Any, new: Any) -> None:
    if not _same_kind(like, new):
        expected, got = _text(like), _text(new)
        if expected == got or type(like) in PYTHON:
            expected, got = f"{type(like).__name__} {expected}", f"{type(new).__name__} {got}"
        raise RuntimeError(
            message(
                "a leaf of the file does not match the one in `like`",
                where=path_text(path, "like"),
                expected=expected,
                got=got,
                instead="load into a tree with the leaves that were saved, in the same order",
            )
        )


def _apply(spec: Any, default: Any, f: Any, path: tuple[Any, ...], x: Any, root: str) -> Any:
    """Calls the filter of a leaf; an error names the leaf."""
    if spec is x or (type(spec) is type(x) and not callable(spec)):
        # Not a filter, but structure of a specification that `jax.tree.map` made from a module.
        spec = default
    if not callable(spec):
        raise type_error(
            "a filter of filter_spec cannot be called",
            where=path_text(path, root),
            expected="a function of the file and the leaf",
            got=short(spec),
            instead=f"use {default.__name__}, or write one like it",
        )
    try:
        return spec(f, x)
    except Exception as error:
        raise RuntimeError(
            message(
                f"a leaf could not be {'written' if root == 'pytree' else 'read'}",
                where=path_text(path, root),
                got=f"{type(error).__name__}: {error}",
            )
        ) from error


def _with_suffix(path: str | os.PathLike[str]) -> pathlib.Path:
    path = pathlib.Path(path)
    return path if path.suffix else path.with_suffix(".eqx")


def tree_serialise_leaves(
    path_or_file: _File,
    pytree: Any,
    filter_spec: Any = default_serialise_filter_spec,
    is_leaf: _IsLeaf | None = None,
) -> None:
    """Saves the leaves of a tree, one after the other, in Equinox's format.

    As in Equinox, all fields of modules that are not declared static are visited, in order: numbers
    in them are written, functions and strings are not. So Equinox reads the file if its classes have
    the same fields. If you do not need Equinox, prefer `vernal.saving.save`, which stores leaves by
    name.

    Args:
        path_or_file: the path of the file, to which `.eqx` is added if it has no suffix; it is
            replaced as a whole or not at all. Or a binary file, open for writing, which is written
            from its current position.
        pytree: any pytree.
        filter_spec: the function that writes a leaf, called with the file and the leaf; or a
            prefix tree of such functions.
        is_leaf: as in `jax.tree.map`: which other nodes the filter gets as a whole.

    Raises:
        RuntimeError: if a leaf cannot be written; it names the leaf, and its cause is the original
            error.
        TypeError: if a filter cannot be called.
        ValueError: if `filter_spec` is not a prefix of the tree.
        OSError: if the file cannot be written; an old file is then unchanged.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> from vernal.saving import tree_deserialise_leaves, tree_serialise_leaves
        >>> path = os.path.join(tempfile.mkdtemp(), "model.eqx")
        >>> tree_serialise_leaves(path, [jnp.arange(3), 7])
        >>> tree_deserialise_leaves(path, like=[jnp.zeros(3, int), 0])
        [Array([0, 1, 2], dtype=int32), 7]
    """

    def write(f: Any) -> None:
        def visit(path: tuple[Any, ...], x: Any, spec: Any) -> Any:
            _apply(spec, default_serialise_filter_spec, f, path, x, "pytree")
            return x

        walk(visit, pytree, filter_spec, is_leaf)

    if isinstance(path_or_file, (str, os.PathLike)):
        with replacing(_with_suffix(path_or_file)) as temporary, open(temporary, "wb") as f:
            write(f)
    else:
        write(path_or_file)


def tree_deserialise_leaves(
    path_or_file: _File,
    like: Any,
    filter_spec: Any = default_deserialise_filter_spec,
    is_leaf: _IsLeaf | None = None,
) -> Any:
    """Loads leaves saved by `tree_serialise_leaves`, of this library or of Equinox.

    Args:
        path_or_file: the path of the file, to which `.eqx` is added if it has no suffix. Or a
            binary file, open for reading, which is read from its current position.
        like: a tree with leaves of the same shapes and dtypes in the same order. It decides
            whether a leaf becomes a JAX array, a NumPy array or a Python number, and on which
            devices it is; a leaf may be a `jax.ShapeDtypeStruct`.
        filter_spec: the function that reads a leaf, called with the file and the leaf of `like`;
            or a prefix tree of such functions.
        is_leaf: as in `jax.tree.map`; the same as for saving.

    Returns:
        The tree.

    Raises:
        RuntimeError: if a leaf is of another type, shape or dtype than in `like`, or cannot be
            read; it names the leaf. If the file at a path holds more than the leaves of `like`. (An
            open file may go on: the rest is the caller's.)
        TypeError: if a filter cannot be called.
        ValueError: if `filter_spec` is not a prefix of the tree.
        OSError: if the file cannot be read.

    Example:
        >>> import io
        >>> import jax, jax.numpy as jnp
        >>> from vernal.saving import tree_deserialise_leaves, tree_serialise_leaves
        >>> file = io.BytesIO()
        >>> tree_serialise_leaves(file, {"weight": jnp.ones(2), "activation": jax.nn.relu})
        >>> _ = file.seek(0)
        >>> skeleton = {"weight": jax.ShapeDtypeStruct((2,), jnp.float32), "activation": jax.nn.relu}
        >>> tree_deserialise_leaves(file, skeleton)["weight"]
        Array([1., 1.], dtype=float32)
    """

    def read(f: Any) -> Any:
        def visit(path: tuple[Any, ...], x: Any, spec: Any) -> Any:
            new = _apply(spec, default_deserialise_filter_spec, f, path, x, "like")
            _check_loaded(path, x, new)
            return new

        return walk(visit, like, filter_spec, is_leaf)

    if not isinstance(path_or_file, (str, os.PathLike)):
        return read(path_or_file)
    path = _with_suffix(path_or_file)
    with open(path, "rb") as f:
        loaded = read(f)
        left = os.fstat(f.fileno()).st_size - f.tell()
    if left:
        raise RuntimeError(
            message(
                "the file holds more than the leaves of `like`",
                where=str(path),
                expected="the end of the file after the last leaf",
                got=f"{left} more bytes",
                instead="load into a tree with all leaves that were saved; to read several trees, open the file",
            )
        )
    return loaded
