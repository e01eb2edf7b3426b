"""JAX's own explanation of why it traces a function, read from its log and shortened.

With `jax_explain_cache_misses`, JAX logs a paragraph before it traces a user's function. While there
are listeners, those records are taken out of the log and parsed. Their wording is JAX's and changes
with its version: text that is not recognised is passed on unchanged, or left out.
"""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

FIRST_CALL = "first call"
REMADE = "a new function each time: make and jit it once, outside of the loop"

# Compiled at their first use: most programs never need them.
_NEVER_SEEN = r"(?m)never seen function:\s+(.+?) id=\d+(?: defined at (.+))?$"
_SEEN = r"(?m)^\s*for (.+?) defined at (.+)$"
_CLOSEST = "For the closest previous key:\n"
_AT = r"\* at (.+?), now (.+) and before (.+)"
_CONTEXT = r"\* (\S+) differs: now (.+) and before (.+)"
# What follows the two values at a path.
_CONCLUSION = r", so the .*?(?:key sets: (\{.*\}))?$"
_LONGEST = 60


class CacheMiss(NamedTuple):
    """One of JAX's paragraphs: which function is about to be traced, and why.

    Args:
        function: its name.
        file: the file that defines it; "" if JAX does not know.
        line: the line in that file.
        reason: what has changed since the most similar call.
    """

    function: str
    file: str
    line: int
    reason: str


def _tidy(value: str) -> str:
    """A type or a value as JAX writes it, without the details for JAX's own developers."""
    value = re.sub(r"\{weak_type=True\}(https://\S+)?", " (weak)", value)
    value = re.sub(r"\{weak_type=False\}(https://\S+)?", "", value)
    value = re.sub(r"\(\{\}\)", "", value)
    value = re.sub(r"<class '[^']*'> with pytree metadata ", "", value)
    value = re.sub(r"<class '(?:[^']*\.)?(\w+)'>", r"\1", value)
    return re.sub(r"^Static\(val=(.*)\)$", r"\1", value)


def _change(before: str, now: str) -> str:
    """`before -> now`; for long texts only the part that differs."""
    if max(len(before), len(now)) > _LONGEST:
        start = len(os.path.commonprefix([before, now]))
        same = len(os.path.commonprefix([before[start:][::-1], now[start:][::-1]]))
        before, now = (_excerpt(x, start, len(x) - same) for x in (before, now))
    return f"{before} -> {now}"


def _excerpt(text: str, start: int, stop: int) -> str:
    start, stop = max(start - 10, 0), min(stop + 10, len(text))
    if stop - start > _LONGEST:
        stop = start + _LONGEST
    return "…" * (start > 0) + text[start:stop] + "…" * (stop < len(text))


def _in_short(line: str) -> str:
    """One line of JAX's comparison, shortened."""
    line = line.strip()
    if found := re.fullmatch(_CONTEXT, line):
        name, now, before = found.groups()
        return f"{name}: {_change(before, now)}"
    conclusion = re.search(_CONCLUSION, line)
    if found := re.fullmatch(_AT, line[: conclusion.start()] if conclusion else line):
        path, now, before = found.groups()
        path = path.replace("input path [0]", "args").replace("input path [1]", "kwargs")
        keys = conclusion[1] if conclusion else None
        return f"{path}: {_change(_tidy(before), _tidy(now))}" + (f", keys {keys}" if keys else "")
    return line


def _reason(comparison: str) -> str:
    """What differs, from the lines below "For the closest previous key"."""
    if "explanation unavailable" in comparison:
        return "JAX does not say what differs"
    lines = comparison.splitlines()
    changes = [line for line in lines if line.lstrip().startswith("*")]
    return "; ".join(map(_in_short, changes or lines))


def read_cache_miss(text: str) -> CacheMiss | None:
    """Parses one of JAX's paragraphs; None if it does not name a function."""
    if found := re.search(_NEVER_SEEN, text):
        reason = REMADE if "same line" in text else FIRST_CALL
    elif found := re.search(_SEEN, text):
        reason = _reason(text.partition(_CLOSEST)[2])
    else:
        return None
    file, _, line = (found[2] or "").rpartition(":")
    return CacheMiss(found[1], file, int(line) if line.isdigit() else 0, reason)


_lock = threading.Lock()
_listeners: list[Callable[[CacheMiss], None]] = []
# Whether the user had asked JAX for these records before the first listener.
_wanted = False


def _divert(record: logging.LogRecord) -> bool:
    """A filter for JAX's loggers: whether a record is logged as usual."""
    text = record.getMessage()
    if "CACHE MISS at " not in text:
        return True
    if miss := read_cache_miss(text):
        for listener in tuple(_listeners):
            listener(miss)
    return _wanted


def _loggers() -> list[logging.Logger]:
    # A filter sees only the records of its own logger, and which logger reports is up to JAX.
    names = list(logging.root.manager.loggerDict)
    return [logging.getLogger(name) for name in names if name.partition(".")[0] == "jax"]


def jax_explains() -> bool:
    """Whether JAX's explanations arrive: the script may have silenced its logger."""
    return bool(_listeners) and logging.getLogger("jax").isEnabledFor(logging.WARNING)


@contextlib.contextmanager
def cache_misses_reported_to(listener: Callable[[CacheMiss], None]) -> Iterator[None]:
    """Inside, `listener` is called with each of JAX's explanations, in the thread that traces, before it traces.
    They are not printed, unless the user had asked for them before."""
    global _wanted
    with _lock:
        if not _listeners:
            _wanted = bool(jax.config.values["jax_explain_cache_misses"])
            jax.config.update("jax_explain_cache_misses", True)
            for logger in _loggers():
                logger.addFilter(_divert)
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                jax.config.update("jax_explain_cache_misses", _wanted)
                for logger in _loggers():
                    logger.removeFilter(_divert)
