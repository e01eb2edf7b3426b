"""The operation that ends a compiled program: the base of `vernal.runtime.error_if` and the run-time
guards.

The difficulty. A check must end the program from inside, report which elements of a batch are at
fault, and cost next to nothing while it passes; the array it guards must not be copied, gathered from
the devices it is sharded over, or lose its derivative; and the compiler must not be able to prove the
check useless.

The plan.
    `check` takes a condition and returns `failed`, a scalar bool. It is one primitive, whose
    batching rule keeps the whole batch of conditions: `failed` is a scalar under any number of
    `vmap`s, so it does not batch what depends on it, and the host knows the failing indices.
    It is lowered to `cond(any(condition), callback, no-op)`; the callback posts the error to the
    mailbox (`_ground/_failure.py`) and raises.
    `poison` (`_poison.py`) then replaces each array by NaN where `failed` holds: an elementwise
    selection by a scalar, which the compiler fuses into the computation of the array, keeps sharded,
    and cannot drop, because it does not know what a callback returns. (That NaN is never seen, except
    as below.)

Several devices. When a device ends its program, devices that wait for it in a collective wait until
the process is killed. So:
    where the compiler partitions the program, the callback runs on every device, all of which know
    `any(condition)`, and all of them raise;
    inside `shard_map`, where each device has its own condition, the callback does not raise: it
    leaves the error with the check and returns `failed`, so the device goes on, with NaNs.
    `filter_jit` finds the error when the program has ended (if several threads run the same program,
    the calling thread is unknown). Plain `jax.jit` does not: there the results are NaN, and the error
    is logged.

Exported programs cannot hold a callback. Inside `without_checks` programs are lowered as if every
check passed; it also yields these checks, so that leaving them out can be refused.

Inside Vernal's loops the operands end with the step numbers, which the loop adds to the traced body
(see `harvest`): the innermost loop first.

Invariants. The condition has the batch axes in front, outermost first; the operands have the same
ones. Outside of compiled code a failed check raises at once, without compiling.

Glossary.
    condition: bool[batch...]; where it holds, the check has failed.
    operands: small arrays that the explanation needs, `[batch..., ...]` each.
    report: what is known of the check during the trace. One object for each call of `check`.
"""

import contextlib
import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray

from .._ground import (
    Primitive,
    RuntimeCheckError,
    Zero,
    batch_axis_in_front,
    concrete_value,
    equations_in,
    fancy_primitive_batchers,
    lower_fun,
    lower_to_python,
    manual_devices,
    post,
    primitive_jvps,
    primitive_transposes,
    register_lowering,
)
from ..show import listed, value_error
from ._place import Place, here
from ._poison import poison

# The outermost frame of a program being traced whose caller will look for errors left with its checks.
_awaiting: contextvars.ContextVar[Any] = contextvars.ContextVar("awaiting", default=None)
# Collects the checks that are left out of programs; None where checks are lowered.
_left_out: contextvars.ContextVar[Any] = contextvars.ContextVar("left_out", default=None)

_logger = logging.getLogger("vernal.runtime")

# What to do when a check fails: end the program; end it only if it is compiled; print the error and go
# on, with the flag set; or only set the flag, for the caller to act upon.
Kind = Literal["end", "end compiled", "tell", "ask"]
# From the condition and the operands, all NumPy arrays, to the message.
Explain = Callable[..., str]


def batch_text(failing: Any) -> str:
    """Text that says which elements of a batch have failed.

    Args:
        failing: bool[batch...].

    Returns:
        A line that lists the indices where `failing` holds; empty without a batch.
    """
    if failing.ndim == 0:
        return ""
    indices = [tuple(map(int, index)) for index in np.argwhere(failing)]
    which = "index" if len(indices) == 1 else "indices"
    return f"\n  at batch {which} {listed(indices)} ({len(indices)} of {failing.size})"


def step_text(failing: Any, steps: Sequence[Any]) -> str:
    """Text that says at which steps of the enclosing loops a check has failed.

    Args:
        failing: bool[batch...].
        steps: the number of the step, i32[batch...], of every loop, the innermost first.

    Returns:
        A line; empty without a loop.
    """
    found = list(dict.fromkeys(zip(*[x[failing].tolist() for x in steps], strict=True)))
    if not steps or not found:
        return ""
    texts = [", in ".join(_nested(at)) for at in found[:3]]
    return f"\n  at {'; '.join(texts)}{'; ...' if len(found) > 3 else ''}"


def _nested(steps: Sequence[int]) -> Iterator[str]:
    for i, step in enumerate(steps):
        yield f"step {step} of the loop around it" if i else f"step {step}"


class Report:
    """What is known of a check during the trace. Compares by identity.

    Args:
        explain: the message, or a function that makes it from the condition and the operands.
        kind: what to do when it fails.
        place: the place of the check in the user's code.
    """

    __slots__ = ("awaited", "explain", "kind", "left", "lock", "place")

    def __init__(self, explain: str | Explain, kind: Kind, place: Place):
        self.explain = explain
        self.kind = kind
        self.place = place
        # Whether the caller of the program will look for errors that are left here.
        self.awaited = _awaiting.get() is not None
        self.lock = threading.Lock()
        # The errors that devices have left here instead of raising them.
        self.left: list[RuntimeCheckError] = []

    def __repr__(self) -> str:
        # Shown in a jaxpr.
        return repr(self.explain) if isinstance(self.explain, str) else "..."

    def error(self, condition: Any, operands: Sequence[Any], loops: int = 0) -> RuntimeCheckError:
        """The error to raise. The last `loops` operands are step numbers."""
        condition = np.asarray(condition)
        arrays = [np.asarray(x) for x in operands]
        own = len(arrays) - loops
        if isinstance(self.explain, str):
            text = self.explain + batch_text(condition)
        else:
            text = self.explain(condition, *arrays[:own])
        return RuntimeCheckError(text + step_text(condition, arrays[own:]), str(self.place))

    def end(self, condition: Any, *operands: Any, loops: int = 0) -> tuple[Any, ...]:
        """Ends the program of the device that calls this."""
        if not np.any(condition):
            return (np.False_,)
        error = self.error(condition, operands, loops)
        raise RuntimeCheckError(
            f"{error}\n\n{post(error)} Compile with vernal.filter_jit instead of jax.jit to see only "
            "this error."
        )

    def leave(self, condition: Any, *operands: Any, loops: int = 0) -> tuple[Any, ...]:
        """Leaves the error here, and lets the device go on."""
        if not np.any(condition):
            return (np.False_,)
        error = self.error(condition, operands, loops)
        with self.lock:
            if not self.left:
                self.left.append(error)
                if not self.awaited:
                    _logger.error("%s", error)
        return (np.True_,)

    def tell(self, condition: Any, *operands: Any, loops: int = 0) -> tuple[Any, ...]:
        """Prints the error, and goes on."""
        if np.any(condition):
            print(self.error(condition, operands, loops), file=sys.stderr)
            return (np.True_,)
        return (np.False_,)

    def take(self) -> RuntimeCheckError | None:
        """Takes the error that a device has left here, if one has."""
        with self.lock:
            left, self.left = self.left, []
        return left[0] if left else None


def _flag(*args: Any, **params: Any) -> Any:
    return ShapedArray((), np.dtype(bool))


check_p = Primitive("vernal_check")
_call_p = Primitive("vernal_check_failed")
_call_p.multiple_results = True


@check_p.def_impl
def _check_now(condition: Any, *operands: Any, report: Report, loops: int) -> Any:
    if report.kind == "ask":
        return np.any(condition)
    if report.kind == "tell":
        return report.tell(condition, *operands, loops=loops)[0]
    if report.kind == "end" and np.any(condition):
        error = report.error(condition, operands, loops)
        raise error
    return np.False_


def _check_lowered(condition: Any, *operands: Any, report: Report, loops: int) -> Any:
    if report.kind == "ask":
        return condition.any()
    left_out = _left_out.get()
    if left_out is not None:
        left_out.append(report)
        return jnp.zeros((), bool)
    # A scalar condition need not be sent: the host is called only if it holds.
    batch = [condition] if condition.ndim else []
    return lax.cond(
        condition.any() if condition.ndim else condition,
        lambda *args: _call_p.bind(*args, report=report, loops=loops, batched=bool(batch))[0],
        lambda *args: jnp.zeros((), bool),
        *batch,
        *operands,
    )


def _call_lowered(ctx: Any, *args: Any, report: Report, loops: int, batched: bool) -> Any:
    ending = report.leave if manual_devices(ctx) > 1 else report.end
    act = functools.partial(report.tell if report.kind == "tell" else ending, loops=loops)
    callback = act if batched else functools.partial(act, np.True_)
    return lower_to_python(ctx, callback, args)


def _check_batched(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    if any(d is not None for d in dims):
        args = [batch_axis_in_front(axis, x, d) for x, d in zip(args, dims, strict=True)]
    return check_p.bind(*args, **params), None


def _check_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    flag = check_p.bind(*primals, **params)
    return flag, Zero(jax.typeof(flag).to_tangent_aval())


def _check_transposed(ct: Any, *args: Any, report: Report, loops: int) -> Any:
    raise value_error(
        "a check cannot be transposed: its condition depends on the linear inputs",
        where=str(report.place),
        expected="a condition that does not depend on the inputs of the transposed function",
        got="a condition that does",
        instead="move the check out of the linear function",
    )


check_p.def_abstract_eval(_flag)
_call_p.def_abstract_eval(lambda *args, **params: [_flag()])
register_lowering(check_p, lower_fun(_check_lowered, multiple_results=False))
register_lowering(_call_p, _call_lowered, cacheable=False)
fancy_primitive_batchers[check_p] = _check_batched
primitive_jvps[check_p] = _check_jvp
primitive_transposes[check_p] = _check_transposed


def check(condition: Any, *operands: Any, explain: str | Explain, kind: Kind = "end") -> Any:
    """Ends the program if a condition holds.

    Args:
        condition: bool of any shape. `vmap` adds its mapped axes in front.
        *operands: arrays that `explain` needs.
        explain: the message; or a function of the condition and the operands as NumPy arrays, with
            the mapped axes in front, that returns the message. It is called on the host when the
            check has failed.
        kind: what to do when the check fails: `"end"` the program; `"end compiled"`, the same, but
            nothing outside of compiled code; `"tell"`: print the error and go on; or `"ask"`: only
            return whether the condition holds anywhere, in loops and branches too.

    Returns:
        A scalar bool: whether the check has failed and the program goes on. If it is not used, the
        check is eliminated.

    Raises:
        RuntimeCheckError: at once, if the condition is known and holds; otherwise when the program
            runs.
    """
    report = Report(explain, kind, here(_awaiting.get()))
    eager = concrete_value(condition) is not None
    report.awaited |= eager
    failed = check_p.bind(condition, *operands, report=report, loops=0)
    if eager:
        # An eager `shard_map` has run the check on every device.
        jax.block_until_ready(concrete_value(failed))
        error = report.take()
        if error is not None:
            raise error
    return failed


def awaited(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function during the trace of a program whose caller will look for errors left with its
    checks. The frames in the places of checks end here.

    Args:
        fn: the function.
        *args: its arguments.

    Returns:
        What it returns.
    """
    outermost = _awaiting.get()
    token = _awaiting.set(sys._getframe() if outermost is None else outermost)
    try:
        return fn(*args)
    finally:
        _awaiting.reset(token)


@contextlib.contextmanager
def without_checks() -> Iterator[list[Report]]:
    """A context in which programs are lowered without their checks. JAX caches what it has lowered, so
    lower a new function inside.

    Yields:
        The reports of the checks that were left out; empty at first.
    """
    left_out: list[Report] = []
    token = _left_out.set(left_out)
    try:
        yield left_out
    finally:
        _left_out.reset(token)


def fail_if(
    arrays: Sequence[Any],
    condition: Any,
    *operands: Any,
    explain: str | Explain,
    kind: Kind = "end",
) -> list[Any]:
    """Ends the program if a condition holds. The check runs only if one of the returned arrays is used.

    Args:
        arrays: arrays of any shapes and dtypes.
        condition: as for `check`.
        *operands: as for `check`.
        explain: as for `check`.
        kind: as for `check`.

    Returns:
        The arrays.

    Raises:
        RuntimeCheckError: as for `check`.
    """
    failed = check(condition, *operands, explain=explain, kind=kind)
    if failed is np.False_:
        return list(arrays)
    return [poison(x, failed) for x in arrays]


def reports_in(jaxpr: Any) -> tuple[Report, ...]:
    """The reports of all checks of a program that may raise, at any depth."""
    reports = (e.params["report"] for e in equations_in(jaxpr) if e.primitive is check_p)
    return tuple(report for report in reports if report.kind != "ask")
