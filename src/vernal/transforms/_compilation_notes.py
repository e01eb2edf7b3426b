"""Records what JAX compiles, also without a trace, for other devices."""

import functools
import threading
import weakref
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """How long JAX has compiled programs of one name in one thread, since the last `take`.

    Names are not unique: each program of the name is notified, and the first whose call ends takes the
    times.
    """

    __slots__ = ("seconds", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.seconds: list[float] = []

    def take(self) -> list[float]:
        """The seconds that each compilation took; clears them."""
        taken, self.seconds = self.seconds, []
        return taken


class _Name:
    def __init__(self) -> None:
        self.programs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.by_thread: dict[int, Compilations] = {}


# By the name of a program in JAX.
_names: dict[str, _Name] = {}


def expect_compilations(name: str, program: Any) -> None:
    """Adds to `program.attention` whenever JAX compiles something of a name.

    Args:
        name: the name of the function.
        program: the program that may have compiled it.
    """
    _names.setdefault(f"jit({name})", _Name()).programs.add(program)


@functools.cache
def listen() -> None:
    """Starts listening to JAX's compilations."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **details: Any) -> None:
    name = _names.get(details.get("fun_name", "")) if event == _COMPILED else None
    if name is not None:
        note = name.by_thread.setdefault(threading.get_ident(), Compilations())
        note.seconds.append(duration_secs)
        for program in list(name.programs):
            program.attention.add(note)
