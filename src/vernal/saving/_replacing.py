"""Writing a file so that it is there as a whole or not at all.

The new content goes to a temporary file in the same folder, is flushed to the disk, and takes the
name of the old file in one step of the file system. Whatever happens before that step, the old
file is as it was.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator

from ..show import message


def flush(path: str) -> None:
    """Waits until what was written is on the disk. For a folder: until the names in it are."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Gives the name of a temporary file to write, and moves it to `path` when the block ends without an error. A
    symbolic link stays one: the file it points at is replaced. Raises `FileNotFoundError` if there is no such
    folder."""
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
        # A name that is too long is an error now, and not when everything has been written.
        os.stat(target)
    # The longest name is of 255 bytes.
    start = os.path.basename(target)[:50]
    temporary = os.path.join(folder, f"{start}.{uuid.uuid4().hex}.tmp")
    try:
        # Whoever fills it may make it anew, readable for nobody else (safetensors does): the
        # permissions come from here.
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
        # Elsewhere a folder cannot be opened like a file.
        flush(folder)
