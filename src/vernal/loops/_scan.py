"""`scan`: a fixed number of steps over any carry."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu

from .._ground import callable_name, weak_like
from ..show import path_text, short, type_error, value_error
from ..transforms import check_hides_nothing
from ..trees import Rest, is_array, split
from ._carry import Carry, numbers_to_arrays
from ._checkpointed import checkpointed
from ._debug_buffers import check_buffers
from ._lax import lax_scan
from ._once import compiled_once
from ._options import check_count, check_function, check_kind, check_unused, returned_by
from ._program import trace_loop

T = TypeVar("T")
KINDS = "lax", "checkpointed"


def scan(
    f: Callable[[T, Any], tuple[T, Any]],
    init: T,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
    kind: str = "lax",
    checkpoints: int | str | None = None,
    buffers: Callable[[T], Any] | None = None,
) -> tuple[T, Any]:
    """Repeats `carry, y = f(carry, x)` for every slice `x` of `xs`, and stacks the results `y`.

    Like `jax.lax.scan`, for any Python objects. There are two kinds:

    | `kind` | derivatives | memory of reverse mode |
    | --- | --- | --- |
    | `"lax"` | forward and reverse mode in any order | for every step, what it computes |
    | `"checkpointed"` | forward and reverse mode in any order | `checkpoints` carries |

    By default `checkpoints` covers every carry if together they take at most 8 KiB; otherwise it grows
    as the square root of the number of steps.

    Args:
        f: takes the carry and a slice; returns the next carry, with the same structure, shapes and
            dtypes, and a result. Traced as in `while_loop`: gradients reach all arrays that it closes
            over.
        init: the first carry: any tree, as in `while_loop`.
        xs: any tree. Its arrays are sliced along their first axis; all other leaves are passed to
            every step unchanged.
        length: the number of steps; needed if `xs` has no arrays.
        reverse: whether to go through `xs`, and to stack the results, from the end.
        unroll: for `"lax"`: how many steps to compile into one, as in `jax.lax.scan`.
        kind: `"lax"` or `"checkpointed"`, see above.
        checkpoints: for `"checkpointed"`: how many carries are kept for reverse mode, or `"all"`.
            Fewer need less memory and more time.
        buffers: as in `while_loop`.

    Returns:
        `(carry, ys)`: the last carry, and the results of all steps, with arrays stacked and
        everything else returned once.

    Raises:
        TypeError: if `f` cannot be called or does not return a pair, or an option has the wrong
            type.
        ValueError: if the carry changes in structure, shape, dtype or a leaf that is not an array;
            if the number of steps is unknown, or the arrays in `xs` disagree on it; if `kind` is
            unknown or does not use an option; if `buffers` selects a leaf that is not an array.

    Example:
        >>> import jax.numpy as jnp
        >>> from vernal.loops import scan
        >>> def step(total, x):
        ...     fn, number = x
        ...     total = total + fn(number)
        ...     return total, {"total": total, "fn": fn}
        >>> total, ys = scan(step, 0.0, (jnp.square, jnp.arange(4.0)), kind="checkpointed")
        >>> print(total, ys["total"], ys["fn"] is jnp.square)
        14.0 [ 0.  1.  5. 14.] True
    """
    check_function("scan", "f", f)
    check_kind("scan", kind, KINDS)
    if checkpoints is not None:
        check_unused("scan", kind, "checkpoints", kind != "checkpointed", 'kind="checkpointed"')
        if checkpoints != "all":
            check_count("scan", "checkpoints", checkpoints, 1, also=', or "all"')
    check_unused("scan", kind, "unroll", kind != "lax" and unroll != 1, 'kind="lax"')
    if length is not None:
        check_count("scan", "length", length, 0)
    steps = number_of_steps("scan", xs, length)
    return compiled_once(
        "scan",
        _run,
        (f, buffers),
        numbers_to_arrays(init),
        xs,
        steps,
        reverse=reverse,
        unroll=unroll,
        kind=kind,
        checkpoints=steps if checkpoints == "all" else checkpoints,
    )


def _run(functions: Sequence[Any], init: Any, xs: Any, steps: int, **options: Any) -> Any:
    f, buffers = functions
    return run_scan(f, init, xs, steps, buffers, name="carry", of=returned_by(f), **options)


def run_scan(
    f: Callable[[Any, Any], Any],
    init: Any,
    xs: Any,
    steps: int,
    buffers: Callable[[Any], Any] | None,
    *,
    reverse: bool,
    unroll: int | bool,
    kind: str,
    checkpoints: Any,
    name: str,
    of: str,
) -> tuple[Any, Any]:
    """`scan` of a known number of steps, with options that have been checked. `name` and `of` are the user's names for
    the carry and for what `f` returns."""
    arrays, rest = split(xs)
    arrays = numbers_to_arrays(arrays)

    def body(carry: Any, x: list[Any]) -> tuple[Any, Any]:
        carry, y = _as_pair(f(carry, rest.fill(x)), of)
        return carry, split(numbers_to_arrays(check_hides_nothing(y, callable_name(f))))

    layout = Carry(init, buffers, name)
    replays = kind == "checkpointed"
    program = trace_loop(init, layout, body, None, arrays, replays=replays, of=of)
    program, arrays = check_buffers(
        program,
        arrays,
        init,
        layout,
        body,
        None,
        of,
        lambda noted, xs: lax_scan(noted, xs, steps, reverse, 1)[:2],
    )
    if kind == "lax" or steps == 0:
        carry, filled, ys = lax_scan(program, arrays, steps, reverse, unroll)
        ys = list(map(weak_like, ys, program.out_types))
    else:
        carry, filled, ys = checkpointed(
            None,
            program.functions.step,
            program.consts,
            program.carry,
            program.buffers,
            [x[::-1] for x in arrays] if reverse else arrays,
            max_steps=None,
            length=steps,
            checkpoints=checkpoints,
            one_way=program.functions.one_way,
            once_only=program.functions.once_only,
        )
        ys = [y[::-1] for y in ys] if reverse else ys
    of_ys: Rest = program.out[1]
    return program.finish(carry, filled), of_ys.fill(ys)


def _as_pair(returned: Any, of: str) -> tuple[Any, Any]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise type_error(
            "the function that scan is given must return a pair",
            where=of,
            expected="(carry, y)",
            got=short(returned),
            instead="`return carry, None` if there is nothing to stack",
        )
    return returned


def number_of_steps(loop: str, xs: Any, length: int | None) -> int:
    """The number of steps, on which all arrays of `xs` and `length` must agree, else `ValueError`."""
    found = [] if length is None else [("length", length)]
    for path, x in jtu.tree_flatten_with_path(xs)[0]:
        if is_array(x):
            text = path_text(path, "xs")
            if not x.shape:
                raise value_error(
                    f"{loop} cannot slice a scalar",
                    where=text,
                    expected="arrays with one slice for each step along the first axis",
                    got=short(x),
                    instead="close over values that are the same in every step",
                )
            found.append((text, x.shape[0]))
    if not found:
        raise value_error(
            f"the number of steps of {loop} is unknown",
            where=f"the arguments of {loop}",
            expected="`xs` with arrays in it, or (for scan) `length`",
            got="neither",
            instead="scan(f, init, length=10)",
        )
    if any(n != found[0][1] for _, n in found):
        raise value_error(
            f"{loop} was given different numbers of steps",
            where=f"the arguments of {loop}",
            expected="arrays in `xs` with the same length along the first axis, and a `length` equal to it",
            got=", ".join(f"{text}: {n}" for text, n in found),
        )
    return found[0][1]
