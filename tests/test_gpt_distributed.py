"""The example that trains over several processes: as one process does, and as if it had never been killed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vernal.saving import Checkpoints

ROOT = Path(__file__).parents[1]

# The example with a model and a text that are compiled and read in no time.
SMALL = f"""
import os, signal, sys
import numpy as np
sys.path.insert(0, {str(ROOT / "examples")!r})
import gpt, gpt_distributed
gpt.WIDTH, gpt.HEADS, gpt.GROUPS, gpt.BLOCKS, gpt.BATCH, gpt.LENGTH = 32, 2, 1, 2, 8, 16
gpt.read_text = lambda: 2 * [np.arange(5000, dtype=np.uint8) ** 2 % 97]
gpt_distributed.MIN_BYTES = 1024
"""

# A run whose second process dies in its fifth step; then, with other arguments, runs that nothing stops.
MAIN = """
read_batch = gpt_distributed.read_batch

def read_and_die(text, seed, step):
    if step == 5 and os.environ["VERNAL_RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return read_batch(text, seed, step)

kind, *folders = sys.argv[1:]
if kind == "killed":
    gpt_distributed.read_batch = read_and_die
for folder in folders:
    sys.argv = ["", "--steps", "6", "--every", "2", "--out", folder]
    gpt_distributed.main()
"""

# In one process, on four devices and on one of them.
ALONE = """
import jax
from vernal.saving import Checkpoints
from vernal.sharding import make_mesh

for count in (4, 1):
    mesh = make_mesh(data=-1, automatic=True, devices=jax.devices()[:count])
    with Checkpoints(f"alone-{count}", every=6) as checkpoints:
        gpt_distributed.train(6, 0, gpt.read_text()[0], mesh, checkpoints, print)
"""


def run(folder, *words):
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # All runs are of the same few programs.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    return done.returncode, done.stdout + done.stderr


def launch(folder, *words):
    options = ["--processes", "2", "--devices-per-process", "2"]
    return run(folder, "-m", "vernal", "launch", *options, "small.py", *words)


def losses(folder, name):
    found = Checkpoints(folder / name).metadata()["losses"]
    assert len(found) == 6 and found[-1] < found[0] - 0.1
    return found


# Five processes on two cores, beside other tests: a limit for what hangs, not for what is slow.
@pytest.mark.timeout(900)
@pytest.mark.slow
def test_a_run_goes_on_after_a_kill_and_two_processes_have_the_losses_of_one(tmp_path):
    (tmp_path / "small.py").write_text(SMALL + MAIN)
    (tmp_path / "alone.py").write_text(SMALL + ALONE)
    code, text = launch(tmp_path, "killed", "stopped")
    assert code == 137, text
    assert "[0] vernal: process 1 of 2 was lost; process 0 stops" in text
    assert "process 1 of 2 was killed by SIGKILL; the others were stopped" in text
    # Whether the fourth step was on the disk when the process died depends on the disk.
    last = Checkpoints(tmp_path / "stopped").latest
    assert last in (2, 4), text

    code, text = launch(tmp_path, "well", "stopped", "whole")
    assert code == 0, text
    resumed, _, whole = text.partition("[0] step 6/6")
    assert f"[0] goes on after step {last}" in resumed and "[0] step 1/6" not in resumed
    assert "[0] 2 processes, 4 devices" in whole and "[0] step 1/6" in whole
    # One process speaks.
    assert "[1] step" not in text
    # The mesh is the same, and so is every bit.
    assert losses(tmp_path, "stopped") == losses(tmp_path, "whole")

    code, text = run(tmp_path, "alone.py")
    assert code == 0, text
    alone = [losses(tmp_path, name) for name in ("alone-4", "alone-1")]
    np.testing.assert_allclose(alone, 2 * [losses(tmp_path, "whole")], rtol=0, atol=1e-5)
