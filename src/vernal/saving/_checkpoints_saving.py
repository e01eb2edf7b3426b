"""Saving one checkpoint: it begins in the main thread of every process, and another thread completes
it while the program continues."""

import concurrent.futures.thread  # noqa: F401 (registers what `_wait_at_exit` has to come before)
import functools
import os
import shutil
import threading
import traceback
from collections.abc import Callable
from typing import Any

from ..show import message, value_error
from ._checkpoints_folder import (
    Manifest,
    checkpoint_path,
    end_turn,
    publish,
    steps_in,
    take_turn,
    unfinished_path,
    write_manifest,
)
from ._processes import agree, check_step, from_first, process_index

# Begins to write arrays into a folder. The function that it returns is called in another thread: it
# completes the writing, and returns the data that the reader needs.
Begin = Callable[[str, dict[str, Any]], Callable[[], dict[str, Any]]]


def _refused(path: str, error: Exception) -> OSError:
    return OSError(
        message(
            "the checkpoint could not be saved",
            where=path,
            got=f"{type(error).__name__}: {error}",
            instead="read the error of the system; earlier checkpoints are unchanged",
        )
    )


def _check_step(folder: str, step: int) -> None:
    """Refuses a step that exists already, or that is earlier than the latest: `keep` would remove it at once."""
    path, steps = checkpoint_path(folder, step), steps_in(folder)
    if os.path.lexists(path):
        raise value_error(
            "something exists under the name of this checkpoint already",
            where=path,
            got="a checkpoint" if step in steps else "something that is not a checkpoint of Vernal",
            instead="remove it first, with Checkpoints.remove if it is one; or save to another folder",
        )
    if steps and step < steps[-1]:
        raise value_error(
            "there are checkpoints of later steps",
            where=path,
            expected=f"a step after {steps[-1]}",
            instead="call Checkpoints.remove for the later ones to go on from an earlier one; "
            "or save to another folder",
        )


_under_way: "set[Saving]" = set()


def _finish_all() -> None:
    for saving in tuple(_under_way):
        error = saving.result()
        if error is not None:
            # No caller is left to raise it to.
            traceback.print_exception(error)


@functools.cache
def _wait_at_exit() -> None:
    """Makes Python wait for running saves when the program ends.

    It joins our threads anyway, but only after shutting down the executors of `concurrent.futures`,
    which Orbax needs. That happens by the same hook, which calls its functions in reverse order;
    `atexit` runs later.
    """
    threading._register_atexit(_finish_all)  # pyright: ignore[reportAttributeAccessIssue] (private)


class Saving:
    """A checkpoint that is being saved to a folder.

    Args:
        folder: the folder. It is created if it does not exist.
        step: the step of the checkpoint.

    Raises:
        ValueError: if the step cannot be saved there, or is not the same in every process.
        OSError: if the folder cannot be written.
    """

    def __init__(self, folder: str, step: int):
        self._folder, self._step = folder, step
        self._path = checkpoint_path(folder, step)
        self._turn: int | None = None
        self._error: BaseException | None = None
        check_step(step)
        self._unfinished: str = from_first(self._open)

    def _open(self) -> str:
        try:
            os.makedirs(self._folder, exist_ok=True)
            self._turn = take_turn(self._folder)
            _check_step(self._folder, self._step)
            unfinished = unfinished_path(self._folder)
            os.mkdir(unfinished)
        except BaseException as error:
            self._end_turn()
            if isinstance(error, OSError):
                raise _refused(self._path, error) from error
            raise
        return unfinished

    def _end_turn(self) -> None:
        if self._turn is not None:
            end_turn(self._turn)
            self._turn = None

    def _give_up(self) -> None:
        if process_index() == 0:
            shutil.rmtree(self._unfinished, ignore_errors=True)
        self._end_turn()

    def start(
        self, begin: Begin, leaves: dict[str, Any], manifest: Manifest, after: Callable[[], None]
    ) -> None:
        """Begins to write leaves, by name, which may be donated or changed after the call. The manifest does not have
        the backend's data yet; `after` is called in the first process once the checkpoint is complete."""
        finish, error = None, None
        try:
            finish = begin(self._unfinished, leaves)
        except OSError as caught:
            error = _refused(self._path, caught)
        except BaseException as caught:
            error = caught
        try:
            agree(error)
        except BaseException:
            self._give_up()
            raise
        _wait_at_exit()
        _under_way.add(self)
        self._thread = threading.Thread(target=self._run, args=(finish, manifest, after))
        self._thread.start()

    def _run(
        self, finish: Callable[[], dict[str, Any]], manifest: Manifest, after: Callable[[], None]
    ) -> None:
        try:
            about = finish()
            if process_index() == 0:
                write_manifest(self._unfinished, manifest._replace(about=about))
                publish(self._unfinished, self._path)
        except Exception as error:
            self._error = _refused(self._path, error)
            self._error.__cause__ = error
            self._give_up()
            return
        try:
            if process_index() == 0:
                after()
        except Exception as error:
            self._error = OSError(
                message(
                    "the checkpoint was saved, but an old checkpoint could not be removed",
                    where=self._folder,
                    got=f"{type(error).__name__}: {error}",
                )
            )
            self._error.__cause__ = error
        finally:
            self._end_turn()

    def result(self) -> BaseException | None:
        """Waits for the end, and returns the error, if there was one."""
        self._thread.join()
        _under_way.discard(self)
        return self._error
