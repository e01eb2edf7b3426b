"""What `test_random_ends.py` runs: programs of several processes, of which one does what it should not.

Importing JAX takes longer than such a program. So this script imports everything and starts nothing, and is forked for
each trial: a launcher, and before that has any thread, its processes.

Requests come as lines of JSON (`Trial`). The answers, also lines: the process id of the launcher, "event" right before
the victim does it, "rank 1 -9" for the exit code of a process, "ended 1" for that of the launcher.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401 (not in every process again)
from jax import P

from vernal import _launch
from vernal.saving import Checkpoints
from vernal.sharding import initialise, make_mesh, shard_batch

STEPS, EVERY = 6, 2
# The number of rows that a process gives, and the seconds after which a process counts as hanging.
ROWS, PATIENCE = 2, 5
DATA = ("rows", "dtype", "names", "fewer", "more")


class Trial(NamedTuple):
    """What happens, to whom and when.

    Attributes:
        folder: where the output and the checkpoints go.
        processes: how many there are.
        victim: the process it happens to.
        what: "kill", "return", "exit", "raise", "hang", or how its data differ: "rows", "dtype" or "names" of a batch,
            or one batch "fewer" or "more".
        point: where in a step: before the "batch", before the "step" is computed, in the "collective" of the compiled
            program, before its result is "read", before a "save", "saving", or "saved". Of no account for data.
        at: the step.
        delay: the seconds after which it is killed, while it goes on.
        backend: of the checkpoints.
    """

    folder: str
    processes: int
    victim: int
    what: str
    point: str
    at: int
    delay: float
    backend: str


class Ended(Exception):
    """Ends the program as a `return` in the middle of it."""


def program(trial: Trial) -> None:
    """Trains, and saves every second step."""
    initialise(batch_timeout=PATIENCE)
    rank, mesh = jax.process_index(), make_mesh(data=-1, automatic=True)

    def reach(point: str, step: int) -> None:
        if (rank, point, step) == (trial.victim, trial.point, trial.at):
            act(trial)

    def inside(total: Any, step: Any) -> Any:
        reach("collective", int(step))
        return total

    @jax.jit
    @jax.shard_map(
        mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=(P("data"), P()), check_vma=False
    )
    def train(weights: Any, batch: Any, step: Any) -> Any:
        total = batch.astype(jnp.float32).sum()
        total = jax.pure_callback(inside, jax.ShapeDtypeStruct((), jnp.float32), total, step)
        mean = jax.lax.psum(total, "data") / (ROWS * trial.processes)
        return weights + mean, mean

    weights = shard_batch(np.zeros(1, np.float32), mesh, "data")
    checkpoints = Checkpoints(f"{trial.folder}/run", backend=trial.backend)
    for step in steps(trial, rank):
        reach("batch", step)
        batch = shard_batch(examples(trial, rank, step), mesh, "data")
        reach("step", step)
        weights, mean = train(weights, batch["x"], np.int32(step))
        reach("read", step)
        assert float(mean) == 1.0
        if step % EVERY == 0:
            reach("save", step)
            checkpoints.save(step, {"weights": weights, "step": step})
            reach("saving", step)
            checkpoints.wait()
            print(f"saved {step}")
            reach("saved", step)


def steps(trial: Trial, rank: int) -> Iterator[int]:
    """The steps of a process."""
    for step in range(1, STEPS + 1):
        here = (rank, step) == (trial.victim, trial.at)
        if here and trial.what in DATA:
            say("event")
        if here and trial.what == "fewer":
            continue
        yield step
        if here and trial.what == "more":
            yield step


def examples(trial: Trial, rank: int, step: int) -> dict[str, np.ndarray]:
    """The part of a batch of a process."""
    x = np.ones(ROWS, np.float32)
    odd = {
        "rows": {"x": np.ones(2 * ROWS, np.float32)},
        "dtype": {"x": np.ones(ROWS, np.int32)},
        "names": {"x": x, "y": x},
    }
    here = (rank, step) == (trial.victim, trial.at)
    return odd.get(trial.what, {"x": x}) if here else {"x": x}


def act(trial: Trial) -> None:
    """What happens to the victim, in its main thread."""
    if trial.what not in DATA:
        say("event")
    if trial.what == "kill":
        if trial.delay:
            threading.Timer(trial.delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    elif trial.what == "return":
        raise Ended
    elif trial.what == "exit":
        sys.exit(0)
    elif trial.what == "raise":
        raise ValueError("mine")
    elif trial.what == "hang":
        time.sleep(600)


# --- processes that are forked


def say(line: str) -> None:
    """Answers, in one piece."""
    os.write(answers, f"{line}\n".encode())


class Forked:
    """A process in the place of `subprocess.Popen`: forked early, and begins when it is told its environment."""

    def __init__(self, rank: int):
        self.rank = rank
        self.begin, begin = os.pipe()
        ends = [os.pipe() for _ in range(2)]
        self.pid = os.fork()
        if self.pid == 0:
            os.close(begin)
            with open(self.begin) as told:
                os.environ.update(json.loads(told.readline()))
            for number, (_, end) in enumerate(ends, 1):
                os.dup2(end, number)
            raise Begin
        self.begin = begin
        for _, end in ends:
            os.close(end)
        self.stdout, self.stderr = (open(end, "rb") for end, _ in ends)

    def start(self, env: Any, process_group: int) -> "Forked":
        os.setpgid(self.pid, process_group)
        with open(self.begin, "w") as tell:
            tell.write(json.dumps(dict(env)) + "\n")
        return self

    def wait(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        say(f"rank {self.rank} {code}")
        return code


class Begin(Exception):
    """Leaves the functions of the processes that this one was forked from."""


def launch(trial: Trial) -> int:
    """Runs the launcher of Vernal on processes that are forked."""
    output = os.open(f"{trial.folder}/output", os.O_WRONLY | os.O_CREAT)
    waiting = [Forked(rank) for rank in range(trial.processes)]
    for number in (1, 2):
        os.dup2(output, number)

    def popen(command: list[str], **options: Any) -> Any:
        if command != ["program"]:
            return subprocess.Popen(command, **options)
        return waiting.pop(0).start(options["env"], options["process_group"])

    _launch.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": popen})
    return _launch.launch(["program"], trial.processes, 1)


def serve() -> Trial:
    """Forks a launcher for every request; returns the request in the processes of the program."""
    for line in sys.stdin:
        trial = Trial(*json.loads(line))
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(launch(trial))
            except Begin:
                return trial
        say(f"launcher {pid}")
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    os._exit(0)


if __name__ == "__main__":
    # JAX warns of forks: but it has no thread yet.
    warnings.simplefilter("ignore")
    answers = os.dup(1)
    random.seed()
    mine = serve()
    # At the end of the file, so that this process ends as any script does.
    try:
        program(mine)
    except Ended:
        pass
