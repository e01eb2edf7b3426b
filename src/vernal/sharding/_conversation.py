"""Lines of JSON through a socket: what the processes of one program say to each other."""

import contextlib
import json
import socket
from typing import Any

# In bytes: how much is read at once, and what a stranger may say.
LONGEST = 2000


class Connection:
    """One end of a connection.

    Args:
        connection: the socket.

    Attributes:
        rank: who is at the other end, once that is known.
        open: whether more may come.
        broken: whether it ended without the death of the other process, such as by a network.
    """

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.rank: int | None = None
        self.open, self.broken = True, False
        self._rest = b""

    def say(self, word: str, what: Any = None) -> None:
        """Sends a line: a word, and what belongs to it. Whoever does not hear it is dead or has left."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps([word, what]).encode() + b"\n")

    def hear(self) -> list[tuple[str, Any]]:
        """Waits until something comes, and returns the lines that are complete."""
        words = b""
        try:
            words = self.socket.recv(LONGEST)
        except ConnectionResetError:
            pass
        except OSError:
            self.broken = True
        self.open = bool(words)
        *lines, self._rest = (self._rest + words).split(b"\n")
        if self.rank is None and len(self._rest) >= LONGEST:
            # A stranger.
            self.open, self.broken = False, True
        return [_read(line) for line in lines]


def _read(line: bytes) -> tuple[str, Any]:
    try:
        word, what = json.loads(line)
    except (ValueError, TypeError):
        return "", None
    return word, what
