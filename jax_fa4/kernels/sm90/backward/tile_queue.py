"""Which key blocks a CTA does: one, or, where CTAs are persistent, one after another from a counter in global memory.

The load warp takes a tile and passes it on through one of :data:`SLOTS` slots in shared memory, where every other warp
reads it. Tiles are taken in the order in which they are numbered, and a dQ block's key blocks are numbered in the order
in which they add, so that the holder of the lowest unfinished tile never waits for another: no deadlock, however few
CTAs run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from jax_fa4.kernels.sm90.backward.config import MainConfig
from jax_fa4.kernels.sm90.backward.ptx import arrive_once_per_warp
from jax_fa4.kernels.sm90.backward.scratch import DQ_CHUNKS

SLOTS = 2

READERS = MainConfig.consumers * 4 + DQ_CHUNKS + 1
"""Warps that read a slot: those of the consumers, the dQ writers, the store warp."""


class Before(NamedTuple):
    """What this CTA did before a tile: ``steps`` in all, ``tiles``, and ``loaded``, those of them that had steps. Every
    phase bit follows from these."""

    steps: Int32 | int
    tiles: Int32 | int
    loaded: Int32 | int


@cute.jit
def each_tile(total: Int32, decode: Callable, following: Callable, body: Callable) -> Int32:
    """Calls ``body(work, before)`` for each tile of a persistent CTA; returns how many steps they had.

    ``following(count)`` is the number of the tile after ``count`` others, at least ``total`` after the last one;
    ``decode(number)`` its work.
    """
    steps, tiles, loaded = Int32(0), Int32(0), Int32(0)
    number = following(tiles)
    while number < total:
        work = decode(number)
        body(work, Before(steps, tiles, loaded))
        steps, tiles, loaded = steps + work.steps, tiles + 1, loaded + Int32(work.steps > 0)
        number = following(tiles)
    return steps


def only_tile(work: Any, following: Callable, body: Callable) -> Int32:
    """The same for a CTA of one tile, whose work is given."""
    body(work, Before(0, 0, 0))
    return work.steps


@cute.jit
def draw(shared: Any, counter: cute.Pointer, count: Int32) -> Int32:
    """The load warp's next tile; ``count`` tiles were drawn before."""
    slot = count % SLOTS
    cute.arch.mbarrier_wait(shared.tile_empty + slot, ((count // SLOTS) & 1) ^ 1)
    tile = Int32(0)
    if cute.arch.lane_idx() == 0:
        tile = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
        shared.ticket[slot] = tile
        cute.arch.mbarrier_arrive(shared.tile_full + slot)
    return cute.arch.shuffle_sync(tile, 0)


@cute.jit
def read(shared: Any, count: Int32) -> Int32:
    """The tile after ``count`` others, for a warp that is not the load warp."""
    slot = count % SLOTS
    cute.arch.mbarrier_wait(shared.tile_full + slot, (count // SLOTS) & 1)
    tile = shared.ticket[slot]
    arrive_once_per_warp(shared.tile_empty + slot)
    return cute.arch.make_warp_uniform(tile)
