"""`error_if` and `branched_error_if`: errors raised from inside compiled code.

The operation itself is in `transforms/_runtime_check.py`; this file checks the arguments.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from .._ground import trace_state_clean
from ..show import short, type_error, value_error
from ..transforms import batch_text, check
from ..trees import is_array, split
from ._on_error import OnError, choose, guard

T = TypeVar("T")


def error_if(x: T, pred: Any, msg: str, *, on_error: OnError = "default") -> T:
    """Raises an error while the program runs, if a condition holds.

    Write `x = error_if(x, ...)`, and go on with that `x`: the check runs only if its result is used. It
    works in compiled code and outside of it, and under every transformation of JAX. Derivatives are
    those of `x`. Under `vmap` the message lists the indices of the batch that failed. A check that
    passes costs a comparison of scalars, and a selection that the compiler fuses into the computation
    of `x`; sharded arrays stay where they are.

    Inside `filter_jit` the error is a `RuntimeCheckError` with the message, and the place in your
    code where the check was traced. The call raises it, so calls of programs with checks wait for the
    results. Under plain `jax.jit` JAX raises a `JaxRuntimeError` with the same text, where the result
    is first used. Inside `shard_map` over several devices, where one device must not leave the others
    waiting, only `filter_jit` raises; under plain `jax.jit` the error is logged (logger
    `vernal.runtime`) and the results are NaN.

    A check calls Python, so a program with a check cannot be exported with `jax.export`.
    `vernal.saving.export(..., checks="drop")` leaves checks out.

    Args:
        x: any tree with at least one array in it.
        pred: bool. If it is an array with axes, the error is raised if any element is true.
        msg: the message.
        on_error: what to do: `"raise"`; `"breakpoint"`: print the error, open JAX's debugger in the
            frame of the caller, and go on with NaN; `"nan"`: go on with NaN (the largest integer,
            True) in every array of `x`, each element of a batch separately; `"off"`: nothing.
            `"default"` follows the environment variable `VERNAL_ON_ERROR`, read when `error_if` is
            called (in compiled code: traced), and raises if it is not set.

    Returns:
        `x`. If `pred` is Python's False, the same object.

    Raises:
        RuntimeCheckError: if `pred` holds; at once outside of compiled code.
        TypeError: if `pred` is not bool or `msg` is not a string.
        ValueError: if `x` has no array, or for an unknown `on_error`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import vernal
        >>> from vernal.runtime import error_if
        >>> @vernal.filter_jit
        ... def log(x):
        ...     x = error_if(x, x <= 0, "log of a number that is not positive")
        ...     return jnp.log(x)
        >>> print(log(jnp.array(1.0)))
        0.0
    """
    _check_messages([msg], "argument `msg`")
    action, pred = choose(on_error), _condition(pred)
    if action == "off" or _is_false(pred):
        return x
    if pred.ndim:
        pred = pred.any()
    return _thread("error_if", x, pred, (), msg, action)


def branched_error_if(
    x: T, pred: Any, index: Any, msgs: Sequence[str], *, on_error: OnError = "default"
) -> T:
    """Raises one of several errors while the program runs, if a condition holds.

    Like `error_if`, with a message chosen by an index, which may be known only at run time.

    Args:
        x: any tree with at least one array in it.
        pred: bool. If it has axes, see `index`.
        index: which message: an integer. If it is an array with axes, `pred` must have the same shape,
            and the axes are treated as those of a batch. If it is a scalar, the error is raised if any
            element of `pred` is true.
        msgs: the messages. If `index` is out of range, the error says so.
        on_error: as for `error_if`.

    Returns:
        `x`, as for `error_if`. Under `vmap` the error lists every failing index of the batch, with its
        message.

    Raises:
        RuntimeCheckError: if `pred` holds; at once outside of compiled code.
        TypeError: if `pred` is not bool, `index` is not an integer, or a message is not a string.
        ValueError: if `msgs` is empty, if `x` has no array, if the shapes of `pred` and `index` differ,
            or for an unknown `on_error`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> from vernal.runtime import RuntimeCheckError, branched_error_if
        >>> @vernal.filter_jit
        ... def step(x, status):
        ...     return branched_error_if(x, status > 0, status - 1, ["diverged", "step too small"])
        >>> try:
        ...     step(jnp.array(1.0), jnp.array(2))
        ... except RuntimeCheckError as error:
        ...     print(error.message)
        step too small
    """
    msgs = list(msgs)
    _check_messages(msgs, "argument `msgs`")
    action, pred, index = choose(on_error), _condition(pred), _index(index)
    if action == "off" or _is_false(pred):
        return x
    if index.ndim and index.shape != pred.shape:
        raise value_error(
            "`index` of branched_error_if must have one entry for all of `pred`, or one for each element",
            where="argument `index`",
            expected=f"a scalar, or shape {pred.shape} like `pred`",
            got=short(index),
            instead="`vernal.filter_vmap` for a batch of calls",
        )
    if not index.ndim:
        pred = pred.any()

    def explain(failing: Any, index: Any) -> str:
        chosen = [int(i) for i in np.unique(index[failing])]
        return "\n".join(_choose(msgs, i) + batch_text(failing & (index == i)) for i in chosen)

    return _thread("branched_error_if", x, pred, (index,), explain, action)


def _choose(msgs: list[str], index: int) -> str:
    if 0 <= index < len(msgs):
        return msgs[index]
    return f"branched_error_if: there is no message {index} in a list of {len(msgs)}"


def _thread(
    name: str, x: Any, pred: Any, operands: tuple[Any, ...], explain: Any, action: str
) -> Any:
    arrays, rest = split(x)
    if arrays:
        return rest.fill(guard(arrays, pred, operands, explain, action))
    if action == "raise" and trace_state_clean():
        check(pred, *operands, explain=explain)
        return x
    raise value_error(
        f"{name} has no array to attach the check to",
        where="argument `x`",
        expected="a tree with at least one array in it",
        got=short(x),
        instead="pass an array that the program uses afterwards",
    )


def _is_false(pred: Any) -> bool:
    return isinstance(pred, np.generic) and not pred


def _condition(pred: Any) -> Any:
    """The condition: a NumPy bool if it is static, else an array."""
    if isinstance(pred, bool):
        return np.bool_(pred)
    if not is_array(pred) or pred.dtype != bool:
        raise type_error(
            "the condition of an error must be a bool",
            where="argument `pred`",
            expected="a bool, or an array of bools",
            got=short(pred),
            instead="`x < 0`, `jnp.isnan(x)`",
        )
    return pred


def _index(index: Any) -> Any:
    if isinstance(index, int) and not isinstance(index, bool):
        limits = np.iinfo(np.int32)
        return np.int32(min(max(index, limits.min), limits.max))
    if not is_array(index) or not jnp.issubdtype(index.dtype, jnp.integer):
        raise type_error(
            "the index of a message must be an integer",
            where="argument `index`",
            expected="an int, or an array of integers",
            got=short(index),
            instead="`jnp.argmax(flags)` for the first flag that is set",
        )
    return index


def _check_messages(msgs: list[Any], where: str) -> None:
    if not msgs:
        raise value_error(
            "branched_error_if needs at least one message",
            where=where,
            expected="a sequence of strings",
            got=short(msgs),
            instead='["diverged", "step too small"]',
        )
    for msg in msgs:
        if not isinstance(msg, str):
            raise type_error(
                "the message of an error must be a string, known while tracing",
                where=where,
                expected="a string",
                got=short(msg),
                instead="a fixed string; `on_error='breakpoint'` shows values",
            )
