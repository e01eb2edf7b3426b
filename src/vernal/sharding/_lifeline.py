"""The lifeline: how a process learns at once that another one was lost, and which.

The difficulty: JAX notices a dead process when its heartbeat has been missing for a while. Until then
the others hang in a collective, or fail in it with a report that names no process. And a process
that fails by an exception waits at the end for all others (JAX's barrier), which wait for it in a
collective: both for minutes.

The plan: every process has one connection to process 0, in which it says who it is, nothing while it
runs, and a farewell when it ends. When a process dies, whatever of, its kernel closes the connection.
If there was no farewell, process 0 tells the others, and all stop. They are stopped from a thread:
what hangs in a collective can be told nothing.

Invariants: a farewell is said before JAX's barrier; whoever is told of a loss ends by it, with exit code
75; what breaks the connection without a death (a network) stops nobody, but is left to JAX's heartbeat.

Glossary: the *hub* is process 0, a *spoke* is the connection of another one; the *token* is what a
stranger who finds the port does not know; *last words* are all that came through a connection.
"""

import atexit
import contextlib
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from typing import NoReturn

import jax

from .._ground import distributed_state
from ..show import message

_LOST = 75  # EX_TEMPFAIL of sysexits.h: try again. `vernal/_launch.py` knows it as well.
_KEY = "vernal/lifeline"
_END, _FAILED = "end", "failed: "
_KILLED = "no farewell: it was killed (out of memory?), or its machine is gone"
_LONGEST = 2000  # In bytes, of last words.
# For how long who fails in a collective waits for the news that another process was lost.
_NEWS = 2.0


def hold_lifeline(timeout: int) -> None:
    """Connects this process with process 0 until it ends; for programs of several processes. Waits for it at most
    `timeout` seconds."""
    host = distributed_state.coordinator_address.rpartition(":")[0].strip("[]")
    client = distributed_state.client
    if distributed_state.process_id == 0:
        listener = _listen(host)
        token = secrets.token_hex(16)
        client.key_value_set(_KEY, f"{listener.getsockname()[1]} {token}")
        line: _Hub | _Spoke = _Hub(listener, token)
    else:
        port, token = client.blocking_key_value_get(_KEY, 1000 * timeout).split()
        try:
            connection = socket.create_connection((host, int(port)), timeout)
        except OSError:
            # A firewall between the machines, which lets only JAX through: its heartbeat is left.
            return
        line = _Spoke(connection, token)
    threading.Thread(target=line.listen, name="vernal lifeline", daemon=True).start()
    # JAX's own function for the end was registered when it was imported, and so is called later.
    atexit.register(_leave, line, os.getpid())
    # A copy of this process would keep the connection open when this process is dead.
    os.register_at_fork(after_in_child=line.drop)


def _listen(host: str) -> socket.socket:
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _receive(connection: socket.socket) -> bytes | None:
    """What came through a connection; nothing where the process at its other end is dead, None where
    that cannot be known."""
    try:
        return connection.recv(_LONGEST)
    except ConnectionResetError:
        return b""
    except OSError:
        return None


def _send(connection: socket.socket, words: str) -> None:
    # Whoever does not hear it is dead or has left.
    with contextlib.suppress(OSError):
        connection.sendall(words.encode())


class _Hub:
    """Process 0: hears everyone's last words, and tells everyone of a loss."""

    def __init__(self, listener: socket.socket, token: str):
        self.listener, self.token = listener, token
        self.heard: dict[socket.socket, bytes] = {}

    def listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    connection = key.fileobj
                    if connection is self.listener:
                        connection = self.listener.accept()[0]
                        self.heard[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                    elif isinstance(connection, socket.socket):
                        heard = self._hear(connection)
                        if heard is not None:
                            selector.unregister(connection)
                            connection.close()
                            self._judge(heard)

    def _hear(self, connection: socket.socket) -> bytes | None:
        """The last words, once no more can come through this connection."""
        words = _receive(connection)
        if words:
            self.heard[connection] += words
            if len(self.heard[connection]) < _LONGEST:
                return None
        heard = self.heard.pop(connection)
        return b"" if words is None else heard

    def _judge(self, heard: bytes) -> None:
        greeting, _, farewell = heard.decode(errors="replace").partition("\n")
        token, _, rank = greeting.partition(" ")
        if token != self.token or farewell == _END:
            return
        reason = farewell.removeprefix(_FAILED) or _KILLED
        self._tell(f"{rank} {reason}")
        _stop(int(rank), reason)

    def _tell(self, words: str) -> None:
        for connection in list(self.heard):
            _send(connection, words)

    def leave(self, farewell: str) -> None:
        self._tell(_END if farewell == _END else f"0 {farewell.removeprefix(_FAILED)}")

    def drop(self) -> None:
        for connection in (self.listener, *self.heard):
            connection.close()


class _Spoke:
    """Any other process: says who it is, hears of losses, and that of process 0 by itself."""

    def __init__(self, connection: socket.socket, token: str):
        self.connection = connection
        connection.settimeout(None)
        # It is silent for days: what forgets silent connections is reminded of it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        _send(connection, f"{token} {distributed_state.process_id}\n")

    def listen(self) -> None:
        heard = b""
        while words := _receive(self.connection):
            heard += words
        if words is None or heard.decode(errors="replace") == _END:
            return
        rank, _, reason = heard.decode(errors="replace").partition(" ")
        _stop(int(rank or 0), reason or _KILLED)

    def leave(self, farewell: str) -> None:
        _send(self.connection, farewell)

    def drop(self) -> None:
        self.connection.close()


def _stop(rank: int, reason: str) -> NoReturn:
    text = message(
        f"vernal: process {rank} of {distributed_state.num_processes} was lost; "
        f"process {distributed_state.process_id} stops",
        got=reason,
        instead="start the program again: it goes on from its last checkpoint, if it saves any",
    )
    # Straight to the terminal: the thread that holds the lock of `sys.stderr` may hang.
    os.write(2, f"{text}\n".encode())
    os._exit(_LOST)


def _leave(line: _Hub | _Spoke, owner: int) -> None:
    """The last thing that this process does, but for JAX's own end."""
    # What Python has just printed the traceback of.
    error = getattr(sys, "last_value", None)
    if os.getpid() != owner:
        return
    if error is None:
        line.leave(_END)
        return
    if isinstance(error, jax.errors.JaxRuntimeError):
        # Perhaps of a collective, because another process was lost. Then the thread ends this one.
        time.sleep(_NEWS)
    line.leave(f"{_FAILED}{type(error).__name__}: {error}"[: _LONGEST // 4])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Past JAX's barrier, where this process would wait for others that wait for it.
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)
