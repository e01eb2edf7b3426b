"""Libraries built on Equinox on Vernal and on Equinox: `python benchmarks/stack.py`.

Two processes, one with each, solve the same small problems in turns. Processor time of a warm call, of tracing and
compiling, and of importing Diffrax, Lineax and Optimistix: the least of many, which the other tenants of a machine
disturb least, and the ratios. Leaves with an error if a bar is missed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax

WORKER = Path(__file__).with_name("_stack_worker.py")
SYSTEMS = ("vernal", "equinox")
NAMES = (
    "Diffrax",
    "Diffrax, gradient",
    "Diffrax, network, gradient",
    "Optimistix",
    "Optimistix, gradient",
    "Lineax",
    "Lineax, gradient",
    "flowjax",
    "flowjax, gradient",
    "quax, LoRA, gradient",
)
# XLA takes from 0.9 to 1.7 s for one and the same program: the minima of a dozen differ by a fifth.
COMPILES, ROUNDS = 21, 31
CALL_BAR, COMPILE_BAR, IMPORT_BAR = 0.7, 1.0, 1.0


class Worker:
    """A process that solves on one of the two."""

    def __init__(self, system: str):
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(WORKER), system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )

    def ask(self, command: str, name: str, number: int = 1) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{command}\t{name}\t{number}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def imports() -> list[float]:
    """Seconds to import the libraries, on each."""
    libraries = "import diffrax, lineax, optimistix"
    starts = {
        "vernal": f"import jax, time; t = time.process_time(); import vernal.compat as c; c.install(); {libraries}",
        "equinox": f"import jax, time; t = time.process_time(); {libraries}",
    }
    # Without this, every import would compile the sources again; installed packages never do.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    taken: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for _ in range(5):
        for system in SYSTEMS:
            code = starts[system] + "; print(time.process_time() - t)"
            command = [sys.executable, "-W", "ignore", "-c", code]
            run = subprocess.run(
                command, capture_output=True, text=True, check=True, env=environment
            )
            taken[system].append(float(run.stdout))
    return [min(taken[system]) for system in SYSTEMS]


def measure(workers: list[Worker], name: str) -> tuple[list[float], list[float]]:
    """Seconds of a call, and of tracing and compiling, on each."""
    compiling = [[worker.ask("compile", name) for worker in workers] for _ in range(COMPILES)]
    number = max(1, round(0.02 / workers[-1].ask("call", name, 5)))
    calls = []
    for i in range(ROUNDS):
        turn = workers if i % 2 else workers[::-1]
        taken = {worker: worker.ask("call", name, number) for worker in turn}
        calls.append([taken[worker] for worker in workers])
    least, compiled = (
        [min(column) for column in zip(*rows, strict=True)] for rows in (calls, compiling)
    )
    return least, compiled


def main() -> int:
    start = time.perf_counter()
    print(f"\nLibraries built on Equinox (JAX {jax.__version__}, CPU; processor time, minima)\n")
    print("| | call, Vernal | call, Equinox | ratio | trace + compile: Vernal | Equinox | ratio |")
    print("|---|---|---|---|---|---|---|")
    workers, missed = [Worker(system) for system in SYSTEMS], []
    for name in NAMES:
        (ours, theirs), (compile_ours, compile_theirs) = measure(workers, name)
        ratio, compile_ratio = ours / theirs, compile_ours / compile_theirs
        print(
            f"| {name} | {ours * 1e6:.0f} us | {theirs * 1e6:.0f} us | {ratio:.2f} | {compile_ours:.2f} s "
            f"| {compile_theirs:.2f} s | {compile_ratio:.2f} |",
            flush=True,
        )
        if ratio > CALL_BAR:
            missed.append(f"{name}: a call takes {ratio:.2f} > {CALL_BAR}")
        if compile_ratio > COMPILE_BAR:
            missed.append(f"{name}: compiling takes {compile_ratio:.2f} > {COMPILE_BAR}")
    ours, theirs = imports()
    print(
        f"\nImporting Diffrax, Lineax and Optimistix, after JAX: {ours:.2f} s on Vernal, "
        f"{theirs:.2f} s on Equinox: {ours / theirs:.2f}"
    )
    if ours / theirs > IMPORT_BAR:
        missed.append(f"importing takes {ours / theirs:.2f} > {IMPORT_BAR}")
    print(f"\n({time.perf_counter() - start:.0f} s)")
    print("\n" + ("\n".join(f"MISSED: {text}" for text in missed) or "All bars are met."))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
