"""`save` and `load`: trees in safetensors files, by the names of their leaves.

Entries are found by name, so the order of fields, the order of dictionaries and the classes of nodes
may change between saving and loading. One error lists everything that does not fit.
"""

import json
import os
from typing import Any, Literal, TypeVar, overload

import numpy as np

from ..show import short, shown_name, type_error
from ._encoding import encode
from ._file import Entry, StoredFile, read, write
from ._fitting import Store, fill
from ._leaves import leaves_by_name, spec_of
from ._replacing import replacing
from ._report import LoadReport
from ._torch_rules import Rules

_T = TypeVar("_T")


def check_plain(value: Any, where: str) -> None:
    """Refuses values that do not come back from JSON unchanged. Tuples may become lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise type_error(
                    "the keys of `metadata` must be strings",
                    where=f"{where}[{short(key)}]",
                    expected="a string",
                    got=short(key),
                    instead="use str(key)",
                )
            check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, bool, int, float):
        raise type_error(
            "the metadata cannot be written as JSON",
            where=where,
            expected="None, bools, numbers, strings, and lists and dictionaries of those",
            got=short(value),
            instead="convert it, for example by float(x) or str(x), or make it a leaf of the tree",
        )


def data_of(tree: Any) -> dict[str, Any]:
    """The leaves of a tree that are stored, by name. Raises `TypeError` if one cannot be stored, and `ValueError`
    if two have the same name."""
    leaves = leaves_by_name(tree, "the tree to save")
    return {n: leaf for n, leaf in leaves.items() if spec_of(leaf, shown_name(n)) is not None}


def _check_path(path: Any, where: str, call: str) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise type_error(
            "`path` is not a path",
            where=where,
            expected="a string or an os.PathLike",
            got=short(path),
            instead=f"the path first: {call}",
        )


def save(
    path: str | os.PathLike[str], tree: Any, *, metadata: dict[str, Any] | None = None
) -> None:
    """Saves the leaves of a tree by name, in the safetensors format.

    It stores arrays (of JAX and NumPy, of every dtype that JAX has), typed PRNG keys, and bools,
    ints, floats and complex numbers that are leaves. It does not store other leaves (functions,
    strings) or structure (the static fields of modules): put what you need to rebuild the model into
    `metadata`. Nothing is pickled.

    The file is written under a temporary name, flushed to the disk and then renamed: whenever the
    program dies, `path` is the old file or the new one. Checksums let `load` detect a damaged file.
    Other programs can read it: `safetensors.numpy.load_file` can if no leaf has one of the float8
    types (NumPy has none); a PRNG key appears as its key data, an int4 array as uint8, and a
    complex128 array as float64 with one more axis for the real and imaginary parts.

    Args:
        path: the file to write. No suffix is added; `.safetensors` is usual.
        tree: any pytree. Names are those of `vernal.trees.named_leaves`, for example
            `layers.0.weight`.
        metadata: anything JSON can hold: read it back with `load_metadata`. Tuples come back as
            lists.

    Raises:
        TypeError: if a leaf cannot be stored (an array of strings, a tracer), `metadata` is not
            JSON, or `path` is not a path.
        ValueError: if the elements of a leaf cannot be read (a `ShapeDtypeStruct`, a donated
            array), or two leaves have the same name.
        OSError: if the file cannot be written; an old file is then unchanged.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> from vernal.saving import load, load_metadata, save
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> save(path, {"weight": jnp.arange(3), "steps": 7}, metadata={"width": 3})
        >>> load(path, like={"weight": jnp.zeros(3, int), "steps": 0})
        {'steps': 7, 'weight': Array([0, 1, 2], dtype=int32)}
        >>> load_metadata(path)
        {'width': 3}
    """
    _check_path(path, "save(path, tree)", 'save("model.safetensors", model)')
    text = None
    if metadata is not None:
        check_plain(metadata, "metadata")
        text = json.dumps(metadata)
    leaves = {name: encode(leaf, shown_name(name)) for name, leaf in data_of(tree).items()}
    with replacing(path) as temporary:
        write(temporary, leaves, text)


class File(Store):
    """A file that `save` wrote, as a `Store`."""

    def __init__(self, stored: StoredFile):
        super().__init__(stored.path, stored.entries)
        self._stored = stored

    def array(self, entry: Entry) -> np.ndarray:
        """The elements of an entry, as a view of the file."""
        return self._stored.array(entry)


@overload
def load(
    path: str | os.PathLike[str],
    like: _T,
    *,
    strict: Literal[True] = True,
    rename: Rules | None = None,
    cast: bool = False,
) -> _T: ...


@overload
def load(
    path: str | os.PathLike[str],
    like: _T,
    *,
    strict: Literal[False],
    rename: Rules | None = None,
    cast: bool = False,
) -> tuple[_T, LoadReport]: ...


def load(
    path: str | os.PathLike[str],
    like: Any,
    *,
    strict: bool = True,
    rename: Rules | None = None,
    cast: bool = False,
) -> Any:
    """Loads a file that `save` wrote into a tree.

    Leaves are found by name: the order of fields does not matter. The file is mapped into memory, so
    every array is copied only once; for an array that is sharded over devices, only the pieces of this
    process are copied.

    Args:
        path: a safetensors file, written by `save` or another program.
        like: a tree of the same structure. Each of its leaves decides the kind of the loaded one: a
            NumPy array gives a NumPy array; a JAX array gives a JAX array with the same sharding and
            weak type; a `jax.ShapeDtypeStruct` (from `jax.eval_shape`: a model that takes no memory)
            gives a JAX array with its sharding, if it has one; a Python number gives a number of its
            type. Other leaves (functions, strings) are kept.
        strict: whether the whole file must fit.
        rename: rules, as for `from_torch`, for leaves with another name or form in the file: paths in
            `like` and names in the file, with the same wildcards on both sides, as in
            `{"encoder.*": "blocks.*"}`; a tuple of names where an array was joined or cut; a
            `Conversion` for any other change; None for leaves that keep their value in `like`.
            Random keys can only be renamed.
        cast: whether to convert floating-point numbers to the precision of `like`, and complex ones likewise. A number
            never changes its kind: an int never becomes a float. (Arrays that a rule of `rename` joins, cuts or
            converts always get the dtype of `like`.)

    Returns:
        The tree. With `strict=False`, `(tree, report)`: leaves that the file lacks, or has in
        another shape or dtype, keep their value in `like`; the `LoadReport` lists them, and the entries
        of the file that are not in `like`.

    Raises:
        ValueError: if the file is damaged (truncated, or its checksums do not match), or has another format. If it does
            not fit: one error lists all names that are missing, extra, or of another shape or
            dtype. With `strict=False`, if a leaf that does not fit has no value in `like`, because
            it is a `ShapeDtypeStruct`. If a rule of `rename` applies to no leaf, or two apply to the same.
        TypeError: if `like` has a leaf that cannot be loaded (an array of strings, a tracer), or is a class or a
            function; if `path` is not a path.
        OSError: if the file cannot be read.

    Example:
        >>> import os, tempfile
        >>> import jax.numpy as jnp
        >>> from vernal.saving import load, save
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> save(path, {"weight": jnp.ones(2), "scale": jnp.ones(())})
        >>> load(path, like={"bias": jnp.zeros(3), "weight": jnp.zeros(2)})
        Traceback (most recent call last):
            ...
        ValueError: the file does not fit the tree
          where: ...model.safetensors
          expected: an entry of the right shape and dtype for every leaf of `like`, and no other
          got: bias: missing, expected f32[3]
            scale: not expected, found f32[]
          instead: load into a tree like the one that was saved; ...
        >>> tree, report = load(path, like={"bias": jnp.zeros(3), "weight": jnp.zeros(2)}, strict=False)
        >>> tree["weight"], report.missing
        (Array([1., 1.], dtype=float32), {'bias': 'f32[3]'})
        >>> load(path, {"w": jnp.zeros(2), "scale": 0 * tree["bias"][0]}, rename={"w": "weight"})
        {'scale': Array(1., dtype=float32), 'w': Array([1., 1.], dtype=float32)}
    """
    _check_path(path, "load(path, like)", 'load("model.safetensors", model)')
    return fill(File(read(path)), like, strict, rename, cast)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the metadata of a file, without its arrays.

    Args:
        path: a safetensors file.

    Returns:
        The `metadata` given to `save`; empty if none was. For a file that another program wrote: its
        metadata, which are strings.

    Raises:
        ValueError: if the file is truncated, or its header damaged.
        OSError: if the file cannot be read.

    Example:
        >>> import os, tempfile
        >>> from vernal.saving import load_metadata, save
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> save(path, [1.0], metadata={"sizes": (784, 10), "lr": 1e-3})
        >>> load_metadata(path)
        {'sizes': [784, 10], 'lr': 0.001}
    """
    return read(path).metadata()
