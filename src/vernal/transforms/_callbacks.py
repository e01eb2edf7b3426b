"""Callbacks: calling Python from compiled code, with arguments and results of any kind.

Only arrays leave Python: the callback that JAX sees takes and returns a flat list of arrays, and
fills in the rest. An exception inside a callback ends the computation. It surfaces as a
`jax.errors.JaxRuntimeError` whose text contains the exception and its traceback, where the result
is used or at `jax.effects_barrier()`. (A debug callback outside of compiled code raises it directly.)
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.experimental import io_callback

from .._ground import callable_name
from ..show import diff, diff_text, value_error
from ..trees import Rest, has_shape, is_array, split
from ._transformed import check_callable

# With these, JAX calls the callback once with batched arrays, and expects the same leading axes on
# the results.
_BATCHED = ("expand_dims", "broadcast_all", "legacy_vectorized")


def _canonical(x: Any) -> Any:
    """An array in the dtype that JAX will give it: NumPy's float64 becomes float32 unless JAX computes
    in 64 bits."""
    if isinstance(x, (bool, int, float, complex)):
        x = np.asarray(x)
    if not isinstance(x, (np.ndarray, np.generic)) or not is_array(x):
        return x
    return np.asarray(x, dtype=jax.dtypes.canonicalize_dtype(x.dtype))


def _one_of_batch(x: Any, wanted: jax.ShapeDtypeStruct) -> Any:
    """The shape and dtype of one call's result, where `x` is the result of a batch of calls."""
    if not is_array(x) or x.ndim <= len(wanted.shape):
        return x
    return jax.ShapeDtypeStruct(x.shape[x.ndim - len(wanted.shape) :], x.dtype)


@dataclasses.dataclass(frozen=True)
class _Host:
    """The callback that JAX sees. JAX's caches treat equal ones as one callback.

    Attributes:
        rest: the structure of `(callback, args, kwargs)`.
        wanted: the shapes and dtypes of the results' arrays.
        wanted_rest: the rest of the results.
        batched: whether JAX may call it for a whole batch.
        name: the callback's name.
    """

    rest: Rest
    wanted: tuple[jax.ShapeDtypeStruct, ...]
    wanted_rest: Rest
    batched: bool
    name: str

    def __call__(self, arrays: list[Any]) -> list[Any]:
        callback, args, kwargs = self.rest.fill(arrays)
        out = callback(*args, **kwargs)
        found, seen = [], out
        leaves, treedef = jtu.tree_flatten(out)
        if treedef == self.wanted_rest.treedef:
            wanted = iter(self.wanted)
            for i, m in enumerate(self.wanted_rest.mask):
                if m:
                    x, struct = _canonical(leaves[i]), next(wanted)
                    found.append(x)
                    leaves[i] = _one_of_batch(x, struct) if self.batched else x
            seen = treedef.unflatten(leaves)
        expected = self.wanted_rest.fill(self.wanted)
        if diff(expected, seen, weak_type=False):
            raise value_error(
                f"the result of the callback `{self.name}` does not match result_shape_dtypes",
                where=f"result of `{self.name}`",
                expected="the structure, shapes, dtypes and non-array values of result_shape_dtypes",
                got=diff_text(expected, seen, weak_type=False, root="result"),
                instead="correct result_shape_dtypes, or convert what the callback returns: np.asarray(x, dtype)",
            )
        return found


def _prepare(
    transform: str,
    callback: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result_shape_dtypes: Any,
    batched: bool,
) -> tuple[_Host, list[Any]]:
    check_callable(callback, transform)
    arrays, rest = split((callback, args, kwargs))
    wanted, wanted_rest = split(result_shape_dtypes, has_shape)
    structs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted)
    return _Host(rest, structs, wanted_rest, batched, callable_name(callback)), arrays


def filter_pure_callback(
    callback: Callable[..., Any],
    /,
    *args: Any,
    result_shape_dtypes: Any,
    sharding: Any = None,
    vmap_method: str | None = None,
    **kwargs: Any,
) -> Any:
    """Calls a Python function without side effects from compiled code.

    Like `jax.pure_callback`, for arbitrary Python objects.

    Args:
        callback: called as `callback(*args, **kwargs)` with concrete arrays, and everything else
            unchanged. If it is a module or a method of one, its arrays are passed likewise.
        *args: any Python objects.
        result_shape_dtypes: a tree with the structure of the result, with `jax.ShapeDtypeStruct` (or
            arrays) in place of its arrays, and the same values everywhere else.
        sharding: as for `jax.pure_callback`.
        vmap_method: what `vmap` does: `"sequential"`, `"sequential_unrolled"`, `"expand_dims"`,
            `"broadcast_all"`; with the last two the callback is called once, for arrays with a
            leading axis. None: an error.
        **kwargs: any Python objects.

    Returns:
        The result. Its leaves that are not arrays come from `result_shape_dtypes`.

    Raises:
        TypeError: if `callback` cannot be called.
        ValueError: inside the callback (so it surfaces as `jax.errors.JaxRuntimeError`), if its
            result does not have the structure, shapes, dtypes and non-array values of
            `result_shape_dtypes`.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import vernal
        >>> def host(x, how):
        ...     return {"value": np.asarray(x) ** 2, "how": how}
        >>> like = {"value": jax.ShapeDtypeStruct((2,), jnp.float32), "how": "squared"}
        >>> vernal.filter_pure_callback(host, jnp.array([1.0, 2.0]), "squared", result_shape_dtypes=like)
        {'how': 'squared', 'value': Array([1., 4.], dtype=float32)}
    """
    host, arrays = _prepare(
        "filter_pure_callback", callback, args, kwargs, result_shape_dtypes, vmap_method in _BATCHED
    )
    out = jax.pure_callback(
        host, list(host.wanted), arrays, sharding=sharding, vmap_method=vmap_method
    )
    return host.wanted_rest.fill(out)


def filter_io_callback(
    callback: Callable[..., Any],
    /,
    *args: Any,
    result_shape_dtypes: Any,
    sharding: Any = None,
    ordered: bool = False,
    **kwargs: Any,
) -> Any:
    """Calls a Python function with side effects from compiled code.

    Like `jax.experimental.io_callback`, for arbitrary Python objects. Unlike a pure callback it is
    called exactly once each time the program runs, even if its result is not used.

    Args:
        callback: as for `filter_pure_callback`.
        *args: any Python objects.
        result_shape_dtypes: as for `filter_pure_callback`; None if it returns nothing.
        sharding: as for `jax.experimental.io_callback`.
        ordered: whether calls happen in the order of the program. Ordered callbacks cannot be
            vmapped.
        **kwargs: any Python objects.

    Returns:
        The result. Its leaves that are not arrays come from `result_shape_dtypes`.

    Raises:
        TypeError: if `callback` cannot be called.
        ValueError: inside the callback, as for `filter_pure_callback`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> seen = []
        >>> @vernal.filter_jit
        ... def step(x):
        ...     vernal.filter_io_callback(seen.append, {"x": x, "tag": "a"}, result_shape_dtypes=None)
        ...     return x
        >>> _ = step(jnp.array(1.0)); jax.effects_barrier()
        >>> seen
        [{'tag': 'a', 'x': Array(1., dtype=float32)}]
    """
    host, arrays = _prepare(
        "filter_io_callback", callback, args, kwargs, result_shape_dtypes, False
    )
    out = io_callback(host, list(host.wanted), arrays, sharding=sharding, ordered=ordered)
    return host.wanted_rest.fill(out)


@dataclasses.dataclass(frozen=True)
class _Watcher:
    """A debug callback as JAX sees it."""

    rest: Rest

    def __call__(self, arrays: list[Any]) -> None:
        callback, args, kwargs = self.rest.fill(arrays)
        callback(*args, **kwargs)


def filter_debug_callback(
    callback: Callable[..., Any], /, *args: Any, ordered: bool = False, **kwargs: Any
) -> None:
    """Passes values of a compiled program to a Python function, for debugging.

    Like `jax.debug.callback`, for arbitrary Python objects. It works under every transformation, may be
    called any number of times, and its result is ignored.

    Args:
        callback: called as `callback(*args, **kwargs)` with concrete arrays, and everything else
            unchanged.
        *args: any Python objects.
        ordered: whether calls happen in the order of the program.
        **kwargs: any Python objects.

    Raises:
        TypeError: if `callback` cannot be called.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> vernal.filter_debug_callback(lambda name, x: print(name, x), "x is", jnp.array(1.0))
        x is 1.0
        >>> jax.effects_barrier()
    """
    check_callable(callback, "filter_debug_callback")
    arrays, rest = split((callback, args, kwargs))
    jax.debug.callback(_Watcher(rest), arrays, ordered=ordered)
