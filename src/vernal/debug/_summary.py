"""`summary`: a model as a table of its layers."""

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from ..harvest import reap
from ..modules import Module, buffer_leaves, frozen_leaves
from ..nn import Stack, Variable, keys, resolve
from ..show import human_bytes, human_count, path_text, short, table, tree_pformat, type_error
from ..transforms import filter_eval_shape
from ..trees import has_shape, is_inexact_array, split, tree_at
from ._watch import Call, Path, Recorder, layers_of

_ONE_LINE = 10**6


def _is_parameter(x: Any) -> bool:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)
    return is_inexact_array(x)


def _unique(leaves: Iterable[Any]) -> list[Any]:
    """The arrays among some leaves, each object once."""
    return list({id(x): x for x in leaves if has_shape(x)}.values())


class _Leaf(NamedTuple):
    """A leaf of a model, and why it is not trained."""

    path: Path
    value: Any
    frozen: bool
    buffer: bool


def _leaves(model: Any) -> list[_Leaf]:
    paths = jtu.tree_leaves_with_path(model)
    reasons = zip(frozen_leaves(model), buffer_leaves(model), strict=True)
    return [_Leaf(*leaf, *why) for leaf, why in zip(paths, reasons, strict=True)]


def _by_place(leaves: Iterable[_Leaf]) -> dict[Path, list[Any]]:
    """The values in each part of a model."""
    found: dict[Path, list[Any]] = collections.defaultdict(list)
    for leaf in leaves:
        for length in range(len(leaf.path) + 1):
            found[leaf.path[:length]].append(leaf.value)
    return found


def _count(arrays: Iterable[Any]) -> str:
    return f"{sum(x.size for x in _unique(arrays)):,}"


def _bytes(arrays: Iterable[Any]) -> str:
    return human_bytes(sum(x.size * x.dtype.itemsize for x in _unique(arrays)))


def _has_row(layer: Module) -> bool:
    """Whether a module is a layer, not a part of one: a slot for its state, or a placeholder for a weight that is
    elsewhere."""
    return callable(layer) or (not isinstance(layer, Variable) and bool(jtu.tree_leaves(layer)))


def _calls(model: Any, args: Any, kwargs: Any) -> dict[Path, list[Call]]:
    """The arguments and results of each layer in a call of the model."""

    def run(recorder: Recorder) -> dict[Path, list[Call]]:
        shapes, rest = split((recorder.watch(model), args, kwargs), has_shape)

        def call(arrays: Any) -> Any:
            watched, args, kwargs = rest.fill(arrays)
            return split(watched(*args, **kwargs))

        jax.eval_shape(call, shapes)
        return recorder.calls

    try:
        return run(Recorder(tell_apart=True))
    except (TypeError, ValueError) as error:
        # Perhaps because the model needs two layers to have the same structure. If not, it fails again.
        try:
            return run(Recorder(tell_apart=False))
        except Exception:
            raise error from None


def _unrolled(tree: Any) -> Any:
    """The tree with the loop of every `Stack` unrolled, because XLA counts the body of a loop once."""

    def unroll(node: Any) -> Any:
        if not isinstance(node, Stack):
            return node
        new = _unrolled(node.layers), node.num_layers
        return tree_at(lambda stack: (stack.layers, stack.unroll), node, new)

    return jtu.tree_map(unroll, tree, is_leaf=lambda node: isinstance(node, Stack))


def _flops_of(call: Call) -> float | None:
    """XLA's count for one call, or None if it has none."""

    def run(arrays: Any) -> Any:
        layer, args, kwargs = call.rest.fill(arrays)
        return split(_unrolled(layer)(*args, **kwargs))

    try:
        # `reap`, because a layer may change its state.
        analysis = jax.jit(reap(run)).lower(call.shapes).cost_analysis()
    except Exception:
        # A layer that works only where it was called (with an axis name of a surrounding vmap), or a
        # backend without cost analysis: only this count is missing, not the rest of the table.
        return None
    if isinstance(analysis, (list, tuple)):
        analysis = analysis[0] if analysis else None
    # An operation unknown to XLA, such as a sharding constraint, counts as -1.
    return None if analysis is None else max(0.0, float(analysis.get("flops", 0.0)))


def _flops_counter() -> Callable[[list[Call]], float | None]:
    known: dict[Any, float | None] = {}

    def flops(calls: list[Call]) -> float | None:
        total = 0.0
        for call in calls:
            key = (call.rest, tuple((x.shape, x.dtype) for x in call.shapes))
            if key not in known:
                known[key] = _flops_of(call)
            if known[key] is None:
                return None
            total += call.times * (known[key] or 0.0)
        return total if calls else None

    return flops


def _flops_text(flops: float | None) -> str:
    return "-" if flops is None else human_count(int(flops))


def _output(calls: list[Call]) -> str:
    if not calls:
        return "not called"
    texts = dict.fromkeys(
        tree_pformat(_in_brief(call.out), width=_ONE_LINE, struct_as_array=True) for call in calls
    )
    number = sum(call.times for call in calls)
    return ", ".join(texts) + (f" ({number} calls)" if number > 1 else "")


class _Name:
    """Stands for a module that is shown only by name."""

    def __init__(self, module: Module):
        self._name = type(module).__name__

    def __repr__(self) -> str:
        return self._name


def _in_brief(out: Any) -> Any:
    """The result of a call, with the names of modules in place of the modules."""
    is_module = lambda node: isinstance(node, Module)  # noqa: E731 (twice the same)
    return jtu.tree_map(lambda x: _Name(x) if is_module(x) else x, out, is_leaf=is_module)


def _ready(model: Any, key: Any) -> Any:
    """The model, ready to be called."""
    return resolve(keys(model, key), layers=False)


def summary(model: Any, /, *example: Any, **kwargs: Any) -> str:
    r"""A table of a model's layers: their outputs, their sizes, and the cost of a call.

    The model is called once with abstract values: nothing is allocated, computed or compiled, so models and inputs may
    have any size. Each layer in the model has a row, whose numbers include the layers inside it. A layer that needs a
    random key and has none, such as a `Dropout`, is given one; parametrised arrays are resolved first
    (`vernal.nn.resolve`).

    * output: shape and dtype as the layer itself returns them, without the axes of a surrounding `vmap`. A layer called
      several times says so; one that the model did not call is "not called".
    * parameters: the number of elements of floating-point (and complex) arrays that are not buffers.
    * frozen: how many of them are frozen (see `vernal.freeze`). The column is left out if none are.
    * buffers: the number of elements of arrays that a layer keeps and that are never trained, such as running
      statistics. The column is left out if there are none.
    * bytes: of all arrays.
    * FLOPs: floating-point operations of all calls of this layer by XLA's cost analysis, which counts the body of a
      loop once; the body of a `Stack`, however, counts for every layer. `-` if XLA has no count. The total is that of
      the whole model.

    The totals count an array in several places once.

    Args:
        model: a module that can be called (or any callable pytree: a method of a module, a `vernal.Partial`).
        *example: arguments of the call; `jax.ShapeDtypeStruct` may stand for arrays. Without any arguments, the model
            is not called, and outputs and FLOPs are left out.
        **kwargs: keyword arguments of the call.

    Returns:
        The table as text.

    Raises:
        TypeError: if `model` is not a pytree, or cannot be called with the example.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> model = vernal.nn.MLP(2, 1, 8, depth=1, key=jax.random.key(0))
        >>> text = vernal.debug.summary(model, jax.ShapeDtypeStruct((2,), jnp.float32))
        >>> print("\n".join(line for line in text.splitlines() if "Linear" in line))
        .layers[0]   Linear   f32[8]   24   96 B   ...
        .layers[1]   Linear   f32[1]    9   36 B   ...
    """
    called = bool(example or kwargs)
    if jtu.all_leaves([model]) or (called and not callable(model)):
        raise type_error(
            "a summary needs a model whose arrays can be seen",
            where="summary(model, *example)",
            expected="a module, or another pytree, that can be called",
            got=short(model),
            instead="for jax.vmap(model) or jax.jit(model), summary(model, one_example)",
        )
    ready = (
        filter_eval_shape(_ready, model, jax.eval_shape(lambda: jax.random.key(0)))
        if called
        else model
    )
    calls = _calls(ready, example, kwargs) if called else {}
    flops = _flops_counter()
    leaves = _leaves(model)
    buffers = [x for x in leaves if x.buffer]
    parameters = [x for x in leaves if not x.buffer and _is_parameter(x.value)]
    frozen = [x for x in parameters if x.frozen]
    counted = {"parameters": parameters, "frozen": frozen, "buffers": buffers}
    counted = {n: _by_place(some) for n, some in counted.items() if some or n == "parameters"}
    every = _by_place(leaves)

    def sizes(path: Path) -> list[str]:
        return [*[_count(values[path]) for values in counted.values()], _bytes(every[path])]

    rows = []
    for path, layer in layers_of(model):
        if not _has_row(layer):
            continue
        found = calls.get(path, [])
        row = [path_text(path) if path else "model", type(layer).__name__, *sizes(path)]
        if called:
            row[2:2] = [_output(found) if callable(layer) else ""]
            row.append(_flops_text(flops(found)))
        rows.append(row)
    columns = ["layer", "type", *counted, "bytes"]
    footer = ["total", "", *sizes(())]
    if called:
        columns = [*columns[:2], "output", *columns[2:], "FLOPs"]
        whole = Call(*split((ready, example, kwargs), has_shape), None)
        footer = [*footer[:2], "", *footer[2:], _flops_text(flops([whole]))]
    return table(None, columns, rows, footer)
