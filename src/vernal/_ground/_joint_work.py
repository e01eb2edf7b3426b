"""What all processes of a program do together is announced before it is done, to whoever watches over them.

The processes of one program save a checkpoint together (`saving`), and are watched while they do (`sharding`): two
rooms that do not know each other.
"""

from collections.abc import Callable

_watchers: list[Callable[[], None]] = []


def on_joint_work(watch: Callable[[], None]) -> None:
    """Registers a function that is called before each joint work. It may raise, if not all processes take part."""
    _watchers.append(watch)


def announce_joint_work() -> None:
    """Announces work that waits for all processes."""
    for watch in _watchers:
        watch()
