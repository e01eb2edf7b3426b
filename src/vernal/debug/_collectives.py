"""The communication between the devices of a compiled program, read from its text: nothing is run.

A collective in the body of a loop runs once for each iteration. XLA annotates loops with their number of iterations if
it knows it; for other loops one iteration is counted, and marked as a lower bound.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from ..show import human_bytes, short, table, type_error

_KINDS = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
_COMPUTATION = re.compile(r"^(ENTRY )?%(\S+) \(.*\{$")
_INSTRUCTION = re.compile(r"^  (?:ROOT )?%\S+ = (\(.*?\)|\S+) ([a-z-]+)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([^\s,)}]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective among groups of one size.

    Attributes:
        kind: `"all-gather"`, `"all-reduce"`, `"reduce-scatter"`, `"all-to-all"` or `"collective-permute"`.
        devices: the number of devices in a group.
        count: how often it runs in one call of the program.
        bytes: the bytes that each device receives by all of them, if a ring (or better) of devices is used.
        at_least: whether some of them are in a loop of unknown length, of which one iteration is counted.
    """

    kind: str
    devices: int
    count: int
    bytes: int
    at_least: bool


@dataclasses.dataclass(frozen=True)
class Collectives:
    """All communication of a compiled program; `print` shows a table.

    Attributes:
        rows: one row for each kind and number of devices, the most bytes first.
    """

    rows: tuple[Collective, ...]

    def count(self, kind: str | None = None) -> int:
        """The number of collectives in a call.

        Args:
            kind: count only this kind.

        Returns:
            The number.
        """
        return sum(row.count for row in self.rows if kind in (None, row.kind))

    def bytes(self, kind: str | None = None) -> int:
        """The number of bytes that each device receives in a call.

        Args:
            kind: count only this kind.

        Returns:
            The number of bytes.
        """
        return sum(row.bytes for row in self.rows if kind in (None, row.kind))

    def __str__(self) -> str:
        if not self.rows:
            return "no communication"
        cells = [
            [row.kind, row.devices, f"{'>= ' * row.at_least}{row.count}", human_bytes(row.bytes)]
            for row in self.rows
        ]
        columns = ["collective", "devices", "times a call", "each receives"]
        footer = ["sum", None, self.count(), human_bytes(self.bytes())]
        return table("communication", columns, cells, footer)


def collectives(compiled: Any) -> Collectives:
    """Lists the communication between the devices of a compiled program in one call.

    For an array of `B` bytes that is sharded over a group of `n` devices, a device receives `B (n - 1) / n` in an
    all-gather, a reduce-scatter or an all-to-all, twice as much in an all-reduce (Patarasuk and Yuan, 2009,
    doi:10.1016/j.jpdc.2008.09.002), and `B` in a permutation.

    On CPUs, XLA does not use reduce-scatter: there, sums of which each device keeps a part are all-reduces.

    Args:
        compiled: a program: `vernal.filter_jit(f).lower(...).compile()`, or the same with `jax.jit`.

    Returns:
        The collectives, by kind and by the number of devices.

    Raises:
        TypeError: for anything that is not a compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from vernal import debug
        >>> mesh = jax.make_mesh((8,), ("data",))
        >>> x = jax.device_put(jnp.ones((8, 128)), jax.NamedSharding(mesh, jax.P("data")))
        >>> found = debug.collectives(jax.jit(lambda x: x.sum(axis=0)).lower(x).compile())
        >>> found.count("all-reduce"), found.bytes("all-reduce")
        (1, 896)
    """
    text = getattr(compiled, "as_text", lambda: None)()
    if not isinstance(text, str) or not text.startswith("HloModule"):
        raise type_error(
            "not a compiled program",
            where="debug.collectives(compiled)",
            expected="what `.lower(...).compile()` returns",
            got=short(compiled),
            instead="debug.collectives(vernal.filter_jit(f).lower(*args).compile())",
        )
    program = _Program(text)
    rows = [Collective(*key, *values) for key, values in program.found().items()]
    return Collectives(tuple(sorted(rows, key=lambda row: (-row.bytes, row.kind, row.devices))))


class _Program:
    """The text of a program, by computations."""

    def __init__(self, text: str):
        self._all = _devices(text)
        self._lines: dict[str, list[str]] = defaultdict(list)
        name = ""
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                name = start[2]
                if start[1]:
                    self._entry = name
            else:
                self._lines[name].append(line)

    def found(self) -> dict[tuple[str, int], tuple[int, int, bool]]:
        """Count, bytes, and whether they are lower bounds, by kind and number of devices."""
        counts: Counter[tuple[str, int]] = Counter()
        sizes: Counter[tuple[str, int]] = Counter()
        unsure: set[tuple[str, int]] = set()
        for kind, devices, received, times, known in self._walk(self._entry, 1, True):
            key = kind, devices
            counts[key] += times
            sizes[key] += times * received
            if not known:
                unsure.add(key)
        return {key: (counts[key], sizes[key], key in unsure) for key in counts}

    def _walk(
        self, name: str, times: int, known: bool
    ) -> Iterator[tuple[str, int, int, int, bool]]:
        for line in self._lines[name]:
            instruction = _INSTRUCTION.match(line)
            if instruction is None:
                continue
            shape, operation = instruction[1], instruction[2]
            kind = operation.removesuffix("-start")
            if kind in _KINDS:
                devices = self._group(line)
                if devices > 1:
                    received = _received(kind, shape, devices, kind != operation)
                    yield kind, devices, received, times, known
                continue
            trips = _TRIPS.search(line) if operation == "while" else None
            inside = times * int(trips[1]) if trips else times
            sure = known and (operation != "while" or trips is not None)
            for one, several in _CALLED.findall(line):
                for called in [one] if one else re.findall(r"%([^\s,]+)", several):
                    yield from self._walk(called, inside, sure)

    def _group(self, line: str) -> int:
        """The number of devices in a group."""
        if "source_target_pairs=" in line:
            return self._all
        text = line.partition("replica_groups=")[2]
        if names := re.match(r"mesh\[([^]]*)\] \{([^}]*)\}", text):
            sizes = dict(re.findall(r"'([^']+)'=(\d+)", names[1]))
            # A part of an axis is written 'a':(size before it)its size.
            used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", names[2])
            return math.prod(int(part or sizes[axis]) for axis, part in used)
        if ranges := re.match(r"\[\d+,(\d+)\]<=", text):
            return int(ranges[1])
        if first := re.match(r"\{\{([\d,]+)\}", text):
            return first[1].count(",") + 1
        return self._all


def _devices(text: str) -> int:
    header = text[: text.index("\n")]
    numbers = [re.search(rf"{name}=(\d+)", header) for name in ("num_partitions", "replica_count")]
    return math.prod(int(n[1]) for n in numbers if n)


def _received(kind: str, shape: str, devices: int, starts: bool) -> int:
    """The bytes that one device receives, from the type of an instruction."""
    if starts and kind in ("all-gather", "collective-permute"):
        # The type of an asynchronous start holds the inputs, then the outputs.
        parts = [_bytes(part) for part in _ARRAY.finditer(shape) if part[1] != "u" or part[3]]
        size = sum(parts[len(parts) // 2 :])
    else:
        size = sum(_bytes(part) for part in _ARRAY.finditer(shape))
    if kind == "collective-permute":
        return size
    # The type of a reduce-scatter is that of one device's part.
    whole = size * devices if kind == "reduce-scatter" else size
    return whole * (devices - 1) * (2 if kind == "all-reduce" else 1) // devices


def _bytes(array: re.Match[str]) -> int:
    bits = 8 if array[1] == "pred" else int(array[2])
    return math.prod(int(n) for n in array[3].split(",") if n) * bits // 8
