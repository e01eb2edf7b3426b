"""Atomic writing of a file.

The new content goes to a temporary file in the same folder, is flushed to the disk, and replaces the
old file by an atomic rename. Whatever happens before the rename, the old file is unchanged.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator

from ..show import message


def flush(path: str) -> None:
    """Waits until the contents of a file are on the disk; for a folder, until the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yields the name of a temporary file to write, and moves it to `path` when the block ends without an error. A
    symbolic link stays a link: the file it points to is replaced. Raises `FileNotFoundError` if the folder does not
    exist."""
    target = os.path.realpath(path)
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            message(
                "the file cannot be written, because its folder does not exist",
                where=os.fspath(path),
                expected=f"a folder {folder}",
                instead="make it first: os.makedirs(os.path.dirname(path), exist_ok=True)",
            )
        )
    with contextlib.suppress(FileNotFoundError):
        # Raises now if the name is too long, not when everything has been written.
        os.stat(target)
    # A name may have at most 255 bytes.
    start = os.path.basename(target)[:50]
    temporary = os.path.join(folder, f"{start}.{uuid.uuid4().hex}.tmp")
    try:
        # The writer may replace the file by one that only the owner can read (safetensors does), so the
        # permissions are taken from this one.
        open(temporary, "xb").close()
        mode = os.stat(target if os.path.exists(target) else temporary).st_mode
        yield temporary
        os.chmod(temporary, mode & 0o7777)
        flush(temporary)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if os.name == "posix":
        # On other systems a folder cannot be opened like a file.
        flush(folder)
