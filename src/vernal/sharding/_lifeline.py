"""The lifeline: a process learns at once that another one was lost, and which; and whether all give the same batches.

The difficulty: JAX notices a dead process when its heartbeat has been missing for a while. Until then
the others hang in a collective, or fail in it with an error that does not name the process. And a
process that fails by an exception waits at exit for all others (JAX's barrier), which wait for it in a
collective: both for minutes.

The solution: every process has one connection to process 0. Over it, it sends its rank, reports its batches
(`_ledger.py`), and says goodbye when it ends. When a process dies, for whatever reason, its kernel closes the
connection. If it did not say goodbye, process 0 tells the others, and all stop. A thread stops them, because
the main thread may hang in a collective. The same thread tells where the main thread is, when process 0 asks because
a process does not go on.

Invariants: the goodbye comes before JAX's barrier; a process that is told of a loss exits, with exit code
75; process 0 stops last; a connection that breaks without a death (a network failure) does not stop any
process: that is left to JAX's heartbeat.

Glossary: the *hub* is process 0, a *spoke* is the connection of another process; the *token* is a secret
that an unknown peer does not have.
"""

import atexit
import contextlib
import os
import queue
import secrets
import selectors
import socket
import sys
import sysconfig
import threading
import time
from typing import Any, NoReturn

import jax

from .._ground import distributed_state, on_joint_work
from ..show import message, value_error
from ..transforms import here
from ._conversation import LONGEST, Connection
from ._ledger import CHECKPOINT, Ledger, Signature, Stream, Verdict, too_late

_LOST = 75  # EX_TEMPFAIL of sysexits.h: try again. Also in `vernal/_launch.py`.
_KEY = "vernal/lifeline"
_CUT_OFF = "the connection to process 0 has ended"
_AGAIN = "start the program again: it goes on from its last checkpoint, if it saves any"
_KILLED = "no farewell: it was killed (out of memory?), or its machine is gone"
# The maximum length of the error text of a failed process.
_LONGEST = 500
# The seconds that a process that fails in a collective waits for the news that another was lost, and process 0 for
# the answers of processes that it asks, or for their end.
_NEWS = 2.0
# A collective of gloo (on CPUs) fails by a `ValueError`, some others by a `JaxRuntimeError`.
_COLLECTIVE = "Gloo"
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))

# The connection of this process, if it has one.
_lines: list["_Hub | _Spoke"] = []


def hold_lifeline(timeout: int, patience: float | int | None) -> None:
    """Connects this process to process 0 until it ends; for programs of several processes. Waits for it at most
    `timeout` seconds. For `patience` see `Ledger`; only that of process 0 counts."""
    host = distributed_state.coordinator_address.rpartition(":")[0].strip("[]")
    client = distributed_state.client
    if distributed_state.process_id == 0:
        listener = _listen(host)
        token = secrets.token_hex(16)
        client.key_value_set(_KEY, f"{listener.getsockname()[1]} {token}")
        line: _Hub | _Spoke = _Hub(listener, token, patience)
    else:
        port, token = client.blocking_key_value_get(_KEY, 1000 * timeout).split()
        try:
            connection = socket.create_connection((host, int(port)), timeout)
        except OSError:
            # A firewall between the machines lets only JAX through: its heartbeat must do.
            return
        line = _Spoke(connection, token)
    _lines.append(line)
    everyone = tuple(range(distributed_state.num_processes))
    on_joint_work(lambda: line.compare(everyone, CHECKPOINT))
    threading.Thread(target=line.listen, name="vernal lifeline", daemon=True).start()
    # JAX registered its own exit function when it was imported, so that one is called later.
    atexit.register(_leave, line, os.getpid())
    # A forked copy would keep the connection open after this process has died.
    os.register_at_fork(after_in_child=line.drop)


def compare_batches(stream: Stream, signature: Signature) -> bool:
    """Reports a batch to process 0. Raises `ValueError` if it differs from that of the other processes.

    Returns:
        Whether there is a connection to process 0.
    """
    for line in _lines:
        line.compare(stream, signature)
    return bool(_lines)


def _listen(host: str) -> socket.socket:
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


class _Line:
    """One process's side of the conversation."""

    def __init__(self):
        self.sent: dict[Stream, Signature] = {}
        self.verdicts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.waiting = self.refused = False

    def refuse(self, refusal: str) -> None:
        """Stops this process: by an exception if it waits for the verdict, otherwise at once."""
        self.refused = True
        if self.waiting:
            self.verdicts.put(refusal)
        else:
            self.outlast()
            _stop(f"vernal: {refusal}", 1)

    def outlast(self) -> None:
        """What is waited for before this process stops."""

    def wait(self) -> None:
        """Waits for the verdict on the last batch."""
        refusal = self.verdicts.get()
        self.waiting = False
        if refusal is not None:
            raise value_error(
                "the processes do not agree on their batches",
                where="vernal.sharding.shard_batch",
                got=refusal,
            )


class _Hub(_Line):
    """Process 0: receives every goodbye, tells all processes of a loss, and keeps the ledger."""

    def __init__(self, listener: socket.socket, token: str, patience: float | int | None = None):
        super().__init__()
        self.listener, self.token = listener, token
        self.spokes: list[Connection] = []
        self.ledger = Ledger(patience)
        # Two threads use the ledger and send messages.
        self.lock = threading.RLock()
        # What a process does not do in time, until when the processes are asked where they are, and their answers.
        self.problem: str | None = None
        self.until = 0.0
        self.places: dict[int, str] = {}

    def listen(self) -> None:
        wake = None if self.ledger.patience is None else 1.0
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(wake):
                    if key.fileobj is self.listener:
                        spoke = Connection(self.listener.accept()[0])
                        selector.register(spoke.socket, selectors.EVENT_READ, spoke)
                        with self.lock:
                            self.spokes.append(spoke)
                        continue
                    spoke = key.data
                    with self.lock:
                        for word, what in spoke.hear():
                            self._hear(spoke, word, what)
                        if not spoke.open:
                            selector.unregister(spoke.socket)
                            spoke.socket.close()
                            self.spokes.remove(spoke)
                            self._judge(spoke)
                with self.lock:
                    self._look()

    def _hear(self, spoke: Connection, word: str, what: Any) -> None:
        if spoke.rank is None:
            if word == self.token and type(what) is int:
                spoke.rank = what
        elif word == "batch":
            members, signature, waits = what
            said = None if signature is None else Signature(*signature)
            self._announce(self.ledger.report(tuple(members), spoke.rank, said, waits))
        elif word == "here":
            self.places[spoke.rank] = what
        elif word == "end":
            self._announce(self.ledger.end(spoke.rank))
        elif word == "failed":
            self._lose(spoke.rank, what)

    def _look(self) -> None:
        """Stops all if a process is late. First asks where each of them is."""
        if self.problem is None:
            self.problem = self.ledger.late()
            if self.problem is not None:
                self.places, self.until = {0: _place()}, time.monotonic() + _NEWS
                self._tell("where")
        elif len(self.places) > len(self.spokes) or time.monotonic() > self.until:
            ranks = sorted({0, *(spoke.rank for spoke in self.spokes if spoke.rank is not None)})
            lines = [
                f"process {rank}: {self.ledger.progress(rank)}; {self.places.get(rank, 'no answer')}"
                for rank in ranks
            ]
            self._announce(
                Verdict(refusal=too_late(self.problem, self.ledger.patience or 0, lines))
            )

    def _judge(self, spoke: Connection) -> None:
        """Decides what the end of a connection means."""
        known = spoke.rank is not None and spoke.rank not in self.ledger.ended
        if known and not spoke.broken and not self.refused:
            self._lose(spoke.rank, _KILLED)

    def _lose(self, rank: int | None, reason: str) -> None:
        if not self.refused:
            # Not to the lost process: it may still be alive, and ends on its own.
            for spoke in self.spokes:
                if spoke.rank != rank:
                    spoke.say("lost", [rank, reason])
            self.outlast()
            _stop(_loss(rank or 0, reason), _LOST)

    def _announce(self, verdict: Verdict) -> None:
        if verdict.refusal is not None:
            if not self.refused:
                self._tell("refused", verdict.refusal)
                self.refuse(verdict.refusal)
            return
        for spoke in self.spokes:
            if spoke.rank in verdict.agreed:
                spoke.say("agreed")
        if 0 in verdict.agreed:
            self.verdicts.put(None)

    def _tell(self, word: str, what: Any = None) -> None:
        for spoke in self.spokes:
            spoke.say(word, what)

    def compare(self, stream: Stream, signature: Signature) -> None:
        new = self.sent.get(stream) != signature
        self.sent[stream] = signature
        with self.lock:
            self.waiting = new
            self._announce(self.ledger.report(stream, 0, signature, new))
        if new:
            self.wait()

    def leave(self, failure: str | None) -> None:
        with self.lock:
            if failure is not None:
                # After a refusal all know why.
                if not self.refused:
                    self._tell("lost", [0, failure])
                self.outlast()
                return
            self._tell("end")
            self._announce(self.ledger.end(0))

    def outlast(self) -> None:
        """Waits until the others have ended. When process 0 ends, JAX ends them at once, before they say why."""
        until = time.monotonic() + _NEWS
        for spoke in self.spokes:
            with contextlib.suppress(OSError):
                while (left := until - time.monotonic()) > 0:
                    spoke.socket.settimeout(left)
                    if not spoke.socket.recv(LONGEST):
                        break

    def drop(self) -> None:
        for connection in (self.listener, *(spoke.socket for spoke in self.spokes)):
            connection.close()


class _Spoke(_Line):
    """Any other process: sends its rank, is told of losses, and detects that of process 0 itself."""

    def __init__(self, connection: socket.socket, token: str):
        super().__init__()
        connection.settimeout(None)
        # It may be silent for days: keep-alive packets stop routers from dropping the connection.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Reports are short, and a process may wait for the answer.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.hub = Connection(connection)
        self.hub.rank, self.hub_ended = 0, False
        self.hub.say(token, distributed_state.process_id)

    def listen(self) -> None:
        while self.hub.open:
            for word, what in self.hub.hear():
                if word == "lost":
                    _stop(_loss(*what), _LOST)
                elif word == "refused":
                    self.refuse(what)
                elif word == "agreed":
                    self.verdicts.put(None)
                elif word == "where":
                    self.hub.say("here", _place())
                elif word == "end":
                    self.hub_ended = True
        if not (self.hub.broken or self.hub_ended or self.refused):
            _stop(_loss(0, _KILLED), _LOST)
        if self.waiting and not self.refused:
            self.verdicts.put(_CUT_OFF)

    def compare(self, stream: Stream, signature: Signature) -> None:
        new = self.sent.get(stream) != signature
        self.sent[stream] = signature
        self.waiting = new
        if not self.hub.open:
            raise value_error(
                "the batches of the processes cannot be compared",
                where="vernal.sharding.shard_batch",
                got=_CUT_OFF,
                instead=_AGAIN,
            )
        self.hub.say("batch", [stream, signature if new else None, new])
        if new:
            self.wait()

    def leave(self, failure: str | None) -> None:
        self.hub.say("end" if failure is None else "failed", failure)

    def drop(self) -> None:
        self.hub.socket.close()


def _place() -> str:
    """What the main thread does: the line of the program, not of a library that it calls."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    entries = () if frame is None else here(innermost=frame).entries
    if not entries:
        # It ends.
        return "not in the program any more"
    own = [entry for entry in entries if not entry[0].startswith(_INSTALLED)]
    file, line, function = (own or entries)[-1]
    return f"at {file}:{line}, in {function}"


def _loss(rank: int, reason: str) -> str:
    return message(
        f"vernal: process {rank} of {distributed_state.num_processes} was lost; "
        f"process {distributed_state.process_id} stops",
        got=reason,
        instead=_AGAIN,
    )


def _stop(text: str, code: int) -> NoReturn:
    # Straight to the terminal: the thread that holds the lock of `sys.stderr` may be hanging.
    os.write(2, f"{text}\n".encode())
    os._exit(code)


def _leave(line: _Hub | _Spoke, owner: int) -> None:
    """Runs last in this process, except for JAX's own exit function."""
    # The exception whose traceback Python has just printed.
    error = getattr(sys, "last_value", None)
    if os.getpid() != owner:
        return
    if error is None:
        line.leave(None)
        return
    if _may_be_a_loss(error):
        # Then the thread ends this process.
        time.sleep(_NEWS)
    line.leave(_shortened(f"{type(error).__name__}: {error}"))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Skip JAX's barrier, where this process would wait for others that wait for it.
    os._exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _may_be_a_loss(error: BaseException | None) -> bool:
    """Whether an exception, or one that it was raised for, may be that of a collective whose peer was lost."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError) or _COLLECTIVE in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _shortened(text: str) -> str:
    """The error of a failed process for the others. Its end counts: errors of callbacks hold a traceback."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]}\n...\n{text[-half:]}"
