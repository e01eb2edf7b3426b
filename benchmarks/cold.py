"""The first step: `python benchmarks/cold.py [--quick]`.

Seconds of the processor, all threads together, in which a fresh process constructs a model, compiles a step of
training and takes it, after its imports: Vernal, Equinox and Flax NNX, each as in `training.py`, in turns. Prints the
medians and our time over that of the others, and leaves with an error if a bar is missed.
"""

import importlib
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
from _training_settings import Cnn, Gpt, Mlp

MODULES = {"Vernal": "vernal", "Equinox": "equinox", "Flax NNX": "nnx"}
BARS = {"Equinox": 0.85, "Flax NNX": 1.0}
SIZES: dict[str, Any] = {
    "MLP, 2 of 32": Mlp(32, 2, 32),
    "MLP, 40 of 64": Mlp(64, 40, 64),
    "CNN of the digits": Cnn((32, 64), 8, 64),
    "GPT, 6 blocks": Gpt(512, 64, 4, 6, 4, 64),
}


def first_step(library: str, kind: str) -> float:
    """In this process."""
    module = importlib.import_module(f"_training_{MODULES[library]}")
    # What JAX itself does once in each process, such as looking for devices.
    jax.block_until_ready(jax.jit(lambda x: x + 1)(0.0))
    start = time.process_time()
    jax.block_until_ready(module.training(SIZES[kind], half=False).work.start())
    return time.process_time() - start


def in_a_new_process(library: str, kind: str, on_cpu: bool = True) -> float:
    """On the CPU, or on the first device that JAX finds."""
    command = [sys.executable, __file__, "--worker", library, kind]
    # Beside a process that has taken most of a GPU's memory.
    environment = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
    if on_cpu:
        environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> int:
    if "--worker" in sys.argv:
        print(first_step(*sys.argv[-2:]))
        return 0
    rounds = 1 if "--quick" in sys.argv else 7
    print(f"\nSeconds of the processor for the first step (JAX {jax.__version__}, CPU; medians)\n")
    print(
        f"| | {' | '.join(MODULES)} | {' | '.join(f'of {name} (bar {bar})' for name, bar in BARS.items())} |"
    )
    print("|---" * (1 + len(MODULES) + len(BARS)) + "|")
    missed = []
    for kind in SIZES:
        times: dict[str, list[float]] = {library: [] for library in MODULES}
        for _ in range(rounds):
            for library, found in times.items():
                found.append(in_a_new_process(library, kind))
        medians = {library: statistics.median(found) for library, found in times.items()}
        ratios = {name: medians["Vernal"] / medians[name] for name in BARS}
        cells = [f"{median:.2f}" for median in medians.values()]
        cells += [f"{ratio:.2f}" for ratio in ratios.values()]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
        missed += [f"{kind}, of {n}: {r:.2f} > {BARS[n]}" for n, r in ratios.items() if r > BARS[n]]
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
