"""The processes of one program: how they find each other, and which one is the main process.

The engine is `jax.distributed`. This file adds the settings of `python -m vernal launch`, scripts that run
unchanged as a single process, and the lifeline (`_lifeline.py`).
"""

import os
from collections.abc import Sequence
from typing import Any

import jax

from .._ground import distributed_state
from ..show import message, value_error
from ._lifeline import hold_lifeline

# Set by `python -m vernal launch`.
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
    """Joins this process to the others of a program; each then sees the devices of all.

    Call it once, before anything asks JAX for devices or makes an array. The settings come from:

    1. `python -m vernal launch`, if it has started this process: it sets the environment variables
       `VERNAL_COORDINATOR` (`"host:port"`), `VERNAL_PROCESSES` and `VERNAL_RANK`;
    2. the arguments;
    3. for arguments not given, what `jax.distributed.initialize` detects: Slurm, Open MPI, Kubernetes, Cloud
       TPU, and JAX's environment variables.

    Without any of them the program is this one process, so that a script runs unchanged on a laptop.

    When a process is lost, the others stop at once: they print which one it was, and why if that is
    known, and exit with code 75 ("try again": from the last checkpoint). They also stop, with exit code 1,
    when a process ends, or saves a checkpoint, while others still give batches to `shard_batch`. For that,
    each keeps a connection to process 0. A process that fails by an exception does not wait for the others.
    A process that hangs is noticed after `batch_timeout` seconds. Another loss that does not close the
    connection (a machine without power) is noticed by JAX, after `heartbeat` seconds; its message calls the
    process a *task*, and process 0, which coordinates, *the leader*.

    Args:
        coordinator: `"host:port"`, where the others can reach process 0; the port must be free.
        processes: the number of processes.
        rank: the number of this process, from 0.
        local_devices: the numbers of this machine's accelerators that this process uses. None: as detected,
            or all.
        heartbeat: the seconds without a sign of life after which a process counts as lost.
        timeout: the seconds that a process waits for the others at the beginning, and at the end.
        batch_timeout: the seconds after which a process counts as hanging, which stops all; None: never. From
            its first batch or checkpoint on, it must give the next batch to `shard_batch`, save or end within
            them. So choose more than the longest step takes, with its compilation, and whatever is between
            two batches, such as writing a checkpoint. The message says in which line of the program each
            process is. Only that of process 0 counts.

    Raises:
        ValueError: if the settings are incomplete or contradict each other; this includes arguments that
            differ from the launcher's settings.
        RuntimeError: if JAX has been used already, or the processes were already joined, in another way with
            other settings. (With the same ones, the call does nothing.)

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
    # As a tuple, for comparison: a range is the same devices as the equal list.
    devices = None if local_devices is None else tuple(local_devices)
    given = (*places, devices, heartbeat, timeout, batch_timeout)
    if given in _initialised:
        return
    if _initialised or jax.distributed.is_initialized():
        raise RuntimeError(
            message(
                "the processes were already joined, in another way",
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
    """Whether this is the main process, the one with rank 0. Does not start JAX's devices.

    Use it to guard printing, plotting and writing your own files. Do not put it around anything that the
    processes do together, or the first would wait for the others: computing with arrays of all
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
    """The settings of `python -m vernal launch`; None if it has not started this process."""
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
            "the settings differ from those of the launcher",
            where=_HERE,
            expected=f"{found}, as in {', '.join(names)}",
            got=str(given),
            instead="vernal.sharding.initialise() without arguments, under the launcher",
        )
    return found


def _join(coordinator: str | None, processes: int | None, rank: int | None, **options: Any) -> bool:
    """Joins the processes; returns False if this process is alone."""
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
