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
    """Who accesses memory: its column, its clock, the text for reports; for a warp its clock when its lanes last met
    (``met``)."""

    __slots__ = ("clock", "column", "describe", "flags", "met")

    def __init__(self, column: int, clock: np.ndarray, flags: int, describe):
        self.column, self.clock, self.flags, self.describe = column, clock, flags, describe
        self.met = 0


SEVERAL = -1  # in place of a lane's number: unknown, or more than one


class Shadow:
    """Access history of one memory region. Indices are granules: a slice or an integer array.

    Every write makes a record; ``last`` holds each granule's last record (0: never written). Most accesses find one
    record in all their granules, so the check is a handful of scalar comparisons.
    """

    def __init__(self, name: str, size: int, columns: Columns, proxy_row: int, check_unwritten: bool):
        count = -(-size // GRANULE)
        self.name, self.columns, self.proxy_row = name, columns, proxy_row
        self.check_unwritten = check_unwritten
        self.last = np.zeros(count, np.int32)
        self.records: list[tuple[int, int, int, int, Accessor | None]] = [(0, 0, 0, 0, None)]
        self.readers: dict[int, np.ndarray] = {}
        self.latest: dict[int, tuple[int, int, Accessor]] = {}  # column -> (latest clock, line, who) of its reads
        self.writing_lane = np.full(count, SEVERAL, np.int8)
        self.reading_lanes: dict[int, np.ndarray] = {}  # column -> each granule's last reading lane

    # Lanes of one warp share a column. An access by one lane to what another lane wrote (or read) needs a point in
    # between where the lanes met: a warp barrier or a wider one, or a passed mbarrier.

    def lanes_read(self, index, lanes, who: Accessor, line: int, records: list[int]) -> None:
        """Checks and notes which lane reads which granules. ``lanes``: a number, or an array that broadcasts to
        ``index``; SEVERAL for all lanes; None where no single lane reads a granule (nothing is checked then)."""
        row = self.reading_lanes.get(who.column)
        if row is None:
            row = self.reading_lanes[who.column] = np.full(len(self.last), SEVERAL, np.int8)
        row[index] = SEVERAL if lanes is None else lanes
        for record in () if lanes is None else records:
            column, clock, flags, write_line, _ = self.records[record]
            if column != who.column or clock <= who.met or (flags | who.flags) & (ASYNC | STRONG):
                continue
            writers = self.writing_lane[index]
            bad = (writers != lanes) & (writers != SEVERAL) & (self.last[index] == record)
            if bad.any():
                raise RaceError(
                    f"{who.describe()} reads {self.name}+{self._place(index, record):#x} in another lane than wrote it "
                    f"(PTX line {write_line}), without a barrier between its lanes"
                )

    def lanes_write(self, index, lanes, who: Accessor, line: int) -> None:
        """The same for a write, after :meth:`write`."""
        found = self.latest.get(who.column)
        if found is not None and found[0] > who.met and not who.flags & (ASYNC | STRONG):
            readers = self.reading_lanes[who.column][index]
            recent = self.readers[who.column][index] > who.met
            bad = recent & (readers != SEVERAL) & (readers != lanes)
            if bad.any():
                raise RaceError(
                    f"{who.describe()} overwrites {self.name}+{self._at(index, bad):#x}, which another lane has read "
                    f"(PTX line about {found[1]}), without a barrier between its lanes"
                )
        self.writing_lane[index] = lanes

    def mark_written(self, index) -> None:
        """Memory that the host or an initialising instruction wrote before anybody could race with it."""
        self.records.append((0, 0, 0, 0, None))
        self.last[index] = len(self.records) - 1

    def records_at(self, index) -> list[int]:
        """The distinct records of the granules."""
        found = self.last[index]
        low, high = int(np.minimum.reduce(found, axis=None)), int(np.maximum.reduce(found, axis=None))
        return [low] if low == high else np.unique(found).tolist()

    def _conflict(self, record: int, who: Accessor) -> str | None:
        """Why an access by ``who`` is not ordered after that write, or None."""
        column, clock, flags, line, writer = self.records[record]
        if column == who.column or (flags & STRONG and who.flags & STRONG):
            return None
        ordered = clock <= who.clock[ORDER, column]
        crosses = who.flags & ASYNC and not flags & ASYNC  # writes by the async proxy need no proxy fence
        if ordered and not (crosses and clock > who.clock[self.proxy_row, column]):
            return None
        name = writer.describe() if writer is not None and flags & ASYNC else self.columns.names[column]
        reason = "without fence.proxy.async after" if ordered else "not ordered after"
        return f"{reason} the write by {name} (PTX line {line})"

    def check_writes(self, records: list[int], who: Accessor, index) -> None:
        for record in records:
            why = self._conflict(record, who) if record else None
            if why:
                raise RaceError(f"{who.describe()} accesses {self.name}+{self._place(index, record):#x}, {why}")

    def _place(self, index, record: int) -> int:
        """Byte offset of the first granule whose last record is ``record``."""
        return self._at(index, self.last[index] == record)

    @staticmethod
    def _at(index, chosen: np.ndarray) -> int:
        """Byte offset of the first granule that is chosen."""
        at = int(np.flatnonzero(chosen.ravel())[0])
        if isinstance(index, slice):
            return (index.start + at) * GRANULE
        return int(np.asarray(index).ravel()[at]) * GRANULE

    def read(self, index, who: Accessor, line: int, records: list[int] | None = None) -> list[int]:
        """Checks and notes a read; returns the records found, which may be passed again while nothing is written."""
        if records is None:
            records = self.records_at(index)
        if (
            self.check_unwritten and records[0] == 0 and not who.flags & ASYNC
        ):  # operands may have rows that no one uses
            place = self._place(index, 0)
            raise MemoryFault(f"{who.describe()} reads {self.name}+{place:#x}, which nobody has written")
        self.check_writes(records, who, index)
        if who.flags & STRONG:
            return records
        row = self.readers.get(who.column)
        if row is None:
            row = self.readers[who.column] = np.zeros(len(self.last), np.int32)
        clock = int(who.clock[ORDER, who.column])
        row[index] = clock
        self.latest[who.column] = (clock, line, who)
        return records

    def write(self, index, who: Accessor, line: int) -> None:
        self.check_writes(self.records_at(index), who, index)
        order = who.clock[ORDER]
        for column, (latest, read_line, reader) in self.latest.items():
            seen = order[column]
            if latest > seen and column != who.column:
                row = self.readers[column][index]
                if np.maximum.reduce(row, axis=None) > seen:
                    name = reader.describe() if reader.flags & ASYNC else self.columns.names[column]
                    raise RaceError(
                        f"{who.describe()} overwrites {self.name}+{self._at(index, row > seen):#x}, not ordered after "
                        f"the read by {name} (PTX line about {read_line})"
                    )
        self.records.append((who.column, int(who.clock[ORDER, who.column]), who.flags & 3, line, who))
        self.last[index] = len(self.records) - 1


def join(target: np.ndarray, source: np.ndarray) -> None:
    np.maximum(target, source, out=target)
