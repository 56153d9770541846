"""(DSL) TMA copies by descriptor pointer and run-time coordinates.

The box of a copy is in the descriptor alone, so one kernel serves boxes that the plan chooses at run time. Each
function is for one elected thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Int32


def _coordinates(first: int, rank: int) -> str:
    return ", ".join(f"{{$r{first + index}}}" for index in range(rank))


def prefetch_descriptor(descriptor) -> None:
    """Brings a descriptor into the descriptor cache."""
    cute.arch.inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[descriptor])


def load(descriptor, shared: cute.Pointer, barrier: cute.Pointer, coordinates: Sequence[Int32]) -> None:
    """Global to shared; ``barrier`` (mbarrier) counts the bytes. ``coordinates`` start with the innermost dimension."""
    rank = len(coordinates)
    cute.arch.inline_ptx(
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[{{$r0}}], [{{$r1}}, {{{_coordinates(3, rank)}}}], [{{$r2}}];",
        read_only_args=[shared, descriptor, barrier, *[Int32(c) for c in coordinates]],
    )


def store(descriptor, shared: cute.Pointer, coordinates: Sequence[Int32]) -> None:
    """Shared to global, out-of-range elements dropped; joins the thread's current bulk group."""
    rank = len(coordinates)
    cute.arch.inline_ptx(
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group "
        f"[{{$r1}}, {{{_coordinates(2, rank)}}}], [{{$r0}}];",
        read_only_args=[shared, descriptor, *[Int32(c) for c in coordinates]],
    )
