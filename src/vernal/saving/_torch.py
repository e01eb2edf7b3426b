"""`from_torch` and `to_torch`: a model with the weights of another program, and the other way."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..show import message, short
from ..trees import Pattern, is_array, named_leaves
from ._leaves import Spec, is_key, on_host, place, spec_of
from ._named import LoadReport
from ._torch_rules import Conversion, Link, Rules, Tied, links_of
from ._weights import Source, tensor_array, tensor_like, weights_of

_T = TypeVar("_T")
# What may become what: a number keeps its value, but for its precision.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


class _Misfit(Exception):
    """Why a link does not give what is wanted of it."""


def _arrays(model: Any) -> dict[str, Any]:
    """The leaves that have a counterpart elsewhere: arrays, but no random keys."""

    def counts(leaf: Any) -> bool:
        return (is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)) and not is_key(leaf)

    return {name: leaf for name, leaf in named_leaves(model).items() if counts(leaf)}


def _specs(leaves: Mapping[str, Any]) -> dict[str, Spec]:
    specs = {name: spec_of(leaf, name) for name, leaf in leaves.items()}
    return {name: spec for name, spec in specs.items() if spec is not None}


def _spec_of_theirs(tensor: Any) -> Spec:
    return Spec(tuple(tensor.shape), np.dtype(str(tensor.dtype).removeprefix("torch.")))


def _described(tensor: Any) -> str:
    try:
        return str(_spec_of_theirs(tensor))
    except TypeError:
        # A dtype that JAX does not have.
        return f"{tensor.dtype}{list(tensor.shape)}"
    except AttributeError:
        # A state dictionary may hold more than tensors.
        return short(tensor)


def _fitted(array: np.ndarray, spec: Spec) -> np.ndarray:
    """An array in the shape and dtype that is wanted."""

    def without_ones(shape: Sequence[int]) -> list[int]:
        return [size for size in shape if size != 1]

    def rank(dtype: Any) -> int:
        found = (i for i, kind in enumerate(_KINDS) if jnp.issubdtype(dtype, kind))
        return next(found, len(_KINDS))

    fits = without_ones(array.shape) == without_ones(spec.shape)
    if not fits or rank(array.dtype) > rank(spec.dtype):
        raise _Misfit(f"{_described(array)}, of another shape or kind of number")
    return array.reshape(spec.shape).astype(spec.dtype)


def _indices(link: Link, specs: Mapping[str, Spec]) -> list[tuple[int, ...]]:
    """The indices along the leading axes of ours that a link is repeated over."""
    leading = {specs[name].shape[: link.depth] for name in link.ours}
    sizes = leading.pop()
    if leading or len(sizes) < link.depth:
        raise _Misfit(f"no {link.depth} leading axes in common, which the rule for {link} wants")
    return list(itertools.product(*map(range, sizes)))


def _called(function: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Calls a function of a `Conversion`."""
    try:
        result = function(*arrays)
    except Exception as error:
        raise _Misfit(f"{type(error).__name__} in the conversion: {error}") from error
    return [np.asarray(x) for x in (result if isinstance(result, tuple | list) else (result,))]


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays put together along their first axis."""
    if len(arrays) == 1:
        return arrays[0]
    if not all(array.shape and array.shape[1:] == arrays[0].shape[1:] for array in arrays):
        found = ", ".join(map(_described, arrays))
        raise _Misfit(f"{found}, which cannot be joined along their first axis")
    return np.concatenate(arrays)


def _cut(array: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """An array taken apart along its first axis, into pieces as long as these shapes say."""
    if len(shapes) == 1:
        return [array]
    sizes = [shape[0] for shape in shapes if shape]
    if not array.shape or len(sizes) < len(shapes) or sum(sizes) != len(array):
        raise _Misfit(f"{_described(array)}, which cannot be cut along its first axis")
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
                raise _Misfit(f"other values in {name!r} than in {names[0]!r}, which are tied")
        arrays = arrays[:1]
    if isinstance(link.conversion, Conversion):
        pieces = _called(link.conversion.load, *arrays)
        if len(pieces) != len(wanted):
            raise _Misfit(f"{len(pieces)} arrays from the conversion, for {len(wanted)} leaves")
    else:
        pieces = _cut(_joined(arrays), [spec.shape for spec in wanted])
    return [_fitted(piece, spec) for piece, spec in zip(pieces, wanted, strict=True)]


def _absent(link: Link, theirs: Collection[str], index: tuple[int, ...]) -> list[str]:
    names = link.sources(index)
    absent = [name for name in names if name not in theirs]
    # One name of a tied weight is enough.
    return [] if isinstance(link.conversion, Tied) and len(absent) < len(names) else absent


def _load(
    link: Link, specs: Mapping[str, Spec], theirs: Mapping[str, Any], report: LoadReport
) -> list[np.ndarray] | None:
    """The values of the leaves of a link; None if it does not fit, which is then in the report."""
    try:
        indices = _indices(link, specs)
        absent = [name for index in indices for name in _absent(link, theirs, index)]
        if absent:
            more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
            where = f" from {', '.join(map(repr, absent[:3]))}{more}"
            for name in link.ours:
                report.missing[name] = f"{specs[name]}{'' if absent == [name] else where}"
            return None
        values = [np.empty(specs[name].shape, specs[name].dtype) for name in link.ours]
        for index in indices:
            for value, piece in zip(values, _loaded(link, specs, theirs, index), strict=True):
                value[index] = piece
    except _Misfit as misfit:
        for name in link.ours:
            report.misshapen[name] = (str(specs[name]), f"{link}: {misfit}")
        return None
    return values


def _refuse(report: LoadReport, leaves: Mapping[str, Any], strict: bool) -> None:
    amiss = [*report.missing, *report.misshapen]
    if strict and (amiss or report.extra):
        raise ValueError(
            message(
                "the weights do not fit the model",
                where="from_torch(model, state_dict, rules)",
                expected="a tensor of the same shape for every array of the model, and no other",
                got=str(report),
                instead="rules for names and forms that differ, None as the rule for arrays to keep, `ignore` for "
                "tensors to leave; or strict=False to take what fits and get this list as a report",
            )
        )
    empty = [name for name in amiss if isinstance(leaves[name], jax.ShapeDtypeStruct)]
    if empty:
        raise ValueError(
            message(
                "leaves that are only a shape and dtype have no value to keep where no weights fit them",
                where="from_torch(model, state_dict, rules, strict=False)",
                got=", ".join(empty),
                instead="give a model with arrays there",
            )
        )


@overload
def from_torch(
    model: _T,
    state_dict: Source,
    rules: Rules | None = None,
    *,
    ignore: Sequence[str] = (),
    strict: Literal[True] = True,
) -> _T: ...


@overload
def from_torch(
    model: _T,
    state_dict: Source,
    rules: Rules | None = None,
    *,
    ignore: Sequence[str] = (),
    strict: Literal[False],
) -> tuple[_T, LoadReport]: ...


def from_torch(
    model: Any,
    state_dict: Source,
    rules: Rules | None = None,
    *,
    ignore: Sequence[str] = (),
    strict: bool = True,
) -> Any:
    """A model with the weights of a PyTorch model, or of a Hugging Face checkpoint.

    Arrays are found by name: without a rule, an array of the model takes the tensor of the same
    dotted name. A rule maps a name of ours to one of theirs:

    * `*` (within one part of a name) and `**` (any parts) may stand in both; what they match in
      ours stands in theirs: `{"blocks.*.norm.*": "transformer.h.*.ln_1.*"}`;
    * `#` in theirs is an index along the leading axis of ours, so that a `Stack` takes its layers
      from `n` tensors each: `{"blocks.layers.norm.*": "h.#.ln_1.*"}`;
    * one of the sides may be a tuple of names: then the tensors (or arrays) are joined along their
      first axis. `{("q.weight", "k.weight", "v.weight"): "in_proj_weight"}` cuts, the other way
      round would join;
    * `Conversion(theirs, load, dump)` is for any other form, such as a transposed matrix;
    * `Tied(a, b)` is for one weight that they have under two names;
    * None keeps the array of the model.

    Shapes must be equal but for axes of size 1 (the bias of our convolutions is of shape
    `(channels, 1, 1)`). The dtype is that of the model: a float32 tensor becomes bfloat16 where the
    model has that. Random keys in a model are kept.

    Args:
        model: gives names, shapes, dtypes, devices. Arrays may be `jax.ShapeDtypeStruct`s:
            `jax.eval_shape` makes a model that takes no memory.
        state_dict: tensors by name, of PyTorch, NumPy or JAX; or the path of a safetensors file, of
            an index in JSON of several (`model.safetensors.index.json`), or of the folder that a
            model of Hugging Face was saved to. Files are mapped into memory, and tensors read one
            after the other.
        rules: see above. `lstm_rules`, `gru_rules` and `attention_rules` are ready ones.
        ignore: patterns (see `vernal.trees.Pattern`) of tensors to leave, such as
            `"**.num_batches_tracked"`.
        strict: whether everything must fit.

    Returns:
        The model. With `strict=False`, `(model, report)`: arrays without a fitting tensor keep
        their value; the `LoadReport` lists them, and the tensors that were not used.

    Raises:
        ValueError: if the two do not fit: one error lists all names that are missing, extra, or of
            another shape or kind of number (a float does not become an integer). If a rule matches
            no array, or two the same. If a file is damaged, or none. With `strict=False`, if a
            `ShapeDtypeStruct` gets no value.
        OSError: if a file cannot be read.

    Example:
        >>> import numpy as np
        >>> from vernal.saving import from_torch
        >>> model = {"norm": {"bias": np.zeros((2, 3))}, "head": {"weight": np.zeros(4)}}
        >>> theirs = {"ln.0.bias": np.ones(3), "ln.1.bias": np.ones(3), "head.weight": np.arange(4.0)}
        >>> from_torch(model, theirs, {"norm.*": "ln.#.*"})
        {'head': {'weight': array([0., 1., 2., 3.])}, 'norm': {'bias': array([[1., 1., 1.],
           [1., 1., 1.]])}}
        >>> from_torch(model, theirs)
        Traceback (most recent call last):
            ...
        ValueError: the weights do not fit the model
          where: from_torch(model, state_dict, rules)
          expected: a tensor of the same shape for every array of the model, and no other
          got: norm.bias: missing, expected f64[2,3]
            ln.0.bias: not expected, found f64[3]
            ln.1.bias: not expected, found f64[3]
          instead: rules for names and forms that differ, ...
    """
    leaves = _arrays(model)
    specs, theirs, report = _specs(leaves), weights_of(state_dict), LoadReport()
    unused = {name: None for name in theirs if not _is_one_of(name, ignore)}
    loaded: dict[str, Any] = dict(named_leaves(model))
    for link in links_of(specs, rules or {}):
        values = _load(link, specs, theirs, report)
        for name, value in zip(link.ours, values or (), strict=False):
            loaded[name] = place(value, leaves[name], name)
        for source in _every_source(link, specs):
            unused.pop(source, None)
    report.extra.update((name, _described(theirs[name])) for name in unused)
    _refuse(report, leaves, strict)
    tree = jtu.tree_structure(model).unflatten(loaded.values())
    return tree if strict else (tree, report)


def _is_one_of(name: str, patterns: Sequence[str]) -> bool:
    return any(Pattern(pattern).matches(name) for pattern in patterns)


def _every_source(link: Link, specs: Mapping[str, Spec]) -> list[str]:
    try:
        return [name for index in _indices(link, specs) for name in link.sources(index)]
    except _Misfit:
        return []


def to_torch(
    model: Any,
    rules: Rules | None = None,
    *,
    like: Source | None = None,
    ignore: Sequence[str] = (),
) -> dict[str, Any]:
    """The weights of a model under the names that PyTorch has for them: the inverse of
    `from_torch`.

    Args:
        model: any tree of arrays.
        rules: those of `from_torch`; each `Conversion` needs its `dump`.
        like: tensors, as for `from_torch`, of which the result gets the shapes, dtypes and kind:
            `torch_model.state_dict()` for tensors that `torch_model.load_state_dict` takes. Without
            it, arrays of NumPy in the shapes and dtypes of ours.
        ignore: patterns of tensors of `like` that the model has nothing for. They are returned as
            they are.

    Returns:
        A dictionary: tensors by name.

    Raises:
        ValueError: if a rule matches no array, or two the same; if a rule cannot be inverted; if
            two leaves give different values to one tensor; if the result does not fit `like`.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> from vernal.saving import to_torch
        >>> model = nn.Linear(2, 3, key=jax.random.key(0))
        >>> {name: array.shape for name, array in to_torch(model).items()}
        {'weight': (3, 2), 'bias': (3,)}
    """
    leaves = _arrays(model)
    specs, wanted = _specs(leaves), None if like is None else weights_of(like)
    made: dict[str, np.ndarray] = {}
    for link in links_of(specs, rules or {}):
        ours = [on_host(leaves[name], name) for name in link.ours]
        try:
            for index in _indices(link, specs):
                names = link.sources(index)
                tensors = _dumped(link, [array[index] for array in ours], names, wanted)
                for name, tensor in zip(names, tensors, strict=True):
                    if not np.array_equal(made.setdefault(name, tensor), tensor):
                        raise _Misfit(f"another value for {name!r} than other leaves give it")
        except _Misfit as misfit:
            raise ValueError(
                message(
                    "leaves of the model cannot be made what PyTorch has for them",
                    where=", ".join(link.ours),
                    expected=str(link),
                    got=str(misfit),
                )
            ) from misfit
    return made if wanted is None else _like(made, wanted, ignore)


def _dumped(
    link: Link, arrays: list[Any], names: list[str], like: Mapping[str, Any] | None
) -> list[np.ndarray]:
    """The tensors of a link for one index along the leading axes of ours."""
    arrays = list(map(np.asarray, arrays))
    if isinstance(link.conversion, Conversion):
        if link.conversion.dump is None:
            raise _Misfit("a Conversion without `dump`")
        tensors = _called(link.conversion.dump, *arrays)
        if len(tensors) != len(names):
            raise _Misfit(f"{len(tensors)} arrays from the conversion, for {len(names)} tensors")
        return tensors
    if isinstance(link.conversion, Tied) or len(names) == 1:
        return [_joined(arrays)] * len(names)
    if like is None or not all(name in like for name in names):
        raise _Misfit("one array, and no sizes for its pieces: give `like` with these tensors")
    return _cut(_joined(arrays), [like[name].shape for name in names])


def _like(
    made: dict[str, np.ndarray], wanted: Mapping[str, Any], ignore: Sequence[str]
) -> dict[str, Any]:
    """The tensors in the shapes, dtypes and kind that are wanted, in the order of `wanted`."""
    left = {name for name in wanted if name not in made and _is_one_of(name, ignore)}
    report = LoadReport(
        missing={n: _described(x) for n, x in wanted.items() if n not in made and n not in left},
        extra={n: _described(x) for n, x in made.items() if n not in wanted},
    )
    result: dict[str, Any] = {}
    for name, like in wanted.items():
        if name in made:
            try:
                result[name] = tensor_like(_fitted(made[name], _spec_of_theirs(like)), like)
            except _Misfit as misfit:
                report.misshapen[name] = (_described(like), str(misfit))
        elif name in left:
            result[name] = like
    if report != LoadReport():
        raise ValueError(
            message(
                "the weights of the model are not those of `like`",
                where="to_torch(model, rules, like=...)",
                got=str(report),
                instead="rules for names and forms that differ; `ignore` for tensors that the model has not",
            )
        )
    return result
