"""Whole steps of training, end to end: `python benchmarks/training.py [--quick]`.

Forward, backward and AdamW, on one batch that is on the device already: Vernal, Equinox, Flax NNX and PyTorch, each
written as its own documentation would have it, in one process and in turns, by the clock. On a CPU in float32; on an
accelerator with larger sizes, in bfloat16 with parameters in float32 (`make accelerator` prints that). All train the
same model: as many parameters, and, in Vernal and Equinox, the same numbers. Prints milliseconds and our time over that
of the faster of Equinox and NNX, and leaves with an error if a bar is missed.
"""

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from _training_settings import CPU, SMOKE, Settings, Training

OURS, BAR = "Vernal", 1.05
# Where a library trains each kind of model, and how it is to be called for it.
LIBRARIES: dict[str, tuple[str, dict[str, Any]]] = {
    OURS: ("_training_vernal", {}),
    "Equinox": ("_training_equinox", {}),
    "Flax NNX": ("_training_nnx", {}),
    "PyTorch": ("_training_torch", {}),
    "PyTorch, compiled": ("_training_torch", {"compiled": True}),
}
KINDS = ("gpt", "resnet")
ROUND = 0.05


class Way(NamedTuple):
    training: Training
    count: int


def units(kind: str, settings: Settings) -> tuple[int, str]:
    """How much a step trains on, and of what."""
    if kind == "gpt":
        return settings.gpt.batch * settings.gpt.length, "tokens"
    return settings.resnet.batch, "images"


def seconds(way: Way) -> float:
    """Of one step, in a round of several."""
    loss = None
    start = time.perf_counter()
    for _ in range(way.count):
        loss = way.training.step()
    way.training.wait(loss)
    return (time.perf_counter() - start) / way.count


def begin(name: str, kind: str, settings: Settings) -> Way:
    """A training that is compiled, whose loss falls, and how many steps make a round."""
    module, options = LIBRARIES[name]
    make: Callable[..., Training] = getattr(importlib.import_module(module), kind)
    training = make(settings, **options)
    losses = [float(training.step()) for _ in range(5)]
    assert losses[-1] < losses[0], losses
    once = min(seconds(Way(training, 1)) for _ in range(3))
    return Way(training, max(1, round(ROUND / once)))


def steps(
    kind: str, settings: Settings, libraries: Sequence[str], budget: float
) -> dict[str, float]:
    """The median seconds of a step in each library, in turns for about as many seconds as the budget says.

    A library that is not installed, or fails, is left out, and the reason printed.
    """
    ways: dict[str, Way] = {}
    for name in libraries:
        try:
            ways[name] = begin(name, kind, settings)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            print(f"({kind}, {name}: {type(error).__name__}: {reason[0][:300]})", flush=True)
    counts = {name: way.training.parameters for name, way in ways.items()}
    assert len(set(counts.values())) <= 1, counts
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + budget
    while any(len(found) < 3 for found in times.values()) or time.perf_counter() < end:
        for name, way in ways.items():
            times[name].append(seconds(way))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> int:
    quick = "--quick" in sys.argv
    libraries = [name for name in LIBRARIES if name != "PyTorch, compiled"]
    print(f"\nMilliseconds of a step of training (JAX {jax.__version__}, CPU; medians)\n")
    print("| | " + " | ".join(libraries) + " | ratio | bar |")
    print("|---" * (len(libraries) + 3) + "|")
    missed = []
    for kind in KINDS:
        found = steps(kind, SMOKE if quick else CPU, libraries, 2.0 if quick else 20.0)
        ratio = found[OURS] / min(found["Equinox"], found["Flax NNX"])
        cells = [f"{found[name] * 1e3:.2f}" if name in found else "" for name in libraries]
        print(f"| {kind} | {' | '.join(cells)} | {ratio:.2f} | {BAR} |", flush=True)
        missed += [f"{kind}: {ratio:.2f} > {BAR}"] if ratio > BAR else []
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
