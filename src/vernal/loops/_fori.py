"""`fori_loop`: a loop over integers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ..show import short, type_error
from ..trees import is_array
from ._bounded import DEFAULT_BASE
from ._carry import numbers_to_arrays
from ._once import compiled_once
from ._options import check_count, check_function, check_kind, check_unused, returned_by
from ._scan import run_scan
from ._while import KINDS, run_while

T = TypeVar("T")


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, T], T],
    init_val: T,
    *,
    unroll: int | bool | None = None,
    kind: str = "lax",
    max_steps: int | None = None,
    checkpoints: int | None = None,
    buffers: Callable[[T], Any] | None = None,
    base: int | None = None,
) -> T:
    """Repeats `carry = body_fun(i, carry)` for i from `lower` to `upper - 1`.

    Like `jax.lax.fori_loop`, for any Python objects. If `lower` and `upper` are known while tracing
    it runs as a `scan`, otherwise as a `while_loop`. So `kind="lax"` has a reverse mode only if the
    bounds are known; the other kinds always have one.

    Args:
        lower: the first integer: a Python int, or an integer array of shape ().
        upper: the integer after the last, likewise. If it is not greater than `lower` there are no
            steps. Under `vmap` every element of the batch may have its own bounds.
        body_fun: takes the integer, of shape (), and the carry; returns the next carry, with the
            same structure, shapes and dtypes.
        init_val: the first carry: any tree, as in `while_loop`.
        unroll: for `"lax"` and known bounds: how many steps to compile into one.
        kind: `"lax"`, `"checkpointed"` or `"bounded"`, as in `while_loop`.
        max_steps: for unknown bounds: the greatest number of steps, as in `while_loop`.
        checkpoints: for `"checkpointed"`, as in `while_loop`.
        buffers: as in `while_loop`.
        base: for `"bounded"`, as in `while_loop`; 16 by default.

    Returns:
        The last carry.

    Raises:
        TypeError: if a bound is not an integer, or as in `while_loop`.
        ValueError: if an option does not apply, or as in `while_loop`.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.loops import fori_loop
        >>> def body(i, carry):
        ...     fn, total = carry
        ...     return fn, total + fn(i * 1.0)
        >>> fn, total = fori_loop(0, 4, body, (jnp.square, 0.0))
        >>> print(total)
        14.0
    """
    check_function("fori_loop", "body_fun", body_fun)
    check_kind("fori_loop", kind, KINDS, checkpoints=checkpoints, base=base)
    # A list, so that both bounds are checked even if the first is unknown.
    known = all([_is_known("lower", lower), _is_known("upper", upper)])
    if unroll is not None:
        wrong = kind != "lax" or not known
        check_unused("fori_loop", kind, "unroll", wrong, 'kind="lax" and known bounds')
    if max_steps is not None:
        check_unused("fori_loop", kind, "max_steps", known, "bounds that are arrays")
    steps = max(0, int(upper) - int(lower)) if known else 0
    most = steps if known else max_steps
    if most is not None or kind == "bounded":
        check_count("fori_loop", "max_steps", most, 0)
    return compiled_once(
        "fori_loop",
        _run,
        (body_fun, buffers),
        lower,
        upper,
        numbers_to_arrays(init_val),
        steps=steps if known else None,
        unroll=1 if unroll is None else unroll,
        max_steps=most,
        kind=kind,
        checkpoints=checkpoints,
        base=DEFAULT_BASE if base is None else base,
    )


def _run(
    functions: Sequence[Any],
    lower: Any,
    upper: Any,
    init: Any,
    *,
    steps: int | None,
    unroll: int | bool,
    max_steps: int | None,
    kind: str,
    checkpoints: int | None,
    base: int,
) -> Any:
    """`fori_loop` with options that have been checked; `steps` is the number of steps, if known."""
    body, buffers = functions
    first, last = _bounds(lower, upper)
    state = first, init
    select = None if buffers is None else lambda state: buffers(state[1])
    names: Any = {"name": "(i, carry)", "of": returned_by(body)}

    def step(state: Any) -> Any:
        return state[0] + 1, body(*state)

    if steps is not None and kind != "bounded":
        out, _ = run_scan(
            lambda state, _: (step(state), None),
            state,
            None,
            steps,
            select,
            reverse=False,
            unroll=unroll,
            kind=kind,
            checkpoints=checkpoints,
            **names,
        )
    else:
        out = run_while(
            lambda state: state[0] < last,
            step,
            state,
            select,
            max_steps=max_steps,
            kind=kind,
            checkpoints=checkpoints,
            base=base,
            **names,
        )
    return out[1]


def _bounds(lower: Any, upper: Any) -> tuple[Any, Any]:
    """Both bounds, in one dtype that holds both."""
    if type(lower) is int:
        # It stays a Python number, so that the loop's index is weakly typed, as in JAX.
        return lower, jnp.asarray(upper, jnp.asarray(lower).dtype)
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.result_type(lower, upper)
    return jnp.asarray(lower, dtype), jnp.asarray(upper, dtype)


def _is_known(name: str, bound: Any) -> bool:
    """Whether a bound is known while tracing; refuses anything but an integer."""
    array = is_array(bound) and bound.shape == () and jnp.issubdtype(bound.dtype, jnp.integer)
    if type(bound) is not int and not array:
        raise type_error(
            "the bounds of fori_loop must be integers",
            where=f"argument `{name}` of fori_loop",
            expected="a Python int, or an integer array of shape ()",
            got=short(bound),
            instead="while_loop for anything else",
        )
    return not isinstance(bound, jax.Array)
