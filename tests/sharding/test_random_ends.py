"""Whatever happens to one of several processes, at whatever point: all end soon, say why, and lose no checkpoint."""

import json
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.sharding.test_processes import ENVIRONMENT
from vernal.saving import Checkpoints

SCRIPT = Path(__file__).with_name("_ends.py")
# The seconds that a program may take to reach the event, and all its processes to end after it.
BEGIN, END = 120, 15
WAYS = (
    ("kill",),
    ("return", "exit", "raise"),
    ("hang",),
    ("rows", "dtype", "names", "fewer", "more"),
)
POINTS = ("batch", "step", "collective", "read", "save", "saving", "saved")


class Server:
    """The process that `_ends.py` forks programs from."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env=ENVIRONMENT | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.lines: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.split())

    def run(self, trial):
        """Runs a trial; returns the exit codes of its processes by rank, and that of the launcher. Raises
        `queue.Empty` if they do not end in time."""
        self.process.stdin.write(json.dumps(trial) + "\n")
        self.process.stdin.flush()
        codes, limit = {}, BEGIN
        launcher = int(self.lines.get(timeout=BEGIN)[1])
        try:
            while True:
                word, *numbers = self.lines.get(timeout=limit)
                if word == "event":
                    limit = END
                elif word == "rank":
                    codes[int(numbers[0])] = int(numbers[1])
                elif word == "ended":
                    assert limit == END, "it ended before anything happened"
                    return codes, int(numbers[0])
        except queue.Empty:
            os.kill(launcher, signal.SIGKILL)
            while self.lines.get(timeout=BEGIN)[0] != "ended":
                pass
            raise

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=BEGIN)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server():
    server = Server()
    yield server
    server.close()


def drawn(seed, folder):
    """The trial of a seed: the fields of `Trial` in `_ends.py`."""
    draw = random.Random(seed)
    processes = (2, 4)[seed % 2]
    what = draw.choice(WAYS[seed // 2 % len(WAYS)])
    # A `return` in a callback is not an end.
    point = draw.choice([point for point in POINTS if (what, point) != ("return", "collective")])
    saves = point.startswith("sav")
    # Whoever returns after the last save has not ended early.
    at = draw.choice((2, 4) if saves else range(1, 7)) if what in WAYS[1] else 0
    at = at or draw.choice((2, 4, 6) if saves else range(1, 7))
    delay = draw.choice((0.0, draw.uniform(0.0, 0.05)))
    backend = draw.choice(("orbax", "safetensors"))
    return [folder, processes, draw.randrange(processes), what, point, at, delay, backend]


def reason(what, point, victim, processes):
    """A pattern of what the others say."""
    lost = rf"process {victim} of {processes} was lost"
    if what == "kill":
        return rf"{lost}.*\n.*it was killed"
    if what == "raise" or point == "collective" and what == "exit":
        return rf"{lost}(.|\n)*{'mine' if what == 'raise' else 'SystemExit'}"
    if what in ("return", "exit"):
        return rf"process {victim}:? has ended after \d batches"
    if what == "hang":
        return rf"process {victim}: \d batches; at .*_ends\.py:\d+, in act"
    if what in ("fewer", "more"):
        return (
            r"has ended after \d batches, and process \d gives one more"
            r"|a process saves or restores a checkpoint where another gives a batch"
        )
    return rf"different parts of a batch(.|\n)*process {victim}: batch"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_all_processes_end_say_why_and_lose_no_checkpoint(server, tmp_path, seed):
    trial = drawn(seed, str(tmp_path))
    _, processes, victim, what, point, *_ = trial
    try:
        codes, code = server.run(trial)
    except queue.Empty:
        text = (tmp_path / "output").read_text()
        pytest.fail(f"{trial}: not ended after {END} s\n{text}", pytrace=False)
    text = (tmp_path / "output").read_text()
    shown = f"{trial}: exit codes {codes}, {code}\n{text}"
    assert code not in (0, -signal.SIGKILL), shown
    # All ended by themselves, before the launcher kills them.
    assert set(codes) == set(range(processes)), shown
    for rank in set(range(processes)) - {victim}:
        mine = "\n".join(re.findall(rf"^\[{rank}\] (.*)$", text, re.MULTILINE))
        assert codes[rank] in (1, 75), shown
        assert re.search(reason(what, point, victim, processes), mine), f"process {rank}: {shown}"
        assert str(victim) in mine, shown
    check_checkpoints(tmp_path / "run", processes, text)


def check_checkpoints(folder, processes, text):
    """All that was reported is there, all that is there is complete, and a new process goes on from it."""
    with Checkpoints(folder, backend="safetensors") as checkpoints:
        reported = {int(step) for step in re.findall(r"saved (\d+)$", text, re.MULTILINE)}
        assert reported <= set(checkpoints.steps), text
        for step in checkpoints.steps:
            state = checkpoints.restore(
                {"weights": np.zeros(processes, np.float32), "step": 0}, step
            )
            np.testing.assert_array_equal(state["weights"], step)
            assert state["step"] == step
        after = (checkpoints.latest or 0) + 1
        checkpoints.save(after, {"step": after})
    assert checkpoints.latest == after


def test_the_trials_differ():
    trials = [drawn(seed, "") for seed in range(50)]
    for column, values in ((1, {2, 4}), (2, set(range(4))), (4, set(POINTS))):
        assert {trial[column] for trial in trials} == values
    assert {trial[3] for trial in trials} == {what for ways in WAYS for what in ways}
