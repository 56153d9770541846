"""(DSL) What the prologue hands to every role of a CTA in a pair: a single CTA's context, and the place in the pair."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64

from jax_fa4.kernels.sm100.backward.context import Context, Edges
from jax_fa4.kernels.sm100.backward_pair.config import SEND_BYTES, PairShape
from jax_fa4.kernels.sm100.backward_pair.shared import PairMap
from jax_fa4.kernels.sm100.forward.pipeline import Edge


class PairEdges(Edges):
    """All edges by name."""

    kt: Edge
    qt: Edge
    doutt: Edge
    read: Edge
    send: Edge
    received: Edge
    exchange: Edge


@dataclass(frozen=True)
class ColumnMaps:
    """Generic addresses of the TMA descriptors of what is loaded by columns, and of the scratch."""

    qt: Int64
    kt: Int64
    doutt: Int64
    dq: Int64


@dataclass(frozen=True)
class PairContext(Context):
    """``rank``: the CTA's number in its pair."""

    shared: PairMap
    edges: PairEdges
    shape: PairShape
    rank: Int32
    column_maps: ColumnMaps

    def dscore(self) -> Int32:
        """Shared-memory address of dS of this rank's keys: in this CTA its own, in the peer what this CTA sends."""
        return self.base + self.shared.dscore + self.rank * SEND_BYTES
