"""What an accelerator makes of the library, in one command: `make accelerator`, or
`python benchmarks/accelerator.py [--out FILE] [--only PART ...] [--smoke]`.

Every layer, loop, check, estimator and saved file against the CPU's answers; attention; donation; the cost of a call;
training steps per second beside Equinox, Flax NNX and PyTorch, where they are installed; the estimators' cost. Prints
one Markdown report, writes it to `--out`, and leaves with an error if something is wrong. It runs on whatever JAX finds
first; `--smoke` has small sizes and every twelfth row of the tables, to try the script itself on a CPU.
"""

import argparse
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

# The tables of everything that is public are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))
# XLA's runtime may hang in batched triangular solves on two processors. It reads this when it starts.
os.environ.setdefault("NPROC", "4")

import _accelerator_answers
import _accelerator_attention
import _accelerator_speed
import jax

# A part returns the lines of its section and what is wrong.
Part = Callable[[jax.Device, bool], tuple[list[str], list[str]]]

PARTS: dict[str, tuple[str, Part]] = {
    "answers": ("Answers, compared with the CPU's", _accelerator_answers.run),
    "attention": ("Attention", _accelerator_attention.run),
    "donation": ("Donation", _accelerator_speed.donation),
    "dispatch": ("A call, before anything is computed", _accelerator_speed.dispatch),
    "estimators": ("Estimators of a trace", _accelerator_speed.estimates),
    "training": ("Training", _accelerator_speed.training),
}


def section(name: str, device: jax.Device, smoke: bool) -> tuple[str, list[str]]:
    """A part as Markdown, and what is wrong in it. A part that fails does not stop the others."""
    title, part = PARTS[name]
    start = time.perf_counter()
    try:
        lines, wrong = part(device, smoke)
    except Exception as error:
        traceback.print_exc()
        lines, wrong = [], [f"{name}: {type(error).__name__}: {error}"]
    lines = [f"## {title}", "", *lines, "", f"({time.perf_counter() - start:.0f} s)", ""]
    return "\n".join(lines), wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = jax.devices()[0]
    text = f"# {device.device_kind}\n\nJAX {jax.__version__}, Python {platform.python_version()}.\n"
    print(text, flush=True)
    wrong = []
    for name in options.only:
        found, failures = section(name, device, options.smoke)
        text += f"\n{found}"
        print(found, flush=True)
        wrong += failures
        if options.out:
            options.out.write_text(text)
    print("\n".join(f"WRONG: {what}" for what in wrong) or "Everything is right.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
