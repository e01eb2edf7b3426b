"""Processes whose batches differ, in shape or number, say so: nobody computes with them or waits for ever."""

import contextlib
import inspect
import re
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax import P

from tests.sharding.test_processes import ENVIRONMENT
from vernal._ground import _joint_work
from vernal.saving import _processes as saving_processes
from vernal.sharding import _agreement, _lifeline, even_batches, make_mesh
from vernal.sharding._ledger import CHECKPOINT, Ledger, Signature, Verdict, too_late

BOTH = (0, 1)
FOUR, EIGHT = Signature("4", "f32[4]"), Signature("8", "f32[8]")


def test_parts_that_are_alike_let_those_go_on_who_wait():
    ledger = Ledger()
    assert ledger.report(BOTH, 0, FOUR, True) == Verdict()
    assert ledger.report(BOTH, 1, FOUR, True) == Verdict(agreed=(0, 1))
    # Nobody waits with a batch like the last one, and one process may be ahead.
    assert ledger.report(BOTH, 1, None, False) == Verdict()
    assert ledger.report(BOTH, 1, None, False) == Verdict()
    assert ledger.report(BOTH, 0, None, False) == Verdict()
    assert ledger.report(BOTH, 0, None, False) == Verdict()
    assert not ledger.open


def test_a_part_that_changes_in_one_process_is_refused_at_its_number():
    ledger = Ledger()
    for rank in BOTH:
        ledger.report(BOTH, rank, FOUR, True)
    ledger.report(BOTH, 0, None, False)
    refusal = ledger.report(BOTH, 1, EIGHT, True).refusal
    assert "the processes give different parts of a batch" in refusal
    assert "call 2" in refusal
    assert "process 0: f32[4]" in refusal and "process 1: f32[8]" in refusal


@pytest.mark.parametrize("ended_first", [True, False])
def test_one_batch_more_than_an_ended_process_gave_is_refused(ended_first):
    ledger = Ledger()
    for rank in BOTH:
        ledger.report(BOTH, rank, FOUR, True)
    first, second = lambda: ledger.end(1), lambda: ledger.report(BOTH, 0, None, False)
    verdicts = [first(), second()] if ended_first else [second(), first()]
    assert verdicts[0] == Verdict()
    assert (
        "process 1 has ended after 1 batches, and process 0 gives one more" in verdicts[1].refusal
    )


def test_a_joint_end_is_clean():
    ledger = Ledger()
    for rank in BOTH:
        ledger.report(BOTH, rank, FOUR, True)
    assert ledger.end(0) == ledger.end(1) == Verdict()


def test_meshes_of_some_processes_count_for_themselves():
    ledger = Ledger()
    assert ledger.report((1, 2), 1, FOUR, True) == Verdict()
    assert ledger.report(BOTH, 1, EIGHT, True) == Verdict()
    assert ledger.report((1, 2), 2, FOUR, True) == Verdict(agreed=(1, 2))
    assert ledger.end(3) == Verdict()


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless its one element is changed."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_late_batch_is_noticed_if_there_is_a_limit(clock):
    patient, limited = Ledger(), Ledger(10)
    for ledger in (patient, limited):
        ledger.report(BOTH, 0, FOUR, True)
    clock[0] = 9.0
    assert limited.late() is None
    clock[0] = 11.0
    assert patient.late() is None
    assert limited.late() == "process 1 gives no batch 1"


def test_a_process_that_does_not_go_on_is_noticed_although_no_batch_is_missing(clock):
    ledger = Ledger(10)
    clock[0] = 100.0
    # Nobody has begun.
    assert ledger.late() is None
    for rank in BOTH:
        ledger.report(BOTH, rank, FOUR, True)
    clock[0] = 109.0
    ledger.end(1)
    assert ledger.late() is None
    clock[0] = 111.0
    assert ledger.late() == "process 0 does not go on"
    assert ledger.progress(0) == "1 batches" and ledger.progress(1) == "has ended after 1 batches"
    text = too_late("process 0 does not go on", 10, ["process 0: 1 batches; at a.py:3, in f"])
    assert "within batch_timeout=10 s" in text and "got: process 0: 1 batches; at a.py" in text


def test_a_checkpoint_is_something_to_do_together(clock):
    ledger = Ledger(10)
    for rank in BOTH:
        ledger.report(BOTH, rank, FOUR, True)
    assert ledger.report(BOTH, 0, CHECKPOINT, True) == Verdict()
    clock[0] = 11.0
    assert ledger.late() == "process 1 gives no part in a checkpoint after batch 1"
    refusal = ledger.report(BOTH, 1, FOUR, True).refusal
    assert "a process saves or restores a checkpoint where another gives a batch" in refusal
    assert "process 0: saves or restores a checkpoint" in refusal and "process 1: f32[4]" in refusal


@pytest.mark.parametrize("ended_first", [True, False])
def test_a_checkpoint_after_the_end_of_a_process_is_refused(ended_first):
    ledger = Ledger()
    for rank in BOTH:
        ledger.report(BOTH, rank, FOUR, True)
    first, second = lambda: ledger.end(1), lambda: ledger.report(BOTH, 0, CHECKPOINT, True)
    verdicts = [first(), second()] if ended_first else [second(), first()]
    expected = "process 1 has ended after 1 batches, and process 0 saves or restores a checkpoint"
    assert expected in verdicts[1].refusal


def test_a_checkpoint_is_announced_to_whoever_watches(monkeypatch):
    said = []
    monkeypatch.setattr(_joint_work, "_watchers", [lambda: said.append("watched")])

    def gather(x):
        said.append("gathered")
        return np.stack([x, x])

    monkeypatch.setattr(saving_processes, "process_count", lambda: 2)
    monkeypatch.setattr(saving_processes.multihost_utils, "process_allgather", gather)
    saving_processes.agree(None)
    saving_processes.check_step(1)
    saving_processes.check_same({"a": np.ones(2)})
    assert said == ["watched", "gathered"] * 3


def conversation(monkeypatch, patience=None):
    """A hub and a spoke in this process, and what would have stopped it."""
    stopped, told = [], threading.Semaphore(0)

    def stop(text, code):
        stopped.append((text, code))
        told.release()
        raise SystemExit

    monkeypatch.setattr(_lifeline, "_stop", stop)
    monkeypatch.setattr(_lifeline.distributed_state, "process_id", 1)
    hub = _lifeline._Hub(_lifeline._listen("localhost"), "secret", patience)
    spoke = _lifeline._Spoke(socket.create_connection(hub.listener.getsockname()), "secret")

    def listen(line):
        with contextlib.suppress(OSError):
            try:
                line.listen()
            except SystemExit:
                line.drop()

    for line in (hub, spoke):
        threading.Thread(target=listen, args=(line,), daemon=True).start()
    return hub, spoke, stopped, told


def together(hub, spoke, one, other):
    """Both compare a batch, each in a thread of its own; what each raised."""
    raised = [None, None]

    def compare(i, line, signature):
        try:
            line.compare(BOTH, signature)
        except ValueError as error:
            raised[i] = str(error)

    threads = [
        threading.Thread(target=compare, args=args) for args in ((0, hub, one), (1, spoke, other))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return raised


def test_who_waits_gets_an_error_and_who_does_not_is_stopped(monkeypatch):
    hub, spoke, stopped, told = conversation(monkeypatch)
    assert together(hub, spoke, FOUR, FOUR) == [None, None]
    assert together(hub, spoke, FOUR, FOUR) == [None, None]
    raised = together(hub, spoke, FOUR, EIGHT)
    assert told.acquire(timeout=60)
    assert raised[0] is None and "different parts" in raised[1]
    assert [code for _, code in stopped] == [1] and "different parts" in stopped[0][0]
    hub.drop()
    spoke.drop()


def test_processes_that_do_not_go_on_are_asked_where_they_are(monkeypatch):
    monkeypatch.setattr(_lifeline, "_NEWS", 60.0)
    hub, spoke, stopped, told = conversation(monkeypatch, patience=1e9)
    assert together(hub, spoke, FOUR, FOUR) == [None, None]
    # An age ago.
    hub.ledger.heard = dict.fromkeys(BOTH, -1e10)
    # Both, before the real function that stops is back in its place.
    assert told.acquire(timeout=60) and told.acquire(timeout=60)
    # This process is both.
    text, code = stopped[0]
    assert code == 1 and "process 0, 1 does not go on" in text
    for rank in BOTH:
        place = rf"process {rank}: 1 batches; at {re.escape(__file__)}:\d+, in test_\w+"
        assert re.search(place, text), text
    hub.drop()
    spoke.drop()


def test_a_refusal_is_an_error_of_who_waits():
    line = _lifeline._Line()
    line.waiting = True
    line.refuse("for a reason")
    with pytest.raises(ValueError, match=r"do not agree on their batches(.|\n)*for a reason"):
        line.wait()


def test_without_a_hub_nobody_knows():
    with _lifeline._listen("localhost") as server:
        spoke = _lifeline._Spoke(socket.create_connection(server.getsockname()), "secret")
        hub = server.accept()[0]
    hub.recv(1000)
    hub.sendall(b'["end", null]\n')
    hub.close()
    spoke.listen()
    with pytest.raises(ValueError, match="the batches of the processes cannot be compared"):
        spoke.compare(BOTH, FOUR)
    spoke.drop()


def test_without_a_lifeline_checksums_are_compared(monkeypatch):
    mesh = make_mesh(data=-1)
    assert _agreement.over_processes(mesh, 7) == {0: 7}
    _agreement.compare(mesh, FOUR)
    monkeypatch.setattr(_agreement, "over_processes", lambda mesh, number: {0: 1, 1: number})
    with pytest.raises(ValueError, match="the processes give different parts of a batch"):
        _agreement.compare(mesh, FOUR)


@pytest.fixture
def mesh():
    return make_mesh(data=2, devices=jax.devices()[:2])


def test_short_batches_are_padded_and_masked(mesh):
    data = [{"x": np.arange(8.0).reshape(4, 2), "s": "a"}, {"x": np.ones((3, 2)), "s": "a"}]
    (whole, all_real), (short, some) = even_batches(data, mesh, "data", rows=4)
    np.testing.assert_array_equal(whole["x"], data[0]["x"])
    assert all_real.all() and whole["s"] == "a"
    np.testing.assert_array_equal(some, [True, True, True, False])
    assert short["x"].sharding.spec == P("data")
    np.testing.assert_array_equal(short["x"], np.ones((4, 2)))


@pytest.mark.parametrize(("last", "steps"), [("pad", 3), ("drop", 1)])
def test_the_number_of_steps_is_that_of_all(mesh, monkeypatch, last, steps):
    monkeypatch.setattr(
        "vernal.sharding._even.over_processes", lambda mesh, number: {0: number, 1: 3, 2: 1}
    )
    masks = [mask for _, mask in even_batches([np.ones(2)] * 2, mesh, "data", rows=2, last=last)]
    assert len(masks) == steps
    assert [bool(mask.all()) for mask in masks] == [True, True, False][:steps]


def test_what_cannot_be_made_even_is_refused(mesh, monkeypatch):
    with pytest.raises(TypeError, match="the number of batches is unknown"):
        even_batches(iter([np.ones(2)]), mesh, "data", rows=2)
    assert len(list(even_batches(iter([np.ones(2)]), mesh, "data", rows=2, steps=1))) == 1
    with pytest.raises(ValueError, match="unknown value of `last`"):
        inspect.unwrap(even_batches)([], mesh, "data", rows=2, last="keep")
    for wrong in (np.ones(3), np.ones(0), (np.ones(2), np.ones(1)), "none", np.float32(1)):
        with pytest.raises(ValueError, match="a batch cannot be padded"):
            list(even_batches([wrong], mesh, "data", rows=2))
    monkeypatch.setattr("vernal.sharding._even.over_processes", lambda mesh, number: {0: 0, 1: 1})
    with pytest.raises(ValueError, match="this process has no batch, but others do"):
        list(even_batches([], mesh, "data", rows=2))


# Each of two processes gives `steps` batches, and then does `what`; before the batch `odd` it changes the rows.
EPOCH = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from vernal import sharding

lifeline, steps, what, victim, rows = sys.argv[1:]
if lifeline == "vernal":
    sharding.initialise(batch_timeout=10)
else:
    jax.distributed.initialize(os.environ["VERNAL_COORDINATOR"], 2, int(os.environ["VERNAL_RANK"]))
rank, mesh = jax.process_index(), sharding.make_mesh(data=-1, automatic=True)
chosen, early = rank == int(victim), False
mean = jax.jit(lambda x: x.mean())
for i in range(int(steps)):
    if chosen and i == 3:
        exec(what)
    if early:
        break
    x = np.full(8 if chosen and i == 3 and rows == "8" else 4, rank + 1.0, np.float32)
    value = float(mean(sharding.shard_batch(x, mesh, "data")))
    assert value == 1.5, value
print("done", flush=True)
"""


# The axes are within each process and across both, or the other way round.
AXES = """
import jax, numpy as np
from vernal import sharding

sharding.initialise(batch_timeout=30)
mesh = sharding.make_mesh(a=2, b=2)
rows = np.arange(4, dtype=np.float32)
sharding.shard_batch(rows, mesh, "b")
sharding.shard_batch(rows, mesh, "ab"[jax.process_index()])
print("done", flush=True)
"""


def run(tmp_path, *words, program=EPOCH, lifeline="vernal", steps=10):
    (tmp_path / "epoch.py").write_text(program)
    environment = ENVIRONMENT | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    options = ["launch", "--processes", "2", "--devices-per-process", "2", "epoch.py"]
    done = subprocess.run(
        [sys.executable, "-m", "vernal", *options, lifeline, str(steps), *words],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
@pytest.mark.parametrize("lifeline", ["vernal", "jax"])
def test_unequal_parts_are_an_error_and_no_number(tmp_path, victim, lifeline):
    code, text = run(tmp_path, "pass", victim, "8", lifeline=lifeline)
    assert code == 1, text
    assert "the processes give different parts of a batch" in text
    assert "done" not in text and "AssertionError" not in text
    if lifeline == "vernal":
        assert "call 4" in text and "f32[8]" in text and "f32[4]" in text


@pytest.mark.slow
def test_parts_along_another_axis_are_an_error(tmp_path):
    code, text = run(tmp_path, program=AXES)
    assert code == 1, text
    assert "the processes give different parts of a batch" in text and "call 2" in text, text
    assert "process 0: batch f32[4](numpy), along 'a'" in text, text
    assert "process 1: batch f32[4](numpy), along 'b'" in text, text
    assert "done" not in text


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
@pytest.mark.parametrize("what", ["early = True", "sys.exit(0)"])
def test_an_early_end_stops_the_others(tmp_path, victim, what):
    code, text = run(tmp_path, what, victim, "4")
    assert code == 1, text
    other = 1 - int(victim)
    assert f"process {victim} has ended after 3 batches, and process {other} gives one more" in text


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_process_that_gives_no_batch_is_taken_to_hang(tmp_path, victim):
    code, text = run(tmp_path, "time.sleep(100)", victim, "4")
    assert code == 1, text
    assert f"process {victim} gives no batch 4" in text


@pytest.mark.slow
@pytest.mark.parametrize("lifeline", ["vernal", "jax"])
def test_equal_batches_end_without_a_word(tmp_path, lifeline):
    code, text = run(tmp_path, "pass", "0", "4", lifeline=lifeline)
    assert code == 0, text
    # Gloo reports its connections, in lines that two threads may cut in pieces, down to a lone number.
    gloo = "[Gloo] Rank is connected to peer ranks. Expected number of connected peer ranks is :".split()
    said = [
        line
        for line in text.splitlines()
        if not all(x in gloo or x.isdigit() for x in re.sub(r"^\[[01]\] ", "", line).split())
    ]
    assert sorted(said) == ["[0] done", "[1] done"]
