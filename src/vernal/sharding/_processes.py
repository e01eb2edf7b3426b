"""The processes of one program: how they find each other, and which of them speaks for all.

The engine is `jax.distributed`. On top of it: the settings of `python -m vernal launch`, a script that
runs unchanged where there is nobody to find, and the lifeline (`_lifeline.py`).
"""

import os
from collections.abc import Sequence
from typing import Any

import jax

from .._ground import distributed_state
from ..show import message, value_error
from ._lifeline import hold_lifeline

# What `python -m vernal launch` sets.
_COORDINATOR, _PROCESSES, _RANK = "VERNAL_COORDINATOR", "VERNAL_PROCESSES", "VERNAL_RANK"
_HERE = "vernal.sharding.initialise"

# The arguments of the first call, once it has succeeded.
_initialised: list[tuple[Any, ...]] = []


def initialise(
    coordinator: str | None = None,
    processes: int | None = None,
    rank: int | None = None,
    *,
    local_devices: Sequence[int] | None = None,
    heartbeat: int = 100,
    timeout: int = 300,
    batch_timeout: float | int | None = None,
) -> None:
    """Makes this process one of the processes of a program, which all see the devices of all.

    To be called once, before anything asks JAX for devices or makes an array. The settings come from:

    1. `python -m vernal launch`, if it has started this process: it sets the environment variables
       `VERNAL_COORDINATOR` (`"host:port"`), `VERNAL_PROCESSES` and `VERNAL_RANK`;
    2. the arguments;
    3. for what is not given, what `jax.distributed.initialize` detects: Slurm, Open MPI, Kubernetes, Cloud
       TPU, and JAX's environment variables.

    Without any of them the program is this one process, so that a script runs unchanged on a laptop.

    A process that is lost stops the others at once: they print which one it was, and why if that is
    known, and end with exit code 75 ("try again": from the last checkpoint). So does a process that ends while
    others go on giving batches to `shard_batch`; the exit code is 1 then. Each keeps a connection to
    process 0 for that. A process that fails by an exception does not wait for the others. What closes
    no connection (a machine without power, a process that hangs) is noticed by JAX, after `heartbeat`
    seconds; its message calls the process a *task*, and process 0, which coordinates, *the leader*.

    Args:
        coordinator: `"host:port"`, where process 0 can be reached by the others; the port is free.
        processes: how many there are.
        rank: the number of this one, from 0.
        local_devices: the numbers of those accelerators of this machine that are this process's. None: as
            detected, or all.
        heartbeat: after how many seconds without a sign of life a process is lost.
        timeout: for how many seconds a process waits for the others at the beginning, and at the end.
        batch_timeout: after how many seconds a process that does not give its next batch to `shard_batch`, when
            another one has, is taken to hang, which stops all; None: never. That of process 0 counts.

    Raises:
        ValueError: if the settings are incomplete or contradict each other, among them arguments that
            are not those of the launcher.
        RuntimeError: if JAX has been used already, or the processes have been joined already with
            other settings. (With the same ones, nothing happens.)

    Example:
        The program `hello.py`, started by `python -m vernal launch --processes 2 hello.py`:

        >>> hello = '''
        ... import jax
        ... from vernal.sharding import initialise, is_main
        ... initialise()
        ... devices = jax.device_count()
        ... if is_main():
        ...     print(f"{jax.process_count()} processes, {devices} devices")
        ... '''
        >>> import pathlib, subprocess, sys, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     script = pathlib.Path(folder, "hello.py")
        ...     _ = script.write_text(hello)
        ...     launch = [sys.executable, "-m", "vernal", "launch", "--processes", "2", str(script)]
        ...     print(subprocess.run(launch, capture_output=True, text=True).stdout)
        [0] 2 processes, 2 devices
    """
    places = (coordinator, processes, rank)
    # As a tuple, to be compared: two equal ranges are the same devices as their list.
    devices = None if local_devices is None else tuple(local_devices)
    given = (*places, devices, heartbeat, timeout, batch_timeout)
    if given in _initialised:
        return
    if _initialised or jax.distributed.is_initialized():
        raise RuntimeError(
            message(
                "the processes have been joined already",
                where=_HERE,
                expected="one call, or several with the same arguments",
                got=f"first {_initialised[0]}, now {given}"
                if _initialised
                else "a call of JAX's own",
                instead="one call of vernal.sharding.initialise, at the beginning of the program",
            )
        )
    places = _from_launcher(places) or places
    joined = _join(
        *places,
        local_device_ids=None if devices is None else list(devices),
        heartbeat_timeout_seconds=heartbeat,
        initialization_timeout=timeout,
        shutdown_timeout_seconds=timeout,
    )
    _initialised.append(given)
    if joined and distributed_state.num_processes > 1:
        hold_lifeline(timeout, batch_timeout)


def is_main() -> bool:
    """Whether this process speaks for all: it has rank 0. Asks no device.

    What is printed, plotted or written to a file of its own belongs behind it. What the processes do
    together does not, or the first would wait for the others: computing with arrays of all
    processes, saving checkpoints, and asking JAX for devices for the first time.

    Returns:
        True in process 0, and in a program of one process.

    Raises:
        RuntimeError: in a process that `python -m vernal launch` has started, before `initialise`.

    Example:
        >>> from vernal.sharding import is_main
        >>> if is_main():
        ...     print("said once")
        said once
    """
    if _RANK in os.environ and not jax.distributed.is_initialized():
        raise RuntimeError(
            message(
                "the rank of this process is not known yet",
                where="vernal.sharding.is_main",
                expected="a call of vernal.sharding.initialise before it",
                got="a process of `python -m vernal launch` that has not joined the others",
                instead="vernal.sharding.initialise() at the beginning of the program",
            )
        )
    return distributed_state.process_id == 0


def _from_launcher(given: tuple[Any, Any, Any]) -> tuple[str, int, int] | None:
    """The settings of `python -m vernal launch`, and None where it has not started this process."""
    names = (_COORDINATOR, _PROCESSES, _RANK)
    texts = [os.environ.get(name) for name in names]
    if texts == [None] * 3:
        return None
    coordinator, processes, rank = texts
    if not (coordinator and (processes or "").isdecimal() and (rank or "").isdecimal()):
        raise value_error(
            "the settings of the launcher are incomplete",
            where="the environment of this process",
            expected=f"{_COORDINATOR}=host:port, {_PROCESSES} and {_RANK} (numbers)",
            got=", ".join(f"{name}={text}" for name, text in zip(names, texts, strict=True)),
            instead="all three, or none of them",
        )
    found = (str(coordinator), int(str(processes)), int(str(rank)))
    if any(here not in (None, there) for here, there in zip(given, found, strict=True)):
        raise value_error(
            "the launcher has other settings than these",
            where=_HERE,
            expected=f"{found}, as in {', '.join(names)}",
            got=str(given),
            instead="vernal.sharding.initialise() without arguments, under the launcher",
        )
    return found


def _join(coordinator: str | None, processes: int | None, rank: int | None, **options: Any) -> bool:
    """Joins the processes; False if there is nobody to join."""
    try:
        jax.distributed.initialize(coordinator, processes, rank, **options)
    except ValueError as error:
        alone = (coordinator, processes, rank) == (None, None, None)
        if alone and "coordinator_address should be defined" in str(error):
            return False
        raise value_error(
            "the processes cannot find each other",
            where=_HERE,
            expected="a cluster that JAX detects, or all of `coordinator`, `processes`, `rank`",
            got=f"coordinator={coordinator!r}, processes={processes}, rank={rank}: {error}",
            instead='initialise("host:1234", processes=2, rank=0)',
        ) from error
    except RuntimeError as error:
        if "must be called before" not in str(error):
            raise
        raise RuntimeError(
            message(
                "JAX was used before the processes were joined",
                where=_HERE,
                expected="a call before anything asks for devices or makes an array",
                got="JAX has chosen its devices, those of this process alone",
                instead="vernal.sharding.initialise() right after the imports",
            )
        ) from error
    return True
