"""`filter_pmap`: `jax.pmap` for functions of arbitrary Python objects. The rules of axes are in
`_axes.py`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

import jax
import numpy as np

from .._ground import callable_name, register_cache, trace_state_clean
from ..modules import Static, field
from ..show import value_error
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
from ._donation import Donate, check_donate, donated_leaves, quietly
from ._lowered import Lowered
from ._transformed import Transformed, call_inside, check_callable, wrap

P = ParamSpec("P")
T = TypeVar("T")

_FIRST = if_array(0)


@functools.lru_cache(maxsize=256)
def _program(settings: Rest, rest: Rest, axes: tuple[int | None, ...]) -> Any:
    """The pmapped function of two lists of arrays, the donated ones and the others, and a counter. Cached, because JAX
    compiles again for a new function object.

    Args:
        settings: the non-array rest of `(out_axes, donated, options)`, as `_Pmap._prepare` makes it.
        rest: the structure of `(fn, args, kwargs)`.
        axes: the axis of every array.
    """
    out_axes, donated, options = settings.fill([])
    kept = [i for i in range(len(axes)) if i not in donated]
    fn = rest.fill([None] * len(axes))[0]

    def run(of_donated: list[Any], of_kept: list[Any], _counter: Any) -> Any:
        given = dict(zip([*donated, *kept], [*of_donated, *of_kept], strict=True))
        out = call_inside(fn, rest, [given[i] for i in range(len(axes))])
        return sort_result(out, out_axes)

    run.__name__ = run.__qualname__ = callable_name(fn)
    return jax.pmap(
        run,
        in_axes=([axes[i] for i in donated], [axes[i] for i in kept], 0),
        out_axes=(0, None, None, None),
        donate_argnums=(0,) if donated else (),
        **options,
    )


register_cache(_program.cache_clear)


class _Pmap(Transformed[P, T]):
    """What `filter_pmap` returns."""

    in_axes: Static
    out_axes: Static
    donate: str = field(static=True)
    options: Static

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        rest, arrays, axes = self._split(args, kwargs)
        size = mapped_size(self.fn, rest, arrays, axes, self.options.value["axis_size"])
        if size is None:
            return call_unmapped(self.fn, rest, arrays, self.out_axes.value)
        self._check_devices(size)
        program, given = self._prepare(rest, arrays, axes)
        with quietly(self.donate):
            return join_result(*program(*given))

    def _check_devices(self, size: int) -> None:
        options = self.options.value
        devices = options["devices"] or jax.devices(options["backend"])
        if size > len(devices):
            raise value_error(
                "the mapped axis is larger than the number of devices",
                where=f"filter_pmap of `{callable_name(self.fn)}`",
                expected=f"mapped axes of size {len(devices)} at most",
                got=f"{size}",
                instead="filter_vmap inside filter_pmap, to give each device several parts; or filter_jit with sharded "
                "arrays",
            )

    def _split(self, args: Any, kwargs: Any) -> tuple[Rest, list[Any], list[int | None]]:
        if kwargs:
            args, kwargs = to_positional(self.fn, args, kwargs)
        arrays, rest = split((self.fn, args, kwargs))
        return rest, arrays, argument_axes(self.fn, rest, arrays, self.in_axes.value)

    def _prepare(
        self, rest: Rest, arrays: list[Any], axes: list[int | None]
    ) -> tuple[Any, tuple[Any, ...]]:
        dynamic = [i for i, m in enumerate(rest.mask) if m]
        chosen = set(donated_leaves(rest.treedef, dynamic, self.donate))
        donated = tuple(n for n, i in enumerate(dynamic) if i in chosen)
        settings = split((self.out_axes.value, donated, self.options.value))[1]
        # During a trace the function may hold tracers, which a cache must not keep.
        make = _program if trace_state_clean() else _program.__wrapped__
        kept = [a for n, a in enumerate(arrays) if n not in donated]
        given = [arrays[n] for n in donated], kept
        # JAX needs a mapped array, even if `axis_size` gives the number of devices.
        size = None if any(axis is not None for axis in axes) else self.options.value["axis_size"]
        counter = None if size is None else np.zeros(size, np.int8)
        return make(settings, rest, tuple(axes)), (*given, counter)

    def lower(self, /, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Traces and lowers without compiling or running.

        Args:
            *args: as for a call.
            **kwargs: likewise.

        Returns:
            The lowered program: `.as_text()`, `.compile()`.
        """
        rest, arrays, axes = self._split(args, kwargs)
        size = mapped_size(self.fn, rest, arrays, axes, self.options.value["axis_size"])
        if size is not None:
            self._check_devices(size)
        program, given = self._prepare(rest, arrays, axes)
        return Lowered(program.lower(*given), self.fn, rest.fill(arrays), self._run_compiled)

    def _run_compiled(self, compiled: Any, args: Any, kwargs: Any) -> Any:
        rest, arrays, axes = self._split(args, kwargs)
        return join_result(*compiled(*self._prepare(rest, arrays, axes)[1]))


@overload
def filter_pmap(
    fun: Callable[P, T],
    *,
    in_axes: Any = _FIRST,
    out_axes: Any = _FIRST,
    axis_name: Any = None,
    axis_size: int | None = None,
    donate: Donate = "none",
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
) -> _Pmap[P, T]: ...
@overload
def filter_pmap(
    *,
    in_axes: Any = _FIRST,
    out_axes: Any = _FIRST,
    axis_name: Any = None,
    axis_size: int | None = None,
    donate: Donate = "none",
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
) -> Callable[[Callable[P, T]], _Pmap[P, T]]: ...
def filter_pmap(
    fun: Any = None,
    *,
    in_axes: Any = _FIRST,
    out_axes: Any = _FIRST,
    axis_name: Any = None,
    axis_size: int | None = None,
    donate: str = "none",
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    **refused: Any,
) -> Any:
    """Runs a function of arbitrary Python objects on several devices, one for each index of the
    mapped axes.

    In new code prefer `filter_jit` with sharded arrays, or `filter_shard_map`. The function is
    compiled once for each set of static values.

    Args:
        fun: the function.
        in_axes: which axes are mapped, as for `filter_vmap`. The size of the mapped axes is the
            number of devices.
        out_axes: where the mapped axis is in the result, as for `filter_vmap`; None takes the
            result of one device.
        axis_name: a name for the mapped axis, for collectives such as `jax.lax.psum`.
        axis_size: the number of devices; needed only if no array is mapped.
        donate: whose memory the results may take over, as for `filter_jit`.
        devices: the devices to use.
        backend: the platform to use.

    Returns:
        The mapped function, with `.lower(*args)`. If a call maps nothing and `axis_size` is not given,
        it just calls `fun`.

    Raises:
        TypeError: if `fun` is not callable, for something that is not an axis, or for an unknown
            option.
        ValueError: for an unknown `donate` and for a name that is not an argument; at a call, for
            axes that do not fit the arrays, for sizes that disagree, and for a result that should be
            mapped though no argument is.
        TracedShapeError: at a call, if a traced value reaches a shape.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_pmap(axis_name="devices")
        ... def normalise(fn, x):
        ...     return fn(x) / jax.lax.psum(fn(x), "devices")
        >>> x = jnp.ones((jax.device_count(), 3))
        >>> normalise(jnp.exp, x).shape == x.shape
        True
    """
    refuse_options(
        "filter_pmap",
        refused,
        "in_axes, out_axes, axis_name, axis_size, donate, devices or backend",
        "leave static_broadcasted_argnums out: whatever is not an array is static already; "
        "in place of donate_argnums use donate='all' or 'all-except-first'",
    )
    check_donate("filter_pmap", donate)
    options = {
        "axis_name": axis_name,
        "axis_size": axis_size,
        "devices": None if devices is None else list(devices),
        "backend": backend,
    }

    def decorate(fn: Any) -> Any:
        check_callable(fn, "filter_pmap")
        check_axes(fn, in_axes, out_axes)
        return wrap(_Pmap(fn, Static(in_axes), Static(out_axes), donate, Static(options)))

    return decorate if fun is None else decorate(fun)
