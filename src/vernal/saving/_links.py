"""Applies a link of `_torch_rules.py`: makes the values of our leaves from arrays with other names and
forms."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..show import listed, short
from ._leaves import Spec, spec_of
from ._report import LoadReport
from ._torch_rules import Conversion, Link, Tied
from ._weights import tensor_array

# In ascending order: a number may become one of a later kind. It keeps its value, except for the precision.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


class Misfit(Exception):
    """The reason why a link does not fit."""


def specs_of(leaves: Mapping[str, Any]) -> dict[str, Spec]:
    """The specs of the leaves that are data, by name."""
    specs = {name: spec_of(leaf, name) for name, leaf in leaves.items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def spec_of_theirs(tensor: Any) -> Spec:
    """The shape and dtype of a NumPy, JAX or PyTorch array."""
    return Spec(tuple(tensor.shape), np.dtype(str(tensor.dtype).removeprefix("torch.")))


def described(tensor: Any) -> str:
    """The shape and dtype as text, whatever the object is."""
    try:
        return str(spec_of_theirs(tensor))
    except TypeError:
        # JAX does not have this dtype.
        return f"{tensor.dtype}{list(tensor.shape)}"
    except AttributeError:
        # A state dictionary may hold more than tensors.
        return short(tensor)


def fitted(array: np.ndarray, spec: Spec) -> np.ndarray:
    """An array in the wanted shape and dtype."""

    def without_ones(shape: Sequence[int]) -> list[int]:
        return [size for size in shape if size != 1]

    def rank(dtype: Any) -> int:
        found = (i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))
        return next(found, len(_KINDS))

    fits = without_ones(array.shape) == without_ones(spec.shape)
    if not fits and array.ndim == 2 and array.shape == spec.shape[::-1]:
        raise Misfit(
            f"{described(array)}, its transpose (square ones fit either way: give all layers of the kind a "
            "`Conversion` with np.transpose)"
        )
    if not fits or rank(array.dtype) > rank(spec.dtype):
        raise Misfit(f"{described(array)}, of another shape or kind of number")
    array = array.reshape(spec.shape)
    made = array.astype(spec.dtype)
    if np.issubdtype(spec.dtype, np.integer) and not np.array_equal(made, array):
        raise Misfit(
            f"{described(array)}, with a number that does not fit into {np.dtype(spec.dtype)}"
        )
    return made


def indices_of(link: Link, specs: Mapping[str, Spec]) -> list[tuple[int, ...]]:
    """The indices along our leading axes that a link is repeated for."""
    leading = {specs[name].shape[: link.depth] for name in link.ours}
    sizes = leading.pop()
    if leading or len(sizes) < link.depth:
        raise Misfit(f"no {link.depth} leading axes in common, which the rule for {link} needs")
    return list(itertools.product(*map(range, sizes)))


def called(function: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Calls a function of a `Conversion`."""
    try:
        result = function(*arrays)
    except Exception as error:
        raise Misfit(f"{type(error).__name__} in the conversion: {error}") from error
    return [np.asarray(x) for x in (result if isinstance(result, tuple | list) else (result,))]


def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays concatenated along their first axis."""
    if len(arrays) == 1:
        return arrays[0]
    if not all(array.shape and array.shape[1:] == arrays[0].shape[1:] for array in arrays):
        found = ", ".join(map(described, arrays))
        raise Misfit(f"{found}, which cannot be joined along their first axis")
    return np.concatenate(arrays)


def cut(array: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Pieces of an array along its first axis, with the lengths from these shapes."""
    if len(shapes) == 1:
        return [array]
    sizes = [shape[0] for shape in shapes if shape]
    if not array.shape or len(sizes) < len(shapes) or sum(sizes) != len(array):
        raise Misfit(f"{described(array)}, which cannot be cut along its first axis")
    return np.split(array, np.cumsum(np.array(sizes))[:-1])


def _loaded(
    link: Link, specs: Mapping[str, Spec], theirs: Mapping[str, Any], index: tuple[int, ...]
) -> list[np.ndarray]:
    """The values of the leaves of a link for one index along their leading axes."""
    wanted = [specs[name]._replace(shape=specs[name].shape[link.depth :]) for name in link.ours]
    names = [name for name in link.sources(index) if name in theirs]
    arrays = [tensor_array(theirs[name]) for name in names]
    if isinstance(link.conversion, Tied):
        for name, array in zip(names, arrays, strict=True):
            if not np.array_equal(array, arrays[0]):
                raise Misfit(
                    f"values in {name!r} that differ from those in {names[0]!r}, to which it is tied"
                )
        arrays = arrays[:1]
    if isinstance(link.conversion, Conversion):
        pieces = called(link.conversion.load, *arrays)
        if len(pieces) != len(wanted):
            raise Misfit(f"{len(pieces)} arrays from the conversion, for {len(wanted)} leaves")
    else:
        pieces = cut(joined(arrays), [spec.shape for spec in wanted])
    return [fitted(piece, spec) for piece, spec in zip(pieces, wanted, strict=True)]


def _absent(link: Link, theirs: Collection[str], index: tuple[int, ...]) -> list[str]:
    names = link.sources(index)
    absent = [name for name in names if name not in theirs]
    # One name of a tied weight is enough.
    return [] if isinstance(link.conversion, Tied) and len(absent) < len(names) else absent


def load_link(
    link: Link, specs: Mapping[str, Spec], theirs: Mapping[str, Any], report: LoadReport
) -> list[np.ndarray] | None:
    """The values of the leaves of a link; None if it does not fit, which the report then says."""
    try:
        indices = indices_of(link, specs)
        absent = [name for index in indices for name in _absent(link, theirs, index)]
        if absent:
            where = f" from {listed(map(repr, absent), most=3)}"
            for name in link.ours:
                report.missing[name] = f"{specs[name]}{'' if absent == [name] else where}"
            return None
        values = [np.empty(specs[name].shape, specs[name].dtype) for name in link.ours]
        for index in indices:
            for value, piece in zip(values, _loaded(link, specs, theirs, index), strict=True):
                value[index] = piece
    except Misfit as misfit:
        for name in link.ours:
            report.misshapen[name] = (str(specs[name]), f"{link}: {misfit}")
        return None
    return values


def every_source(link: Link, specs: Mapping[str, Spec]) -> list[str]:
    """All tensor names that a link uses."""
    try:
        return [name for index in indices_of(link, specs) for name in link.sources(index)]
    except Misfit:
        return []
