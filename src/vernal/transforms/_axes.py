"""The rules of axes that `filter_vmap` and `filter_pmap` share.

Arguments become a flat list of arrays with one axis (or None) each. During the trace the result is
sorted into a list that is mapped along axis 0 and a list that is not mapped; the mapped arrays are
moved to their axes afterwards. So the axis of a result may depend on that result, which JAX itself
does not allow.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu

from .._ground import callable_name
from ..show import listed, message, path_text, short, type_error, value_error
from ..trees import Rest, is_array, split
from ._arguments import check_names, for_arguments
from ._boundary import argument_text
from ._prefixes import broadcast_prefix
from ._transformed import call_inside

_NUMBERS = bool, int, float, complex


@dataclasses.dataclass(frozen=True)
class if_array:
    """Maps this axis of every array, and nothing else. The default of `filter_vmap` is `if_array(0)`.

    Args:
        axis: an axis of every array.

    Returns:
        A function of a leaf that returns `axis` for an array, otherwise None.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.transforms import if_array
        >>> if_array(1)(jnp.ones((2, 3))), if_array(1)("text")
        (1, None)
    """

    axis: int

    def __call__(self, x: Any) -> int | None:
        return self.axis if is_array(x) else None


def is_axis(x: Any) -> bool:
    """Whether this is a leaf of `in_axes`: None, an integer or a function of a leaf."""
    if x is None or (callable(x) and jtu.all_leaves([x])):
        return True
    return hasattr(type(x), "__index__") and not isinstance(x, bool)


def check_axes(fn: Callable[..., Any], in_axes: Any, out_axes: Any) -> None:
    """Refuses axes that are wrong for every call: leaves that are not an integer, None or a function, and names
    that are not arguments of `fn`."""
    for what, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
        for path, leaf in jtu.tree_leaves_with_path(axes, is_leaf=is_axis):
            if not is_axis(leaf):
                raise TypeError(_no_axis(what + path_text(path) if path else what, leaf))
    if not (is_axis(in_axes) or isinstance(in_axes, (tuple, list, dict))):
        raise type_error(
            "`in_axes` must be a prefix tree of the arguments",
            where=f"in_axes of `{callable_name(fn)}`",
            expected="an integer, None, a function of a leaf, a tuple with one prefix tree for each positional "
            "argument, or a dictionary by argument name",
            got=short(in_axes),
            instead="in_axes=(axes,) for a function of one argument",
        )
    check_names(fn, in_axes, "in_axes")


def _no_axis(where: str, got: Any) -> str:
    return message(
        "not an axis",
        where=where,
        expected="an integer, None (not mapped), or a function from a leaf to one of those",
        got=short(got),
        instead="vernal.if_array(0) to map arrays and leave everything else unmapped",
    )


def axis_of(spec: Any, leaf: Any, where: Callable[[], str]) -> int | None:
    """The axis of one array, or None if it is not mapped, from an integer, None, or a function of the leaf. `where`
    returns the place, for the message."""
    axis: Any = spec(leaf) if callable(spec) else spec
    if axis is None:
        return None
    if isinstance(axis, bool) or not hasattr(type(axis), "__index__"):
        raise TypeError(_no_axis(where(), axis))
    return operator.index(axis)


def argument_axes(
    fn: Callable[..., Any], rest: Rest, arrays: list[Any], in_axes: Any
) -> list[int | None]:
    """The axis, or None, of every array of a call: of the `arrays` that fill `rest`, the structure of `(fn, args,
    kwargs)`. Those of the function itself are not mapped."""
    specs = for_arguments(
        fn,
        rest,
        arrays,
        in_axes,
        what="in_axes",
        default=if_array(0),
        of_function=None,
        is_leaf=is_axis,
    )

    def name(i: int) -> str:
        return argument_text(fn, rest.paths()[i])

    axes: list[int | None] = []
    for i, (spec, array) in enumerate(zip(specs, arrays, strict=True)):
        axis = axis_of(spec, array, lambda i=i: f"in_axes, for the argument {name(i)}")
        if axis is not None and not -array.ndim <= axis < array.ndim:
            raise ValueError(
                _out_of_range(
                    name(i), array, axis, array.ndim, f"argument of `{callable_name(fn)}`"
                )
            )
        # `pmap` does not accept negative axes.
        axes.append(axis if axis is None else axis % array.ndim)
    return axes


def _out_of_range(name: str, array: Any, axis: int, ndim: int, of_what: str) -> str:
    key = name.split(".")[0].split("[")[0]
    if ndim == 0:
        instead = "make it with this axis, as filter_vmap of what makes it does; or do not map it: "
        instead += f"in_axes={{{key!r}: None}}, or None in its place in the tuple"
        expected = "an array with an axis to map"
    else:
        instead = f"an axis from {-ndim} to {ndim - 1}, or None if it is not mapped"
        expected = f"{ndim} axes"
    return message(
        f"{name} has no axis {axis} to map",
        where=f"{name}, {of_what}",
        expected=expected,
        got=f"shape {tuple(array.shape)}, axis {axis}",
        instead=instead,
    )


def mapped_size(
    fn: Callable[..., Any],
    rest: Rest,
    arrays: list[Any],
    axes: list[int | None],
    axis_size: int | None,
) -> int | None:
    """The common size of all mapped axes, and of `axis_size` if the user gave one; None if nothing is mapped. Raises
    `ValueError` if they disagree."""
    sizes = [None if axis is None else a.shape[axis] for a, axis in zip(arrays, axes, strict=True)]
    distinct = {s for s in (*sizes, axis_size) if s is not None}
    if len(distinct) > 1:
        lines = [
            f"{argument_text(fn, path)}: size {size} (axis {axis} of shape {tuple(a.shape)})"
            for path, size, axis, a in zip(rest.paths(), sizes, axes, arrays, strict=True)
            if size is not None
        ]
        if axis_size is not None:
            lines.insert(0, f"axis_size: size {axis_size}")
        raise value_error(
            f"the mapped axes of `{callable_name(fn)}` have different sizes",
            where="the arguments",
            expected="one size for all mapped axes",
            got=listed(lines, "\n"),
            instead="do not map an argument that all calls share: in_axes=None for it",
        )
    return distinct.pop() if distinct else None


def _result_specs(out: Any, out_axes: Any) -> list[Any]:
    """The value of `out_axes` for every leaf of a result."""
    if is_axis(out_axes):
        return [out_axes] * len(jtu.tree_leaves(out))
    return broadcast_prefix(out_axes, out, what="`out_axes`", root="the result", is_leaf=is_axis)


def _numbers_mapped(out: Any, out_axes: Any) -> Any:
    """The result, with Python numbers that get an axis as arrays."""
    leaves, treedef = jtu.tree_flatten(out)
    specs = _result_specs(out, out_axes)
    return treedef.unflatten(
        jnp.asarray(leaf)
        if type(leaf) in _NUMBERS and axis_of(spec, leaf, lambda: "out_axes") is not None
        else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    )


def result_axes(out: Any, out_axes: Any) -> list[int | None]:
    """The axis, or None, of every array of a result."""
    leaves = jtu.tree_leaves_with_path(out)
    specs = _result_specs(out, out_axes)
    axes: list[int | None] = []
    for spec, (path, leaf) in zip(specs, leaves, strict=True):
        if not is_array(leaf):
            continue
        name = path_text(path, root="result")
        axis = axis_of(spec, leaf, lambda name=name: f"out_axes, for {name}")
        ndim = leaf.ndim + 1
        if axis is not None and not -ndim <= axis < ndim:
            raise value_error(
                f"{name} cannot have its mapped axis at position {axis}",
                where="out_axes",
                expected=f"an axis from {-ndim} to {ndim - 1}: each call's result has shape {tuple(leaf.shape)}",
                got=f"axis {axis}",
                instead="out_axes=0, or a negative axis to count from the end",
            )
        axes.append(axis)
    return axes


def sort_result(out: Any, out_axes: Any) -> tuple[list[Any], list[Any], Rest, Rest]:
    """Sorts a result, inside a transformation, into `(mapped, unmapped, rest, axes)` for `join_result`. `rest` and
    `axes` hold no array."""
    out = _numbers_mapped(out, out_axes)
    axes = result_axes(out, out_axes)
    arrays, rest = split(out)
    mapped = [a for a, axis in zip(arrays, axes, strict=True) if axis is not None]
    unmapped = [a for a, axis in zip(arrays, axes, strict=True) if axis is None]
    return mapped, unmapped, rest, split(axes)[1]


def join_result(mapped: list[Any], unmapped: list[Any], rest: Rest, axes: Rest) -> Any:
    """Undoes `sort_result`, outside the transformation: moves axis 0 of the mapped arrays to where it
    belongs."""
    first, second = iter(mapped), iter(unmapped)
    arrays = []
    for axis in axes.fill([]):
        if axis is None:
            arrays.append(next(second))
        else:
            arrays.append(jnp.moveaxis(next(first), 0, axis) if axis else next(first))
    return rest.fill(arrays)


def call_unmapped(fn: Callable[..., Any], rest: Rest, arrays: list[Any], out_axes: Any) -> Any:
    """Calls a function without mapped arguments. Raises `ValueError` if an output should be mapped: the size of its
    axis is unknown."""
    out = _numbers_mapped(call_inside(fn, rest, arrays), out_axes)
    axes = result_axes(out, out_axes)
    if all(axis is None for axis in axes):
        return out
    paths = split(out)[1].paths()
    name = next(path_text(p, "result") for p, a in zip(paths, axes, strict=True) if a is not None)
    raise value_error(
        f"nothing is mapped in this call of `{callable_name(fn)}`, but `out_axes` maps its result",
        where=name,
        expected="a mapped argument, or axis_size=..., or out_axes=None",
        got=f"no argument with an array whose axis is mapped, and out_axes that map {name}",
        instead="pass arrays rather than Python numbers, give axis_size=..., or set out_axes=None",
    )
