"""The folder of checkpoints: what is in it, and how something comes into it and goes out of it.

    folder/step-00000100/checkpoint.json    what the checkpoint is (see `Manifest`)
    folder/step-00000100/...                its arrays, as its backend keeps them
    folder/.unfinished-4f2a...              what somebody is writing, or removing, or was when it died
    folder/.lock                            whose turn it is to write

A checkpoint is made under an unfinished name, flushed to the disk, and gets its own name in one step
of the file system; it loses it in one step before anything in it is removed. So whatever has the
name of a checkpoint is a whole one.

Those who write take turns: they hold an advisory lock, which the system takes from them when they
die, however they do. Who holds it may therefore remove everything unfinished.
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
    """What a checkpoint says about itself.

    Attributes:
        step: its number.
        backend: who wrote its arrays.
        metadata: the user's dictionary.
        about: what the backend has to know.
    """

    step: int
    backend: str
    metadata: dict[str, Any]
    about: dict[str, Any]


def checkpoint_path(folder: str, step: int) -> str:
    """Where the checkpoint of a step is."""
    return os.path.join(folder, f"step-{step:08d}")


def steps_in(folder: str) -> list[int]:
    """The steps with a checkpoint, in their order."""
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
    """Writes it into the folder of a checkpoint."""
    content = {"version": _VERSION, **manifest._asdict()}
    with open(os.path.join(path, _MANIFEST), "x", encoding="utf-8") as file:
        json.dump({"crc32": _crc(content), **content}, file)


def _checked(raw: bytes) -> dict[str, Any] | None:
    """What was written; None if this is not it."""
    try:
        content = json.loads(raw)
        return content if content.pop("crc32") == _crc(content) else None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None


def read_manifest(path: str) -> Manifest:
    """Reads it from the folder of a checkpoint. Raises `ValueError` if it is not what was written, or was written
    by a newer version."""
    with open(os.path.join(path, _MANIFEST), "rb") as file:
        raw = file.read()
    content = _checked(raw)
    if content is None:
        raise damaged(path, f"{_MANIFEST} is not what was written")
    if content.pop("version") != _VERSION:
        raise value_error(
            "the checkpoint was written by a newer version of Vernal",
            where=path,
            instead="update Vernal",
        )
    return Manifest(**content)


def damaged(path: str, why: str) -> ValueError:
    """The error for a checkpoint that is not what was written."""
    return value_error(
        "the checkpoint is damaged",
        where=path,
        got=why,
        instead="restore another step, or take another copy of it; nothing was loaded",
    )


# --- turns


def take_turn(folder: str) -> int:
    """Waits until nobody else writes into a folder, and cleans up after those who died. Returns what to give to
    `end_turn`, in whatever thread."""
    turn = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(turn, fcntl.LOCK_EX)
            for name in os.listdir(folder):
                if name.startswith(_UNFINISHED):
                    # If it cannot be removed, it does no harm either.
                    shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    except BaseException:
        os.close(turn)
        raise
    return turn


def end_turn(turn: int) -> None:
    """Lets others write."""
    if fcntl is not None:
        # Closing would not do if another process was forked meanwhile.
        fcntl.flock(turn, fcntl.LOCK_UN)
    os.close(turn)


# --- in and out


def unfinished_path(folder: str) -> str:
    """A name of its own for something unfinished."""
    return os.path.join(folder, _UNFINISHED + uuid.uuid4().hex)


def publish(unfinished: str, path: str) -> None:
    """Makes what is finished a checkpoint.

    Raises:
        OSError: if the system refuses, or something has that name.
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
