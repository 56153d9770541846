"""Cluster launch control: a running CTA takes over a cluster that has not been launched yet.

The 16-byte response is opaque in PTX; here bit 0 says whether a cluster was cancelled, followed by its first CTA's
coordinates in 32-bit fields. Handles are pairs of 64-bit values, each an int or an array of 32 lanes.
"""

from __future__ import annotations

import numpy as np

from tests.emulator.copies import distinct
from tests.emulator.errors import SyncError
from tests.emulator.operations import Operation

RESPONSE_BYTES = 16


class TryCancel(Operation):
    """``clusterlaunchcontrol.try_cancel.async``: writes the response and completes its bytes on an mbarrier."""

    def __init__(self, warp, offset: int, barrier: int, everywhere: bool):
        super().__init__(warp, "cluster launch control request")
        self.offset, self.barrier = offset, barrier
        self.targets = list(self.cta.cluster) if everywhere else [self.cta]

    def run(self) -> bool:
        waiting = self.machine.waiting
        response = np.zeros(4, np.uint32)
        if waiting:
            response[:] = (1, *waiting.pop())
        for cta in self.targets:
            self.write_bytes(cta.shared, self.offset, response.view(np.uint8))
        self.machine.count("clusters_cancelled", int(response[0]))
        self.close()
        for cta in self.targets:
            self.signal(cta, self.barrier, RESPONSE_BYTES)
        return True


def try_cancel(warp, response: int, barrier: int, everywhere: bool, mask) -> None:
    """Issues the requests of the active lanes; raises SyncError for a misaligned response or one in another CTA."""
    for address, bar in distinct(mask, response, barrier):
        if address >> 24 != warp.cta.rank or bar >> 24 != warp.cta.rank:
            raise SyncError(f"{warp.describe()}: clusterlaunchcontrol.try_cancel with an address of another CTA")
        if address % RESPONSE_BYTES:
            raise SyncError(f"{warp.describe()}: clusterlaunchcontrol response at {address:#x} is not 16-byte aligned")
        TryCancel(warp, address & 0xFFFFFF, bar & 0xFFFFFF, everywhere).issue()


def is_canceled(handle: tuple):
    """Whether a cluster was cancelled: bool, or an array of 32."""
    low = handle[0]
    return bool(low & 1) if isinstance(low, int) else (low & np.uint64(1)) != 0


def first_ctaid(handle: tuple, axis: int):
    """Coordinate ``axis`` (0..2) of the cancelled cluster's first CTA: int, or uint32 of 32 lanes."""
    value = handle[(axis + 1) // 2]
    if isinstance(value, int):
        return value >> 32 if axis != 1 else value & 0xFFFFFFFF
    return (value >> np.uint64(32) if axis != 1 else value & np.uint64(0xFFFFFFFF)).astype(np.uint32)
