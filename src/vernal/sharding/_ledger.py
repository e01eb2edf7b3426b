"""The ledger, kept by process 0: whether all processes give the same batches, and save at the same steps.

The difficulty: an array of all processes is made of parts, and JAX takes the shape of the whole from the local part.
Processes whose parts differ silently compute with different wholes; a process that has one batch more than the others
waits for them for ever. And comparing at every step would make every step wait.

The solution: each process reports every batch to process 0 and continues. It waits for the verdict only if the batch
differs from its last one. If batches differ between processes, at least one differs from the last of its process: so
that process waits, and the program that would compute with them never runs.

Saving and restoring a checkpoint is reported like a batch, since the processes do it together as well.

Glossary: a *stream* is the processes of one mesh, which give their batches together; a *signature* is the part of a
batch that must be the same in all processes, with a text of it.
"""

import time
from typing import Any, NamedTuple

from ..show import message

Stream = tuple[int, ...]
_WHERE = "vernal.sharding.shard_batch"
_INSTEAD = (
    "vernal.sharding.even_batches pads the last batches of an epoch and makes their number the same"
)


class Signature(NamedTuple):
    """The description of a process's part of a batch.

    Attributes:
        key: what must be the same in every process.
        text: its arrays as text.
    """

    key: str
    text: str


# The signature in the place of that of a batch when a checkpoint is saved or restored.
CHECKPOINT = Signature("checkpoint", "saves or restores a checkpoint")


class Verdict(NamedTuple):
    """The result of a report.

    Attributes:
        agreed: the waiting processes that may continue.
        refusal: why all processes must stop; None if they need not.
    """

    agreed: tuple[int, ...] = ()
    refusal: str | None = None


class _Batch:
    """A batch, or a checkpoint, that some processes have not reported yet. `name` is for messages."""

    def __init__(self, name: str):
        self.name = name
        self.parts: dict[int, Signature] = {}
        self.waiting: list[int] = []
        self.since = time.monotonic()


class Ledger:
    """The reports of all processes.

    Args:
        patience: the seconds after which a process that does not go on stops the program; None: never.

    Attributes:
        ended: the processes that have ended.
        counts: of each process in a stream, the number of reports.
        batches: how many of them were batches.
        last: the signature of the last one.
        open: what some of a stream have not reported yet.
        heard: when each process reported something or ended. It need not go on before its first report.
    """

    def __init__(self, patience: float | int | None = None):
        self.patience = patience
        self.ended: set[int] = set()
        self.heard: dict[int, float] = {}
        self.counts: dict[tuple[Stream, int], int] = {}
        self.batches: dict[tuple[Stream, int], int] = {}
        self.last: dict[tuple[Stream, int], Signature] = {}
        self.open: dict[tuple[Stream, int], _Batch] = {}

    def report(
        self, stream: Stream, rank: int, signature: Signature | None, waits: bool
    ) -> Verdict:
        """Records that a process gives its next batch. A signature of None is that of its last one."""
        place = stream, rank
        self.heard[rank] = time.monotonic()
        number = self.counts[place] = self.counts.get(place, 0) + 1
        if signature is not None:
            self.last[place] = signature
        saves = self.last[place] == CHECKPOINT
        given = self.batches[place] = self.batches.get(place, 0) + (not saves)
        for other in stream:
            if other in self.ended and self.counts.get((stream, other), 0) < number:
                return self._ended(stream, other, rank, self.last[place])
        name = f"part in a checkpoint after batch {given}" if saves else f"batch {given}"
        batch = self.open.setdefault((stream, number), _Batch(name))
        batch.parts[rank] = self.last[place]
        if waits:
            batch.waiting.append(rank)
        if len(batch.parts) < len(stream):
            return Verdict()
        del self.open[stream, number]
        if len({part.key for part in batch.parts.values()}) == 1:
            return Verdict(agreed=tuple(batch.waiting))
        return Verdict(refusal=different_parts(f"call {max(given, 1)}", batch.parts))

    def end(self, rank: int) -> Verdict:
        """Records that a process has ended."""
        self.ended.add(rank)
        self.heard[rank] = time.monotonic()
        for (stream, number), batch in self.open.items():
            if rank in stream and self.counts.get((stream, rank), 0) < number:
                other = min(batch.parts)
                return self._ended(stream, rank, other, batch.parts[other])
        return Verdict()

    def late(self) -> str | None:
        """What a process does not do in time, if there is a limit."""
        if self.patience is None:
            return None
        limit = time.monotonic() - self.patience
        for (stream, _), batch in self.open.items():
            if batch.since < limit:
                missing = [rank for rank in stream if rank not in batch.parts]
                return f"{_names(missing)} gives no {batch.name}"
        late = [rank for rank, at in self.heard.items() if at < limit and rank not in self.ended]
        return f"{_names(sorted(late))} does not go on" if late else None

    def progress(self, rank: int) -> str:
        """How far a process is."""
        given = [count for (_, other), count in self.batches.items() if other == rank]
        ended = "has ended after " if rank in self.ended else ""
        return f"{ended}{sum(given)} batches"

    def _ended(self, stream: Stream, ended: int, rank: int, signature: Signature) -> Verdict:
        count = self.batches.get((stream, ended), 0)
        more = signature.text if signature == CHECKPOINT else "gives one more"
        return Verdict(
            refusal=message(
                f"process {ended} has ended after {count} batches, and process {rank} {more}",
                where=_WHERE,
                expected="as many batches in every process",
                instead=_INSTEAD,
            )
        )


def too_late(problem: str, patience: float | int, places: list[str]) -> str:
    """The message that processes do not go on. `places` are lines of text, one for each process."""
    return message(
        problem,
        where=_WHERE,
        expected=f"the next batch, checkpoint or end within batch_timeout={patience:g} s",
        got="\n".join(places),
        instead="see what each process does; if that only takes long, "
        "vernal.sharding.initialise(batch_timeout=...) gives it longer",
    )


def _names(ranks: list[int]) -> str:
    return f"process {', '.join(map(str, ranks))}"


def different_parts(where: str, parts: dict[int, Any]) -> str:
    """The message that the parts of a batch differ. `parts` are the signatures of the processes."""
    rows = [f"process {rank}: {part.text}" for rank, part in sorted(parts.items())]
    mixed = any(part == CHECKPOINT for part in parts.values())
    return message(
        "a process saves or restores a checkpoint where another gives a batch"
        if mixed
        else "the processes give different parts of a batch",
        where=f"{_WHERE}, {where}",
        expected="arrays of the same names, shapes and dtypes in every process",
        got="\n".join(rows),
        instead=_INSTEAD,
    )
