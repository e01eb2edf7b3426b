"""`from_torch` and `to_torch`: convert weights from another program, and back."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import jax
import jax.tree_util as jtu
import numpy as np

from ..show import listed, value_error
from ..trees import Pattern, has_shape, named_leaves
from ._leaves import is_key, on_host, place
from ._links import (
    Misfit,
    called,
    cut,
    described,
    every_source,
    fitted,
    indices_of,
    joined,
    load_link,
    spec_of_theirs,
    specs_of,
)
from ._report import LoadReport
from ._their_names import other_forms, their_names
from ._torch_rules import Conversion, Link, Rules, Tied, links_of
from ._weights import Source, tensor_like, weights_of

_T = TypeVar("_T")


def _arrays(model: Any) -> dict[str, Any]:
    """The leaves that have a counterpart in PyTorch: arrays, but not random keys."""

    def counts(leaf: Any) -> bool:
        return has_shape(leaf) and not is_key(leaf)

    return {name: leaf for name, leaf in named_leaves(model).items() if counts(leaf)}


def _refuse(report: LoadReport, leaves: Mapping[str, Any], strict: bool) -> None:
    amiss = [*report.missing, *report.misshapen]
    if strict and (amiss or report.extra):
        raise value_error(
            "the weights do not fit the model",
            where="from_torch(model, state_dict, rules)",
            expected="a tensor of the same shape for every array of the model, and no other",
            got=str(report),
            instead="rules for names and forms that differ, None as the rule for arrays to keep, `ignore` for "
            "tensors to leave; or strict=False to take what fits and get this list as a report",
        )
    empty = [name for name in amiss if isinstance(leaves[name], jax.ShapeDtypeStruct)]
    if empty:
        raise value_error(
            "leaves that are only a shape and dtype have no value to keep where no weights fit them",
            where="from_torch(model, state_dict, rules, strict=False)",
            got=", ".join(empty),
            instead="give a model with arrays there",
        )


@overload
def from_torch(
    model: _T,
    state_dict: Source,
    rules: Rules | None = None,
    *,
    ignore: str | Sequence[str] = (),
    strict: Literal[True] = True,
) -> _T: ...


@overload
def from_torch(
    model: _T,
    state_dict: Source,
    rules: Rules | None = None,
    *,
    ignore: str | Sequence[str] = (),
    strict: Literal[False],
) -> tuple[_T, LoadReport]: ...


def from_torch(
    model: Any,
    state_dict: Source,
    rules: Rules | None = None,
    *,
    ignore: str | Sequence[str] = (),
    strict: bool = True,
) -> Any:
    """Loads the weights of a PyTorch model, or of a Hugging Face checkpoint, into a model.

    Arrays are found by name: without a rule, an array of the model takes the tensor of the same
    dotted name, without the parts that PyTorch does not have: `layers` of a `Sequential` and `model`
    of a `nn.cast` one. Rules may leave them out too. A rule maps one of our paths (see
    `vernal.trees.Pattern`), of an array or of a whole part, to one of their names:

    * `*` (within one part of a name) and `**` (any parts) may be in both: their names get the text
      matched in ours, as in `{"blocks.*.norm.*": "transformer.h.*.ln_1.*"}`;
    * `#` in their name is an index along our leading axis, so that a `Stack` takes its layers from
      `n` tensors each: `{"blocks.layers.norm.*": "h.#.ln_1.*"}`;
    * one of the sides may be a tuple of names: then the tensors (or arrays) are joined along their
      first axis. `{("q.weight", "k.weight", "v.weight"): "in_proj_weight"}` cuts; the reverse would
      join;
    * `Conversion(theirs, load, dump)` is for any other form, such as a transposed matrix;
    * `Tied(a, b)` is for one weight that they have under two names;
    * None keeps the array of the model.

    Shapes must be equal except for axes of size 1 (the bias of our convolutions has shape
    `(channels, 1, 1)`). The dtype is that of the model: a float32 tensor becomes bfloat16 where the
    model has bfloat16. Random keys in a model are kept.

    Args:
        model: gives names, shapes, dtypes and devices. Arrays may be `jax.ShapeDtypeStruct`s:
            `jax.eval_shape` makes a model that takes no memory.
        state_dict: tensors by name, of PyTorch, NumPy or JAX; or the path of a safetensors file, of a
            JSON index of several in its folder (`model.safetensors.index.json`), or of the folder that
            a Hugging Face model was saved to. Files are mapped into memory, and tensors are read one by
            one.
        rules: see above. `lstm_rules`, `gru_rules` and `attention_rules` are ready-made.
        ignore: a pattern, or several (see `vernal.trees.Pattern`), of tensors to ignore, such as
            `"**.num_batches_tracked"`.
        strict: whether everything must fit.

    Returns:
        The model. With `strict=False`, `(model, report)`: arrays without a fitting tensor keep
        their value; the `LoadReport` lists them, and the tensors that were not used.

    Raises:
        ValueError: if the two do not fit: one error lists all names that are missing, extra, or of
            another shape or kind of number (a float does not become an integer). If a rule matches
            no array, or two rules match the same. If a file is damaged or not a safetensors file, or an
            index names one outside of its folder. With `strict=False`, if a `ShapeDtypeStruct` gets no
            value.
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
    specs, theirs, report = specs_of(leaves), weights_of(state_dict), LoadReport()
    ignored = _matching(theirs, ignore)
    unused = {name: None for name in theirs if name not in ignored}
    loaded: dict[str, Any] = dict(named_leaves(model))
    for link in _links(model, specs, rules, "from_torch"):
        values = load_link(link, specs, theirs, report)
        for name, value in zip(link.ours, values or (), strict=False):
            loaded[name] = place(value, leaves[name], name)
        for source in every_source(link, specs):
            unused.pop(source, None)
    report.extra.update((name, described(theirs[name])) for name in unused)
    _refuse(report, leaves, strict)
    tree = jtu.tree_structure(model).unflatten(loaded.values())
    return tree if strict else (tree, report)


def _links(model: Any, specs: Any, rules: Rules | None, function: str) -> list[Link]:
    """The links between leaves and tensors. Raises `ValueError` for a leaf that has another form in PyTorch and no
    rule for it."""
    links = list(links_of(specs, rules or {}, their_names(model)))
    others = other_forms(model)
    wrong = [
        (name, link.theirs[0])
        for link in links
        if not isinstance(link.conversion, Conversion)
        for name in link.ours
        if name in others
    ]
    if wrong:
        ours, theirs = (name.rpartition(".")[0] for name in wrong[0])
        rules_of = f"saving.{others[wrong[0][0]]}({ours!r}, {theirs!r}, groups=...)"
        raise value_error(
            "PyTorch stores these arrays in another layout, even where the shapes agree",
            where=f"{function}(model, ...)",
            expected="a ready rule for each, or a `Conversion` of your own",
            got=listed([f"{name}: {others[name]}" for name, _ in wrong], "\n"),
            instead=f"{function}(model, ..., {rules_of} | other_rules)",
        )
    return links


def _matching(names: Iterable[str], patterns: str | Sequence[str]) -> set[str]:
    texts = [patterns] if isinstance(patterns, str) else patterns
    ignored = [Pattern(text) for text in texts]
    return {name for name in names if any(pattern.matches(name) for pattern in ignored)}


def to_torch(
    model: Any,
    rules: Rules | None = None,
    *,
    like: Source | None = None,
    ignore: str | Sequence[str] = (),
) -> dict[str, Any]:
    """Returns the weights of a model under PyTorch's names: the inverse of `from_torch`.

    Args:
        model: any tree of arrays.
        rules: those of `from_torch`; each `Conversion` needs its `dump`.
        like: tensors, as for `from_torch`; the result gets their shapes, dtypes and kind. Give
            `torch_model.state_dict()` for tensors that `torch_model.load_state_dict` takes. (A single
            float becomes an integer if it is a whole number: `num_batches_tracked`.) Default: NumPy
            arrays in the shapes and dtypes of the model.
        ignore: a pattern, or several, of tensors of `like` that are returned unchanged, whatever the model has for
            them.

    Returns:
        A dictionary of tensors by name.

    Raises:
        ValueError: if a rule matches no array, or two rules match the same; if a rule cannot be inverted; if
            two leaves give different values to one tensor, or to tensors of `like` that share their memory; if the
            result does not fit `like`.

    Example:
        >>> import jax
        >>> from vernal import nn
        >>> from vernal.saving import to_torch
        >>> model = nn.Linear(2, 3, key=jax.random.key(0))
        >>> {name: array.shape for name, array in to_torch(model).items()}
        {'weight': (3, 2), 'bias': (3,)}
    """
    leaves = _arrays(model)
    specs, wanted = specs_of(leaves), None if like is None else weights_of(like)
    made: dict[str, np.ndarray] = {}
    for link in _links(model, specs, rules, "to_torch"):
        ours = [on_host(leaves[name], name) for name in link.ours]
        try:
            for index in indices_of(link, specs):
                names = link.sources(index)
                tensors = _dumped(link, [array[index] for array in ours], names, wanted)
                for name, tensor in zip(names, tensors, strict=True):
                    # Compare bytes, so that a NaN equals itself.
                    if made.setdefault(name, tensor).tobytes() != tensor.tobytes():
                        raise Misfit(f"a value for {name!r} that differs from another leaf's")
        except Misfit as misfit:
            raise value_error(
                "leaves of the model cannot be converted to PyTorch's tensors",
                where=", ".join(link.ours),
                expected=str(link),
                got=str(misfit),
            ) from misfit
    return made if wanted is None else _like(made, wanted, ignore)


def _dumped(
    link: Link, arrays: list[Any], names: list[str], like: Mapping[str, Any] | None
) -> list[np.ndarray]:
    """The tensors of a link for one index along our leading axes."""
    arrays = list(map(np.asarray, arrays))
    if isinstance(link.conversion, Conversion):
        if link.conversion.dump is None:
            raise Misfit("a Conversion without `dump`")
        tensors = called(link.conversion.dump, *arrays)
        if len(tensors) != len(names):
            raise Misfit(f"{len(tensors)} arrays from the conversion, for {len(names)} tensors")
        return tensors
    if isinstance(link.conversion, Tied) or len(names) == 1:
        return [joined(arrays)] * len(names)
    if like is None or not all(name in like for name in names):
        raise Misfit("one array, and no sizes for its pieces: give `like` with these tensors")
    return cut(joined(arrays), [like[name].shape for name in names])


def _counted(array: np.ndarray, wanted: np.dtype) -> np.ndarray:
    """An array; as an integer if one is wanted and it is a whole number. (`BatchNorm` counts batches in a float.)"""
    if array.ndim or not (
        np.issubdtype(array.dtype, np.floating) and np.issubdtype(wanted, np.integer)
    ):
        return array
    count = abs(array) < 2**53 and array == np.round(array)
    return array.astype(np.int64) if count else array


def _check_tied(made: Mapping[str, np.ndarray], like: Mapping[str, Any]) -> None:
    """Refuses different values for tensors that share their memory: `load_state_dict` would keep those of the last."""
    first: dict[int, tuple[str, bytes]] = {}
    for name, array in made.items():
        pointer = getattr(like[name], "data_ptr", None)
        if pointer is None or not like[name].numel() or array.ndim != like[name].ndim:
            continue
        # In the order of memory: a transposed tensor has the same bytes.
        order = sorted(range(array.ndim), key=lambda axis, of=like[name]: -of.stride(axis))
        content = array.transpose(order).tobytes()
        other, known = first.setdefault(pointer(), (name, content))
        if content[: len(known)] != known[: len(content)]:
            raise value_error(
                "tensors of `like` are tied, and the model has different values for them",
                where=f"{other}, {name}",
                expected="equal values: the tensors share their memory",
                instead="a module without tied tensors (tie_word_embeddings=False), or one array of the model for both",
            )


def _like(
    made: dict[str, np.ndarray], wanted: Mapping[str, Any], ignore: str | Sequence[str]
) -> dict[str, Any]:
    """The tensors in the wanted shapes, dtypes and kind, in the order of `wanted`."""
    left = _matching(wanted, ignore)
    made = {name: x for name, x in made.items() if name not in left}
    report = LoadReport(
        missing={n: described(x) for n, x in wanted.items() if n not in made and n not in left},
        extra={n: described(x) for n, x in made.items() if n not in wanted},
    )
    result: dict[str, Any] = {}
    for name, like in wanted.items():
        if name in made:
            try:
                spec = spec_of_theirs(like)
                result[name] = tensor_like(fitted(_counted(made[name], spec.dtype), spec), like)
            except Misfit as misfit:
                report.misshapen[name] = (described(like), str(misfit))
        elif name in left:
            result[name] = like
    if report != LoadReport():
        raise value_error(
            "the weights of the model do not match `like`",
            where="to_torch(model, rules, like=...)",
            got=str(report),
            instead="rules for names and forms that differ; `ignore` for tensors that stay as they are in `like`",
        )
    _check_tied(made, wanted)
    return result
