"""`Checkpoints`: saves the states of a training run to a folder while the run continues."""

import copy
import importlib.util
import math
import operator
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeVar, overload

from ..show import message, short, value_error
from . import _checkpoints_orbax, _checkpoints_safetensors
from ._checkpoints_folder import (
    Manifest,
    checkpoint_path,
    end_turn,
    read_manifest,
    remove,
    steps_in,
    take_turn,
)
from ._checkpoints_saving import Begin, Saving
from ._fitting import Store, fill
from ._named import check_plain, data_of
from ._processes import agree, check_alike, from_first
from ._report import LoadReport
from ._torch_rules import Rules

_T = TypeVar("_T")


class _Backend(NamedTuple):
    begin: Begin
    open: Callable[[str, dict[str, Any]], Store]


_BACKENDS = {
    "orbax": _Backend(_checkpoints_orbax.begin, _checkpoints_orbax.OrbaxStore),
    "safetensors": _Backend(_checkpoints_safetensors.begin, _checkpoints_safetensors.open_store),
}
_BEST = {"lowest": 1.0, "highest": -1.0}


def _bad(argument: str, expected: str, got: Any, instead: str | None = None) -> ValueError:
    return value_error(
        f"the argument {argument} cannot be used",
        where="Checkpoints",
        expected=expected,
        got=short(got),
        instead=instead,
    )


def _has_orbax() -> bool:
    # `orbax` is a namespace of several packages.
    return bool(importlib.util.find_spec("orbax") and importlib.util.find_spec("orbax.checkpoint"))


class Checkpoints:
    """The checkpoints of a run in a folder: saved in the background, and atomic.

    A checkpoint is one tree: model, optimiser state, random keys (typed ones too), the position in
    the data, whatever the run needs to continue. Its leaves are stored by name, as by `save`, with
    `metadata` beside them. It is written under a temporary name, flushed to the disk and then renamed,
    and only then are older ones removed: whenever the program or the machine dies, every checkpoint in
    the folder is complete. Checksums detect later damage. Nothing is pickled.

    `save` copies the arrays and returns. Another thread writes them, so the run may continue, and
    change and donate them. Only one save runs at a time: the next one, `wait` and the end of a `with`
    block wait for it, and raise its error. Programs that save to the same folder take turns (not on
    Windows).

    With several processes (`jax.distributed`), every process calls the same methods with the same
    arguments, and the folder must be visible to all of them. An array that is sharded over them is
    written in pieces by Orbax; for safetensors, it is gathered whole first. Other leaves are written
    once, and must be the same in all processes.

    Args:
        folder: the folder of the checkpoints. The first save creates it.
        keep: how many of the latest checkpoints to keep; None keeps all. The best is always kept.
        every: `save` skips steps that are not multiples of this.
        best: the name of a number in `metadata` that says how good a checkpoint is, such as
            `"loss"`. Every save must give it. NaN is never the best.
        best_is: "lowest" (the default) or "highest".
        backend: the writer of the arrays, "orbax" or "safetensors". Default: Orbax if it is installed.
            A checkpoint records which of them wrote it.

    Raises:
        ValueError: if an argument cannot be used.

    Example:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp
        >>> from vernal.saving import Checkpoints
        >>> folder = tempfile.mkdtemp()
        >>> state = {"weight": jnp.zeros(2), "key": jax.random.key(0), "step": 0}
        >>> with Checkpoints(folder, keep=2, best="loss", backend="safetensors") as checkpoints:
        ...     for step in range(1, 6):
        ...         state = {**state, "weight": state["weight"] + 1.0, "step": step}
        ...         saved = checkpoints.save(step, state, metadata={"loss": abs(step - 2.5)})
        >>> checkpoints.steps, checkpoints.latest, checkpoints.best
        ([2, 4, 5], 5, 2)
        >>> state = checkpoints.restore(like=state)
        >>> state["step"], state["weight"]
        (5, Array([5., 5.], dtype=float32))
        >>> checkpoints.metadata(checkpoints.best)
        {'loss': 0.5}
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int | None = None,
        best: str | None = None,
        best_is: str | None = None,
        backend: str | None = None,
    ):
        if keep is not None and keep < 1:
            raise _bad("keep", "a number from 1 on, or None for all", keep)
        if every is not None and every < 1:
            raise _bad("every", "a number from 1 on, or None for every step", every)
        if best_is is not None and best is None:
            raise _bad("best_is", "nothing, without `best`", best_is, 'add best="loss" or the like')
        if best_is not in (None, *_BEST):
            raise _bad("best_is", " or ".join(map(repr, _BEST)), best_is)
        if backend not in (None, *_BACKENDS):
            raise _bad("backend", " or ".join(map(repr, _BACKENDS)), backend)
        self.folder = os.path.abspath(folder)
        self._keep, self._every = keep, every
        self._best, self._sign = best, _BEST[best_is or "lowest"]
        self._backend = backend or ("orbax" if _has_orbax() else "safetensors")
        self._saving: Saving | None = None

    # --- the checkpoints in the folder

    @property
    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in ascending order."""
        return steps_in(self.folder)

    @property
    def latest(self) -> int | None:
        """The last step with a complete checkpoint; None if there is none."""
        return max(self.steps, default=None)

    @property
    def best(self) -> int | None:
        """The step of the best checkpoint, the earliest of equals; None if there is none.

        Raises:
            ValueError: if `best` was not given.
        """
        if self._best is None:
            raise _bad("best", "what to look for", None, 'Checkpoints(folder, best="loss")')
        scores = {step: self._score(step, self._best) for step in self.steps}
        return min(scores, key=scores.__getitem__, default=None)

    def _score(self, step: int, name: str) -> float:
        """How good a checkpoint is: the lower, the better."""
        try:
            value = self._manifest(step).metadata.get(name)
        except ValueError:
            # Restoring a damaged checkpoint raises. Saving must go on.
            return math.inf
        score = self._sign * value if isinstance(value, int | float) else math.inf
        return math.inf if math.isnan(score) else score

    def metadata(self, step: int | None = None) -> dict[str, Any]:
        """Reads the metadata of a checkpoint, without its arrays.

        Args:
            step: the step of the checkpoint. Default: the latest.

        Returns:
            The `metadata` given to `save`. Tuples come back as lists.

        Raises:
            FileNotFoundError: if there is no such checkpoint.
            ValueError: if it is damaged.
        """
        return self._manifest(self._existing(step)).metadata

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if not steps or (step is not None and step not in steps):
            raise FileNotFoundError(
                message(
                    f"there is no checkpoint{'' if step is None else f' of step {step}'}",
                    where=self.folder,
                    got=f"checkpoints of the steps {', '.join(map(str, steps))}"
                    if steps
                    else "none at all",
                    instead="one of these"
                    if steps
                    else "ask for `latest` first: it is None where a run begins",
                )
            )
        return steps[-1] if step is None else step

    def _manifest(self, step: int) -> Manifest:
        return read_manifest(checkpoint_path(self.folder, step))

    # --- saving

    def save(
        self,
        step: SupportsIndex,
        tree: Any,
        *,
        metadata: dict[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a checkpoint in the background.

        Args:
            step: the step number (an int of any kind), higher than that of every checkpoint in the folder.
            tree: everything the run needs to continue. Stores the same leaves as `vernal.saving.save`.
                After the call, its arrays may be changed and donated.
            metadata: anything JSON can hold. It may be changed after the call, too.
            force: saves a step that `every` would skip: the last one of a run.

        Returns:
            Whether it saves this step.

        Raises:
            ValueError: if the folder has this step or a later one already, or another process saves a different step;
                if `metadata` has no number for `best`; if the elements of a leaf cannot be read, or are not the same
                in every process; if a leaf is absent or of another shape or dtype in one of them.
            TypeError: if a leaf cannot be stored, or `metadata` is not JSON.
            OSError: if the folder cannot be written; or if the previous save failed. The checkpoints
                in the folder are unchanged.
            ImportError: if Orbax is asked for and not installed.
        """
        step = operator.index(step)
        if step < 0:
            raise _bad("step", "a number from 0 on", step)
        if self._every is not None and step % self._every and not force:
            return False
        check_plain(metadata or {}, "metadata")
        # The other thread writes it while the caller may change it (a list of losses).
        metadata = copy.deepcopy(metadata or {})
        if self._best is not None and type(metadata.get(self._best)) not in (int, float):
            raise value_error(
                f"the metadata has no number for {self._best!r}",
                where=f"save({step}, ...)",
                expected="a number that says how good the checkpoint is, because `best` asks for it",
                got=short(metadata),
                instead=f"metadata={{{self._best!r}: float(...)}}",
            )
        self.wait()
        leaves = data_of(tree)
        check_alike(leaves)
        saving = Saving(self.folder, step)
        manifest = Manifest(step, self._backend, metadata, {})
        saving.start(_BACKENDS[self._backend].begin, leaves, manifest, self._remove_old)
        self._saving = saving
        return True

    def _remove_old(self) -> None:
        steps = self.steps
        kept = {*(steps[-self._keep :] if self._keep else steps), self.best if self._best else None}
        for step in steps:
            if step not in kept:
                remove(checkpoint_path(self.folder, step))

    def wait(self) -> None:
        """Waits until the last save is on the disk, in all processes.

        Raises:
            OSError: if the save failed.
            RuntimeError: if another process could not save its part.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            agree(saving.result())

    def remove(self, step: int) -> None:
        """Removes a checkpoint, for example to continue from an earlier one.

        Args:
            step: the step of the checkpoint.

        Raises:
            FileNotFoundError: if there is no such checkpoint.
            OSError: if it cannot be removed.
        """
        self.wait()
        from_first(lambda: self._remove(step))

    def _remove(self, step: int) -> None:
        path = checkpoint_path(self.folder, self._existing(step))
        turn = take_turn(self.folder)
        try:
            remove(path)
        finally:
            end_turn(turn)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.wait()
        elif self._saving is not None:
            # Other processes may not get here: this one does not wait for them.
            failed = self._saving.result()
            if failed is not None:
                error.add_note(f"Besides, a checkpoint was lost: {failed}")

    # --- restoring

    @overload
    def restore(
        self,
        like: _T,
        step: int | None = None,
        *,
        strict: Literal[True] = True,
        rename: Rules | None = None,
        cast: bool = False,
    ) -> _T: ...

    @overload
    def restore(
        self,
        like: _T,
        step: int | None = None,
        *,
        strict: Literal[False],
        rename: Rules | None = None,
        cast: bool = False,
    ) -> tuple[_T, LoadReport]: ...

    def restore(
        self,
        like: Any,
        step: int | None = None,
        *,
        strict: bool = True,
        rename: Rules | None = None,
        cast: bool = False,
    ) -> Any:
        """Reads a checkpoint into a tree.

        Args:
            like: a tree of the same structure, of arrays or `jax.ShapeDtypeStruct`s, as in
                `vernal.saving.load`. Restored arrays get its shardings, whatever mesh and number of
                processes they were saved from. Everything but data (functions, strings, static
                fields) is taken from it.
            step: the step of the checkpoint. Default: the latest. A damaged checkpoint is an error: an
                older one is never used instead.
            strict: whether the whole checkpoint must fit.
            rename: rules for leaves that had another name or form when they were saved, as in `load`.
            cast: whether to convert floats to the precision of `like`, as in `load`.

        Returns:
            The tree; with `strict=False`, `(tree, report)`.

        Raises:
            FileNotFoundError: if there is no such checkpoint.
            ValueError: if the checkpoint is damaged or does not fit; see `load`.
            TypeError: if `like` has a leaf that cannot be restored.
            ImportError: if Orbax wrote it and is not installed.
        """
        self.wait()
        step = from_first(lambda: self._existing(step))
        assert step is not None
        try:
            manifest = self._manifest(step)
            path = checkpoint_path(self.folder, step)
            store = _BACKENDS[manifest.backend].open(path, manifest.about)
            return fill(store, like, strict, rename, cast)
        except (ValueError, OSError) as error:
            error.add_note(f"Steps in this folder: {', '.join(map(str, self.steps))}")
            raise

    def __repr__(self) -> str:
        steps = self.steps
        found = f"steps {', '.join(map(str, steps))}" if steps else "empty"
        return f"Checkpoints({self.folder!r}: {found})"
