"""Notes of what JAX compiles, which it does without a trace too, for other devices."""

import functools
import threading
import weakref
from typing import Any, NamedTuple

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"


class Compilation(NamedTuple):
    """A note that JAX has compiled something of this name."""

    thread: int
    seconds: float


# Where to leave notes of compilations, by the name under which JAX knows a program.
_programs: dict[str, weakref.WeakSet[Any]] = {}


def expect_compilations(name: str, program: Any) -> None:
    """Leaves a note in `program.attention` whenever JAX compiles something of a name.

    Args:
        name: of the function.
        program: what has compiled it, perhaps: names are not unique.
    """
    _programs.setdefault(f"jit({name})", weakref.WeakSet()).add(program)


@functools.cache
def listen() -> None:
    """Begins to take notes."""
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **details: Any) -> None:
    if event == _COMPILED:
        note = Compilation(threading.get_ident(), duration_secs)
        for program in list(_programs.get(details.get("fun_name", ""), ())):
            program.attention.add(note)
