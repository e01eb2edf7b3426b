"""The ledger, kept by process 0: whether all processes give the same batches.

The difficulty: an array of all processes is made of parts, and JAX takes the shape of the whole from the local part.
Processes whose parts differ silently compute with different wholes; a process that has one batch more than the others
waits for them for ever. And comparing at every step would make every step wait.

The solution: each process reports every batch to process 0 and continues. It waits for the verdict only if the batch
differs from its last one. If batches differ between processes, at least one differs from the last of its process: so
that process waits, and the program that would compute with them never runs.

Glossary: a *stream* is the processes of one mesh, which give their batches together; a *signature* is the part of a
batch that must be the same in all processes, with a text of it.
"""

import time
from typing import Any, NamedTuple

from ..show import message

Stream = tuple[int, ...]
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


class Verdict(NamedTuple):
    """The result of a report.

    Attributes:
        agreed: the waiting processes that may continue.
        refusal: why all processes must stop; None if they need not.
    """

    agreed: tuple[int, ...] = ()
    refusal: str | None = None


class _Batch:
    """A batch that some processes have not reported yet."""

    def __init__(self):
        self.parts: dict[int, Signature] = {}
        self.waiting: list[int] = []
        self.since = time.monotonic()


class Ledger:
    """The reports of all processes.

    Args:
        patience: the seconds after which an incomplete batch stops the program; None: never.
    """

    def __init__(self, patience: float | int | None = None):
        self.patience = patience
        self.ended: set[int] = set()
        self.counts: dict[tuple[Stream, int], int] = {}
        self.last: dict[tuple[Stream, int], Signature] = {}
        self.open: dict[tuple[Stream, int], _Batch] = {}

    def report(
        self, stream: Stream, rank: int, signature: Signature | None, waits: bool
    ) -> Verdict:
        """Records that a process gives its next batch. A signature of None is that of its last one."""
        place = stream, rank
        number = self.counts[place] = self.counts.get(place, 0) + 1
        if signature is not None:
            self.last[place] = signature
        for other in stream:
            if other in self.ended and self.counts.get((stream, other), 0) < number:
                return self._ended(stream, other, rank)
        batch = self.open.setdefault((stream, number), _Batch())
        batch.parts[rank] = self.last[place]
        if waits:
            batch.waiting.append(rank)
        if len(batch.parts) < len(stream):
            return Verdict()
        del self.open[stream, number]
        if len({part.key for part in batch.parts.values()}) == 1:
            return Verdict(agreed=tuple(batch.waiting))
        return Verdict(refusal=different_parts(f"call {number}", batch.parts))

    def end(self, rank: int) -> Verdict:
        """Records that a process has ended."""
        self.ended.add(rank)
        for (stream, number), batch in self.open.items():
            if rank in stream and self.counts.get((stream, rank), 0) < number:
                return self._ended(stream, rank, min(batch.parts))
        return Verdict()

    def late(self) -> Verdict:
        """Checks whether a process is late with its batch."""
        now = time.monotonic()
        for (stream, number), batch in self.open.items():
            if self.patience is not None and now - batch.since > self.patience:
                missing = [rank for rank in stream if rank not in batch.parts]
                return Verdict(
                    refusal=message(
                        f"process {', '.join(map(str, missing))} gives no batch {number}",
                        where="vernal.sharding.shard_batch",
                        expected=f"a batch within {self.patience:g} s after process {min(batch.parts)}",
                        instead="if it is only slow, vernal.sharding.initialise(batch_timeout=...) gives it longer",
                    )
                )
        return Verdict()

    def _ended(self, stream: Stream, ended: int, rank: int) -> Verdict:
        count = self.counts.get((stream, ended), 0)
        return Verdict(
            refusal=message(
                f"process {ended} has ended after {count} batches, and process {rank} gives one more",
                where="vernal.sharding.shard_batch",
                expected="as many batches in every process",
                instead=_INSTEAD,
            )
        )


def different_parts(where: str, parts: dict[int, Any]) -> str:
    """The message that the parts of a batch differ. `parts` are the signatures of the processes."""
    rows = [f"process {rank}: {part.text}" for rank, part in sorted(parts.items())]
    return message(
        "the processes give different parts of a batch",
        where=f"vernal.sharding.shard_batch, {where}",
        expected="arrays of the same names, shapes and dtypes in every process",
        got="\n".join(rows),
        instead=_INSTEAD,
    )
