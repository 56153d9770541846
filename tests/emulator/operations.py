"""Asynchronous operations: what they have in common, and the non-tensor bulk copies.

An operation is issued by a warp, sits among the machine's actions, and runs when the adversary picks it. It has its own
column of the vector clocks: its clock is the issuer's at the time of issue. Whoever waits for the operation (through an
mbarrier, or a bulk or wgmma group) joins that clock. Operations that read shared memory and then write global memory
do so in two steps with two columns, because ``wait_group.read`` waits for the first step only.
"""

from __future__ import annotations

import numpy as np

from .errors import MemoryFault, SyncError
from .memory import Region, granules
from .race import ASYNC, GRANULE, ORDER, STRONG, Accessor, join
from .sync import AsyncAction
from .warp_memory import combine


class Operation(AsyncAction):
    """Base of asynchronous operations. ``what`` names it in reports."""

    def __init__(self, warp, what: str):
        self.warp, self.machine, self.cta, self.line, self.what = warp, warp.machine, warp.cta, warp.line, what
        self.done = self.read_done = False
        self.clocks, self.column = self._open(warp.published(warp.issuing))
        self.accessor = Accessor(self.column, self.clocks, ASYNC, self.report)

    def _open(self, source: np.ndarray) -> tuple[np.ndarray, int]:
        columns = self.machine.columns
        column = columns.operation(self.what, self.warp.clocks)
        clocks = source.copy()
        clocks[ORDER, column] = columns.clock[column]
        return clocks, column

    def issue(self) -> None:
        """Hands the operation to the scheduler; the issuer starts a new epoch."""
        self.warp.tick()
        inflight(self.cta).append(self)
        self.machine.start(self)

    def close(self) -> None:
        self.done = self.read_done = True
        self.machine.columns.done(self.column)

    def observe(self, clocks: np.ndarray, reading: bool) -> None:
        """The waiter learns of the operation's completion (or only of its reads)."""
        join(clocks, self.clocks)

    def report(self) -> str:
        warp = self.warp
        return f"{self.what} issued by warp {warp.index} of CTA {warp.cta.ctaid} at PTX line {self.line}"

    def _barrier(self, cta, offset: int):
        barrier = cta.mbarriers.get(offset)
        if barrier is None:
            raise SyncError(f"{self.report()}: no initialised mbarrier at +{offset:#x} of CTA {cta.ctaid}")
        barrier.check_async(self.clocks, self.report)
        return barrier

    def signal(self, cta, offset: int, nbytes: int) -> None:
        """``complete_tx`` on the mbarrier at ``offset`` of a CTA."""
        barrier = self._barrier(cta, offset)
        barrier.complete_tx(nbytes, self.clocks, self.report)
        self.machine.progress += 1
        if barrier.advance():
            self.machine.changed(barrier)

    def arrive(self, cta, offset: int) -> None:
        """One arrival on the mbarrier at ``offset`` of a CTA, publishing the operation's clock."""
        barrier = self._barrier(cta, offset)
        barrier.arrive(1, self.clocks, self.report)
        self.machine.progress += 1
        if barrier.advance():
            self.machine.changed(barrier)

    def read_bytes(self, region: Region, offset: int, nbytes: int) -> np.ndarray:
        self._range(region, offset, nbytes)
        if region.shadow is not None:
            region.shadow.read(slice(offset // GRANULE, -(-(offset + nbytes) // GRANULE)), self.accessor, self.line)
        return region.bytes[offset : offset + nbytes]

    def write_bytes(self, region: Region, offset: int, data: np.ndarray) -> None:
        self._range(region, offset, len(data))
        self._writable(region)
        if region.shadow is not None:
            region.shadow.write(slice(offset // GRANULE, -(-(offset + len(data)) // GRANULE)), self.accessor, self.line)
        region.bytes[offset : offset + len(data)] = data
        region.touch(offset, len(data))

    def _writable(self, region: Region) -> None:
        if not region.writable:
            raise MemoryFault(f"{self.report()} writes {region.name}, which is read-only")

    def _range(self, region: Region, offset: int, nbytes: int) -> None:
        if offset < region.low or offset + nbytes > region.size:
            raise MemoryFault(
                f"{self.report()}: bytes {offset}..{offset + nbytes} are outside {region.name} ({region.size} bytes)"
            )


class TwoStep(Operation):
    """Reads shared memory first, writes global memory at a later time."""

    def __init__(self, warp, what: str):
        super().__init__(warp, what)
        self.write_clocks, self.write_column = self._open(self.clocks)
        self.data: np.ndarray | None = None

    def run(self) -> bool:
        if not self.read_done:
            self.read()
            self.read_done = True
            self.machine.columns.done(self.column)
            self.machine.changed(self.warp.bulk)
            return False
        self.accessor = Accessor(self.write_column, self.write_clocks, self.accessor.flags, self.report)
        self.write()
        self.done = True
        self.machine.columns.done(self.write_column)
        self.machine.changed(self.warp.bulk)
        return True

    def observe(self, clocks: np.ndarray, reading: bool) -> None:
        join(clocks, self.clocks if reading else self.write_clocks)

    def read(self) -> None:
        raise NotImplementedError

    def write(self) -> None:
        raise NotImplementedError


class Inflight:
    """A CTA's asynchronous operations; at its end none may still use its shared memory."""

    def __init__(self, cta):
        self.cta, self.operations = cta, []

    def append(self, operation: Operation) -> None:
        if len(self.operations) > 64:
            self.operations = [o for o in self.operations if not o.read_done]
        self.operations.append(operation)

    def finish(self) -> None:
        for operation in self.operations:
            if not operation.read_done:
                raise SyncError(f"CTA {self.cta.ctaid} exits while its shared memory is in use by {operation.report()}")


def inflight(cta) -> Inflight:
    found = cta.units.get("inflight")
    if found is None:
        found = cta.units["inflight"] = Inflight(cta)
    return found


class BulkLoad(Operation):
    """``cp.async.bulk.shared.global``: bytes to shared memory, completion on an mbarrier."""

    def __init__(self, warp, target: tuple, source: tuple[Region, int], nbytes: int, barrier: tuple):
        super().__init__(warp, f"bulk load of {nbytes} bytes")
        self.target, self.source, self.nbytes, self.barrier = target, source, nbytes, barrier
        check_bulk(self, nbytes, source[1], target[1])

    def run(self) -> bool:
        data = self.read_bytes(*self.source, self.nbytes)
        cta, offset = self.target
        self.write_bytes(cta.shared, offset, data)
        self.machine.count("async_shared_write", self.nbytes)
        self.machine.count("global_read", self.nbytes)
        self.close()
        self.signal(*self.barrier, self.nbytes)
        return True


class BulkShared(Operation):
    """``cp.async.bulk.shared::cluster.shared::cta``: to the shared memory of a CTA of the cluster."""

    def __init__(self, warp, target: tuple, source: tuple[Region, int], nbytes: int, barrier: tuple):
        super().__init__(warp, f"bulk copy of {nbytes} bytes through the cluster")
        self.target, self.source, self.nbytes, self.barrier = target, source, nbytes, barrier
        check_bulk(self, nbytes, source[1], target[1])

    def run(self) -> bool:
        data = self.read_bytes(*self.source, self.nbytes).copy()
        cta, offset = self.target
        self.write_bytes(cta.shared, offset, data)
        self.machine.count("async_shared_read", self.nbytes)
        self.machine.count("async_shared_write", self.nbytes)
        self.close()
        self.signal(*self.barrier, self.nbytes)
        return True


class BulkStore(TwoStep):
    """``cp.async.bulk.global.shared``, and with ``operation`` ``cp.reduce.async.bulk``."""

    def __init__(self, warp, target: tuple[Region, int], source: tuple[Region, int], nbytes: int,
                 operation: str | None = None, kind: str = "b32"):  # fmt: skip
        super().__init__(warp, f"bulk {'reduce' if operation else 'store'} of {nbytes} bytes")
        self.target, self.source, self.nbytes = target, source, nbytes
        self.operation, self.kind = operation, kind
        check_bulk(self, nbytes, source[1], target[1])

    def read(self) -> None:
        self.data = self.read_bytes(*self.source, self.nbytes).copy()
        self.machine.count("async_shared_read", self.nbytes)

    def write(self) -> None:
        assert self.data is not None
        region, offset = self.target
        self.machine.count("global_write", self.nbytes)
        if self.operation is None:
            self.write_bytes(region, offset, self.data)
            return
        self.accessor.flags |= STRONG
        self._range(region, offset, self.nbytes)
        self._writable(region)
        if region.shadow is not None:
            region.shadow.write(granules(np.arange(offset, offset + self.nbytes, 4), 4), self.accessor, self.line)
        reduce_into(region.bytes[offset : offset + self.nbytes], self.data, self.operation, self.kind)


def reduce_into(target: np.ndarray, data: np.ndarray, operation: str, kind: str) -> None:
    """Elementwise reduction of bytes ``data`` into bytes ``target``, as elements of type ``kind``."""
    if kind == "f32" and operation == "add":
        target.view(np.float32)[:] += np.ascontiguousarray(data).view(np.float32)
        return
    itemsize = {"16": 2, "32": 4, "64": 8}[kind.lstrip("busf")]
    dtype = {2: np.uint16, 4: np.uint32, 8: np.uint64}[itemsize]
    a, b = target.view(dtype), np.ascontiguousarray(data).view(dtype)
    if kind[0] in "us" and operation == "add":
        a += b
        return
    for i in range(len(a)):
        a[i] = combine(operation, kind, a[i], b[i])


def check_bulk(operation: Operation, nbytes: int, source: int, target: int) -> None:
    """Sizes and addresses of bulk copies are multiples of 16 bytes."""
    if nbytes % 16 or source % 16 or target % 16:
        raise MemoryFault(
            f"{operation.report()}: size {nbytes}, source offset {source:#x} and destination offset {target:#x} "
            "must be multiples of 16"
        )
