"""`log_retraces` and `no_retrace`: log functions that are compiled again, or forbid it.

`transforms/_explain.py` notifies both of the traces of functions under `filter_jit`, and finds the
reason.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..show import listed, message, short, type_error
from ..transforms import Trace, Transformed, Watch, guard_traces, traces_of, watch_traces


class RetraceError(RuntimeError):
    """A function would have been compiled again where `no_retrace` forbids it.

    Attributes:
        trace: the forbidden trace: `.name`, `.place`, `.reason`, `.differences`.
    """

    def __init__(self, text: str, trace: Trace):
        super().__init__(text)
        self.trace = trace


def log_retraces(announce: Callable[[str], Any] = print, *, first: bool = False) -> Watch:
    """Logs every function under `filter_jit` that is compiled again, in one line that says why.

    The line comes after the call that had to wait. It names the function, how often it was traced, how
    long that took, and each place where the call differs from the most similar earlier one. `compiled
    again` stands for a function that was compiled again without being traced, for example for arrays on
    another device. Calls that do not compile are not slowed down.

    Args:
        announce: called with each line, such as `logging.getLogger("train").info`.
        first: whether to log first traces, too.

    Returns:
        The watch. It starts at once, in all threads, and ends with `.stop()`, or with the `with` block
        that it opens.

    Example:
        >>> import re
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_jit
        ... def power(x, n):
        ...     return x**n
        >>> lines = []
        >>> with vernal.debug.log_retraces(lines.append):
        ...     _ = power(jnp.ones(2), 2), power(jnp.ones(2), 2), power(jnp.ones(3), 4)
        >>> print(re.sub(r"[0-9.]+ s", "0.1 s", lines[0]))
        power traced again (2nd, 0.1 s): x: f32[2] -> f32[3]; n: 2 -> 4 (instead: pad to one shape, or leave out
        what does not fill it; jnp.asarray(n))
    """

    def tell(trace: Trace) -> None:
        if first or trace.again:
            announce(str(trace))

    return watch_traces(tell)


@contextlib.contextmanager
def no_retrace(*functions: Callable[..., Any], first: bool = True) -> Iterator[None]:
    """Forbids functions to be compiled again inside a `with` block, in this thread.

    Use it for a training loop after its first steps, or in a test. A call that would compile again
    raises, and changes nothing: after the block it works.

    Args:
        *functions: the functions under `filter_jit` to watch. Default: all.
        first: whether a function may be compiled for the first time.

    Raises:
        RetraceError: in place of the trace. It says where, and what has changed since the most similar
            call.
        TypeError: if one of the functions is not under `filter_jit`.

    Example:
        >>> import jax.numpy as jnp
        >>> import vernal
        >>> @vernal.filter_jit
        ... def power(x, n):
        ...     return x**n
        >>> with vernal.debug.no_retrace():
        ...     _ = power(jnp.ones(2), 3)
        ...     try:
        ...         power(jnp.ones(2), 4)
        ...     except vernal.debug.RetraceError as error:
        ...         print(error.trace.reason)
        n: 3 -> 4
    """
    sources = [_source(fn) for fn in functions]

    def refuse(trace: Trace) -> None:
        meant = not sources or trace.source in sources
        if meant and (trace.again or not first):
            raise RetraceError(_refusal(trace), trace)

    with guard_traces(refuse):
        yield


def _source(fn: Any) -> object:
    jitted = getattr(fn, "__func__", fn)
    if not (isinstance(jitted, Transformed) and hasattr(jitted, "trace_count")):
        raise type_error(
            "only functions under filter_jit are watched",
            where="no_retrace(*functions)",
            expected="what vernal.filter_jit returns",
            got=short(fn),
            instead="step = vernal.filter_jit(step), then no_retrace(step)",
        )
    return traces_of(jitted.fn).source


def _refusal(trace: Trace) -> str:
    lines = [str(difference) for difference in trace.differences]
    cures = dict.fromkeys(d.instead for d in trace.differences if d.instead)
    alike = "a call like the earlier ones" if trace.again else "make and jit the function once"
    return message(
        f"`{trace.name}` would be {trace.kind}{' again' if trace.again else ''}",
        where=f"{trace.place}, inside of no_retrace",
        expected="a call that is compiled already",
        got="\n".join(lines) or trace.reason or "the first call",
        instead=f"{listed(cures, '; ', 3) or alike}; or a call like this one before the block",
    )
