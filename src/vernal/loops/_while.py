"""`while_loop`: any carry, any functions, derivatives in forward and reverse mode."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from ._bounded import DEFAULT_BASE, bounded_while
from ._carry import Carry, numbers_to_arrays
from ._checkpointed import checkpointed
from ._debug_buffers import check_buffers
from ._lax import lax_while
from ._once import compiled_once
from ._options import check_count, check_function, check_kind, returned_by
from ._plan import MOST_STEPS
from ._program import trace_loop

T = TypeVar("T")
KINDS = "lax", "checkpointed", "bounded"
# More steps than any loop makes.
_ENDLESS = 2**62


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    max_steps: int | None = None,
    kind: str = "lax",
    checkpoints: int | None = None,
    buffers: Callable[[T], Any] | None = None,
    base: int | None = None,
) -> T:
    """Repeats `carry = body_fun(carry)` while `cond_fun(carry)` holds.

    Like `jax.lax.while_loop`, for any Python objects. There are three kinds:

    | `kind` | derivatives | memory of reverse mode, in carries |
    | --- | --- | --- |
    | `"lax"` | forward mode | has none |
    | `"checkpointed"` | forward and reverse mode in any order | `checkpoints` |
    | `"bounded"` | forward and reverse mode in any order | about `base * log(max_steps) / log(base)` |

    By default `checkpoints` covers every carry if together they take at most 8 KiB; otherwise it grows
    as `sqrt(max_steps)`. It is a fixed number if `max_steps` is None, or at least 2**31, more steps than
    a checkpointed loop takes.

    The functions may be any callables (modules, methods, closures), and gradients reach all arrays
    that `body_fun` closes over. They are traced once (`body_fun` sometimes twice); outside of compiled
    code, once for the same function objects and types, as by `filter_jit`.

    Under `vmap` the loop runs until every element of the batch has finished. A finished element
    keeps its carry, and its later writes to buffers are dropped.

    Inside `jax.shard_map` the initial carry may be the same on all devices. If `cond_fun` varies
    between devices, each takes its own number of steps, and the whole carry varies over the same axes.
    Devices then do not wait for each other: gradients of arrays that they share are summed over them
    after the loop, and the functions must not contain a collective over such an axis.

    Args:
        cond_fun: takes the carry and returns bool[]: whether to take another step.
        body_fun: takes the carry and returns the next, with the same structure, shapes and dtypes.
        init_val: the first carry: any tree. Python numbers become arrays; all other leaves that
            are not arrays (strings, functions) must be the same after every step.
        max_steps: the greatest number of steps, or None for no limit. Needed by `"bounded"`.
        kind: `"lax"`, `"checkpointed"` or `"bounded"`, see above.
        checkpoints: for `"checkpointed"`: how many carries are kept for reverse mode. Fewer need
            less memory and more time. The default is described above.
        buffers: takes a carry and returns some of its arrays (one, or a tree of them). `cond_fun`
            and `body_fun` get a `Buffer` in place of each, to write every element once and to read
            what has been written. Buffers are never copied, nor kept in checkpoints.
        base: for `"bounded"`: how many carries are kept at each level. Fewer need less memory and
            more time. By default 16, or for more than `16**8` steps as many as 8 levels need.

    Returns:
        The last carry. As in `jax.lax.while_loop`, a Python number in `init_val` is weakly typed in the result if
        `body_fun` keeps it so.

    Raises:
        TypeError: if `cond_fun` does not return a scalar bool, if a function cannot be called, or
            if `max_steps` (None too, for `"bounded"`), `checkpoints` or `base` is not a Python int.
        ValueError: if the carry changes in structure, shape, dtype or a leaf that is not an array; if
            `kind` is unknown or does not use an option; if `buffers` selects something that is not an
            array of the carry; if a collective waits for devices that stop independently, or the
            gradient would need one in the loop, because the array is hidden in an object that is
            neither a callable nor a pytree.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal.loops import while_loop
        >>> def newton(a):
        ...     # The square root of a, by Newton's method, and the steps that it took.
        ...     def cond(carry):
        ...         x, steps = carry
        ...         return jnp.abs(x**2 - a) > 1e-5 * a
        ...     def body(carry):
        ...         x, steps = carry
        ...         return (x + a / x) / 2, steps + 1
        ...     return while_loop(cond, body, (a, 0), max_steps=50, kind="checkpointed")
        >>> root, steps = newton(jnp.array(9.0))
        >>> print(f"{root:.4f} after {steps} steps")
        3.0000 after 5 steps
        >>> print(f"{jax.grad(lambda a: newton(a)[0])(jnp.array(9.0)):.4f}")
        0.1667
    """
    check_function("while_loop", "cond_fun", cond_fun)
    check_function("while_loop", "body_fun", body_fun)
    check_kind("while_loop", kind, KINDS, checkpoints=checkpoints, base=base)
    if max_steps is not None or kind == "bounded":
        check_count("while_loop", "max_steps", max_steps, 0)

    return compiled_once(
        "while_loop",
        _run,
        (cond_fun, body_fun, buffers),
        numbers_to_arrays(init_val),
        max_steps=max_steps,
        kind=kind,
        checkpoints=checkpoints,
        base=_base(max_steps) if base is None else base,
    )


def _run(functions: Sequence[Any], init: Any, **options: Any) -> Any:
    cond, body, buffers = functions
    return run_while(cond, body, init, buffers, name="carry", of=returned_by(body), **options)


def run_while(
    cond: Callable[[Any], Any],
    body: Callable[[Any], Any],
    init: Any,
    buffers: Callable[[Any], Any] | None,
    *,
    max_steps: int | None,
    kind: str,
    checkpoints: int | None,
    base: int,
    name: str,
    of: str,
) -> Any:
    """`while_loop` with options that have been checked. `name` and `of` are the user's names for the carry and for
    what `body` returns."""
    layout = Carry(init, buffers, name)

    def step(carry: Any, _: Any) -> tuple[Any, Any]:
        return body(carry), ()

    program = trace_loop(
        init,
        layout,
        step,
        cond,
        replays=kind == "checkpointed",
        of=of,
        max_steps=max_steps,
    )
    program, _ = check_buffers(
        program, [], init, layout, step, cond, of, lambda noted, _: lax_while(noted, max_steps)
    )
    if max_steps == 0:
        last = program.carry, program.buffers
    elif kind == "lax":
        last = lax_while(program, max_steps)
    elif kind == "bounded":
        assert max_steps is not None
        last = bounded_while(program, min(max_steps, _ENDLESS), base)
        # A scan keeps the types of its initial carry.
        program = program._replace(types=list(map(jax.typeof, layout.start(init)[0])))
    else:
        if max_steps is not None and max_steps > MOST_STEPS:
            # Its counter is too small, and no loop runs that long.
            max_steps = None
        last = checkpointed(
            program.functions.cond,
            program.functions.step,
            program.consts,
            program.carry,
            program.buffers,
            [],
            max_steps=max_steps,
            length=None,
            checkpoints=checkpoints,
            one_way=program.functions.one_way,
            once_only=program.functions.once_only,
        )[:2]
    return program.finish(*last)


def _base(max_steps: int | None) -> int:
    """How many carries are kept at each level, for at most 8 levels: each level takes time to compile."""
    return max(DEFAULT_BASE, math.ceil(min(max_steps or 0, _ENDLESS) ** (1 / 8)))
