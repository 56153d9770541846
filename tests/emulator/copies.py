"""What translated code calls to start bulk and tensor copies: operand checks, then operations for the scheduler."""

from __future__ import annotations

import numpy as np

from .errors import MemoryFault
from .lanes import signed
from .memory import SHARED_WINDOW
from .operations import BulkLoad, BulkShared, BulkStore
from .tma import TensorLoad, TensorStore, decode


def _place(warp, address: int):
    """(CTA, byte offset) of a shared-window address, which may also be generic."""
    if address >= SHARED_WINDOW:
        address -= SHARED_WINDOW
    rank, offset = address >> 24 & 0xFF, address & 0xFFFFFF
    if rank >= len(warp.cta.cluster):
        raise MemoryFault(f"{warp.describe()}: shared address {address:#x} names CTA rank {rank}")
    return warp.cta.cluster[rank], offset


def distinct(mask, *values):
    """Operand tuples (ints) of the active lanes without repetitions, in lane order."""
    lanes = np.flatnonzero(mask)
    columns = [[int(v)] * len(lanes) if not isinstance(v, np.ndarray) else v[lanes].tolist() for v in values]
    return list(dict.fromkeys(zip(*columns, strict=True)))


def tma_load(
    warp, target: int, tensor: int, barrier: int, coordinates: tuple, multicast: int | None, pair: bool
) -> None:
    """``cp.async.bulk.tensor`` to shared memory. With ``multicast`` every CTA of the mask gets the box at the same
    offset and its own barrier is signalled; ``pair`` (cta_group::2) lets the barrier be in either CTA of the pair."""
    description = decode(warp, tensor)
    origin = tuple(signed(c, 32) for c in coordinates)
    cta, offset = _place(warp, target)
    bar_cta, bar_offset = _place(warp, barrier)
    if multicast is None:
        TensorLoad(warp, cta, offset, description, origin, (bar_cta, bar_offset)).issue()
        return
    for rank, member in enumerate(warp.cta.cluster):
        if multicast >> rank & 1:
            signal = member
            if pair:  # the barrier of the CTA of the destination's pair that has the parity of the given barrier
                signal = warp.cta.cluster[(rank & ~1) | (bar_cta.rank & 1)]
            TensorLoad(warp, member, offset, description, origin, (signal, bar_offset)).issue()


def tma_store(warp, source: int, tensor: int, coordinates: tuple, operation: str | None) -> None:
    description = decode(warp, tensor)
    _, offset = _place(warp, source)
    store = TensorStore(warp, offset, description, tuple(signed(c, 32) for c in coordinates), operation)
    store.issue()
    warp.bulk.open.append(store)


def bulk_load(warp, target: int, source: int, nbytes: int, barrier: int) -> None:
    region, offset, _ = warp.resolve("global", source)
    BulkLoad(warp, _place(warp, target), (region, offset), nbytes, _place(warp, barrier)).issue()


def bulk_shared(warp, target: int, source: int, nbytes: int, barrier: int) -> None:
    region, offset = warp.shared_region(source if source < SHARED_WINDOW else source - SHARED_WINDOW)
    BulkShared(warp, _place(warp, target), (region, offset), nbytes, _place(warp, barrier)).issue()


def bulk_store(warp, target: int, source: int, nbytes: int, operation: str | None, kind: str) -> None:
    region, offset, _ = warp.resolve("global", target)
    shared, place = warp.shared_region(source if source < SHARED_WINDOW else source - SHARED_WINDOW)
    copy = BulkStore(warp, (region, offset), (shared, place), nbytes, operation, kind)
    copy.issue()
    warp.bulk.open.append(copy)


def async_store(warp, address, values: list, nbytes: int, barrier, mask) -> None:
    """``st.async``: lanes' values appear in a CTA of the cluster and signal its barrier, all asynchronously."""
    from .remote import RemoteStore

    for lane in np.flatnonzero(mask):
        place = int(address if isinstance(address, int) else address[lane])
        bar = int(barrier if isinstance(barrier, int) else barrier[lane])
        data = np.array([v if isinstance(v, int) else v[lane] for v in values], np.uint32 if nbytes == 4 else np.uint64)
        RemoteStore(warp, _place(warp, place), data.view(np.uint8), _place(warp, bar)).issue()
