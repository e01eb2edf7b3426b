"""Lines of JSON over a socket, by which the processes of a program talk to each other."""

import contextlib
import json
import socket
from typing import Any

# The number of bytes to read at once, and the most that an unknown peer may send.
LONGEST = 2000


class Connection:
    """One end of a connection.

    Args:
        connection: the socket.

    Attributes:
        rank: the process at the other end, once known.
        open: whether more may come.
        broken: whether it ended although the other process did not die, for example by a network failure.
    """

    def __init__(self, connection: socket.socket):
        self.socket = connection
        self.rank: int | None = None
        self.open, self.broken = True, False
        self._rest = b""

    def say(self, word: str, what: Any = None) -> None:
        """Sends a line: a word and its data. Errors are ignored: a process that does not get it is dead or has left."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps([word, what]).encode() + b"\n")

    def hear(self) -> list[tuple[str, Any]]:
        """Waits for data, and returns the complete lines."""
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
            # An unknown peer.
            self.open, self.broken = False, True
        return [_read(line) for line in lines]


def _read(line: bytes) -> tuple[str, Any]:
    try:
        word, what = json.loads(line)
    except (ValueError, TypeError):
        return "", None
    return word, what
