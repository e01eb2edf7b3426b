"""Several JAX processes on this machine, for development and tests: what `python -m vernal launch` does.

The difficulty: nothing may be left behind, whatever ends first, be it a process, one of its own
children, or this launcher, and be it by SIGKILL.

The plan: all processes, and whatever they start, are in one process group. Its leader is a guard, a shell
that waits for the end of its input, which only the launcher holds open, and then kills the group. So
the group dies with the launcher; and as long as the guard lives, the number of the group is its own.

The launcher itself waits for one thing at a time, in `_watch`: the end of a process, or a signal.

Invariants: lines of the processes come out whole, each behind the rank of its process; the exit code is that
of the process that failed first. The port of process 0 is reserved before anything starts, and kept:
bound by the launcher, which never listens on it, so that only a socket that shares it, as
that of JAX does, can have it as well.
"""

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO, Any

_GUARD = 'trap "" INT TERM HUP; read -r _; kill -KILL 0'
# For how long processes may take to end when they are asked to.
_GRACE = 5.0
# A process that ends with this code (EX_TEMPFAIL) does so because another one was lost (see
# `sharding/_lifeline.py`), whose own end is known here in a moment.
_LOST, _MOMENT = 75, 2.0


def launch(command: list[str], processes: int, devices: int) -> int:
    """Runs a Python command in several processes that find each other by `vernal.sharding.initialise`.

    Args:
        command: what is run, program and arguments.
        processes: how many times.
        devices: how many devices each process has: CPUs in name, or accelerators of this machine.

    Returns:
        The exit code: 0, that of the process that failed first, or 128 and the number of the
        signal that ended it or the launcher.
    """
    events: queue.SimpleQueue[tuple[int | None, int]] = queue.SimpleQueue()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Such a queue may be written to while it is being read by the same thread.
        signal.signal(number, lambda number, frame: events.put((None, number)))
    relay = _Relay(events)
    with _reserved_port() as port, _group() as group:
        for rank in range(processes):
            process = subprocess.Popen(
                command,
                env=os.environ | _environment(port, processes, rank, devices),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=group,
            )
            prefix = f"[{rank:{len(str(processes - 1))}}] ".encode()
            relay.start(process.stdout, sys.stdout.buffer, prefix)
            relay.start(process.stderr, sys.stderr.buffer, prefix)
            waiter = threading.Thread(target=_wait, args=(process, rank, events), daemon=True)
            waiter.start()
        code, words = _watch(events, processes, group)
    relay.finish()
    if words is not None:
        print(f"vernal launch: {words}", file=sys.stderr, flush=True)
    return code


def _environment(port: int, processes: int, rank: int, devices: int) -> dict[str, str]:
    address = f"127.0.0.1:{port}"
    return {
        "VERNAL_COORDINATOR": address,
        "VERNAL_PROCESSES": str(processes),
        "VERNAL_RANK": str(rank),
        # Nobody else on the network can join.
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(rank * devices + i) for i in range(devices)),
        # What was printed before a crash is seen.
        "PYTHONUNBUFFERED": "1",
    }


def _wait(process: subprocess.Popen[bytes], rank: int, events: Any) -> None:
    events.put((rank, process.wait()))


def _watch(events: Any, processes: int, group: int) -> tuple[int, str | None]:
    """Waits for the end of all processes; asks the rest to end when one has failed, or at a signal.

    Returns:
        The exit code, as of `launch`, and what is to be said of it. Processes may be left, which did
        not end when they were asked.
    """
    alive = set(range(processes))
    code, words, deadline, asked = 0, None, None, False

    def ask(number: int) -> float:
        os.killpg(group, number)
        return time.monotonic() + _GRACE

    while alive:
        try:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            rank, number = events.get(timeout=wait)
        except queue.Empty:
            if asked:
                break
            deadline, asked = ask(signal.SIGTERM), True
            continue
        if rank is None:
            if asked:
                # A second Ctrl-C.
                break
            code, words = 128 + number, f"{_name(number)}: all processes were stopped"
            deadline = ask(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            asked = True
            continue
        alive.remove(rank)
        if number == 0 or asked:
            continue
        how = f"was killed by {_name(-number)}" if number < 0 else f"failed with exit code {number}"
        rest = "; the others were stopped" if processes > 1 else ""
        code = 128 - number if number < 0 else number
        words = f"process {rank} of {processes} {how}{rest}"
        if number == _LOST:
            # Because of another one: which, is about to be known.
            deadline = deadline or time.monotonic() + _MOMENT
        else:
            deadline, asked = ask(signal.SIGTERM), True
    return code, words


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


@contextlib.contextmanager
def _group() -> Iterator[int]:
    """A process group that does not outlive this context, nor this process."""
    guard = subprocess.Popen(["/bin/sh", "-c", _GUARD], stdin=subprocess.PIPE, process_group=0)
    try:
        yield guard.pid
    finally:
        os.killpg(guard.pid, signal.SIGKILL)
        guard.communicate()


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


class _Relay:
    """Passes on what processes print, line by line, each behind a prefix."""

    def __init__(self, events: Any):
        self.events = events
        self.lock = threading.Lock()
        self.threads: list[threading.Thread] = []

    def start(self, source: IO[bytes] | None, target: Any, prefix: bytes) -> None:
        thread = threading.Thread(target=self._run, args=(source, target, prefix), daemon=True)
        self.threads.append(thread)
        thread.start()

    def _run(self, source: IO[bytes], target: Any, prefix: bytes) -> None:
        for line in source:
            try:
                with self.lock:
                    target.write(prefix + line.removesuffix(b"\n") + b"\n")
                    target.flush()
            except BrokenPipeError:
                # As of `python -m vernal launch ... | head`.
                self.events.put((None, int(signal.SIGPIPE)))
                return

    def finish(self) -> None:
        """Waits until everything is passed on."""
        for thread in self.threads:
            # A child that has left the group may hold its end for ever.
            thread.join(_GRACE)
