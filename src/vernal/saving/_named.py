"""`save` and `load`: trees in safetensors files, by the names of their leaves.

What is in a file is found by name, so that the order of fields, the order of dictionaries and the
classes of nodes may change between saving and loading. What does not fit is refused, all of it in
one error.
"""

import dataclasses
import json
import os
from typing import Any, Literal, TypeVar, overload

import jax
import jax.tree_util as jtu

from ..show import message, short
from ..trees import named_leaves
from ._encoding import encode
from ._file import StoredFile, read, write
from ._leaves import Spec, place, spec_of
from ._replacing import replacing

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What did not fit when a file was loaded with `strict=False`.

    Attributes:
        missing: by name, what the tree expected and the file does not have.
        extra: by name, what the file has and the tree does not expect.
        misshapen: by name, what was expected and what was found, for entries of another shape or
            dtype.

    Example:
        >>> from vernal.saving import LoadReport
        >>> print(LoadReport(missing={"bias": "f32[3]"}, misshapen={"weight": ("f32[3,2]", "f32[2,3]")}))
        bias: missing, expected f32[3]
        weight: expected f32[3,2], found f32[2,3]
    """

    missing: dict[str, str] = dataclasses.field(default_factory=dict)
    extra: dict[str, str] = dataclasses.field(default_factory=dict)
    misshapen: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{_shown(n)}: missing, expected {text}" for n, text in self.missing.items()]
        lines += [f"{_shown(n)}: not expected, found {text}" for n, text in self.extra.items()]
        lines += [
            f"{_shown(n)}: expected {expected}, found {found}"
            for n, (expected, found) in self.misshapen.items()
        ]
        return "\n".join(lines) or "everything fits"


def _shown(name: str) -> str:
    return name or "(the tree itself)"


def _check_plain(value: Any, where: str) -> None:
    """Refuses what would not come back from JSON, or not as what it was. Tuples may become
    lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    message(
                        "a key of the metadata is no string, and would become one",
                        where=f"{where}[{short(key)}]",
                        expected="a string",
                        got=short(key),
                        instead="use str(key)",
                    )
                )
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (str, bool, int, float):
        raise TypeError(
            message(
                "the metadata cannot be written as JSON",
                where=where,
                expected="None, bools, numbers, strings, and lists and dictionaries of those",
                got=short(value),
                instead="convert it, for example by float(x) or str(x), or make it a leaf of the tree",
            )
        )


def save(
    path: str | os.PathLike[str], tree: Any, *, metadata: dict[str, Any] | None = None
) -> None:
    """Saves the leaves of a tree by name, in the safetensors format.

    Stored are arrays (of JAX and NumPy, of every dtype that JAX has), typed PRNG keys, and bools,
    ints, floats and complex numbers that are leaves. Other leaves (functions, strings) and
    structure (the static fields of modules) are not: keep what is needed to build the model again
    in `metadata`. Nothing is pickled.

    The file is written under another name, flushed to the disk and then renamed: whenever the
    program dies, `path` is the old file or the new one. Checksums let `load` notice a damaged
    file. Other programs can read it: `safetensors.numpy.load_file` can if no leaf has one of the
    float8 types (NumPy has none); a PRNG key appears as its key data, an int4 array as uint8, and
    a complex128 array as float64 with one more axis for the real and imaginary parts.

    Args:
        path: the file to write. No suffix is added; `.safetensors` is usual.
        tree: any pytree. Names are those of `vernal.trees.named_leaves`, for example
            `layers.0.weight`.
        metadata: anything JSON can hold: read it back with `load_metadata`. Tuples come back as
            lists.

    Raises:
        TypeError: if a leaf cannot be stored (an array of strings, a tracer), or `metadata` is not
            JSON.
        ValueError: if the elements of a leaf cannot be had (a `ShapeDtypeStruct`, a donated
            array), or two leaves have the same name.
        OSError: if the file cannot be written; the old one is then as it was.

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
    text = None
    if metadata is not None:
        _check_plain(metadata, "metadata")
        text = json.dumps(metadata)
    leaves = {
        name: encode(leaf, _shown(name))
        for name, leaf in named_leaves(tree).items()
        if spec_of(leaf, _shown(name)) is not None
    }
    with replacing(path) as temporary:
        write(temporary, leaves, text)


def _fits(wanted: Spec, found: Spec | None, like: Any) -> bool:
    if type(like) is int and found is not None and found.dtype == "uint64":
        # A Python int is signed or unsigned as its value requires.
        found = found._replace(dtype=wanted.dtype)
    return wanted == found


def _compare(file: StoredFile, wanted: dict[str, Spec], leaves: dict[str, Any]) -> LoadReport:
    report = LoadReport()
    for name, spec in wanted.items():
        entry = file.entries.get(name)
        if entry is None:
            report.missing[name] = str(spec)
        elif not _fits(spec, entry.spec, leaves[name]):
            report.misshapen[name] = (str(spec), str(entry))
    report.extra.update((n, str(entry)) for n, entry in file.entries.items() if n not in wanted)
    return report


def _refuse(file: StoredFile, report: LoadReport, leaves: dict[str, Any], strict: bool) -> None:
    amiss = [*report.missing, *report.misshapen]
    if strict and (amiss or report.extra):
        raise ValueError(
            message(
                "the file does not fit the tree",
                where=file.path,
                expected="an entry of the right shape and dtype for every leaf of `like`, and no other",
                got=str(report),
                instead="load into a tree like the one that was saved; or give strict=False to take what fits, "
                "keep the values of `like` elsewhere, and get this list as a report",
            )
        )
    empty = {name for name in amiss if isinstance(leaves[name], jax.ShapeDtypeStruct)}
    if empty:
        about_them = LoadReport(
            missing={n: text for n, text in report.missing.items() if n in empty},
            misshapen={n: texts for n, texts in report.misshapen.items() if n in empty},
        )
        raise ValueError(
            message(
                "leaves of `like` that are only a shape and dtype have no value to keep where the file does not fit",
                where=file.path,
                got=str(about_them),
                instead="give `like` arrays there",
            )
        )


@overload
def load(path: str | os.PathLike[str], like: _T, *, strict: Literal[True] = True) -> _T: ...


@overload
def load(
    path: str | os.PathLike[str], like: _T, *, strict: Literal[False]
) -> tuple[_T, LoadReport]: ...


def load(path: str | os.PathLike[str], like: Any, *, strict: bool = True) -> Any:
    """Loads a file that `save` wrote into a tree.

    Leaves are found by name: the order of fields does not matter. The file is mapped into memory,
    so that every array is copied once; of an array that is spread over devices, only the pieces of
    this process are.

    Args:
        path: a safetensors file, written by `save` or another program.
        like: a tree of the same structure. It decides what is made of an entry: where its leaf is
            a NumPy array, the loaded one is; where it is a JAX array, so is the loaded one
            (strongly typed), with the same sharding; where it is a `jax.ShapeDtypeStruct` (made by
            `jax.eval_shape`: a model that takes no memory), a JAX array with its sharding, if it
            has one; where it is a Python number, a number of its type. Other leaves (functions,
            strings) are taken as they are.
        strict: whether all of the file must fit.

    Returns:
        The tree. With `strict=False`, `(tree, report)`: leaves that the file lacks, or has in
        another shape or dtype, keep their value in `like`; the `LoadReport` lists them, and what
        is in the file and not in `like`.

    Raises:
        ValueError: if the file is damaged (truncated, or its checksums do not match). If it does
            not fit: one error lists all names that are missing, extra, or of another shape or
            dtype. With `strict=False`, if a leaf that does not fit has no value in `like`, because
            it is a `ShapeDtypeStruct`.
        TypeError: if `like` has a leaf that cannot be loaded (an array of strings, a tracer).
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
          instead: load into a tree like the one that was saved; or give strict=False ...
        >>> tree, report = load(path, like={"bias": jnp.zeros(3), "weight": jnp.zeros(2)}, strict=False)
        >>> tree["weight"], report.missing
        (Array([1., 1.], dtype=float32), {'bias': 'f32[3]'})
    """
    leaves = named_leaves(like)
    specs = {name: spec_of(leaf, _shown(name)) for name, leaf in leaves.items()}
    wanted = {name: spec for name, spec in specs.items() if spec is not None}
    file = read(path)
    report = _compare(file, wanted, leaves)
    _refuse(file, report, leaves, strict)
    loaded = dict(leaves)
    for name in wanted:
        if name not in report.missing and name not in report.misshapen:
            entry = file.entries[name]
            impl = entry.remarks.get("key")
            loaded[name] = place(file.array(entry), leaves[name], _shown(name), impl)
    tree = jtu.tree_structure(like).unflatten(loaded.values())
    return tree if strict else (tree, report)


def load_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the metadata of a file, and none of its arrays.

    Args:
        path: a safetensors file.

    Returns:
        What was given to `save` as `metadata`; empty if nothing was. For a file that another
        program wrote: its metadata, which are strings.

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
