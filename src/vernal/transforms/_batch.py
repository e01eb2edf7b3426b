"""`filter_vmap`: `jax.vmap` for functions of arbitrary Python objects. The rules of axes are in
`_axes.py`."""

import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax

from .._ground import callable_name
from ..modules import Static, field
from ..show import message, path_text
from ..trees import Rest, split
from ._arguments import refuse_options
from ._axes import (
    argument_axes,
    call_unmapped,
    check_axes,
    if_array,
    join_result,
    mapped_size,
    sort_result,
)
from ._boundary import to_positional
from ._custom_derivatives import as_jax
from ._transformed import Transformed, call_inside, check_callable, wrap

P = ParamSpec("P")
T = TypeVar("T")

_FIRST = if_array(0)

# JAX's message that the list of unmapped results holds a mapped one, with its index.
_BATCHED = re.compile(r"at vmap out_axes\[1\]\[(\d+)\], got axis spec None")


class _Vmap(Transformed[P, T]):
    """What `filter_vmap` returns."""

    in_axes: Static
    out_axes: Static
    axis_name: Any = field(static=True)
    axis_size: int | None = field(static=True)
    spmd_axis_name: Any = field(static=True)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        fn = self.fn
        given: Any = (args, kwargs)
        if kwargs:
            given = to_positional(fn, args, kwargs)
        arrays, rest = split((fn, *given))
        axes = argument_axes(fn, rest, arrays, self.in_axes.value)
        if mapped_size(fn, rest, arrays, axes, self.axis_size) is None:
            return call_unmapped(fn, rest, arrays, self.out_axes.value)
        # JAX would return a NumPy array that the function returns as it is.
        arrays = [x if axis is None else as_jax(x) for x, axis in zip(arrays, axes, strict=True)]
        finished: list[tuple[Rest, Rest]] = []

        def run(arrays: list[Any]) -> Any:
            out = sort_result(call_inside(fn, rest, arrays), self.out_axes.value)
            finished.append(out[2:])
            return out

        run.__name__ = run.__qualname__ = callable_name(fn)
        try:
            out = jax.vmap(
                run,
                in_axes=(axes,),
                out_axes=(0, None, None, None),
                axis_name=self.axis_name,
                axis_size=self.axis_size,
                spmd_axis_name=self.spmd_axis_name,
            )(arrays)
        except ValueError as error:
            found = _BATCHED.search(str(error))
            if not finished or found is None:
                raise
            raise ValueError(_is_batched(fn, *finished[-1], int(found.group(1)))) from None
        return join_result(*out)


def _is_batched(fn: Callable[..., Any], rest: Rest, axes: Rest, index: int) -> str:
    unmapped = [p for p, axis in zip(rest.paths(), axes.fill([]), strict=True) if axis is None]
    name = path_text(unmapped[index], root="result")
    return message(
        f"out_axes declares that {name} is the same for all calls of `{callable_name(fn)}`, but it is not",
        where=name,
        expected="a result that does not depend on mapped arguments",
        got="a result that is computed from them",
        instead="out_axes=0 for this part of the result, or reduce it inside with a collective such as jax.lax.psum",
    )


@overload
def filter_vmap(
    fun: Callable[P, T],
    *,
    in_axes: Any = _FIRST,
    out_axes: Any = _FIRST,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
) -> _Vmap[P, T]: ...
@overload
def filter_vmap(
    *,
    in_axes: Any = _FIRST,
    out_axes: Any = _FIRST,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
) -> Callable[[Callable[P, T]], _Vmap[P, T]]: ...
def filter_vmap(
    fun: Any = None,
    *,
    in_axes: Any = _FIRST,
    out_axes: Any = _FIRST,
    axis_name: Any = None,
    axis_size: int | None = None,
    spmd_axis_name: Any = None,
    **refused: Any,
) -> Any:
    """Maps a function of arbitrary Python objects over array axes.

    Use it as `filter_vmap(f)`, as a decorator (of a method, `self` is then the first argument), or with
    options as `@filter_vmap(in_axes=...)`. By default the first axis of every array among the arguments
    is mapped, and everything else is the same for all calls. If the function is a module (or a method
    of one), its own arrays are not mapped.

    Args:
        fun: the function.
        in_axes: which axes are mapped: an integer, None (not mapped), or a function from a leaf to
            one of those, for all arguments; a tuple with one prefix tree of those for each
            positional argument; or a dictionary of prefix trees by argument name, where arguments
            without an entry get `if_array(0)`. Leaves that are not arrays are ignored. Keyword
            arguments count by their position; those without one are mapped by default or by name.
        out_axes: where the mapped axis is in the result: an integer (negative ones count from the
            end), None for a result that is the same for all calls, a function of a leaf, or a
            prefix tree of those. A number with an axis is repeated along it; any other result that
            is not an array is returned once, unchanged.
        axis_name: a name for the mapped axis, for collectives such as `jax.lax.psum`.
        axis_size: the number of calls; needed only if no array is mapped.
        spmd_axis_name: as for `jax.vmap`.

    Returns:
        The mapped function. If a call maps nothing and `axis_size` is not given, it just calls `fun`.

    Raises:
        TypeError: if `fun` is not callable, for something that is not an axis, or for an unknown
            option.
        ValueError: for a name that is not an argument; at a call, for a name that is not passed, for
            axes that do not fit the arrays, for sizes that disagree, and for a result that is mapped
            though its axis is None, or that cannot be mapped.
        TracedShapeError: at a call, if a traced value reaches a shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> apply = lambda fn, x, y: fn(x) + y
        >>> vernal.filter_vmap(apply, in_axes={"y": None})(jnp.negative, jnp.arange(3.0), jnp.ones(()))
        Array([ 1.,  0., -1.], dtype=float32)
    """
    refuse_options(
        "filter_vmap",
        refused,
        "in_axes, out_axes, axis_name, axis_size or spmd_axis_name",
        "in_axes={'argument': axes} chooses what is mapped; everything that is not an array is static already",
    )

    def decorate(fn: Any) -> Any:
        check_callable(fn, "filter_vmap")
        check_axes(fn, in_axes, out_axes)
        return wrap(
            _Vmap(fn, Static(in_axes), Static(out_axes), axis_name, axis_size, spmd_axis_name)
        )

    return decorate if fun is None else decorate(fun)
