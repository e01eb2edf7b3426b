"""What an accelerator makes of the library, in one command: `make accelerator`, or
`python benchmarks/accelerator.py [--out FILE] [--only PART ...] [--smoke]`.

Every layer, loop, check, estimator and saved file against the CPU's answers; attention; donation; the cost of a call,
also packed; the first step; training steps per second beside Equinox, Flax NNX and PyTorch, where they are installed;
the estimators' cost. Prints one Markdown report, writes it to `--out`, and leaves with an error if something is wrong.
It runs on whatever JAX finds first; `--smoke` has small sizes and every twelfth row of the tables, to try the script
itself on a CPU.
"""

import argparse
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

# The tables of everything that is public are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))
# XLA's runtime may hang in batched triangular solves on two processors. It reads this when it starts.
os.environ.setdefault("NPROC", "4")

import _accelerator_answers
import _accelerator_attention
import _accelerator_speed
import jax

# A part makes the lines of its section, each with what is wrong in it.
Part = Callable[[jax.Device, bool], Iterator[tuple[str, list[str]]]]

PARTS: dict[str, tuple[str, Part]] = {
    "answers": ("Answers, compared with the CPU's", _accelerator_answers.run),
    "attention": ("Attention", _accelerator_attention.run),
    "donation": ("Donation", _accelerator_speed.donation),
    "dispatch": ("A call, before anything is computed", _accelerator_speed.dispatch),
    "packing": ("`vernal.pack` in a loop", _accelerator_speed.packing),
    "cold": ("The first step", _accelerator_speed.cold),
    "estimators": ("Estimators of a trace", _accelerator_speed.estimates),
    "training": ("Training", _accelerator_speed.training),
}


class Report:
    """What is printed and written at once: another part may take long, or end the process."""

    def __init__(self, file: Path | None):
        self.text, self.file = "", file

    def add(self, line: str) -> None:
        print(line, flush=True)
        self.text += line + "\n"
        if self.file:
            self.file.write_text(self.text)


def section(name: str, device: jax.Device, smoke: bool, report: Report) -> list[str]:
    """Adds a part to the report; returns what is wrong in it. A part that fails does not stop the others."""
    title, part = PARTS[name]
    report.add(f"\n## {title}\n")
    start, wrong = time.perf_counter(), []
    try:
        for line, found in part(device, smoke):
            report.add(line)
            wrong += found
            for what in found:
                print(f"WRONG: {what}", file=sys.stderr, flush=True)
    except Exception as error:
        traceback.print_exc()
        wrong.append(f"{name}: {type(error).__name__}: {error}")
    report.add(f"\n({time.perf_counter() - start:.0f} s)")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device, report = jax.devices()[0], Report(options.out)
    report.add(f"# {device.device_kind}\n")
    report.add(f"JAX {jax.__version__}, Python {platform.python_version()}.")
    wrong = [x for name in options.only for x in section(name, device, options.smoke, report)]
    print(f"{len(wrong)} things are wrong." if wrong else "Everything is right.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
