"""The folder of checkpoints: its contents, and how checkpoints are added and removed.

    folder/step-00000100/checkpoint.json    the manifest of the checkpoint (see `Manifest`)
    folder/step-00000100/...                its arrays, in the format of its backend
    folder/.unfinished-4f2a...              a checkpoint being written or removed, by a process that may have died
    folder/.lock                            the lock of the process that is writing

A checkpoint is written under an unfinished name, flushed to the disk, and renamed in one atomic step.
To remove it, its name is taken away in one step first. So everything under the name of a checkpoint is
complete.

Writers take turns: each holds an advisory lock, which the system releases when the process dies,
however it does. So the holder may remove everything unfinished.
"""

import json
import os
import re
import shutil
import uuid
import zlib
from typing import Any, NamedTuple

from ..show import value_error
from ._replacing import flush

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_VERSION = 1
_MANIFEST, _LOCK, _UNFINISHED = "checkpoint.json", ".lock", ".unfinished-"
_NAME = re.compile(r"step-(\d{8,})")


class Manifest(NamedTuple):
    """The description stored in a checkpoint.

    Attributes:
        step: its number.
        backend: the writer of its arrays.
        metadata: the user's dictionary.
        about: the backend's own data.
    """

    step: int
    backend: str
    metadata: dict[str, Any]
    about: dict[str, Any]


def checkpoint_path(folder: str, step: int) -> str:
    """The path of the checkpoint of a step."""
    return os.path.join(folder, f"step-{step:08d}")


def steps_in(folder: str) -> list[int]:
    """The steps with a checkpoint, in ascending order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [int(match[1]) for match in map(_NAME.fullmatch, names) if match]
    paths = {step: checkpoint_path(folder, step) for step in found}
    return sorted(s for s, path in paths.items() if os.path.isfile(os.path.join(path, _MANIFEST)))


# --- the manifest


def _crc(content: Any) -> str:
    return f"{zlib.crc32(json.dumps(content).encode()):08x}"


def write_manifest(path: str, manifest: Manifest) -> None:
    """Writes the manifest into the folder of a checkpoint."""
    content = {"version": _VERSION, **manifest._asdict()}
    with open(os.path.join(path, _MANIFEST), "x", encoding="utf-8") as file:
        json.dump({"crc32": _crc(content), **content}, file)


def _checked(raw: bytes) -> dict[str, Any] | None:
    """The manifest as it was written; None if the bytes were changed."""
    try:
        content = json.loads(raw)
        return content if content.pop("crc32") == _crc(content) else None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def read_manifest(path: str) -> Manifest:
    """Reads the manifest from the folder of a checkpoint. Raises `ValueError` if it is damaged, or was written by a
    newer version."""
    with open(os.path.join(path, _MANIFEST), "rb") as file:
        raw = file.read()
    content = _checked(raw)
    if content is None:
        raise damaged(path, f"{_MANIFEST} does not match its checksum")
    if content.pop("version") != _VERSION:
        raise value_error(
            "the checkpoint was written by a newer version of Vernal",
            where=path,
            instead="update Vernal",
        )
    return Manifest(**content)


def damaged(path: str, why: str) -> ValueError:
    """The error for a damaged checkpoint."""
    return value_error(
        "the checkpoint is damaged",
        where=path,
        got=why,
        instead="restore another step, or take another copy of it; nothing was loaded",
    )


# --- turns


def take_turn(folder: str) -> int:
    """Waits until no other process writes into a folder, and cleans up after processes that died. Returns the argument
    for `end_turn`, which any thread may call."""
    turn = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(turn, fcntl.LOCK_EX)
            for name in os.listdir(folder):
                if name.startswith(_UNFINISHED):
                    # If it cannot be removed, it does no harm.
                    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    except BaseException:
        os.close(turn)
        raise
    return turn


def end_turn(turn: int) -> None:
    """Lets other processes write."""
    if fcntl is not None:
        # Closing is not enough if another process was forked meanwhile.
        fcntl.flock(turn, fcntl.LOCK_UN)
    os.close(turn)


# --- in and out


def unfinished_path(folder: str) -> str:
    """A unique name for an unfinished checkpoint."""
    return os.path.join(folder, _UNFINISHED + uuid.uuid4().hex)


def publish(unfinished: str, path: str) -> None:
    """Renames a finished folder to a checkpoint.

    Raises:
        OSError: if the system refuses, or the name is taken.
    """
    for folder, _, files in os.walk(unfinished, topdown=False):
        for name in files:
            flush(os.path.join(folder, name))
        if os.name == "posix":
            flush(folder)
    os.rename(unfinished, path)
    if os.name == "posix":
        flush(os.path.dirname(path))


def remove(path: str) -> None:
    """Removes a checkpoint."""
    unfinished = unfinished_path(os.path.dirname(path))
    os.rename(path, unfinished)
    shutil.rmtree(unfinished)
