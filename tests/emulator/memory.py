"""Memory spaces: byte regions at emulated addresses, with bounds, alignment and race checks.

Global buffers lie at addresses from ``GLOBAL_BASE`` on with guard gaps; kernel parameters in their own region; the
shared memory of CTA rank r of a cluster at shared-window addresses ``r << 24``, and at generic addresses
``SHARED_WINDOW`` above that. The first 1024 bytes of shared memory are reserved, as on sm_90 and later.
"""

from __future__ import annotations

import numpy as np

from .errors import MemoryFault
from .race import GRANULE, SEVERAL, Accessor, Shadow

GLOBAL_BASE = 0x7F0000000000
PARAM_BASE = 0x060000000000
SHARED_WINDOW = 0x0A0000000000
SHARED_RESERVED = 1024
GUARD = 1 << 21
_DTYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Region:
    """A contiguous piece of memory. ``size`` is what may be accessed; storage is padded to 16 bytes."""

    def __init__(self, name: str, base: int, size: int, data: np.ndarray | None = None):
        self.name, self.base, self.size = name, base, size
        self.low = 0
        self.writable = True
        self.shadow: Shadow | None = None
        self.original: np.ndarray | None = None  # the caller's array where storage had to be padded
        if data is None:
            data = np.zeros(-(-size // 16) * 16, np.uint8)
        self.bytes = data
        self._views: dict[tuple[int, int], np.ndarray] = {}
        self.versions: np.ndarray | None = None  # per 4 KiB, counts writes (shared memory only)
        self.tiles: dict = {}  # operand tiles read before, by descriptor, valid for the versions they carry

    def view(self, itemsize: int, vector: int = 1) -> np.ndarray:
        """The storage as unsigned integers, in rows of ``vector`` elements when that is more than one."""
        key = (itemsize, vector)
        found = self._views.get(key)
        if found is None:
            whole = len(self.bytes) // (itemsize * vector) * itemsize * vector
            found = self.bytes[:whole].view(_DTYPES[itemsize])
            if vector > 1:
                found = found.reshape(-1, vector)
            self._views[key] = found
        return found

    def touch(self, offset: int, nbytes: int) -> None:
        """Notes a write, so that operand tiles read earlier are read again."""
        if self.versions is not None:
            self.versions[offset >> 12 : (offset + nbytes - 1 >> 12) + 1] += 1

    def check(self, offsets: np.ndarray, nbytes: int, who, base: int) -> None:
        """Faults unless every byte offset is aligned to ``nbytes`` and in range."""
        if np.count_nonzero(offsets & (nbytes - 1)):
            bad = offsets[(offsets & (nbytes - 1)) != 0][0]
            raise MemoryFault(f"{who()}: address {int(bad) + base:#x} is not aligned to {nbytes} bytes")
        low, high = int(np.minimum.reduce(offsets)), int(np.maximum.reduce(offsets))
        if low < self.low or high + nbytes > self.size:
            bad = low if low < self.low else high
            raise MemoryFault(
                f"{who()}: {nbytes} bytes at offset {bad} are outside {self.name} ({self.low}..{self.size} bytes)"
            )


def granules(offsets: np.ndarray, nbytes: int) -> np.ndarray:
    """Granule numbers of accesses of ``nbytes`` at byte offsets."""
    first = offsets // GRANULE
    if nbytes <= GRANULE:
        return first
    return first[:, None] + np.arange(nbytes // GRANULE)


def by_granule(lanes, index: np.ndarray):
    """Lanes (n,) as an array that broadcasts to granule numbers (n,) or (n, g)."""
    return lanes[:, None] if isinstance(lanes, np.ndarray) and index.ndim == 2 else lanes


class GlobalMemory:
    """The global address space: caller's buffers and module variables."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._next = GLOBAL_BASE
        self._last: Region | None = None

    def add(self, name: str, data: np.ndarray, writable: bool = True) -> Region:
        """Maps a contiguous uint8 array; its length is the bound. Addresses are aligned to 2 MiB."""
        size = len(data)
        if size % 16:
            padded = np.zeros(-(-size // 16) * 16, np.uint8)
            padded[:size] = data
            region = Region(name, self._next, size, padded)
            region.original = data
        else:
            region = Region(name, self._next, size, data)
        region.writable = writable
        self.regions.append(region)
        self._next += -(-(size + GUARD) // GUARD) * GUARD
        return region

    def place(self, region: Region) -> Region:
        self.regions.append(region)
        return region

    def write_back(self) -> None:
        """Copies padded storage back to the callers' arrays."""
        for region in self.regions:
            if region.original is not None and region.writable:
                region.original[:] = region.bytes[: region.size]

    def find(self, address: int, who) -> Region:
        last = self._last
        if last is not None and last.base <= address < last.base + last.size:
            return last
        for region in self.regions:
            if region.base <= address < region.base + region.size:
                self._last = region
                return region
        near = min(self.regions, key=lambda r: abs(address - r.base - r.size // 2), default=None)
        hint = f"; nearest is {near.name}, {near.size} bytes at {near.base:#x}" if near else ""
        raise MemoryFault(f"{who()}: global address {address:#x} is in no buffer{hint}")


def load(
    region: Region, offsets: np.ndarray, itemsize: int, vector: int, who: Accessor, line: int, lanes=None
) -> np.ndarray:
    """Gathers at byte offsets (n,). Returns (vector, n) unsigned integers. ``lanes``: the lane of each offset, SEVERAL
    for one that all active lanes read, None where no single lane reads."""
    nbytes = itemsize * vector
    region.check(offsets, nbytes, who.describe, region.base)
    if region.shadow is not None:
        index = granules(offsets, nbytes)
        records = region.shadow.read(index, who, line)
        lanes = by_granule(lanes, index) if nbytes >= GRANULE else None
        region.shadow.lanes_read(index, lanes, who, line, records)
    if vector == 1:
        return region.view(itemsize)[offsets // itemsize][None]
    return np.ascontiguousarray(region.view(itemsize, vector)[offsets // nbytes].T)


def store(region: Region, offsets: np.ndarray, values: np.ndarray, itemsize: int, who: Accessor, line: int,
          lanes=SEVERAL) -> None:  # fmt: skip
    """Scatters values (vector, n) at byte offsets (n,). ``lanes`` as for :func:`load`."""
    vector = len(values)
    nbytes = itemsize * vector
    region.check(offsets, nbytes, who.describe, region.base)
    if not region.writable:
        raise MemoryFault(f"{who.describe()} writes {region.name}, which is read-only")
    if region.shadow is not None:
        index = granules(offsets, nbytes)
        region.shadow.write(index, who, line)
        region.shadow.lanes_write(index, by_granule(lanes, index) if nbytes >= GRANULE else SEVERAL, who, line)
    if region.versions is not None:
        region.versions[offsets >> 12] += 1
    if vector == 1:
        region.view(itemsize)[offsets // itemsize] = values[0]
    else:
        region.view(itemsize, vector)[offsets // nbytes] = values.T
