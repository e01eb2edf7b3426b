"""Whole steps of training, end to end: `python benchmarks/training.py [--quick]`.

Forward, backward and AdamW, on one batch that is on the device already: Vernal, Equinox, Flax NNX and PyTorch, each
written as its own documentation would have it, in one process, by the clock. On a CPU in float32; on an
accelerator with larger sizes, in bfloat16 with parameters in float32 (`make accelerator` prints that). All train the
same model: as many parameters, and, in Vernal and Equinox, the same numbers. Prints milliseconds and our time over that
of the faster of Equinox and NNX, and leaves with an error if a bar is missed.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from _measure import by_the_clock
from _training_settings import CPU, Training

OURS, BAR = "Vernal", 1.05
# Where a library trains each kind of model, and how it is to be called for it.
LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("_training_vernal", {}),
    "Equinox": ("_training_equinox", {}),
    "Flax NNX": ("_training_nnx", {}),
    "PyTorch": ("_training_torch", {}),
    "PyTorch, compiled": ("_training_torch", {"compiled": True}),
}


def begin(name: str, size: Any, half: bool) -> Training:
    """A training that is compiled, and whose loss falls."""
    module, options = LIBRARIES[name]
    training = importlib.import_module(module).training(size, half, **options)
    losses = [float(training.work.start()) for _ in range(8)]
    assert losses[-1] < losses[0], losses
    return training


def steps(size: Any, half: bool, libraries: Sequence[str], budget: float) -> dict[str, float]:
    """The median seconds of a step in each library: those on JAX in turns, then PyTorch's, whose threads go on spinning
    for a while and would slow down what comes next.

    A library that is not installed, or fails, is left out, and the reason printed.
    """
    found: dict[str, Training] = {}
    for name in libraries:
        try:
            found[name] = begin(name, size, half)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            print(
                f"({type(size).__name__}, {name}: {type(error).__name__}: {reason[0][:300]})",
                flush=True,
            )
    counts = {name: training.parameters() for name, training in found.items()}
    assert len(set(counts.values())) <= 1, counts
    times: dict[str, float] = {}
    for torch in (False, True):
        works = {
            n: training.work for n, training in found.items() if n.startswith("PyTorch") is torch
        }
        times |= by_the_clock(works, budget) if works else {}
    return times


def main() -> int:
    quick = "--quick" in sys.argv
    libraries = [name for name in LIBRARIES if name != "PyTorch, compiled"]
    print(f"\nMilliseconds of a step of training (JAX {jax.__version__}, CPU; medians)\n")
    print("| | " + " | ".join(libraries) + " | ratio | bar |")
    print("|---" * (len(libraries) + 3) + "|")
    missed = []
    for kind, size in CPU.sizes.items():
        found = steps(size, False, libraries, 2.0 if quick else 20.0)
        ratio = found[OURS] / min(found["Equinox"], found["Flax NNX"])
        cells = [f"{found[name] * 1e3:.2f}" if name in found else "" for name in libraries]
        print(f"| {kind} | {' | '.join(cells)} | {ratio:.2f} | {BAR} |", flush=True)
        missed += [f"{kind}: {ratio:.2f} > {BAR}"] if ratio > BAR else []
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
