"""`noinline`: a function that is compiled once, separately, however often a program calls it.

Difficulty. XLA compiles a program as a whole. A function that is called at ten places, even under
`jax.jit`, is compiled ten times: XLA copies it to every place, even when told not to inline it. The
only way out of the program is a callback to the host.

Plan. An operation `noinline`, whose parameter is the traced function, a jaxpr. On a single CPU device
it is lowered to a callback that runs the separately compiled jaxpr, and everywhere else to a call of
it under `jax.jit`, which XLA copies:

    several devices      the callback would gather the arrays; within `shard_map`, it could not
                         communicate with the other devices
    accelerators         the program on the device would wait for a program on the same device
    `jax.export`         a callback is not part of an exported program
    ordered effects      would lose their order

A transformed `noinline` is the `noinline` of a transformed jaxpr:

    vmap        of the mapped function
    jvp         of a function that also returns the residuals of its linearisation, and of the
                linear function; so neither direction computes the function again
    transpose   of the transposed linear function (the transpose that `linear_call` is given)

Invariants. Equal calls have one jaxpr, the very same object: traced programs are values, compared by
their parts, and `jax.jit` caches the trace of each. The compiled form is cached by jaxpr.

The callback never waits. It runs on a thread of XLA, and all of these may be in such callbacks. An
array that has to be copied to the device would wait for another thread forever, so it is passed at an
address that XLA can use directly. The program itself runs on the thread that calls it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray, eval_jaxpr

from .._ground import (
    Primitive,
    Zero,
    callable_name,
    fancy_primitive_batchers,
    lower_fun,
    lower_to_python,
    primitive_jvps,
    register_cache,
    register_lowering,
    runs_alone,
)
from ..modules import field, module_update_wrapper
from ..transforms import (
    Transformed,
    check_callable,
    closure_to_pytree,
    materialise,
    unmapped_gathered,
)
from ..trees import Rest, split
from ._finalise import register_impl_finalisation
from ._linear_call import local_linear_call

P = ParamSpec("P")
T = TypeVar("T")

# The number of functions in the cache, compiled or to be compiled.
_MOST = 512
# The alignment that XLA needs to use memory without a copy.
_ALIGNMENT = 64


# --- programs: functions of a list of arrays, compared by their parts


@dataclasses.dataclass(frozen=True)
class _Called:
    """The user's function: from the arrays of a call to those of the result, and the rest of the result."""

    rest: Rest

    def __call__(self, arrays: list[Any]) -> Any:
        fn, args, kwargs = self.rest.fill(arrays)
        return split(fn(*args, **kwargs))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A jaxpr mapped over an axis."""

    jaxpr: Any
    dims: tuple[int | None, ...]
    axis_name: Any
    axis_size: int
    spmd_axis_name: Any

    def __call__(self, arrays: list[Any]) -> list[Any]:
        return jax.vmap(
            lambda *args: _evaluate(self.jaxpr, args),
            in_axes=self.dims,
            axis_name=self.axis_name,
            axis_size=self.axis_size,
            spmd_axis_name=self.spmd_axis_name,
        )(*arrays)


@dataclasses.dataclass(frozen=True)
class _Linearised:
    """A jaxpr with its derivative: it returns the results, the arrays of a linear function, and the rest
    of that function, which maps the tangents of the arguments `moving` to those of the results
    `floating`."""

    jaxpr: Any
    moving: tuple[int, ...]
    floating: tuple[int, ...]

    def __call__(self, arrays: list[Any]) -> tuple[list[Any], list[Any], Rest]:
        def along(*given: Any) -> tuple[list[Any], list[Any]]:
            args = list(arrays)
            for i, x in zip(self.moving, given, strict=True):
                args[i] = x
            out = _evaluate(self.jaxpr, args)
            return [out[i] for i in self.floating], out

        _, linear, out = jax.linearize(along, *(arrays[i] for i in self.moving), has_aux=True)
        return out, *split(linear)


@dataclasses.dataclass(frozen=True)
class _Pushed:
    """A linear function of `_Linearised`: from its arrays and tangents to tangents."""

    linear: Rest

    def __call__(self, arrays: list[Any]) -> list[Any]:
        n = sum(self.linear.mask)
        return list(self.linear.fill(arrays[:n])(*arrays[n:]))


@dataclasses.dataclass(frozen=True)
class _Pulled:
    """The transpose of `_Pushed`: from its arrays and cotangents to cotangents, for tangents like these."""

    linear: Rest
    tangents: tuple[Any, ...]

    def __call__(self, arrays: list[Any]) -> list[Any]:
        n = sum(self.linear.mask)
        linear = self.linear.fill(arrays[:n])
        pull = jax.linear_transpose(lambda *tangents: list(linear(*tangents)), *self.tangents)
        return list(pull(list(arrays[n:])))


def _evaluate(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


@functools.lru_cache(maxsize=_MOST)
def _traceable(program: Callable[[list[Any]], Any]) -> Any:
    return jax.jit(lambda arrays: program(arrays))


def _call(program: Callable[[list[Any]], Any], arrays: Sequence[Any], name: str) -> Any:
    """Calls a program as an operation of its own."""
    traced = _traceable(program).trace(list(arrays))
    out = noinline_p.bind(*arrays, jaxpr=traced.jaxpr, name=name)
    return jtu.tree_structure(traced.out_info).unflatten(out)


# --- the operation


@functools.lru_cache(maxsize=_MOST)
def _jitted(jaxpr: Any, name: str) -> Any:
    def run(*args: Any) -> list[Any]:
        return _evaluate(jaxpr, args)

    run.__name__ = run.__qualname__ = name
    return jax.jit(run)


def _compute(*args: Any, jaxpr: Any, name: str) -> list[Any]:
    return _jitted(jaxpr, name)(*args)


def _batch(
    axis: Any, args: Any, dims: Any, *, jaxpr: Any, name: str
) -> tuple[list[Any], list[int | None]]:
    # A function without mapped arguments may still ask for its position along the axis.
    asks = any(getattr(effect, "name", None) == axis.name for effect in jaxpr.effects)
    if not asks and all(dim is None for dim in dims):
        out = noinline_p.bind(*args, jaxpr=jaxpr, name=name)
        return out, [None] * len(out)
    args = unmapped_gathered(axis, args, dims)
    mapped = _Mapped(jaxpr, tuple(dims), axis.name, axis.size, axis.spmd_name)
    out = _call(mapped, args, name)
    return out, [0] * len(out)


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any, name: str) -> tuple[list[Any], list[Any]]:
    # `jax.jvp` passes Python numbers on unchanged.
    tangents = [jnp.asarray(t) if isinstance(t, float | complex) else t for t in tangents]
    moving = tuple(
        i
        for i, t in enumerate(tangents)
        if not isinstance(t, Zero) and t.dtype != jax.dtypes.float0
    )
    floating = tuple(
        i for i, aval in enumerate(jaxpr.out_avals) if jnp.issubdtype(aval.dtype, jnp.inexact)
    )
    out, residuals, linear = _call(_Linearised(jaxpr, moving, floating), primals, name)
    dots: list[Any] = [Zero(jax.typeof(x).to_tangent_aval()) for x in out]
    given = [tangents[i] for i in moving]
    shapes = tuple(map(jax.typeof, given))

    def push(residuals: list[Any], tangents: list[Any]) -> list[Any]:
        return _call(_Pushed(linear), [*residuals, *tangents], name)

    def pull(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
        cotangents = list(map(materialise, cotangents))
        return _call(_Pulled(linear, shapes), [*residuals, *cotangents], name)

    if floating:
        for i, dot in zip(floating, local_linear_call(push, pull, residuals, given), strict=True):
            dots[i] = dot
    return out, dots


noinline_p = Primitive("noinline")
noinline_p.multiple_results = True
noinline_p.def_impl(_compute)
noinline_p.def_effectful_abstract_eval(lambda *avals, jaxpr, name: (jaxpr.out_avals, jaxpr.effects))
fancy_primitive_batchers[noinline_p] = _batch
primitive_jvps[noinline_p] = _jvp
register_impl_finalisation(noinline_p)


# --- compiled apart


class _Apart:
    """A jaxpr as a separate program, called from a callback of another.

    NumPy has no random keys, so they are passed as their data.

    Args:
        jaxpr: the program.
        name: its name.
        impls: for each argument that is a random key its implementation; None for the others.
    """

    def __init__(self, jaxpr: Any, name: str, impls: tuple[Any, ...]):
        self.out_impls: list[Any] = []

        def run(*data: Any) -> list[Any]:
            args = map(_from_data, data, impls)
            out = _compute(*args, jaxpr=jaxpr, name=name)
            self.out_impls[:] = map(_impl, out)
            return list(map(_to_data, out))

        run.__name__ = run.__qualname__ = name
        given = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
        given = jax.eval_shape(lambda *args: list(map(_to_data, args)), *given)
        # On the device that calls it, whatever the default device is.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            lowered = jax.jit(run, keep_unused=True).lower(*given)
            self.compiled = lowered.compile()
        self.out_avals = [ShapedArray(x.shape, x.dtype) for x in lowered.out_info]
        # XLA's threads do not have the settings of the thread that traces.
        self.x64 = bool(jax.config.read("jax_enable_x64"))

    def __call__(self, *data: Any) -> tuple[np.ndarray, ...]:
        with jax.enable_x64(self.x64):
            return tuple(map(np.asarray, self.compiled(*map(_aligned, data))))


def _impl(x: Any) -> Any:
    return jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None


def _to_data(x: Any) -> Any:
    return x if _impl(x) is None else jax.random.key_data(x)


def _from_data(x: Any, impl: Any) -> Any:
    return x if impl is None else jax.random.wrap_key_data(x, impl=impl)


def _aligned(x: np.ndarray) -> np.ndarray:
    """A copy of an array at an address that XLA can use directly."""
    memory = np.empty(x.nbytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


_apart = functools.lru_cache(maxsize=_MOST)(_Apart)

_apart_p = Primitive("noinline_apart")
_apart_p.multiple_results = True
_apart_p.def_abstract_eval(lambda *avals, apart: apart.out_avals)


def _lower_call(ctx: Any, *args: Any, apart: _Apart) -> Any:
    return lower_to_python(ctx, apart, args)


def _compute_apart(*args: Any, jaxpr: Any, name: str) -> list[Any]:
    apart = _apart(jaxpr, name, tuple(map(_impl, args)))
    out = _apart_p.bind(*map(_to_data, args), apart=apart)
    return list(map(_from_data, out, apart.out_impls))


def _lower_on_cpu(ctx: Any, *args: Any, jaxpr: Any, name: str) -> Any:
    on_mesh = any(not aval.sharding.mesh.empty for aval in (*ctx.avals_in, *ctx.avals_out))
    can_leave = runs_alone(ctx) and not on_mesh and not jaxpr.effects
    lower = lower_fun(_compute_apart if can_leave else _compute, multiple_results=True)
    return lower(ctx, *args, jaxpr=jaxpr, name=name)


register_lowering(_apart_p, _lower_call, cacheable=False)
register_lowering(noinline_p, lower_fun(_compute, multiple_results=True))
register_lowering(noinline_p, _lower_on_cpu, platform="cpu")


def _clear() -> None:
    for cache in (_traceable, _jitted, _apart):
        cache.cache_clear()


register_cache(_clear)


# --- what users call


class _NoInline(Transformed[P, T]):
    """The function that `noinline` returns."""

    name: str = field(static=True)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        arrays, rest = split((closure_to_pytree(self.fn), args, kwargs))
        out, out_rest = _call(_Called(rest), arrays, self.name)
        return out_rest.fill(out)


def noinline(fn: Callable[P, T], name: str | None = None) -> Callable[P, T]:
    """Compiles a function once, as a separate computation, however often programs call it.

    On a single CPU device, it saves compile time if a large function is called at many places. It costs
    run time: the program stops at each call and copies the arrays out and in, and XLA cannot optimise
    across the call. On accelerators, on several devices and in exported programs the function is traced
    and lowered once, but XLA compiles every call of it: there it is only `jax.jit`, arrays stay on the
    devices they are sharded over, and nothing waits for the host.

    The result can be differentiated in both directions (to any order, and without computing the
    function again in the backward pass), mapped and jitted. Each of these is again a separate
    computation.

    Args:
        fn: a function without side effects, of any Python objects. Arrays among its arguments, and
            those that it holds as a module or closes over, are inputs of the computation. Everything
            else is static: other values trace it again.
        name: the name of the computation in compiled programs. By default the name of `fn`.

    Returns:
        A function of the same arguments with the same results.

    Raises:
        TypeError: if `fn` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.primitives import noinline
        >>> @noinline
        ... def f(x, y):
        ...     print("tracing")
        ...     return jnp.sin(x) * y
        >>> @jax.jit
        ... def g(x):
        ...     return f(f(f(x, x), x), x)
        >>> print(g(1.0))
        tracing
        0.67843044
    """
    check_callable(fn, "noinline")
    return module_update_wrapper(_NoInline(fn, callable_name(fn) if name is None else name))
