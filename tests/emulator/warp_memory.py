"""Loads, stores and atomics of a warp, in every state space."""

from __future__ import annotations

import numpy as np

from .errors import MemoryFault, UnsupportedError
from .lanes import FULL, bf2, f2, f4, f8, i8, u4, u8
from .memory import GLOBAL_BASE, PARAM_BASE, SHARED_WINDOW, Region, granules, load, store
from .race import SEVERAL, join

_DTYPES = {1: np.uint8, 2: np.uint16, 4: u4, 8: u8}
_LANES = np.arange(32, dtype=np.int8)


class WarpMemory:
    """Memory operations; mixed into Warp. Addresses are ints or uint arrays of 32 lanes, masks bool arrays."""

    def shared_region(self, address: int) -> tuple[Region, int]:
        """The region of a shared-window address and the byte offset in it."""
        rank, offset = address >> 24, address & 0xFFFFFF
        cta = self.cta
        if rank == cta.rank:
            return cta.shared, offset
        if rank >= len(cta.cluster):
            raise MemoryFault(
                f"{self.describe()}: shared address {address:#x} names CTA rank {rank} of {len(cta.cluster)}"
            )
        other = cta.cluster[rank]
        if other.live == 0:
            raise MemoryFault(f"{self.describe()}: access to the shared memory of CTA {other.ctaid}, which has exited")
        return other.shared, offset

    def resolve(self, space: str, address: int) -> tuple[Region, int, int]:
        """(region, offset, base) of one address; generic addresses find their space."""
        if space == "generic":
            if SHARED_WINDOW <= address < SHARED_WINDOW + (1 << 32):
                space, address = "shared", address - SHARED_WINDOW
            elif PARAM_BASE <= address < PARAM_BASE + (1 << 20):
                space = "param"
            else:
                space = "global"
        if space == "shared":
            region, offset = self.shared_region(address)
            return region, offset, address - offset
        if space == "param":
            region = self.machine.param_region
        else:
            region = self.machine.memory.find(address, self.describe)
        return region, address - region.base, region.base

    def _offsets(self, space: str, addresses, mask):
        """Groups active lanes by region: yields (region, lane indices or None for all, byte offsets)."""
        if mask is not FULL:
            lanes_active = np.flatnonzero(mask)
            addresses = addresses[lanes_active]
        else:
            lanes_active = None
        wide = addresses.astype(i8)
        region, offset, _ = self.resolve(space, int(wide[0]))
        offsets = wide - (int(wide[0]) - offset)
        if int(np.minimum.reduce(offsets)) >= 0 and int(np.maximum.reduce(offsets)) < region.size:
            return [(region, lanes_active, offsets)]
        groups: dict[int, tuple[Region, list[int], list[int]]] = {}
        for i, address in enumerate(wide.tolist()):
            region, offset, _ = self.resolve(space, address)
            entry = groups.setdefault(id(region), (region, [], []))
            entry[1].append(i if lanes_active is None else int(lanes_active[i]))
            entry[2].append(offset)
        return [(r, np.array(where), np.array(off)) for r, where, off in groups.values()]

    def ld(self, space: str, address, itemsize: int, vector: int, mask, strong: bool = False) -> np.ndarray:
        """(vector, 32) unsigned integers; lanes that are not active hold anything."""
        who = self.strong if strong else self.generic
        groups = self._offsets(space, address, mask)
        self.loose = self.loose or mask is FULL or np.count_nonzero(mask) > 1
        self.count_access(space, groups, itemsize * vector, "read")
        if len(groups) == 1 and groups[0][1] is None:
            return load(groups[0][0], groups[0][2], itemsize, vector, who, self.line, _LANES)
        out = np.zeros((vector, 32), _DTYPES[itemsize])
        for region, where, offsets in groups:
            out[:, where] = load(region, offsets, itemsize, vector, who, self.line, _LANES if where is None else where)
        return out

    def ld_uniform(self, space: str, address: int, itemsize: int, vector: int, mask, strong: bool = False) -> list[int]:
        """One address for all active lanes: a list of ints."""
        who = self.strong if strong else self.generic
        region, offset, _ = self.resolve(space, address)
        offsets = np.array([offset])
        self.count_access(space, [(region, None, offsets)], itemsize * vector, "read")
        lane = SEVERAL
        if region.shadow is not None and mask is not FULL and np.count_nonzero(mask) == 1:
            lane = int(mask.argmax())
        return [int(v) for v in load(region, offsets, itemsize, vector, who, self.line, lane)[:, 0]]

    def st(self, space: str, address, values: list, itemsize: int, mask, strong: bool = False) -> None:
        """``values``: one array or scalar per vector element."""
        who = self.strong if strong else self.generic
        dtype = _DTYPES[itemsize]
        if isinstance(address, int):  # every lane writes one place: the last active lane wins
            lane = 31 - int(mask[::-1].argmax())
            region, offset, _ = self.resolve(space, address)
            data = np.array([[v[lane] if isinstance(v, np.ndarray) else v] for v in values]).astype(dtype)
            self.count_access(space, [(region, None, np.array([offset]))], itemsize * len(values), "write")
            several = mask is FULL or np.count_nonzero(mask) > 1
            store(region, np.array([offset]), data, itemsize, who, self.line, SEVERAL if several else lane)
            return
        data = np.empty((len(values), 32), dtype)
        for i, v in enumerate(values):
            data[i] = v
        self.loose = self.loose or mask is FULL or np.count_nonzero(mask) > 1
        groups = self._offsets(space, address, mask)
        self.count_access(space, groups, itemsize * len(values), "write")
        for region, where, offsets in groups:
            if where is None:
                store(region, offsets, data, itemsize, who, self.line, _LANES)
            else:
                store(region, offsets, data[:, where], itemsize, who, self.line, where)

    def count_access(self, space: str, groups: list, nbytes: int, kind: str) -> None:
        counters = self.machine.counters
        self.touched = True
        for region, _, offsets in groups:
            name = ("shared_" if region.base < GLOBAL_BASE and region.name[0] == "s" else "global_") + kind
            counters[name] = counters.get(name, 0) + len(offsets) * nbytes

    # ---- local memory ------------------------------------------------------------------------------------------------
    def local_memory(self) -> np.ndarray:
        if self.local is None:
            self.local = np.zeros((32, self.machine.program.local_bytes), np.uint8)
        return self.local

    def ld_local(self, address, itemsize: int, vector: int) -> np.ndarray:
        memory = self.local_memory()
        address = np.broadcast_to(np.asarray(address, i8), 32)
        index = address[:, None] + np.arange(itemsize * vector)
        if index.min() < 0 or index.max() >= memory.shape[1]:
            raise MemoryFault(f"{self.describe()}: local address {int(address[0])} out of range")
        raw = memory[np.arange(32)[:, None], index]
        return np.ascontiguousarray(np.ascontiguousarray(raw).view(_DTYPES[itemsize]).T)

    def st_local(self, address, values: list, itemsize: int, mask) -> None:
        memory = self.local_memory()
        address = np.broadcast_to(np.asarray(address, i8), 32)
        data = np.empty((32, len(values)), _DTYPES[itemsize])
        for i, v in enumerate(values):
            data[:, i] = v
        index = address[:, None] + np.arange(itemsize * len(values))
        if index.min() < 0 or index.max() >= memory.shape[1]:
            raise MemoryFault(f"{self.describe()}: local address {int(address[0])} out of range")
        rows = np.flatnonzero(mask)
        memory[rows[:, None], index[rows]] = data.view(np.uint8)[rows]

    # ---- matrix loads and stores through shared memory ---------------------------------------------------------------
    def ldmatrix(self, address, count: int, transpose: bool, mask) -> np.ndarray:
        """``ldmatrix.m8n8.x<count>.b16``: (count, 32) uint32; lane 8i+r gives the address of row r of matrix i."""
        address = np.broadcast_to(np.asarray(address, np.int64), 32)
        rows = np.zeros((2, 8 * count), u8)
        groups = self._offsets("shared", address[: 8 * count], FULL)
        self.count_access("shared", groups, 16, "read")
        for region, where, offsets in groups:
            rows[:, slice(None) if where is None else where] = load(region, offsets, 8, 2, self.generic, self.line)
        halves = np.ascontiguousarray(rows.T).view(np.uint16).reshape(count, 8, 8)
        if transpose:
            halves = halves.transpose(0, 2, 1)
        return np.ascontiguousarray(halves).view(u4).reshape(count, 32)

    def stmatrix(self, address, values: list, transpose: bool, mask) -> None:
        count = len(values)
        address = np.broadcast_to(np.asarray(address, np.int64), 32)
        halves = np.stack([np.broadcast_to(v, 32) for v in values]).astype(u4).view(np.uint16).reshape(count, 8, 8)
        if transpose:
            halves = halves.transpose(0, 2, 1)
        rows = np.ascontiguousarray(halves).view(u8).reshape(count * 8, 2)
        for region, _, offsets in self._offsets("shared", address[: 8 * count], FULL):
            self.count_access("shared", [(region, None, offsets)], 16, "write")
            store(region, offsets, np.ascontiguousarray(rows.T), 8, self.generic, self.line)

    # ---- atomics -----------------------------------------------------------------------------------------------------
    def atomic(self, space: str, address, operation: str, kind: str, values: list, mask, order: str) -> np.ndarray:
        """``atom``/``red``: lanes one after the other. ``values``: per operand an array or scalar (for vectors: list).

        Returns (vector, 32) old values as unsigned integers. ``order``: relaxed, acquire, release or acq_rel.
        """
        itemsize = {"16": 2, "32": 4, "64": 8}[kind.lstrip("busf")[:2]] if kind[-2:] != "x2" else 4
        dtype = _DTYPES[itemsize]
        vector = values[0] if isinstance(values[0], list) else [values[0]]
        extra = values[1] if len(values) > 1 else None
        addresses = np.broadcast_to(np.asarray(address, i8), 32)
        arrays = [np.broadcast_to(np.asarray(v, dtype), 32) for v in vector]
        extra = None if extra is None else np.broadcast_to(np.asarray(extra, dtype), 32)
        if order in ("release", "acq_rel"):
            self.release_to(space, addresses, mask, self.clocks)
            self.tick()
        elif self.fence_clock is not None:
            self.release_to(space, addresses, mask, self.fence_clock)
        old = np.zeros((len(arrays), 32), dtype)
        self.machine.progress += 1
        for lane in np.flatnonzero(mask):
            region, offset, base = self.resolve(space, int(addresses[lane]))
            where = np.array([offset])
            region.check(where, itemsize * len(arrays), self.describe, base)
            if region.shadow is not None:
                region.shadow.write(granules(where, itemsize * len(arrays)), self.strong, self.line)
            region.touch(offset, itemsize * len(arrays))
            view = region.view(itemsize)
            for i, array in enumerate(arrays):
                at = offset // itemsize + i
                current = view[at]
                old[i, lane] = current
                view[at] = combine(operation, kind, current, array[lane], None if extra is None else extra[lane])
        self.machine.count("atomic_bytes", int(mask.sum()) * itemsize * len(arrays))
        if order in ("acquire", "acq_rel"):
            self.acquire_from(space, addresses, mask)
        else:
            self.note_acquire(space, addresses, mask)
        return old

    # ---- order through memory ----------------------------------------------------------------------------------------
    def _sync_keys(self, space: str, addresses, mask):
        if isinstance(addresses, int):
            addresses = [addresses]
        else:
            addresses = {int(a) for a in np.asarray(addresses)[mask]}
        for address in addresses:
            region, offset, _base = self.resolve(space, address)
            yield (id(region), offset)

    def release_to(self, space: str, addresses, mask, clocks) -> None:
        table = self.machine.sync_clocks
        for key in self._sync_keys(space, addresses, mask):
            found = table.get(key)
            if found is None:
                table[key] = clocks.copy()
            else:
                join(found, clocks)

    def acquire_from(self, space: str, addresses, mask) -> None:
        table = self.machine.sync_clocks
        for key in self._sync_keys(space, addresses, mask):
            found = table.get(key)
            if found is not None:
                join(self.clocks, found)

    def note_acquire(self, space: str, addresses, mask) -> None:
        """A relaxed read: takes effect as an acquire at the next fence."""
        table = self.machine.sync_clocks
        if not table:
            return
        for key in self._sync_keys(space, addresses, mask):
            found = table.get(key)
            if found is not None:
                if self.pending_acquire is None:
                    self.pending_acquire = found.copy()
                else:
                    join(self.pending_acquire, found)


def combine(operation: str, kind: str, old, value, other=None):
    """One atomic update on unsigned representations of type ``kind``; returns the new representation."""
    dtype = old.dtype.type
    if kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        real = {"f32": f4, "f64": f8, "f16": f2, "f16x2": f2, "bf16": bf2, "bf16x2": bf2}[kind]
        a, b = np.asarray(old).reshape(1).view(real), np.asarray(value).reshape(1).view(real)
        if operation == "add":
            result = (a.astype(f8) + b.astype(f8)).astype(f4).astype(real) if real in (bf2, f2) else a + b
        elif operation in ("min", "max"):
            result = (np.fmin if operation == "min" else np.fmax)(a.astype(f8), b.astype(f8)).astype(real)
        elif operation == "exch":
            return value
        else:
            raise UnsupportedError(f"atomic {operation} on {kind}")
        return result.view(dtype)[0]
    bits = old.dtype.itemsize * 8
    mask = (1 << bits) - 1
    a, b = int(old), int(value)
    if kind[0] == "s" and operation in ("min", "max"):
        sign = 1 << (bits - 1)
        return dtype((min if operation == "min" else max)(a, b, key=lambda v: v - (v & sign) * 2))
    table = {
        "add": lambda: a + b, "min": lambda: min(a, b), "max": lambda: max(a, b), "and": lambda: a & b,
        "or": lambda: a | b, "xor": lambda: a ^ b, "exch": lambda: b,
        "inc": lambda: 0 if a >= b else a + 1, "dec": lambda: b if a == 0 or a > b else a - 1,
        "cas": lambda: int(other) if a == b else a,
    }  # fmt: skip
    if operation not in table:
        raise UnsupportedError(f"atomic {operation}")
    return dtype(table[operation]() & mask)
