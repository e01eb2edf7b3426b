"""Several processes: how they find each other, and what the others do when one is lost."""

import contextlib
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from pathlib import Path

import jax
import pytest

from vernal._launch import _reserved_port
from vernal.sharding import _lifeline, _processes, initialise, is_main
from vernal.sharding._ledger import Verdict

SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(SOURCE), JAX_PLATFORMS="cpu", PYTHONUNBUFFERED="1")

# Two processes compute together, until process `victim` does `what`.
TOGETHER = """
import os, signal, sys
import jax, numpy as np
import vernal
from vernal.sharding import initialise, is_main, make_mesh, shard_batch

victim, what, *places = sys.argv[1:]
initialise(*(int(x) if x.isdecimal() else x for x in places), heartbeat=10)
rank = jax.process_index()
assert is_main() == (rank == 0) and jax.device_count() == 2 * jax.process_count()
mesh = make_mesh(data=-1, automatic=True)
x = shard_batch(np.full(2, rank, np.float32), mesh, "data")
# With an all-reduce, without which they would not be in each other's hands.
step = jax.jit(lambda x: x + x.sum(), out_shardings=x.sharding)
for i in range(10**9):
    x = jax.block_until_ready(step(x))
    if i == 2 and str(rank) == victim:
        exec(what)
"""


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has joined nobody yet; joining would succeed."""
    calls = []
    monkeypatch.setattr(_processes, "_initialised", [])
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kw: calls.append((args, kw)))
    return calls


def under_the_launcher(monkeypatch, coordinator="127.0.0.1:1234", processes="2", rank="1"):
    monkeypatch.setenv("VERNAL_COORDINATOR", coordinator)
    monkeypatch.setenv("VERNAL_PROCESSES", processes)
    monkeypatch.setenv("VERNAL_RANK", rank)


def test_settings_come_from_the_launcher_or_the_arguments(fresh, monkeypatch):
    initialise("host:1", 2, 0, local_devices=range(2), heartbeat=7, timeout=8)
    seconds = {"heartbeat_timeout_seconds": 7, "initialization_timeout": 8}
    options = {"local_device_ids": [0, 1], "shutdown_timeout_seconds": 8, **seconds}
    assert fresh == [(("host:1", 2, 0), options)]
    # The same again is harmless, something else is not.
    initialise("host:1", 2, 0, local_devices=[0, 1], heartbeat=7, timeout=8)
    assert len(fresh) == 1
    with pytest.raises(RuntimeError, match="the processes were already joined, in another way"):
        initialise("host:1", 2, 1)
    _processes._initialised.clear()
    under_the_launcher(monkeypatch)
    initialise(processes=2)
    assert fresh[1][0] == ("127.0.0.1:1234", 2, 1)


def test_contradictions_with_the_launcher_are_refused(fresh, monkeypatch):
    under_the_launcher(monkeypatch)
    with pytest.raises(ValueError, match="the settings differ from those of the launcher"):
        initialise("127.0.0.1:1234", 3, 1)
    with pytest.raises(RuntimeError, match="the rank of this process is not known yet"):
        is_main()
    under_the_launcher(monkeypatch, rank="first")
    with pytest.raises(ValueError, match="the settings of the launcher are incomplete"):
        initialise()
    assert fresh == []


def test_what_jax_refuses_is_explained(monkeypatch):
    # JAX has devices here, which is too late.
    jax.devices()
    with pytest.raises(RuntimeError, match="JAX was used before the processes were joined"):
        initialise()

    def incomplete(*args, **kw):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", incomplete)
    with pytest.raises(ValueError, match="the processes cannot find each other"):
        initialise("host:1")

    def failing(*args, **kw):
        raise RuntimeError("out of sockets")

    monkeypatch.setattr(jax.distributed, "initialize", failing)
    with pytest.raises(RuntimeError, match="^out of sockets$"):
        initialise()
    assert is_main()


def test_alone_a_program_is_one_process_and_asks_for_no_device():
    script = """
import jax, vernal
from vernal.sharding import initialise, is_main
try:
    initialise(processes=2)
except ValueError as error:
    assert "the processes cannot find each other" in str(error), error
initialise()
initialise()
assert is_main() and not jax.distributed.is_initialized()
# It is too late for this once there are devices.
jax.config.update("jax_num_cpu_devices", 3)
assert jax.process_count() == 1 and jax.device_count() == 3
"""
    subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, check=True, timeout=200)


def test_the_hub_knows_a_death_from_a_farewell_and_from_a_stranger(monkeypatch):
    lost, told = [], threading.Event()

    def stop(text, code):
        lost.append((text, code))
        told.set()
        raise SystemExit

    monkeypatch.setattr(_lifeline, "_stop", stop)
    hub = _lifeline._Hub(_lifeline._listen("localhost"), "secret")

    def listen():
        with contextlib.suppress(SystemExit):
            hub.listen()

    threading.Thread(target=listen, daemon=True).start()

    def connect(words):
        connection = socket.create_connection(hub.listener.getsockname())
        connection.sendall(words.encode())
        return connection

    witness = connect('["secret", 3]\n')
    strangers = (
        "GET / HTTP/1.1\r\n\r\n",
        '["guess", 1]\n',
        "x" * 10000,
        "3\n",
        '["secret", "x"]\n',
    )
    for words in (*strangers, '["secret", 2]\n["end", null]\n'):
        connect(words).close()
    failing = connect('["secret", 1]\n')
    assert lost == []
    failing.sendall(b'["failed", "ValueError: mine"]\n')
    assert told.wait(60)
    assert [code for _, code in lost] == [75]
    assert "process 1" in lost[0][0] and "ValueError: mine" in lost[0][0]
    # The others are told, who would otherwise believe that process 0 was lost.
    witness.settimeout(60)
    assert witness.recv(1000) == b'["lost", [1, "ValueError: mine"]]\n'
    witness.close()
    failing.close()
    hub.drop()


@pytest.mark.parametrize("last", [b"", TimeoutError()], ids=["ends", "hangs"])
@pytest.mark.parametrize("why", ["refused", "lost", "failed", "failed after a refusal"])
def test_process_0_stops_last_as_jax_ends_the_others_when_it_does(monkeypatch, why, last):
    events, answers = [], iter([b"words", last])

    def receive(size):
        answer = next(answers)
        events.append("heard")
        if isinstance(answer, Exception):
            raise answer
        return answer

    ear = types.SimpleNamespace(settimeout=lambda seconds: None, recv=receive)
    spoke = types.SimpleNamespace(rank=2, socket=ear, say=lambda word, what: events.append(word))
    monkeypatch.setattr(_lifeline, "_stop", lambda text, code: events.append("stopped"))
    hub = _lifeline._Hub(_lifeline._listen("localhost"), "secret")
    hub.listener.close()
    hub.spokes = [spoke]
    if why == "refused":
        hub._announce(Verdict(refusal="different"))
    elif why == "lost":
        hub._lose(1, "killed")
    else:
        hub.refused = why != "failed"
        hub.leave("ValueError: mine")
    told = {"refused": ["refused"], "failed after a refusal": []}.get(why, ["lost"])
    stopped = ["stopped"] * (why in ("refused", "lost"))
    assert events == [*told, "heard", "heard", *stopped]


def wrapped(error, cause):
    try:
        raise error from cause
    except Exception as caught:
        return caught


GLOO = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer")


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (GLOO, True),
        (jax.errors.JaxRuntimeError("INTERNAL: NCCL operation failed"), True),
        (wrapped(OSError("not saved"), GLOO), True),
        (ValueError("mine"), False),
        (wrapped(OSError("not saved"), ValueError("mine")), False),
    ],
    ids=["gloo", "other collectives", "in another error", "its own", "its own in another"],
)
def test_who_fails_in_a_collective_waits_for_the_news_of_a_loss(monkeypatch, error, waits):
    events = []
    line = types.SimpleNamespace(leave=events.append)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(_lifeline.time, "sleep", lambda seconds: events.append("waits"))
    monkeypatch.setattr(os, "_exit", lambda code: events.append(code))
    inspect.unwrap(_lifeline._leave)(line, os.getpid())
    assert events == ["waits"] * waits + [f"{type(error).__name__}: {error}", 1]


def test_of_a_long_error_the_others_get_beginning_and_end():
    assert _lifeline._shortened("x" * 500) == "x" * 500
    text = _lifeline._shortened("ValueError: INTERNAL" + "x" * 1000 + "ValueError: mine")
    assert text.startswith("ValueError: INTERNALx") and text.endswith("xValueError: mine")
    assert "\n...\n" in text and len(text) < 510


def start(tmp_path, *words, **options):
    (tmp_path / "together.py").write_text(TOGETHER)
    environment = ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "2", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def launch(tmp_path, *words):
    options = ["launch", "--processes", "2", "--devices-per-process", "2", "together.py"]
    process = start(tmp_path, "-m", "vernal", *options, *words)
    text = process.communicate(timeout=250)[0]
    return process.returncode, text


def lines_of(rank, text):
    """What one process has printed: the lines of others may come in between."""
    return "".join(re.findall(rf"^\[{rank}\] (.*\n)", text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_stops_the_other_which_says_so(tmp_path, victim):
    with _reserved_port() as port:
        address = f"127.0.0.1:{port}"
        what = "os.kill(os.getpid(), signal.SIGKILL)"
        words = ("together.py", str(victim), what, address, "2")
        both = [start(tmp_path, *words, str(rank)) for rank in range(2)]
        texts = [process.communicate(timeout=250)[0] for process in both]
    assert both[victim].returncode == -signal.SIGKILL, texts
    assert both[1 - victim].returncode == 75, texts
    assert f"process {victim} of 2 was lost; process {1 - victim} stops" in texts[1 - victim]


@pytest.mark.slow
def test_a_process_that_fails_waits_for_nobody(tmp_path):
    code, text = launch(tmp_path, "1", "raise ValueError('mine')")
    assert code == 1, text
    assert "[1] ValueError: mine" in text
    assert "vernal: process 1 of 2 was lost; process 0 stops\n  got: ValueError: mine" in lines_of(
        0, text
    )
    assert text.endswith("process 1 of 2 failed with exit code 1; the others were stopped\n")


@pytest.mark.slow
def test_a_process_that_hangs_is_lost_by_jaxs_heartbeat(tmp_path):
    code, text = launch(tmp_path, "1", "os.kill(os.getpid(), signal.SIGSTOP)")
    assert code == 128 + signal.SIGABRT, text
    assert re.search(r"unhealthy \(stopped sending heartbeats\):\n.*1\n", lines_of(0, text))
