"""Matrix operands in shared memory: descriptors, canonical layouts, swizzles. Shared by wgmma and tcgen05.

A 16-bit operand tile has ``rows`` along M (or N) and 16 elements along K. Layouts (PTX ISA, "matrix descriptor";
CUTLASS states the same in units of 16 bytes) with 8-element chunks of 16 bytes:

- K-major: row r, chunk c at ``(r % 8) * pitch + (r // 8) * SBO + c * step``; pitch is the swizzle span (16 without
  swizzle) and step 16 (LBO without swizzle);
- MN-major: chunk m of 8 rows, k at ``(m % w) * 16 + (m // w) * LBO + (k % 8) * 16 w + (k // 8) * SBO`` with w chunks
  in a swizzle span; without swizzle ``m * SBO + (k % 8) * 16 + (k // 8) * LBO``.

The swizzle XORs bits 4.. of the absolute shared address with bits 7.. of it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .errors import MemoryFault

_XOR = {0: 0, 1: 7, 2: 3, 3: 1}  # wgmma layout type -> mask of address bits that swizzle (128, 64, 32 bytes)
_CHUNKS = {1: 8, 2: 4, 3: 2}


class Descriptor(NamedTuple):
    """Fields in bytes. ``mode``: 0 none, 1 128-byte, 2 64-byte, 3 32-byte swizzle (the wgmma numbering)."""

    start: int
    leading: int
    stride: int
    mode: int
    base_offset: int = 0


@lru_cache(maxsize=4096)
def decode_wgmma(bits: int) -> Descriptor:
    """The 64-bit matrix descriptor of wgmma."""
    return Descriptor(
        (bits & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4, bits >> 62 & 3, bits >> 49 & 7
    )


@lru_cache(maxsize=4096)
def chunk_table(phase: int, leading: int, stride: int, mode: int, rows: int, k_major: bool, k: int = 16) -> np.ndarray:
    """Physical 16-byte chunk numbers relative to ``start - phase``, ``phase = start % 1024``.

    K-major: shape (rows, k // 8); MN-major: (k, rows // 8).
    """
    if k_major:
        r, c = np.arange(rows)[:, None], np.arange(k // 8)[None, :]
        pitch = 16 * _CHUNKS.get(mode, 1)
        step = 16 if mode else leading
        address = (r % 8) * pitch + (r // 8) * stride + c * step
    else:
        kk, m = np.arange(k)[:, None], np.arange(rows // 8)[None, :]
        if mode:
            w = _CHUNKS[mode]
            address = (m % w) * 16 + (m // w) * leading + (kk % 8) * 16 * w + (kk // 8) * stride
        else:
            address = m * stride + (kk % 8) * 16 + (kk // 8) * leading
    address = address + phase
    address ^= (address >> 7 & _XOR[mode]) << 4
    table = address >> 4
    table.flags.writeable = False
    return table


@lru_cache(maxsize=4096)
def granule_table(
    phase: int, leading: int, stride: int, mode: int, rows: int, k_major: bool, k: int = 16
) -> np.ndarray:
    """The 4-byte granules of the same chunks, flat, relative to ``start - phase``."""
    chunks = chunk_table(phase, leading, stride, mode, rows, k_major, k).ravel()
    return (chunks[:, None] * 4 + np.arange(4)).ravel()


def to_float(bits: np.ndarray, bf16: bool) -> np.ndarray:
    if bf16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def fetch(region, descriptor: Descriptor, rows: int, k_major: bool, bf16: bool, accessor, line: int, k: int = 16):
    """An operand tile as float32 of shape (rows, k). Checks bounds and races; kept until its memory changes."""
    identity = (descriptor, rows, k_major, bf16, k)
    phase = descriptor.start & 1023
    key = (phase, descriptor.leading, descriptor.stride, descriptor.mode, rows, k_major, k)
    kept = region.tiles.get(identity)
    if kept is not None:
        low, high, versions, tile, granules, records = kept
        if region.versions[low:high].tobytes() == versions:
            if region.shadow is not None:
                region.shadow.read(granules, accessor, line, records)
            return tile
    table = chunk_table(*key)
    base = descriptor.start - phase
    first, last = int(table.min()) * 16 + base, int(table.max()) * 16 + 16 + base
    if first < region.low or last > region.size:
        raise MemoryFault(f"{accessor.describe()}: {descriptor} reaches outside {region.name} ({region.size} bytes)")
    granules, records = granule_table(*key) + base // 4, None
    if region.shadow is not None:
        records = region.shadow.read(granules, accessor, line)
    data = region.view(2, 8)[table + base // 16]
    tile = to_float(data.reshape(rows, k), bf16) if k_major else to_float(data.reshape(k, rows), bf16).T
    low, high = first >> 12, (last - 1 >> 12) + 1
    region.tiles[identity] = (low, high, region.versions[low:high].tobytes(), tile, granules, records)
    return tile
