"""Happens-before race detection with vector clocks.

Every warp and every asynchronous operation in flight is an *entity*: a column of the vector clocks. A warp's clock is
an array of shape (3, entities): row 0 is what happened before; rows 1 and 2 are what happened before *and* has been
made visible to the async proxy (``fence.proxy.async``), for shared and for global memory. Synchronisation joins clocks
by an elementwise maximum. A :class:`Shadow` keeps, per 4-byte granule, the last write (entity, clock, flags) and each
entity's last read, and raises :class:`RaceError` for two accesses that the clocks do not order.

Asynchronous operations take a column for their lifetime. A column is used again only by an operation whose issuer has
already synchronised with the column's last operation, so that no false order appears.
"""

from __future__ import annotations

import numpy as np

from .errors import MemoryFault, RaceError

ORDER, PROXY_SHARED, PROXY_GLOBAL = 0, 1, 2
GENERIC, ASYNC, STRONG = 0, 1, 2  # flags of an access: ASYNC proxy, STRONG = atomic or ordered by its own semantics
GRANULE = 4


class Columns:
    """Hands out the columns of the vector clocks. ``names`` describes the current owner of each for reports."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.names: list[str] = ["initial contents"]
        self.clock = np.zeros(capacity, np.int32)
        self.free_warps: list[int] = []
        self.slots: list[int] = []
        self.busy: set[int] = set()
        self.tick_of: dict[int, int] = {}

    def _new(self, name: str) -> int | None:
        if len(self.names) >= self.capacity:
            return None
        self.names.append(name)
        return len(self.names) - 1

    def warp(self, name: str) -> int:
        if self.free_warps:
            column = self.free_warps.pop()
            self.names[column] = name
        else:
            found = self._new(name)
            if found is None:
                raise MemoryFault("emulator: more warps than clock columns")
            column = found
        self.clock[column] += 1
        return column

    def operation(self, name: str, issuer: np.ndarray) -> int:
        """A column for an asynchronous operation issued by a warp whose clock is ``issuer``."""
        row = issuer[ORDER]
        chosen = None
        for column in self.slots:
            if column not in self.busy and row[column] >= self.clock[column]:
                chosen = column
                break
        if chosen is None:
            chosen = self._new(name)
            if chosen is not None:
                self.slots.append(chosen)
            else:  # out of columns: share the least recently used one (may hide a race, never invents one)
                idle = [c for c in self.slots if c not in self.busy] or self.slots
                chosen = min(idle, key=lambda c: self.tick_of.get(c, 0))
        self.names[chosen] = name
        self.busy.add(chosen)
        self.clock[chosen] += 1
        self.tick_of[chosen] = int(self.clock[chosen])
        return chosen

    def done(self, column: int) -> None:
        self.busy.discard(column)


class Accessor:
    """Who accesses memory: its column, its clock, the text for reports."""

    __slots__ = ("clock", "column", "describe", "flags")

    def __init__(self, column: int, clock: np.ndarray, flags: int, describe):
        self.column, self.clock, self.flags, self.describe = column, clock, flags, describe


class Shadow:
    """Access history of one memory region. Indices are granules: a slice or an integer array."""

    def __init__(self, name: str, size: int, columns: Columns, proxy_row: int, check_unwritten: bool):
        count = -(-size // GRANULE)
        self.name, self.columns, self.proxy_row = name, columns, proxy_row
        self.check_unwritten = check_unwritten
        self.writer = np.zeros(count, np.int32)
        self.write_clock = np.zeros(count, np.int32)
        self.write_flags = np.zeros(count, np.uint8)
        self.write_line = np.zeros(count, np.int32)
        self.readers: dict[int, np.ndarray] = {}
        self.read_lines: dict[int, int] = {}

    def mark_written(self, index) -> None:
        """Memory that the host or an initialising instruction wrote before anybody could race with it."""
        self.write_flags[index] |= 4

    def _ordered_writes(self, index, who: Accessor) -> None:
        writer, clock = self.writer[index], self.write_clock[index]
        row = who.clock[self.proxy_row if who.flags & ASYNC else ORDER]
        bad = clock > row[writer]
        if not bad.any():
            return
        flags = self.write_flags[index]
        if who.flags & ASYNC:  # writes by the async proxy need no proxy fence
            bad &= ~((flags & ASYNC).astype(bool) & (clock <= who.clock[ORDER][writer]))
        if who.flags & STRONG:
            bad &= (flags & STRONG) == 0
        bad &= writer != who.column
        if bad.any():
            at = int(np.flatnonzero(bad.ravel())[0])
            column = int(writer.ravel()[at])
            ordered = clock.ravel()[at] <= who.clock[ORDER][column]
            place = self._place(index, at)
            line = int(self.write_line[place // GRANULE])
            why = "without fence.proxy.async after" if ordered else "not ordered after"
            raise RaceError(
                f"{who.describe()} accesses {self.name}+{place:#x}, {why} the write by "
                f"{self.columns.names[column]} (PTX line {line})"
            )

    def _place(self, index, at: int) -> int:
        if isinstance(index, slice):
            return (index.start + at) * GRANULE
        return int(np.asarray(index).ravel()[at]) * GRANULE

    def read(self, index, who: Accessor, line: int) -> None:
        self._ordered_writes(index, who)
        if self.check_unwritten:
            missing = (self.write_clock[index] == 0) & (self.write_flags[index] & 4 == 0)
            if missing.any():
                place = self._place(index, int(np.flatnonzero(missing.ravel())[0]))
                raise MemoryFault(f"{who.describe()} reads {self.name}+{place:#x}, which nobody has written")
        if who.flags & STRONG:
            return
        row = self.readers.get(who.column)
        if row is None:
            row = self.readers[who.column] = np.zeros(len(self.writer), np.int32)
        row[index] = self.columns.clock[who.column]
        self.read_lines[who.column] = line

    def write(self, index, who: Accessor, line: int) -> None:
        self._ordered_writes(index, who)
        order = who.clock[ORDER]
        for column, row in self.readers.items():
            if column != who.column:
                bad = row[index] > order[column]
                if bad.any():
                    place = self._place(index, int(np.flatnonzero(bad.ravel())[0]))
                    raise RaceError(
                        f"{who.describe()} overwrites {self.name}+{place:#x}, not ordered after the read by "
                        f"{self.columns.names[column]} (PTX line about {self.read_lines[column]})"
                    )
        self.writer[index] = who.column
        self.write_clock[index] = self.columns.clock[who.column]
        self.write_flags[index] = who.flags & 3
        self.write_line[index] = line


def join(target: np.ndarray, source: np.ndarray) -> None:
    np.maximum(target, source, out=target)
