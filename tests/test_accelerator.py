"""`make accelerator` runs: its script in small sizes, on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_report_on_an_accelerator(tmp_path):
    report = tmp_path / "accelerator.md"
    command = [sys.executable, "benchmarks/accelerator.py", "--smoke", "--out", report]
    environment = dict(
        os.environ, PYTHONPATH="src", JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1"
    )
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything is right." in done.stdout
    titles = [line for line in report.read_text().splitlines() if line.startswith("## ")]
    assert len(titles) == 8
    # Whether the fused kernel is used is only looked at on a GPU, but whether attention is right, always.
    assert report.read_text().count("| yes |") == 0
